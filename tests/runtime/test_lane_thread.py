"""Lane thread: one thread for all runs, which ends with its owner."""

import threading

import pytest

from penstock.runtime.executor import OpError, execute
from penstock.runtime.machines import lanes
from penstock.runtime.machines.lanes import LaneThread
from penstock.runtime.plan import Lane
from tests.null_machine import NullMachine

from .test_executor import Hanging, tiny_plan


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
