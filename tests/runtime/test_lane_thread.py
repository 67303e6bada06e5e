"""The thread of a lane that outlives runs: one for all of them, which ends with its owner."""

import gc
import inspect
import subprocess
import sys
import threading
import time
import weakref

import pytest

from runtime import lane_thread
from runtime.executor import OpError, execute
from runtime.lane_thread import LaneThread
from runtime.plan import Kind, Lane
from tests.null_machine import NullMachine
from tests.tour import ROOT

from .test_executor import Hanging, tiny_plan


def ended(run) -> bool:
    run.join(10)
    return not run.is_alive()


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_all_runs_are_on_one_thread_one_after_another():
    lane, seen, go_on = LaneThread(Lane.GPU), [], threading.Event()

    def note():
        go_on.wait(20)
        seen.append(threading.current_thread())

    runs = [lane.run(note), lane.run(note)]
    assert not any(run.is_alive() for run in runs), "none is begun yet"
    runs[0].start()
    runs[0].join(0.01)
    assert runs[0].is_alive()
    go_on.set()
    runs[1].start()
    assert all(map(ended, runs))
    assert seen[0] is seen[1] is not threading.current_thread()
    assert seen[0].name == runs[0].name == "lane-gpu"


def test_a_run_that_has_ended_is_not_held():
    class Work:
        def __call__(self):
            pass

    lane = LaneThread(Lane.GPU)
    gc.disable()
    try:
        for _ in range(50):
            work = Work()
            alive, run = weakref.ref(work), lane.run(work)
            del work
            run.start()
            assert ended(run)
            assert alive() is None
    finally:
        gc.enable()


def test_the_thread_ends_with_its_owner_also_while_it_works():
    before = len(threads_of("lane-d2h"))
    idle, busy, go_on = LaneThread(Lane.D2H), LaneThread(Lane.D2H), threading.Event()
    run = busy.run(lambda: go_on.wait(20))
    run.start()
    threads = threads_of("lane-d2h")
    assert len(threads) == before + 2
    del idle, busy
    go_on.set()
    assert ended(run)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


class OnOneThread(NullMachine):
    """A machine whose gpu lane has a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu, self.fails = LaneThread(Lane.GPU), False

    def on_thread(self, lane, work):
        return self.gpu.run(work) if lane is Lane.GPU else super().on_thread(lane, work)

    def perform(self, index, op, step):
        if self.fails and op.kind is Kind.FORWARD and op.block == 2:
            raise KeyError("boom")
        super().perform(index, op, step)


def test_a_run_behind_one_that_hangs_is_an_error_and_no_hang(monkeypatch, capsys):
    monkeypatch.setattr(lane_thread, "ENDING_S", 0.01)

    class HangingOnOneThread(Hanging, OnOneThread):
        pass

    machine = HangingOnOneThread()
    try:
        with pytest.raises(OpError, match="load h2d b3 failed"):
            execute(tiny_plan(prefetch_depth=2), machine, 1, quiet_s=0.05)
        with pytest.raises(RuntimeError, match="lane-gpu is still at an op of a run that has failed"):
            machine.gpu.run(lambda: None).start()
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
from runtime.lane_thread import LaneThread
from tests.null_machine import NullMachine
from runtime.plan import Kind, Lane, Plan

{inspect.getsource(OnOneThread)}
machine = OnOneThread()
machine.keeps_itself = machine
execute(Plan.parse(sys.stdin.read()), machine, 2)
if sys.argv[1] == "hanging":
    machine.gpu.run(threading.Event().wait).start()
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
