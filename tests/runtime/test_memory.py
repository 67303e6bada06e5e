"""Is memory what the plan says, and no more?"""

import resource
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import PlanError
from runtime.executor import execute
from runtime.host.memory import Arenas, available_host_bytes
from runtime.machines.cpu import CpuMachine
from runtime.plan import Arena, Place, Policy, Slot, Update, saves
from tests.tiny import STRUCTURES, tiny_config
from tests.training import ADAMW, batches_of, plan_of, poison, semantics_of

from .test_replay import n_tensors

CPU = torch.device("cpu")
sizes = st.lists(st.integers(0, 6).map(lambda n: n * 256), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=4))
def test_slots_are_of_exactly_the_bytes_asked_for_and_never_overlap(slot_bytes):
    """Each slot is filled with a number of its own; none is found changed afterwards."""
    asked = [Arena(f"arena_{'abcd'[i]}", Place.DEVICE, tuple(s)) for i, s in enumerate(slot_bytes)]
    arenas = Arenas(asked, CPU)
    assert arenas.n_bytes == {a.name: a.n_bytes for a in asked}
    slots = [Slot(a.name, i) for a in asked for i in range(len(a.slot_bytes))]
    for number, slot in enumerate(slots):
        arenas.raw(slot).fill_(number)
    for number, slot in enumerate(slots):
        assert bool((arenas.raw(slot) == number).all())


def test_a_slot_begins_zero_and_a_poisoned_one_is_nan_in_every_float_dtype():
    arenas = Arenas([Arena("state", Place.HOST, (256, 512))], CPU)
    assert not arenas.raw(Slot("state", 1)).any()
    poison(arenas, Slot("state", 1))
    for dtype in ("bf16", "fp32", "fp64"):
        assert bool(arenas.view(Slot("state", 1), dtype).isnan().all())
        assert not arenas.view(Slot("state", 0), dtype).any(), "the neighbour was poisoned too"


def test_a_view_beyond_its_slot_is_refused():
    arenas = Arenas([Arena("state", Place.HOST, (256, 256))], CPU)
    assert arenas.view(Slot("state", 0), "fp32", (8, 8)).shape == (8, 8)
    for shape, offset in (((65,), 0), ((8, 8), 1), ((129,), 0)):
        with pytest.raises(AssertionError, match="exceeds"):
            arenas.view(Slot("state", 0), "fp32", shape, offset)


def test_a_tensor_is_found_in_its_own_slot_only():
    arenas = Arenas([Arena("weights", Place.DEVICE, (256, 256))], CPU)
    first, second = Slot("weights", 0), Slot("weights", 1)
    view = arenas.view(second, "bf16", (4, 8), 16)
    assert arenas.offset_in(second, view) == 32
    assert arenas.offset_in(second, view.t()[1:]) == 34
    assert arenas.offset_in(first, view) is None
    assert arenas.offset_in(second, view.clone()) is None


def test_writing_one_view_does_not_invalidate_what_autograd_saved_of_another():
    arenas = Arenas([Arena("activations", Place.DEVICE, (256,))], CPU)
    slot = Slot("activations", 0)
    x = arenas.view(slot, "fp32", (4,)).fill_(3.0).requires_grad_()
    y = (x * x).sum()
    arenas.view(slot, "fp32", (4,)).fill_(5.0)
    assert torch.autograd.grad(y, x)[0].tolist() == [10.0] * 4, "the slot's content now, as the plan says, and no error"


def test_an_arena_that_cannot_be_had_is_one_line():
    with pytest.raises(PlanError, match=r"arena state of \d+ bytes cannot be allocated"):
        Arenas([Arena("state", Place.HOST, (2**52,))], CPU)


def test_what_is_free_is_less_than_what_there_is():
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    available = available_host_bytes()
    assert available is not None
    assert 0 < available <= int(total.split()[1]) * 1024


# -- a long run -----------------------------------------------------------------------------------------------------


@pytest.mark.fast("some")
@pytest.mark.parametrize("keep", [(), (1, 2)])
@pytest.mark.parametrize("model_type", STRUCTURES)
def test_a_long_run_holds_no_more_than_a_short_one(model_type, keep):
    """No graph, tensor, result or thread is left over, whether activations are kept or not."""
    semantics = semantics_of(model_type)
    config = tiny_config(model_type, num_hidden_layers=2)
    plan = plan_of(config, semantics, Policy(save=saves(all=keep), accumulation_group=3, update=Update.DEFERRED))
    batches = batches_of(config["vocab_size"], 4, 16)
    machine = CpuMachine(plan, lambda step: batches[step % 3], lambda step: ADAMW)
    machine.initialise(0)
    n_threads = threading.active_count()
    execute(plan, machine, 2)
    before = n_tensors()
    execute(plan, machine, 8, first_step=2)
    assert n_tensors() == before
    assert machine.compute._graphs == {}
    assert machine.compute.losses == machine._losses == {}, "they are handed over with the step"
    assert threading.active_count() == n_threads
    for inputs in machine.compute.inputs.passed.values():
        assert all(not t.requires_grad for layer in inputs for t in tensors_in(layer)), "it would hold a graph for ever"


def tensors_in(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors_in(value)


def test_what_layers_are_passed_is_held_once_for_all_micro_batches():
    semantics = semantics_of("gemma2")
    config = tiny_config("gemma2")
    plan = plan_of(config, semantics, Policy(accumulation_group=4))
    machine = CpuMachine(plan, lambda step: batches_of(config["vocab_size"], 4, 16)[step], lambda step: ADAMW)
    machine.initialise(0)
    execute(plan, machine, 1)
    (first,) = machine.compute.inputs.first.values()
    assert any(True for _ in tensors_in(first))
    assert all(inputs is first for inputs in machine.compute.inputs.passed.values())


@pytest.mark.soak
def test_memory_does_not_grow_with_the_steps():
    """Autograd's graphs are out of Python's sight: had 20 steps left theirs, the process would hold 20 times `kept_bytes` more."""
    semantics = semantics_of("llama", seq_len=128)
    config = tiny_config("llama", hidden_size=128, intermediate_size=512, vocab_size=2000)
    plan = plan_of(config, semantics, Policy(save=saves(all=(1, 2)), accumulation_group=4))
    batches = batches_of(2000, 4, 128)
    machine = CpuMachine(plan, lambda step: batches[step % 3], lambda step: ADAMW)
    machine.initialise(0)
    execute(plan, machine, 10)
    before = resident_bytes()
    execute(plan, machine, 20, first_step=10)
    assert resident_bytes() - before < 20 * plan.kept_bytes / 3


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
