"""Recomputation as plans count it: the calls, bytes and memory of PyTorch's selective checkpointing."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from runtime.plan.workload import Block, Saved, Tier
from tests.real_layers import DTYPES, MANY, ROW_HEAVY, SIZES, Work, cases, layers_of, peak_bytes, tensors
from tests.tiny import EAGER_ONLY, EXPERT_TYPES, STRUCTURES

WITH_WEIGHTS = {"mm", "addmm", "_grouped_mm"}
FUSED = {"_scaled_dot_product_flash_attention_for_cpu"}
STORED = {Saved.INPUT: set[str](), Saved.ATTENTION: FUSED, Saved.PRODUCTS: WITH_WEIGHTS | FUSED}

Case = tuple[str, str, str, str]


def called(op: Any) -> str:
    return op.overloadpacket.__name__  # type: ignore[no-any-return]


class Selection(TorchDispatchMode):
    """Saves what a tier saves; of products only the first `n_products`: those that recompute reaches. Good for one checkpoint.

    As a mode around the first run it counts the bytes. Older versions of torch ask again, when it runs again, what was saved.
    """

    def __init__(self, saved: Saved, n_products: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved, self.n_products, self.n_bytes = saved, n_products, 0
        self.n_seen: Counter[str] = Counter()

    def takes(self, op: Any, run: str) -> bool:
        """Whether a run's next call is one whose result is saved."""
        name = called(op)
        self.n_seen[run] += name in WITH_WEIGHTS
        return name in STORED[self.saved] and (name not in WITH_WEIGHTS or self.n_seen[run] <= self.n_products)

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        taken = self.takes(op, "again" if context.is_recompute else "first")
        return CheckpointPolicy.MUST_SAVE if taken else CheckpointPolicy.MUST_RECOMPUTE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.takes(func, "counted"):
            self.n_bytes += sum(t.numel() * t.element_size() for t in tensors(out))
        return out


@contextmanager
def inside(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def checkpointed(layer: Any, x: torch.Tensor, kwargs: Any, selection: Selection, work: Work | None = None) -> torch.Tensor:
    """The layer's output under PyTorch's checkpointing, which stops early; `work` sees what the recompute really runs."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        watch: AbstractContextManager[Any] = work or nullcontext()
        if selection.saved is Saved.INPUT:
            return nullcontext(), watch
        first, again = create_selective_checkpoint_contexts(selection)  # type: ignore[no-untyped-call]
        return inside(selection, first), inside(watch, again)

    return checkpoint(  # type: ignore[no-any-return]
        layer, x, use_reentrant=False, context_fn=contexts, early_stop=True, **kwargs
    )


def gradients(y: torch.Tensor, x: torch.Tensor, layer: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.autograd.grad(y, [x, *layer.parameters()], torch.randn(y.shape, generator=generator).to(y.dtype)))


def watched(layer: Any, x: torch.Tensor, kwargs: dict[str, Any], selection: Selection) -> Work:
    """What the recompute of one backward really does."""
    work = Work()
    gradients(checkpointed(layer, x, kwargs, selection, work), x, layer)
    return work


def n_reached(layer: Any, x: torch.Tensor, kwargs: dict[str, Any]) -> int:
    """Products with weights that recompute from the boundary really makes."""
    calls = watched(layer, x, kwargs, Selection(Saved.INPUT, 0)).calls
    return sum(calls[name] for name in WITH_WEIGHTS)


def can(case: Case, saved: Saved) -> bool:
    """Attention that is spelled out has no one result to save; experts' biases are added to products in place."""
    model_type, attention, _, experts = case
    overwritten = model_type == "gpt_oss" and experts == "grouped_mm"
    return not (attention == "eager" if saved is Saved.ATTENTION else overwritten and saved is Saved.PRODUCTS)


def ways_of(
    case: Case, sizes: tuple[tuple[int, int], ...], **overrides: Any
) -> Iterator[tuple[Block, Tier, Selection, Any, torch.Tensor, dict[str, Any]]]:
    """Each layer, what the workload says of each way to recompute it, and what PyTorch must save for that."""
    for size in sizes:
        for block, layer, x, kwargs in layers_of(case, *size, **overrides):
            for saved in STORED:
                recompute = block.recompute(saved)
                assert (recompute is not None) == can(case, saved)
                if recompute is not None:
                    reached = n_reached(layer, x, kwargs) if saved is Saved.PRODUCTS else 0
                    yield block, recompute, Selection(saved, reached), layer, x, kwargs


@pytest.mark.fast("values")
@pytest.mark.parametrize("case", cases(STRUCTURES), ids="-".join)
def test_recompute_runs_and_saves_what_checkpointing_does(case: Case) -> None:
    """Exact for dense layers; a loop over experts also passes over masks of row numbers, which are left out."""
    model_type, attention, _, experts = case
    looped = model_type in EXPERT_TYPES and experts == "eager"
    for block, ours, selection, layer, x, kwargs in ways_of(case, SIZES):
        work = watched(layer, x, kwargs, selection)
        assert ours.saved_bytes == selection.n_bytes
        n_calls = work.calls.total()
        assert abs(ours.n_kernels - n_calls) <= (0.1 * n_calls if looped else 1), work.calls
        assert ours.pointwise_bytes == pytest.approx(work.n_bytes, rel=0.2 if looped else 0.07)
        assert ours.attention == any(work.calls[name] for name in {"bmm", *FUSED})
        n_products = sum(work.calls[name] for name in WITH_WEIGHTS)
        n_counted = sum(m.count for m in block.matmuls[: ours.n_matmuls])
        assert bool(n_counted) == bool(n_products) if model_type in EXPERT_TYPES else n_counted == n_products
        if model_type not in EXPERT_TYPES or looped:  # PyTorch counts nothing for grouped products
            a = block.attention
            assert a is not None
            squares = 4 * a.n_sequences * a.n_heads * a.head_dim * a.seq_len**2 if attention == "eager" else 0
            assert sum(m.flop for m in block.matmuls[: ours.n_matmuls]) + squares == work.flop


@pytest.mark.fast("values")
@pytest.mark.parametrize("case", cases(STRUCTURES), ids="-".join)
def test_recompute_stays_within_its_transient_bytes(case: Case) -> None:
    for way in ways_of(case, SIZES[1:]):
        stays_within(way, at_most=1.5)


def stays_within(way: tuple[Block, Tier, Selection, Any, torch.Tensor, dict[str, Any]], at_most: float, but_for: int = 0) -> None:
    """The peak of a backward that recomputes, but for some bytes, is what the plan books, which is not far more."""
    block, ours, selection, layer, x, kwargs = way
    gradient, weights = torch.randn_like(x), list(layer.parameters())

    def work() -> object:
        return torch.autograd.grad(checkpointed(layer, x, kwargs, selection), [x, *weights], gradient)

    peak = peak_bytes(work) - block.boundary_bytes  # the output, which is in an arena
    assert peak - but_for <= ours.saved_bytes + ours.transient_bytes <= at_most * peak
    assert ours.transient_bytes <= block.transient_bytes


@pytest.mark.fast("values")
@pytest.mark.parametrize("overrides", ROW_HEAVY, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", EXPERT_TYPES)
def test_rows_of_experts_stay_within_transient_bytes(model_type: str, dtype: str, overrides: dict[str, Any]) -> None:
    """Copies of them that only a name in the module keeps alive, and those that older versions of transformers mask. But for a few
    numbers per token."""
    for way in ways_of((model_type, "eager" if model_type in EAGER_ONLY else "sdpa", dtype, "grouped_mm"), (MANY,), **overrides):
        stays_within(way, at_most=1.6, but_for=12 * MANY[0] * MANY[1])
