"""Torch streams, events, timers, ranges and pinned memory: the calls of lanes, and the measured spans; the thread of a lane."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from penstock.runtime.executor import OpError, execute
from penstock.runtime.machines import lanes
from penstock.runtime.machines.lanes import LaneThread
from penstock.runtime.machines.streams import CudaStreams
from penstock.runtime.plan import Kind, Lane, Policy, saves
from tests.fake_cuda import FakeCuda
from tests.late_streams import OnGpu, Poisoned, machine_of
from tests.null_machine import NullMachine
from tests.tiny import tiny_config
from tests.training import N_STEPS, Remembers, differences, machine_for, plan_of, semantics_of

from .test_executor import Hanging, tiny_plan


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


@pytest.fixture
def cuda(monkeypatch):
    calls = {"set_device": lambda device: None, "init": lambda: None}
    calls |= {"get_device_name": lambda device: "Fake", "max_memory_reserved": lambda device: 9}
    return FakeCuda(monkeypatch, **calls)


class OnTheCpu(CudaStreams):
    def __init__(self):
        super().__init__()
        self.device = torch.device("cpu")

    def pinned(self, tensor):
        return tensor.clone()


def test_torch_is_asked_for_events_ranges_and_locked_slabs(cuda):
    """Check blocking events, ranges named after ops, and backward on the lane's own thread."""
    threads = set()

    class Watched(Remembers, OnGpu):
        def work(self, index, op, step):
            if op.lane is not Lane.CPU:
                threads.add((op.lane, torch._C._is_multithreading_enabled(), torch.is_grad_enabled(), len(cuda.current) > 0))
            super().work(index, op, step)

    plan = plan_of(tiny_config("llama"), semantics_of("llama"), Policy(save=saves(products=(1,))))
    machine = machine_for(plan, Watched, streams=OnTheCpu())
    timeline = execute(plan, machine, N_STEPS)
    assert differences(machine) == []
    assert len(timeline.spans) == N_STEPS * len(plan.ops)
    assert threads == {(lane, False, False, True) for lane in (Lane.GPU, Lane.H2D, Lane.D2H)}
    assert all(blocking for _, blocking in cuda.flags)
    assert {name for name in cuda.ranges if name != "end"} == {op.name for op in plan.ops if op.lane is not Lane.CPU}
    assert cuda.ranges.count("end") * 2 == len(cuda.ranges)
    assert sorted(cuda.registered.values()) == sorted(slab.numel() for slab in machine.arenas.host_slabs().values() if slab.numel())
    assert (machine.device_name(), machine.device_peak_bytes()) == ("Fake", 9)
    del machine
    assert cuda.registered == {}


def test_a_failing_op_ends_its_range_and_a_late_error_says_so(cuda):
    streams = OnTheCpu()

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        streams.issue(streams.stream(), "backward gpu b1 m0", fail)
    assert cuda.ranges == ["backward gpu b1 m0", "end"]
    with pytest.raises(RuntimeError, match=r"^no \(a device reports errors late: an earlier op may be at fault\)$"):
        streams.finish(SimpleNamespace(synchronize=fail))


def test_the_thread_ends_with_its_owner_also_while_it_works():
    existing = {*threading.enumerate()}
    idle, busy, go_on = LaneThread(Lane.D2H), LaneThread(Lane.D2H), threading.Event()
    caller = threading.Thread(target=busy.perform, args=(lambda: go_on.wait(20),), name="lane-d2h")
    caller.start()
    threads = {*threading.enumerate()} - existing
    assert [thread.name for thread in threads] == ["lane-d2h"] * 3
    del idle, busy
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


class OnOneThread(NullMachine):
    """Give the gpu lane of a machine its own thread."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu = LaneThread(Lane.GPU)

    def on_thread(self, lane, work):
        self.gpu.perform(work) if lane is Lane.GPU else work()


def test_a_run_behind_one_that_hangs_is_an_error_and_no_hang(monkeypatch, capsys):
    monkeypatch.setattr(lanes, "ENDING_S", 0.01)

    class HangingOnOneThread(Hanging, OnOneThread):
        pass

    machine = HangingOnOneThread()
    try:
        with pytest.raises(OpError, match="load h2d b3 failed"):
            execute(tiny_plan(prefetch_depth=2), machine, 1, quiet_s=0.05)
        with pytest.raises(RuntimeError, match="lane-gpu still performs an op of a failed run"):
            machine.gpu.perform(lambda: None)
    finally:
        machine.ends.set()
    assert "waits no longer for lane-gpu" in capsys.readouterr().err
