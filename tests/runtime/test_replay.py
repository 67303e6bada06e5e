"""Replays: what layers keep and compute again is what the plan says, in bits, calls and bytes."""

import gc
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from runtime.batch import Batch
from runtime.executor import execute
from runtime.layers.recompute import Replay
from runtime.machines.cpu import CpuMachine
from runtime.plan import Lane, Plan, Policy, Semantics, Update, saves
from runtime.plan.workload import Saved
from tests.real_layers import SIZES, Work, cases, recorded, tensors
from tests.tiny import EAGER_ONLY, STRUCTURES, tiny_config
from tests.training import machine_for, plan_of, semantics_of

from .test_recompute import Case, Selection, checkpointed, gradients, watched, ways_of


def replayed(layer: Any, x: torch.Tensor, kwargs: dict[str, Any], saved: Saved) -> tuple[torch.Tensor, Replay]:
    replay = Replay(saved, lambda: layer(x, **kwargs))
    with replay.recording():
        return layer(x, **kwargs), replay


@pytest.mark.fast("values")
@pytest.mark.parametrize("case", cases(STRUCTURES), ids="-".join)
def test_a_replay_does_what_torchs_checkpointing_does(case: Case) -> None:
    """In bytes, calls and gradients, which are those of a plain backward."""
    for block, ours, selection, layer, x, kwargs in ways_of(case, SIZES[:1]):
        again = Selection(ours.saved, selection.n_products)
        wanted = gradients(checkpointed(layer, x, kwargs, selection), x, layer)
        y, replay = replayed(layer, x, kwargs, ours.saved)
        assert sum(t.nbytes for t in tensors([noted.result for noted in replay._results])) == ours.saved_bytes
        assert all(map(torch.equal, wanted, gradients(y, x, layer)))
        assert all(map(torch.equal, wanted, gradients(layer(x, **kwargs), x, layer)))
        assert not replay._results
        y, replay = replayed(layer, x, kwargs, ours.saved)
        with Work() as work:
            replay._run_again()
        assert work.calls == watched(layer, x, kwargs, again).calls, block.name


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
WIDE = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 96, "num_hidden_layers": 4}


@pytest.mark.fast("some")
@pytest.mark.parametrize("way", REMEMBERING)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_step_takes_the_memory_of_its_plan(model_type: str, way: str) -> None:
    """Of the device's memory beyond the arenas, as the allocator's own records tell, op by op."""
    policy = replace(REMEMBERING[way], accumulation_group=2)
    if Saved.ATTENTION in policy.save and model_type in EAGER_ONLY:
        pytest.skip("attention that is spelled out has no one result to save")
    plan = plan_of(tiny_config(model_type, **WIDE), wide(model_type), policy)
    left_bytes, peak_bytes = device_bytes(plan)
    assert 0.7 * (plan.kept_bytes + plan.transient_bytes) < peak_bytes <= plan.kept_bytes + plan.transient_bytes
    assert left_bytes - masks_bytes(model_type) == pytest.approx(plan.kept_bytes, rel=0.01, abs=1000)  # a few numbers per layer


@cache
def masks_bytes(model_type: str) -> int:
    """What is left where nothing is saved."""
    plan = plan_of(tiny_config(model_type, **WIDE), wide(model_type), Policy(accumulation_group=2))
    return device_bytes(plan)[0]


def wide(model_type: str) -> Semantics:
    return semantics_of(model_type, seq_len=96, batch_size=2, compute_dtype="fp32", loss_tile_tokens=16)


def device_bytes(plan: Plan, batches: Sequence[Batch] = ()) -> tuple[int, int]:
    """Performs two steps, one op after the other. The most that compute left in the allocator between ops, and the most that it
    held at all."""
    machine = machine_for(plan, CpuMachine, batches)

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


@pytest.mark.fast("some")
@pytest.mark.parametrize(("model_type", "way"), [*(("llama", way) for way in REMEMBERING), *((t, "keep") for t in STRUCTURES)])
def test_a_long_run_holds_no_more_than_a_short_one(model_type: str, way: str) -> None:
    """No graph, tensor, result or thread outlives its step; speculation leaves nothing either."""
    policy = replace(REMEMBERING[way], accumulation_group=4, update=Update.DEFERRED, speculate_blocks=(0, 1))
    plan = plan_of(tiny_config(model_type, num_hidden_layers=4), semantics_of(model_type), policy)
    machine, n_threads = machine_for(plan, CpuMachine), threading.active_count()
    execute(plan, machine, 2)
    before = n_tensors()
    execute(plan, machine, 6, first_step=2)
    assert n_tensors() == before
    assert machine.compute._graphs == machine.compute.losses == machine._losses == {}
    assert threading.active_count() == n_threads
    for inputs in machine.compute.inputs.passed.values():
        assert not any(t.requires_grad for t in tensors(inputs)), "it would hold a graph for ever"


def n_tensors() -> int:
    gc.collect()
    of_type = Counter(map(type, gc.get_objects()))
    return sum(n for kind, n in of_type.items() if issubclass(kind, torch.Tensor))
