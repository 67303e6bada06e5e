"""The thread of a lane that outlives runs: one for all of them, which ends with its owner."""

import gc
import inspect
import subprocess
import sys
import threading
import time
import weakref

import pytest

from runtime.executor import OpError, execute
from runtime.machines import lanes
from runtime.machines.lanes import LaneThread
from runtime.plan import Kind, Lane
from tests.null_machine import NullMachine
from tests.tour import ROOT

from .test_executor import Hanging, tiny_plan


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_all_runs_are_on_one_thread_one_after_another():
    lane, seen = LaneThread(Lane.GPU), []
    for _ in range(2):
        lane.perform(lambda: seen.append(threading.current_thread()))
    assert seen[0] is seen[1] is not threading.current_thread()
    assert seen[0].name == "lane-gpu"
    with pytest.raises(KeyError, match="boom"):
        lane.perform(lambda: {}["boom"])
    lane.perform(lambda: seen.append(threading.current_thread()))
    assert seen[2] is seen[0]


def test_a_run_that_has_ended_is_not_held():
    class Work:
        def __call__(self):
            pass

    lane = LaneThread(Lane.GPU)
    gc.disable()
    try:
        for _ in range(50):
            work = Work()
            alive = weakref.ref(work)
            lane.perform(work)
            del work
            assert alive() is None
    finally:
        gc.enable()


def test_the_thread_ends_with_its_owner_also_while_it_works():
    before = len(threads_of("lane-d2h"))
    idle, busy, go_on = LaneThread(Lane.D2H), LaneThread(Lane.D2H), threading.Event()
    caller = threading.Thread(target=busy.perform, args=(lambda: go_on.wait(20),))
    caller.start()
    threads = threads_of("lane-d2h")
    assert len(threads) == before + 2
    del idle, busy
    go_on.set()
    for thread in (caller, *threads):
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


class OnOneThread(NullMachine):
    """A machine whose gpu lane has a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu, self.fails = LaneThread(Lane.GPU), False

    def on_thread(self, lane, work):
        self.gpu.perform(work) if lane is Lane.GPU else work()

    def perform(self, index, op, step):
        if self.fails and op.kind is Kind.FORWARD and op.block == 2:
            raise KeyError("boom")
        super().perform(index, op, step)


def test_a_run_behind_one_that_hangs_is_an_error_and_no_hang(monkeypatch, capsys):
    monkeypatch.setattr(lanes, "ENDING_S", 0.01)

    class HangingOnOneThread(Hanging, OnOneThread):
        pass

    machine = HangingOnOneThread()
    try:
        with pytest.raises(OpError, match="load h2d b3 failed"):
            execute(tiny_plan(prefetch_depth=2), machine, 1, quiet_s=0.05)
        with pytest.raises(RuntimeError, match="lane-gpu is still at an op of a run that has failed"):
            machine.gpu.perform(lambda: None)
    finally:
        machine.ends.set()
    assert "waits no longer for lane-gpu" in capsys.readouterr().err


def test_after_a_failure_the_same_thread_performs_the_next_run():
    machine, plan = OnOneThread(), tiny_plan()
    machine.fails = True
    for _ in range(3):
        with pytest.raises(OpError, match="lane gpu: forward gpu b2"):
            execute(plan, machine, 1)
    machine.fails, before = False, len(machine.performed)
    execute(plan, machine, 4)
    assert len(machine.performed) - before == 4 * len(plan.ops)


# Without the modules of the tests, which take seconds to import
EXITING = f"""
import sys, threading
from runtime.executor import execute
from runtime.machines.lanes import LaneThread
from tests.null_machine import NullMachine
from runtime.plan import Kind, Lane, Plan

{inspect.getsource(OnOneThread)}
machine = OnOneThread()
machine.keeps_itself = machine
execute(Plan.parse(sys.stdin.read()), machine, 2)
if sys.argv[1] == "hanging":
    threading.Thread(target=machine.gpu.perform, args=(threading.Event().wait,), daemon=True).start()
print("done", flush=True)
if sys.argv[1] == "raising":
    raise KeyError("boom")
"""


@pytest.mark.fast("some")
@pytest.mark.parametrize(("how", "code"), [("ending", 0), ("raising", 1), ("hanging", 0)])
def test_no_process_waits_for_such_a_thread_when_it_ends(how, code):
    began_s = time.perf_counter()
    command = [sys.executable, "-c", EXITING, how]
    done = subprocess.run(command, input=str(tiny_plan()), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "done\n"), done.stderr
    assert "Fatal" not in done.stderr
    assert time.perf_counter() - began_s < 100
