"""How fast do PyTorch's FSDP2 and DeepSpeed's ZeRO-3 train the same model with the states on the host?

On one device, with the same micro-batches, boundaries recomputed per layer, bf16 compute, fp32 masters and clipping to the same
norm. Each is set up as its own documentation does it. `benchmarks.gpu` runs each in a process of its own.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from runtime.batch import UNSUPERVISED, Batch
from runtime.plan import Plan

LR = 1e-5
PATTERN_ELEMENTS = 2**24  # random numbers that weights are tiled with: drawing billions would take longer than training


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def fill(weight: torch.Tensor, pattern: torch.Tensor) -> None:
    """Random numbers, as a matrix would have them; ones, as a norm would."""
    flat = weight.view(-1)
    if weight.dim() < 2:
        flat.fill_(1.0)
        return
    for at in range(0, flat.numel(), pattern.numel()):
        part = flat[at : at + pattern.numel()]
        part.copy_(pattern[: part.numel()])


def pattern() -> torch.Tensor:
    return torch.randn(PATTERN_ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02


def step_times(plan: Plan, batches: Callable[[int], Batch], n_steps: int, take_step: Callable[[list[Batch]], float]) -> list[float]:
    """Seconds of each step; `take_step` is given the step's micro-batches and returns the loss once the step is over."""
    s = plan.semantics
    times_s = []
    for step in range(n_steps):
        batch = batches(step)
        rows = [slice(at, at + s.micro_batch) for at in range(0, s.batch_size, s.micro_batch)]
        began_s = time.perf_counter()
        loss = take_step([Batch(batch.input_ids[r], batch.targets[r]) for r in rows])
        times_s.append(time.perf_counter() - began_s)
        assert loss == loss, "the loss is not a number"
    return times_s


def loss_of(model: Any, batch: Batch, n_supervised: int, device: str) -> torch.Tensor:
    logits = model(input_ids=batch.input_ids.to(device), use_cache=False).logits
    targets = batch.targets.to(device)
    return (
        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=UNSUPERVISED, reduction="sum") / n_supervised
    )


def _config(plan: Plan) -> Any:
    fields = {k: v for k, v in plan.model.config.items() if k not in ("torch_dtype", "dtype", "model_type", "auto_map")}
    return AutoConfig.for_model(plan.model.config["model_type"], **fields)


@contextmanager
def _alone(device: str) -> Iterator[None]:
    """A process group of one."""
    from torch import distributed

    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def fsdp2(plan: Plan, batches: Callable[[int], Batch], n_steps: int, device: str) -> list[float]:
    """Step times of `fully_shard` with `CPUOffloadPolicy`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with _alone(device):
        mesh = init_device_mesh(device, (1,))
        config = _config(plan)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=plan.semantics.attention)
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        sharded: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=device != "cpu"),
        }
        for layer in model.model.layers:
            fully_shard(layer, **sharded)
        fully_shard(model, **sharded)
        model.to_empty(device="cpu")
        numbers = pattern()
        with torch.no_grad():
            for parameter in model.parameters():
                fill(parameter.to_local(), numbers)
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers were on the meta device
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

        def take_step(micro_batches: list[Batch]) -> float:
            n_supervised = sum(batch.n_supervised for batch in micro_batches)
            total = torch.zeros((), device=device)
            for batch in micro_batches:
                loss = loss_of(model, batch, n_supervised, device)
                loss.backward()
                total += loss.detach()
            if plan.semantics.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), plan.semantics.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            return total.item()

        return step_times(plan, batches, n_steps, take_step)


def zero3(plan: Plan, batches: Callable[[int], Batch], n_steps: int, device: str) -> list[float]:
    """Step times of DeepSpeed's ZeRO-3 with parameters and optimizer on the host."""
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    s = plan.semantics
    settings = {
        "train_micro_batch_size_per_gpu": s.micro_batch,
        "gradient_accumulation_steps": s.n_micro_batches,
        "gradient_clipping": s.clip_norm or 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    with _alone(device):
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model: Any = AutoModelForCausalLM.from_config(_config(plan), dtype=torch.bfloat16, attn_implementation=s.attention)
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

        def take_step(micro_batches: list[Batch]) -> float:
            # It divides by the count of micro-batches itself.
            n_supervised = sum(batch.n_supervised for batch in micro_batches) / len(micro_batches)
            total = torch.zeros((), device=device)
            for batch in micro_batches:
                loss = loss_of(engine, batch, n_supervised, device)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(micro_batches)
            return total.item()

        return step_times(plan, batches, n_steps, take_step)
