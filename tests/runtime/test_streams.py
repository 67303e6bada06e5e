"""Torch streams, events, timers, ranges and pinned memory: the calls of lanes, and the measured spans."""

import itertools
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from penstock.runtime.executor import execute
from penstock.runtime.machines.streams import CudaStreams
from penstock.runtime.plan import Kind, Lane, Policy, saves
from tests.late_streams import OnGpu, Poisoned, machine_of
from tests.tiny import tiny_config
from tests.training import N_STEPS, Remembers, differences, machine_for, plan_of, semantics_of


def test_spans_are_when_streams_ran_an_op_not_when_it_was_issued():
    """Run lanes in plan order; a waiting op starts after its predecessor ends."""
    slow_s = 0.03

    def is_slow(op):
        return op.kind is Kind.OFFLOAD_GRADIENT and op.block == 2

    class Slow(Poisoned):
        def work(self, index, op, step):
            if is_slow(op):
                time.sleep(slow_s)
            super().work(index, op, step)

    machine = machine_of(tiny_config("llama"), semantics_of("llama"), Policy(), haste=0.5, machine_type=Slow)
    ops, spans = machine.plan.ops, execute(machine.plan, machine, 5).spans
    span_of = {(span.step, span.op): span for span in spans}
    assert len(span_of) == 5 * len(ops)
    for lane in Lane:
        mine = [span for span in spans if ops[span.op].lane is lane]
        assert all(b.start_s >= a.end_s - 1e-6 for a, b in itertools.pairwise(mine))
    for (step, number), span in span_of.items():
        assert span.end_s - span.start_s >= (slow_s if is_slow(ops[number]) else 0)
        for wait in ops[number].waits:
            earlier = span_of.get((step - wait.distance, wait.op))
            if earlier is not None and Lane.CPU not in (ops[number].lane, ops[wait.op].lane):
                assert span.start_s >= earlier.end_s - 1e-6


class Stub:
    """Replace torch.cuda: execute at once on the CPU, and record calls."""

    def __init__(self):
        self.ranges, self.locked, self.current, self.flags = [], {}, [], []

    @contextmanager
    def enter(self, thing):
        self.current.append(thing)
        yield
        self.current.pop()

    def cudaHostRegister(self, address, n_bytes, flags):  # noqa: N802
        self.locked[address] = n_bytes
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.locked[address]

    def stream(self, device):
        return SimpleNamespace(wait_event=lambda event: event.recorded_s, synchronize=lambda: None)

    def event(self, enable_timing=False, blocking=False):
        self.flags.append((enable_timing, blocking))
        event = SimpleNamespace(recorded_s=None)
        event.record = lambda stream: setattr(event, "recorded_s", time.perf_counter())
        event.synchronize = lambda: event.recorded_s
        event.elapsed_time = lambda last: (last.recorded_s - event.recorded_s) * 1e3
        return event


@pytest.fixture
def stub(monkeypatch):
    stub = Stub()
    for name, value in {
        "set_device": lambda device: None, "init": lambda: None, "get_device_name": lambda device: "Stub", "Stream": stub.stream,
        "Event": stub.event, "device": stub.enter, "stream": stub.enter, "cudart": lambda: stub,
        "max_memory_reserved": lambda device: 9,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", stub.ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: stub.ranges.append("end"))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: self.data_ptr() in stub.locked)
    return stub


class OnTheCpu(CudaStreams):
    def __init__(self):
        super().__init__()
        self.device = torch.device("cpu")

    def pinned(self, tensor):
        return tensor.clone()


def test_torch_is_asked_for_events_ranges_and_locked_slabs(stub):
    """Check blocking events, ranges named after ops, and backward on the lane's own thread."""
    threads = set()

    class Watched(Remembers, OnGpu):
        def work(self, index, op, step):
            if op.lane is not Lane.CPU:
                threads.add((op.lane, torch._C._is_multithreading_enabled(), torch.is_grad_enabled(), len(stub.current) > 0))
            super().work(index, op, step)

    plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy(save=saves(products=(1,))))
    machine = machine_for(plan, Watched, streams=OnTheCpu())
    timeline = execute(plan, machine, N_STEPS)
    assert differences(machine) == []
    assert len(timeline.spans) == N_STEPS * len(plan.ops)
    assert threads == {(lane, False, False, True) for lane in (Lane.GPU, Lane.H2D, Lane.D2H)}
    assert all(blocking for _, blocking in stub.flags)
    assert {name for name in stub.ranges if name != "end"} == {op.name for op in plan.ops if op.lane is not Lane.CPU}
    assert stub.ranges.count("end") * 2 == len(stub.ranges)
    assert sorted(stub.locked.values()) == sorted(slab.numel() for slab in machine.arenas.host_slabs().values() if slab.numel())
    assert (machine.device_name(), machine.device_peak_bytes()) == ("Stub", 9)
    del machine
    assert stub.locked == {}


def test_a_failing_op_ends_its_range_and_a_late_error_says_so(stub):
    streams = OnTheCpu()

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        streams.issue(streams.stream(), "backward gpu b1 m0", fail)
    assert stub.ranges == ["backward gpu b1 m0", "end"]
    with pytest.raises(RuntimeError, match=r"^no \(a device reports errors late: an earlier op may be at fault\)$"):
        streams.finish(SimpleNamespace(synchronize=fail))
