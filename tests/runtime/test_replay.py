"""Replays: saved, offloaded and recomputed tensors match the plan and PyTorch's selective checkpointing."""

import gc
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from penstock.planner.model.workload import build_workload
from penstock.runtime.batch import Batch
from penstock.runtime.executor import OpError, execute
from penstock.runtime.layers.recompute import Replay
from penstock.runtime.layers.views import Shelf
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Lane, Plan, Policy, Semantics, Update, saves
from penstock.runtime.plan.workload import SLOT_ALIGN_BYTES, Block, Model, Saved, Tier, Workload
from tests.lanes import diagonal, mostly_slow
from tests.real_layers import DTYPES, MANY, ROW_HEAVY, SIZES, Work, cases, layers_of, peak_bytes, recorded, tensors
from tests.tiny import EAGER_ONLY, EXPERT_TYPES, STRUCTURES, tiny_config
from tests.training import Remembering, machine_for, plan_of, semantics_of, streamed

WITH_WEIGHTS = {"mm", "addmm", "_grouped_mm"}
FUSED = {"_scaled_dot_product_flash_attention_for_cpu", "attention_by_document"}
STORED = {Saved.INPUT: set[str](), Saved.ATTENTION: FUSED, Saved.PRODUCTS: WITH_WEIGHTS | FUSED}

Case = tuple[str, str, str]


def called(op: Any) -> str:
    return op.overloadpacket.__name__  # type: ignore[no-any-return]


class Selection(TorchDispatchMode):
    """Save a tier's results, and only the first `n_products` products, for one checkpoint. Older versions of torch query again in
    the recompute. As a mode around the first run it counts the bytes."""

    def __init__(self, saved: Saved, n_products: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved, self.n_products, self.n_bytes = saved, n_products, 0
        self.n_seen: Counter[str] = Counter()

    def takes(self, op: Any, run: str) -> bool:
        name = called(op)
        self.n_seen[run] += name in WITH_WEIGHTS
        return name in STORED[self.saved] and (name not in WITH_WEIGHTS or self.n_seen[run] <= self.n_products)

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = self.takes(op, "again" if context.is_recompute else "first")
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.MUST_RECOMPUTE

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
    """Return the layer's output under PyTorch's checkpointing with early stop; `work` records the recompute's calls."""

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
    """Record the calls of one backward's recompute."""
    work = Work()
    gradients(checkpointed(layer, x, kwargs, selection, work), x, layer)
    return work


def can(case: Case, saved: Saved) -> bool:
    """Exclude eager attention, which has no single result; experts add biases to products in place."""
    model_type, attention, *_ = case
    return not (attention == "eager" if saved is Saved.ATTENTION else model_type == "gpt_oss" and saved is Saved.PRODUCTS)


def ways_of(case: Case, sizes, **overrides: Any) -> Iterator[tuple[Block, Tier, Selection, Any, torch.Tensor, dict[str, Any]]]:
    """Yield each layer, its recompute variants in the workload, and the results that PyTorch must save for them."""
    for size in sizes:
        for block, layer, x, kwargs in layers_of(case, *size, **overrides):
            for saved in STORED:
                recompute = block.recompute(saved)
                assert (recompute is not None) == can(case, saved)
                if recompute is not None:
                    calls = watched(layer, x, kwargs, Selection(Saved.INPUT, 0)).calls  # of a recompute from the boundary
                    n_reached = sum(calls[name] for name in WITH_WEIGHTS) if saved is Saved.PRODUCTS else 0
                    yield block, recompute, Selection(saved, n_reached), layer, x, kwargs


def replayed(layer: Any, x: torch.Tensor, kwargs: dict[str, Any], saved: Saved) -> tuple[torch.Tensor, Replay]:
    replay = Replay(saved, lambda: layer(x, **kwargs))
    with replay.recording():
        return layer(x, **kwargs), replay


@mostly_slow("case", cases(STRUCTURES), fast=(0, 9, 10, 12, 16), ids="-".join)
def test_a_replay_does_what_torchs_checkpointing_does(case: Case) -> None:
    """Compare bytes, calls and gradients with a plain backward and with the plan."""
    for block, tier, selection, layer, x, kwargs in ways_of(case, SIZES[:1]):
        again = Selection(tier.saved, selection.n_products)
        wanted = gradients(checkpointed(layer, x, kwargs, selection), x, layer)
        y, replay = replayed(layer, x, kwargs, tier.saved)
        assert sum(t.nbytes for t in tensors([noted for noted, _ in replay.results])) == tier.saved_bytes == selection.n_bytes
        assert all(map(torch.equal, wanted, gradients(y, x, layer)))
        assert all(map(torch.equal, wanted, gradients(layer(x, **kwargs), x, layer)))
        assert not replay.results
        y, replay = replayed(layer, x, kwargs, tier.saved)
        with Work() as work:
            replay._recompute()
        assert work.calls == watched(layer, x, kwargs, again).calls, block.name
        is_counted(case, block, tier, work)


def is_counted(case: Case, block: Block, tier: Tier, work: Work) -> None:
    """Exact for dense layers."""
    model_type, attention, *_ = case
    assert abs(tier.n_kernels - work.calls.total()) <= 1, work.calls
    assert tier.pointwise_bytes == pytest.approx(work.n_bytes, rel=0.07)
    assert tier.attention == any(work.calls[name] for name in {"bmm", *FUSED})
    n_products = sum(work.calls[name] for name in WITH_WEIGHTS)
    n_counted = sum(m.count for m in block.matmuls[: tier.n_matmuls])
    assert bool(n_counted) == bool(n_products) if model_type in EXPERT_TYPES else n_counted == n_products
    if model_type not in EXPERT_TYPES:  # PyTorch counts nothing for grouped products
        a = block.attention
        assert a is not None
        squares = 4 * a.n_sequences * a.n_heads * a.head_dim * a.seq_len**2 if attention == "eager" and tier.attention else 0
        assert sum(m.flop for m in block.matmuls[: tier.n_matmuls]) + squares == work.flop


@mostly_slow("case", cases(STRUCTURES), fast=(0, 9, 10, 12, 16), ids="-".join)
def test_recompute_stays_within_its_transient_bytes(case: Case) -> None:
    for way in ways_of(case, SIZES[1:]):
        stays_within(way, at_most=1.5)


def stays_within(way: tuple[Block, Tier, Selection, Any, torch.Tensor, dict[str, Any]], at_most: float, but_for: int = 0) -> None:
    """Check that a recomputing backward's peak, minus some bytes, is at most the plan's booking, and close to it."""
    block, tier, selection, layer, x, kwargs = way
    gradient, weights = torch.randn_like(x), list(layer.parameters())

    def work() -> object:
        return torch.autograd.grad(checkpointed(layer, x, kwargs, selection), [x, *weights], gradient)

    peak = peak_bytes(work) - block.boundary_bytes  # the output, which is in an arena
    assert peak - but_for <= tier.saved_bytes + tier.transient_bytes <= at_most * peak
    assert tier.transient_bytes <= block.transient_bytes


@diagonal(("model_type", EXPERT_TYPES), ("dtype,overrides", [*zip(DTYPES, ROW_HEAVY, strict=True)]))
def test_rows_of_experts_stay_within_transient_bytes(model_type: str, dtype: str, overrides: dict[str, Any]) -> None:
    """Count copies held only by a name in the module, and masked ones of older versions of transformers. Allow a few numbers per
    token."""
    for way in ways_of((model_type, "eager" if model_type in EAGER_ONLY else "sdpa", dtype), (MANY,), **overrides):
        stays_within(way, at_most=1.6, but_for=12 * MANY[0] * MANY[1])


REMEMBERING = {
    "keep": Policy(save=saves(all=(1, 2))),
    "boundaries": Policy(),
    "strided": Policy(boundary_stride=2),
    "products": Policy(save=saves(products=(1, 2))),
    "attention": Policy(save=saves(attention=(1, 2))),
    "attention, spilled": Policy(save=saves(attention=(1, 2)), spill_blocks=(0, 1)),
    "on the host": Policy(save=saves(products=(1, 2), attention=(3,)), offload_blocks=(1, 2, 3)),
    "all ways at once": Policy(save=saves(all=(1,), products=(2,), attention=(3,))),
}
WAYS_OF_EXPERTS = [*product(["qwen3_moe"], ["keep", "on the host"], [None])]
WAYS_OF_EXPERTS += [*product(["gpt_oss"], ["boundaries", "keep", "attention"], [None])]
BY_TILES = [("llama", "all ways at once", 40), *product(["llama", "gemma2"], ["keep", "boundaries", "products"], [40])]
WIDE = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 96, "num_hidden_layers": 3}


@mostly_slow(("model_type", "way", "tile"), [*product(["llama"], REMEMBERING, [None]), *WAYS_OF_EXPERTS, *BY_TILES])
def test_a_step_takes_the_memory_of_its_plan(model_type: str, way: str, tile: int | None) -> None:
    """Compare device memory beyond the arenas with the allocator's records, op by op."""
    policy = replace(REMEMBERING[way], accumulation_group=2)
    plan = plan_of(tiny_config(model_type, **WIDE), replace(wide(model_type), mlp_tile_tokens=tile), policy)
    left_bytes, peak_bytes = device_bytes(plan)
    assert (0.9 if tile else 0.7) * (plan.kept_bytes + plan.transient_bytes) < peak_bytes <= plan.kept_bytes + plan.transient_bytes
    assert left_bytes - masks_bytes(model_type) == pytest.approx(plan.kept_bytes, rel=0.01, abs=1000)  # a few numbers per layer


@cache
def masks_bytes(model_type: str) -> int:
    """Return bytes that remain if nothing is saved, measured after a process's one-time allocations."""
    plan = plan_of(tiny_config(model_type, **WIDE), wide(model_type), Policy(accumulation_group=2))
    return [device_bytes(plan)[0] for _ in range(2)][-1]


def wide(model_type: str) -> Semantics:
    return semantics_of(model_type, seq_len=96, batch_size=2, compute_dtype="fp32", loss_tile_tokens=16)


def device_bytes(plan: Plan, batches: Sequence[Batch] = ()) -> tuple[int, int]:
    """Run two steps op by op. Return compute's maximum allocation between ops, and its peak."""
    machine = machine_for(plan, TorchMachine, batches)

    def two_steps() -> None:
        for step in range(2):
            for index, op in enumerate(plan.ops):
                with torch.profiler.record_function("compute") if op.lane is Lane.GPU else nullcontext(), torch.no_grad():
                    machine.perform(index, op, step)

    events = recorded(two_steps)
    computing = iter([(e.start_ns(), e.end_ns()) for e in events if e.name() == "compute"])
    start, end = next(computing)
    held = most_left = peak = 0
    for event in (e for e in events if e.name() == "[memory]"):
        while event.start_ns() > end:
            most_left = max(most_left, held)
            start, end = next(computing, (2**63, 2**63))
        held += event.nbytes()
        if event.start_ns() >= start:
            peak = max(peak, held)
    return most_left, peak


@mostly_slow(
    ("model_type", "way"), [*(("llama", way) for way in REMEMBERING), *((t, "keep") for t in ("gemma2", "qwen3_moe", "gpt_oss"))]
)
def test_a_long_run_holds_no_more_than_a_short_one(model_type: str, way: str) -> None:
    """No graph, tensor, result or thread outlives its step, not even by speculation."""
    policy = replace(REMEMBERING[way], accumulation_group=4, update=Update.DEFERRED, speculate_blocks=(0, 1))
    plan = plan_of(tiny_config(model_type, num_hidden_layers=4), semantics_of(model_type), policy)
    machine, n_threads = machine_for(plan, TorchMachine), threading.active_count()
    execute(plan, machine, 2)
    n_before = n_tensors()
    execute(plan, machine, 6, first_step=2)
    assert n_tensors() == n_before
    assert machine.compute._graphs == machine.compute.losses == machine._losses == {}
    assert threading.active_count() == n_threads
    assert machine.compute.inputs.calls == {}
    assert not any(t.requires_grad for t in tensors(machine.compute.inputs.first)), "it would hold a graph for ever"


def n_tensors() -> int:
    gc.collect()
    of_type = Counter(map(type, gc.get_objects()))
    return sum(n for kind, n in of_type.items() if issubclass(kind, torch.Tensor))


@pytest.mark.parametrize(("width_of_values", "n_saved"), [(24, 1), (16, 0)])
def test_attention_is_saved_where_a_plan_counts_it(width_of_values: int, n_saved: int) -> None:
    """A GPU's kernel accepts values of another width; a plan uses eager attention otherwise, and books no result."""
    q, v = (torch.randn(1, 4, 32, width, device="meta", requires_grad=True) for width in (24, width_of_values))
    replay = Replay(Saved.PRODUCTS, lambda: None)
    with replay.recording():
        torch.ops.aten._scaled_dot_product_efficient_attention(q, q, v, None, True)[0].square()
    assert len(replay.results) == n_saved


LAYERS = (1, 2)
PRODUCTS = Policy(save=saves(products=LAYERS), offload_blocks=LAYERS)
BOTH = Policy(save=saves(attention=(1,), products=(2,)), offload_blocks=LAYERS)


def test_products_are_computed_in_the_slot_where_they_wait() -> None:
    x, weights = torch.randn(6, 8), [torch.randn(8, 8, requires_grad=True) for _ in range(3)]

    def forward() -> torch.Tensor:
        y = x
        for weight in weights:
            y = torch.relu(y @ weight)
        return y @ weights[0].detach()  # a product that autograd does not save

    wanted = torch.autograd.grad(forward().sum(), weights)
    shelf = Shelf(torch.zeros(4 * SLOT_ALIGN_BYTES, dtype=torch.uint8))
    replay = Replay(Saved.PRODUCTS, forward, shelf)
    with replay.recording():
        y = forward()
    assert shelf.n_bytes == 3 * SLOT_ALIGN_BYTES, "three products of 192 bytes, each at an aligned place"
    first = shelf.restored(replay.results[0][0])
    assert torch.equal(first, x @ weights[0])
    assert first.data_ptr() == shelf.slot.data_ptr()
    elsewhere = shelf.slot.clone()
    shelf.slot.fill_(0xFF)  # NaN reveals a late read
    shelf.slot = elsewhere
    assert all(map(torch.equal, wanted, torch.autograd.grad(y.sum(), weights)))


@pytest.mark.parametrize(
    ("saved", "smaller_alone", "policy"),
    [(Saved.PRODUCTS, True, PRODUCTS), (Saved.ATTENTION, False, BOTH)],  # first: its slot also has room for the other tensors
    ids=["products of a smaller micro-batch", "attention"],
)
def test_undercounted_bytes_are_an_error_and_no_wrong_bits(monkeypatch, saved, smaller_alone, policy):
    """Halve the saved bytes in a plan, for every micro-batch or for a smaller one."""

    def halve_tiers(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        def halved(tier: Tier) -> Tier:
            return replace(tier, saved_bytes=tier.saved_bytes // 2, n_saved=0) if tier.saved is saved else tier

        return tuple(replace(block, tiers=tuple(map(halved, block.tiers))) for block in blocks)

    def build(model: Model, semantics: Semantics) -> Workload:
        true = build_workload(model, semantics)
        return Workload(true.blocks if smaller_alone else halve_tiers(true.blocks), halve_tiers(true.smaller))

    monkeypatch.setattr("tests.training.build_workload", build)
    with pytest.raises(OpError, match="do not fit into their slot"):
        streamed(tiny_config("llama"), semantics_of("llama", batch_size=3, micro_batch=2), policy, machine_type=Remembering)
