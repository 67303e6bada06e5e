"""Stages that train the same model with other systems' host offload.

PyTorch's FSDP2, DeepSpeed's ZeRO-3 and MegaTrain, set up like in their documentation or examples, on one device: bf16 compute,
equal clipping norm, every layer recomputed from its input. All train the same few layers with their best settings: fastest
micro-batch, torch's default attention, and a chunked loss. MegaTrain's code is imported from a folder that the user names.
"""

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.search.result import forward_flop
from penstock.runtime.batch import UNSUPERVISED, Batch
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.train import ALL, Train, parse_train
from penstock.runtime.plan.workload import Model

from .stages import Note, Request, SkippedError
from .training import LR, fill, host_peak_bytes, pattern, random_batches

CLIP_NORM = 1.0
RECOMPUTE = {"use_reentrant": False}
TORCHS = "torch's, fused, fp32 moments"
N_TIMED = 2  # steps per batch, after a warm-up step
Step = Callable[[list[Batch]], float]  # performs a step with these micro-batches, and returns the loss


# -- shared -----------------------------------------------------------------------------------------------------------------


class WithLoss(torch.nn.Module):
    """A causal model that returns the sum of token losses, with logits in chunks."""

    def __init__(self, model: Any, chunk_tokens: int) -> None:
        super().__init__()
        self.model, self.chunk_tokens = model, chunk_tokens

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state.flatten(0, 1)
        total = torch.zeros((), device=hidden.device)
        for part, wanted in zip(hidden.split(self.chunk_tokens), targets.flatten().split(self.chunk_tokens), strict=True):
            total = total + checkpoint(self._of_chunk, part, wanted, use_reentrant=False)
        return total

    def _of_chunk(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model.lm_head(hidden).float(), targets, ignore_index=UNSUPERVISED, reduction="sum")


class Trial:
    """Steps at doubling batch sizes, until one does not fit or the time is over."""

    def __init__(self, request: Request, note: Note, config: dict[str, Any], **fields: object) -> None:
        self.request, self.note, self.config, self.fields = request, note, config, fields
        self.ends_s = time.monotonic() + 0.9 * request.stage_limit_s
        self.flop_per_token = _flop_per_token(config, request.sizes.seq_len)
        note("system", n_layers=config["num_hidden_layers"], seq_len=request.sizes.seq_len, clip_norm=CLIP_NORM, **fields)

    def run(self, take_step: Step, accumulates: bool = True) -> None:
        """Note a line per batch. If gradients can be accumulated, also try the fastest micro-batch in a larger batch."""
        speed: dict[int, float] = {}
        for micro_batch in self.request.sizes.micro_batches:
            tokens_per_s = self.tried(take_step, micro_batch, micro_batch)
            if tokens_per_s is None:
                break
            speed[micro_batch] = tokens_per_s
        if not speed:
            raise RuntimeError("not even the smallest batch was trained")
        largest, best = self.request.sizes.largest_batch, max(speed, key=lambda size: speed[size])
        if accumulates and best < largest:
            self.tried(take_step, largest, best)

    def tried(self, take_step: Step, batch_size: int, micro_batch: int) -> float | None:
        """Return tokens per second, or None if it does not fit in memory or time."""
        seq_len, sizes = self.request.sizes.seq_len, {"batch_size": batch_size, "micro_batch": micro_batch}
        batches, times_s, losses = random_batches(self.config["vocab_size"], batch_size, seq_len), list[float](), list[float]()
        try:
            for step in range(1 + N_TIMED):
                batch = batches(step)
                parts = zip(batch.input_ids.split(micro_batch), batch.targets.split(micro_batch), strict=True)
                began_s = time.perf_counter()
                losses.append(take_step([Batch(*part) for part in parts]))
                times_s.append(time.perf_counter() - began_s)
                if time.monotonic() + times_s[-1] > self.ends_s:
                    break
        except torch.OutOfMemoryError as error:
            self.note("tried", **sizes, failed=str(error).partition("\n")[0][:200])
            return None
        if not times_s[1:]:
            self.note("tried", **sizes, failed="the time is up", warm_up_s=times_s[0])
            return None
        step_s = min(times_s[1:])
        tokens_per_s = batch_size * seq_len / step_s
        self.note(
            "tried", n_layers=self.config["num_hidden_layers"], seq_len=seq_len, **sizes, step_s=step_s, times_s=times_s,
            tokens_per_s=tokens_per_s, model_flop_per_s=tokens_per_s * self.flop_per_token, losses=losses,
            device_peak_bytes=torch.cuda.max_memory_reserved() if self.request.device == "cuda" else None,
            host_peak_bytes=host_peak_bytes(),
        )  # fmt: skip
        return tokens_per_s if time.monotonic() < self.ends_s else None


def _flop_per_token(config: dict[str, Any], seq_len: int, train: Train = ALL) -> float:
    """Return FLOP of the model as in a plan's claim: forward plus twice the forward, causal half of attention, without recompute
    and without gradients of frozen weights."""
    blocks = build_workload(Model(config), Semantics(seq_len, 1, 1, train=train)).blocks
    return sum(3 * forward_flop(block) - sum(m.flop for m in block.matmuls if m.frozen) for block in blocks) / seq_len


def _config_of(request: Request, n_layers: int | None) -> dict[str, Any]:
    """Return the configuration of the model with its first layers; None: with all."""
    config = dict(read_model(str(request.home / request.sizes.model) if request.tiny else request.sizes.model).config)
    return config if n_layers is None else config | {"num_hidden_layers": n_layers}


def _hf_config(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        config["model_type"], **{k: v for k, v in config.items() if k not in ("torch_dtype", "dtype", "model_type", "auto_map")}
    )


def _on_meta(config: dict[str, Any], dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_hf_config(config), dtype=dtype, attn_implementation="sdpa").train()


def _fill(model: Any, parameters: Iterable[torch.Tensor], device: str, numbers: torch.Tensor) -> None:
    """Fill the weights of a model from the meta device, and recreate its rotary embedding, which was constructed there."""
    with torch.no_grad():
        for parameter in parameters:
            fill(parameter, numbers)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)


def _by_torch(model: WithLoss, device: str, in_bf16: bool = False) -> Step:
    """Return a step of a plain loop: gradient accumulation, clipping, torch's fused AdamW. `in_bf16`: with autocast."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, fused=True)

    def take_step(micro_batches: list[Batch]) -> float:
        n_supervised, total = sum(batch.n_supervised for batch in micro_batches), torch.zeros((), device=device)
        optimizer.zero_grad()
        for batch in micro_batches:
            with torch.autocast(device, torch.bfloat16, enabled=in_bf16):
                loss = model(batch.input_ids.to(device), batch.targets.to(device)) / n_supervised
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        return total.item()

    return take_step


@contextmanager
def _alone(device: str) -> Iterator[None]:
    """Open a process group of one."""
    from torch import distributed

    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


# -- systems ----------------------------------------------------------------------------------------------------------------


def fsdp2(request: Request, note: Note) -> None:
    """`fully_shard` with `CPUOffloadPolicy`: fp32 masters, moments and gradients on the host, torch's fused AdamW there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    config, device = _config_of(request, request.sizes.their_layers), request.device
    system = f"FSDP2 of torch {torch.__version__}, CPUOffloadPolicy"
    trial = Trial(request, note, config, system=system, optimizer=TORCHS)
    with _alone(device):
        model = _on_meta(config, torch.float32)
        model.gradient_checkpointing_enable(RECOMPUTE)
        sharded: dict[str, Any] = {
            "mesh": init_device_mesh(device, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=device != "cpu"),
        }
        wrapped = WithLoss(model, request.sizes.loss_chunk_tokens)
        for layer in model.model.layers:
            fully_shard(layer, **sharded)
        fully_shard(wrapped, **sharded)
        wrapped.to_empty(device="cpu")
        _fill(model, (parameter.to_local() for parameter in wrapped.parameters()), device, pattern())  # type: ignore[attr-defined]
        trial.run(_by_torch(wrapped, device))


def zero3(request: Request, note: Note) -> None:
    """DeepSpeed with parameters and optimizer on the host."""
    import deepspeed  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM

    config, device = _config_of(request, request.sizes.their_layers), request.device
    system = f"DeepSpeed {deepspeed.__version__}, ZeRO-3 offload"
    trial = Trial(request, note, config, system=system, optimizer="DeepSpeed's, fp32 moments")
    on_host = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_micro_batch_size_per_gpu": 1,  # only used for DeepSpeed's reports: any batch size works
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP_NORM,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": on_host, "offload_optimizer": on_host},
    }
    with _alone(device):
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model: Any = AutoModelForCausalLM.from_config(_hf_config(config), dtype=torch.bfloat16, attn_implementation="sdpa")
        model.train().gradient_checkpointing_enable(RECOMPUTE)
        wrapped = WithLoss(model, request.sizes.loss_chunk_tokens)
        engine, *_ = deepspeed.initialize(model=wrapped, model_parameters=wrapped.parameters(), config=settings)

        def take_step(micro_batches: list[Batch]) -> float:
            (batch,) = micro_batches
            loss = engine(batch.input_ids.to(device), batch.targets.to(device)) / batch.n_supervised
            engine.backward(loss)
            engine.step()
            return float(loss.item())

        trial.run(take_step, accumulates=False)


def peft(request: Request, note: Note) -> None:
    """PEFT adapters with a bf16 base, all on the device, without streaming."""
    import peft as of_peft

    case, device = request.sizes.cases["lora"], request.device
    config = _config_of(request, None)
    trial = Trial(request, note, config, system=f"PEFT {of_peft.__version__}, all on the device", optimizer=TORCHS)
    trial.flop_per_token = _flop_per_token(config, request.sizes.seq_len, parse_train(case.plan_words[1]))
    model = _on_meta(config, torch.bfloat16).to_empty(device=device)
    _fill(model, model.parameters(), device, pattern().to(device))
    model.gradient_checkpointing_enable(RECOMPUTE)
    model = of_peft.get_peft_model(model, of_peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")).base_model.model
    wrapped = WithLoss(model, request.sizes.loss_chunk_tokens)
    take_step = _by_torch(wrapped, device, in_bf16=True)  # like trainers: PEFT keeps adapters in fp32
    for micro_batch in sorted({case.batch_size, case.batch_size // 2 or 1, case.batch_size // 4 or 1}):
        trial.tried(take_step, case.batch_size, micro_batch)


class _NoMask:
    """Placeholder for a full mask: MegaTrain's layers pass it on, and torch's attention then needs None."""

    def to(self, *_: object, **__: object) -> None:
        return None


def megatrain(request: Request, note: Note) -> None:
    """The class of MegaTrain's examples, from the named folder; weights are filled like the others'."""
    if request.device != "cuda":
        raise SkippedError("it needs a CUDA device")
    from infinity.config.training import CPUMasterConfig  # type: ignore[import-not-found,unused-ignore]
    from infinity.model.cpu_master import CPUMasterModel  # type: ignore[import-not-found,unused-ignore]

    source = "DeepSpeed's" if importlib.util.find_spec("deepspeed") else "torch's"
    flash = "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"
    config = _config_of(request, request.sizes.their_layers)
    moments = "fp32 moments" if source == "DeepSpeed's" else "fused, bf16 moments"
    trial = Trial(request, note, config, system="MegaTrain, its public code", optimizer=f"{source}, {moments}", attention=flash)
    model = _on_meta(config, torch.bfloat16).to_empty(device="cpu")
    model.set_attn_implementation(flash)
    _fill(model, model.parameters(), "cpu", pattern())
    seq_len = request.sizes.seq_len
    settings = CPUMasterConfig(
        model_name="", dataset_path="none", max_seq_len=seq_len, attn_implementation=flash, max_grad_norm=CLIP_NORM
    )
    trainer = CPUMasterModel(model, settings)
    del model
    if source == "DeepSpeed's":
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found,unused-ignore]

        optimizer = DeepSpeedCPUAdam(trainer.get_parameters(), lr=LR, weight_decay=0.0, adamw_mode=True)
    else:
        optimizer = torch.optim.AdamW(trainer.get_parameters(), lr=LR, weight_decay=0.0, fused=True)

    def take_step(micro_batches: list[Batch]) -> float:
        (batch,) = micro_batches
        mask: Any = torch.ones_like(batch.input_ids) if flash == "flash_attention_2" else _NoMask()
        loss, _, _ = trainer.forward_and_backward(batch.input_ids, mask, batch.input_ids)  # shifts the labels itself
        torch.nn.utils.clip_grad_norm_(trainer.get_parameters(), CLIP_NORM)
        optimizer.step()
        trainer._sync_params_to_gpu()
        trainer.zero_grad()
        optimizer.zero_grad()
        return float(loss)

    try:
        trial.run(take_step, accumulates=False)
    finally:
        trainer.cleanup()
