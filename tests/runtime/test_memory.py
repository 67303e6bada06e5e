"""Arenas: slots of the requested bytes, views of them, and constant host memory over the steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.hwprofiles.probe.cpu import resident_bytes
from penstock.runtime.executor import execute
from penstock.runtime.host.memory import Arenas
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Arena, Place, Policy, Slot, saves
from tests.tiny import tiny_config
from tests.training import plan_of, poison, semantics_of, trained

CPU = torch.device("cpu")
sizes = st.lists(st.integers(0, 6).map(lambda n: n * 256), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=4))
def test_slots_have_the_bytes_asked_for_and_never_overlap(slot_bytes):
    """Slots begin as zeros and are filled with distinct numbers. No number changes afterwards."""
    requested = [Arena(f"arena_{'abcd'[i]}", Place.DEVICE, tuple(s)) for i, s in enumerate(slot_bytes)]
    arenas = Arenas(requested, CPU)
    assert arenas.n_bytes == {a.name: a.n_bytes for a in requested}
    slots = [Slot(a.name, i) for a in requested for i in range(len(a.slot_bytes))]
    for number, slot in enumerate(slots):
        assert not arenas.raw(slot).any()
        arenas.raw(slot).fill_(number)
    for number, slot in enumerate(slots):
        assert bool((arenas.raw(slot) == number).all())


def test_a_poisoned_slot_is_nan_in_every_float_dtype():
    arenas = Arenas([Arena("state", Place.HOST, (256, 512))], CPU)
    poison(arenas, Slot("state", 1))
    for dtype in ("bf16", "fp32", "fp64"):
        assert bool(arenas.view(Slot("state", 1), dtype).isnan().all())
        assert not arenas.view(Slot("state", 0), dtype).any(), "the neighbour was poisoned too"


def test_writing_a_view_keeps_what_autograd_saved_of_another():
    arenas = Arenas([Arena("activations", Place.DEVICE, (256,))], CPU)
    slot = Slot("activations", 0)
    x = arenas.view(slot, "fp32", (4,)).fill_(3.0).requires_grad_()
    y = (x * x).sum()
    arenas.view(slot, "fp32", (4,)).fill_(5.0)
    assert torch.autograd.grad(y, x)[0].tolist() == [10.0] * 4, "the slot's content now, as the plan says, and no error"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps():
    """Python does not see autograd graphs: if 20 steps leak theirs, the process grows by 20 times `kept_bytes`."""
    config = tiny_config("llama", hidden_size=128, intermediate_size=512, vocab_size=2000)
    plan = plan_of(config, semantics_of("llama", seq_len=128), Policy(save=saves(all=(1, 2)), accumulation_group=4))
    machine = trained(plan, TorchMachine, n_steps=10)
    before_bytes = resident_bytes()
    execute(plan, machine, 20, first_step=10)
    assert resident_bytes() - before_bytes < 20 * plan.kept_bytes / 3
