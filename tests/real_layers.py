"""Measurements of transformers' layers: library calls, FLOP, traffic, saved and peak bytes."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.planner.model.workload import build_workload
from penstock.runtime.layers.adapters import adapt
from penstock.runtime.layers.kernels import _attention_by_document, use_kernels
from penstock.runtime.layers.layer_chain import Call, shared_inputs
from penstock.runtime.layers.transformers_patches import WITH_SINKS
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.workload import Block, Model

from . import tiny
from .tiny import EAGER_ONLY, EXPERT_TYPES, tiny_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WIDER = {"hidden_size": 128, "intermediate_size": 352}  # wide enough that constant overheads hide no error


def hf_model(config: dict[str, Any], **options: Any) -> torch.nn.Module:
    """Return the model of a configuration with random weights; for `sdpa` of a type with sinks, with our attention."""
    if config["model_type"] in tiny.WITH_SINKS and options.get("attn_implementation") == "sdpa":
        options["attn_implementation"] = WITH_SINKS
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), **options)


def load_model(folder: Path, loader: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Load a model with transformers, which uses every weight in the folder and misses none."""
    model, report = loader.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(report.values()), report
    return model


def semantics(batch: int = 2, seq_len: int = 48, dtype: str = "fp32", **fields: Any) -> Semantics:
    return Semantics(seq_len=seq_len, batch_size=batch, micro_batch=batch, compute_dtype=dtype, **fields)  # type: ignore[arg-type]


VIEWS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "split"}
VIEWS |= {"unbind", "detach", "alias", "empty_like"}
PRODUCTS = {"mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention_for_cpu"}
IN_MASKS = {"ones", "tril_", "triu_", "eq", "all", "_local_scalar_dense", "new_full"}  # calls in attention with sinks on a CPU


def is_idle(name: str, args: Any, out: Any) -> bool:
    """True if a call masks rows of experts on other devices, and no row is masked.

    Older versions of transformers mask such rows on a single device, too. The plan counts the mask's bytes, but not its calls.
    """
    match name:
        case "masked_fill" | "masked_fill_":
            return not args[1].any()
        case "ge":
            return not out.any()
        case "clamp_":  # indices of experts
            return not out.is_floating_point()
        case _:
            return False


class Traffic(TorchDispatchMode):
    """Count library calls that are not views, and the bytes of those that are not matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "attention_by_document":
            with self:  # count the calls within
                return _attention_by_document(*args)
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in VIEWS | IN_MASKS and not is_idle(name, args, out):
            self.calls[name] += 1
            if name not in PRODUCTS:
                self.n_bytes += sum(t.numel() * t.element_size() for t in tensors((args, kwargs, out)))
        return out


class Work(Traffic):
    """Also count FLOP with the formulas of PyTorch's counter."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket in flop_registry:
            self.flop += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def tensors(tree: object) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def layer_calls(model: torch.nn.Module, vocab: int, batch: int, seq_len: int) -> list[tuple[Any, torch.Tensor, dict[str, Any]]]:
    """Return (layer, hidden state, keyword arguments) that the model's forward passes to each layer."""
    calls: list[tuple[Any, torch.Tensor, dict[str, Any]]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda m, a, k: calls.append((m, a[0].detach(), k)), with_kwargs=True)
        for layer in model.model.layers  # type: ignore[union-attr]
    ]
    with torch.no_grad():
        model(torch.randint(0, vocab, (batch, seq_len)), use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


def call_of(kwargs: dict[str, Any]) -> Call:
    """Return the keyword arguments of a layer as a `Call`."""
    leaves, spec = tree_flatten(((None,), kwargs))
    return Call(tuple(leaves), spec, 0, 0)


def saved_bytes(layer: Callable[..., torch.Tensor], x: torch.Tensor, kwargs: dict[str, Any], weights: list[torch.Tensor]) -> int:
    """Return the bytes of distinct storages that autograd saves in a forward, without weights and inputs."""
    inputs = {t.untyped_storage().data_ptr() for t in (*weights, *tensors((x, kwargs)))}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = layer(x, **kwargs)
    assert y is not None
    return sum(s.nbytes() for address, s in saved.items() if address not in inputs)


def recorded(work: Callable[[], object]) -> list[Any]:
    """Return the events of torch's profiler during the work in order of time; `[memory]` events are allocations and frees. Frees of
    memory that was allocated before the work (garbage, or a cached mask that is replaced) are left out."""
    gc.collect()
    gc.disable()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = work()
    finally:
        gc.enable()
    del result  # its memory counts as allocated
    n_live, events = Counter[int](), []
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        n_bytes = event.nbytes() if event.name() == "[memory]" else 0
        n_live[abs(n_bytes)] += (n_bytes > 0) - (n_bytes < 0)
        if n_live[abs(n_bytes)] < 0:
            n_live[abs(n_bytes)] = 0
        else:
            events.append(event)
    return events


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak of allocated bytes above the level before the work, from the allocator's events."""
    changes = [event.nbytes() for event in recorded(work) if event.name() == "[memory]"]
    assert changes
    return max(accumulate(changes))


def cases(types: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Return half of the combinations (model type, attention, dtype); every choice of a type occurs."""
    combinations = []
    for n, t in enumerate(types):
        attention = ("eager",) if t in EAGER_ONLY else ("sdpa", "eager")
        all_of_type = product(enumerate(attention), enumerate(DTYPES))
        combinations += [(t, a, d) for (i, a), (j, d) in all_of_type if len(attention) == 1 or (i + j + n) % 2 == 0]
    return combinations


NO_KERNELS: Mapping[str, Any] = MappingProxyType({})
SIZES = ((2, 48), (1, 160))  # (batch, seq_len): several sequences, and a long one

# Experts with token rows that need more memory than their weights or attention
MANY = (64, 16)
_SPARSE = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 8, "num_hidden_layers": 1, "mlp_only_layers": []}
ROW_HEAVY = tuple(
    {"hidden_size": n, "intermediate_size": k, "moe_intermediate_size": k, **_SPARSE} for n, k in ((128, 48), (32, 96))
)


def layers_of(case, batch: int, seq_len: int, kernels=NO_KERNELS, **overrides) -> Iterator[tuple[Block, Any, torch.Tensor, dict]]:
    """Yield (predicted block, real layer, input, keyword arguments) of each layer. `kernels`: fields of the semantics, also applied
    to the real layer."""
    model_type, attention, dtype = case
    config = tiny_config(model_type, **{**WIDER, **overrides})
    options = {"experts_implementation": "grouped_mm"} if model_type in EXPERT_TYPES else {}
    torch.manual_seed(0)
    model = hf_model(config, attn_implementation=attention, **options).to(DTYPES[dtype]).train()
    how = semantics(batch, seq_len, dtype, attention=attention, **kernels)
    blocks = build_workload(Model(config), how).blocks[1:-1]
    for block, (layer, x, kwargs) in zip(blocks, layer_calls(model, config["vocab_size"], batch, seq_len), strict=True):
        if how.train.lora is not None:
            with torch.no_grad(), shared_inputs(layer) as shared:
                layer(x, **kwargs)
            adapt(layer, f"{block.name}.", [p.name for p in block.trained], how.train.lora, shared)
        use_kernels(layer, how)
        trained = {p.name for p in block.trained}
        for name, p in layer.named_parameters():
            p.requires_grad_(f"{block.name}.{name}" in trained)
            if "lora_" in name:
                torch.nn.init.normal_(p, std=0.1)
        yield block, layer, x.requires_grad_(), kwargs
