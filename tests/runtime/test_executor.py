"""Are lanes in order, waits kept, failures named, and stalls seen?"""

import dataclasses
import signal
import threading
import time
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import executor, lane_track
from runtime.errors import DataError
from runtime.executor import Execution, OpError, StallError, Stop, execute
from runtime.plan import Kind, Lane, Plan, Policy, Update, Wait
from tests.null_machine import NullMachine
from tests.strategies import plans
from tests.tiny import tiny_config
from tests.training import plan_of, semantics_of


def tiny_plan(**policy) -> Plan:
    return plan_of(tiny_config("llama", num_hidden_layers=4), semantics_of("llama"), Policy(**policy))


def look_every(monkeypatch, seconds: float) -> None:
    """Let lanes, and the caller's thread, look for themselves so often."""
    for room in (lane_track, executor):
        monkeypatch.setattr(room, "LOOK_S", seconds)


class Jittery(NullMachine):
    """Remembers when each op began and ended; ops of some lanes are slow."""

    def __init__(self, slow: Lane | None = None) -> None:
        super().__init__()
        self.slow = slow
        self.began: dict[tuple[int, int], int] = {}
        self.ended: dict[tuple[int, int], int] = {}
        self.clock = 0
        self.lock = threading.Lock()

    def tick(self) -> int:
        with self.lock:
            self.clock += 1
            return self.clock

    def perform(self, index, op, step):
        self.began[step, index] = self.tick()
        super().perform(index, op, step)
        if op.lane is self.slow:
            time.sleep(0.0005)
        self.ended[step, index] = self.tick()


@pytest.mark.drawn
@settings(max_examples=30, deadline=None)
@given(plans(), st.sampled_from([None, *Lane]))
def test_every_op_of_every_step_runs_once_after_what_it_waits_for(plan, slow):
    machine = Jittery(slow)
    timeline = execute(plan, machine, 3)
    assert sorted(machine.performed) == [(step, i) for step in range(3) for i in range(len(plan.ops))]
    for (step, index), began in machine.began.items():
        for wait in plan.ops[index].waits:
            if step >= wait.distance:
                assert machine.ended[step - wait.distance, wait.op] < began
    for lane in Lane:
        in_lane = [(step, i) for step, i in machine.performed if plan.ops[i].lane is lane]
        assert in_lane == sorted(in_lane), "a lane performs its ops in plan order"
    assert [(s.step, s.op) for s in timeline.spans] == sorted(machine.performed)


def test_a_lane_may_run_ahead_into_the_next_step_under_a_deferred_policy():
    """Otherwise nothing would be deferred: some op of step 1 begins before the last op of step 0 has ended."""
    machine = Jittery(Lane.CPU)
    plan = tiny_plan(update=Update.DEFERRED)
    execute(plan, machine, 3)
    last_end = max(end for (step, _), end in machine.ended.items() if step == 0)
    assert any(began < last_end for (step, _), began in machine.began.items() if step == 1)


def test_steps_are_reported_in_order_and_only_the_last_spans_are_kept():
    seen = []
    timeline = reported(seen.append, tiny_plan(), NullMachine(), 10, first_step=5, keep_steps=4)
    assert [step.number for step in seen] == list(range(5, 15))
    assert {span.step for span in timeline.spans} == {11, 12, 13, 14}


def reported(report, *given, **how):
    """Execute, and report each step when it is done."""
    with Execution(*given, **how) as steps:
        for step in steps:
            report(step)
    return steps.timeline


class Failing(NullMachine):
    def __init__(self, at: tuple[int, int], error: Exception) -> None:
        super().__init__()
        self.at, self.error = at, error

    def perform(self, index, op, step):
        if (step, index) == self.at:
            raise self.error
        super().perform(index, op, step)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1), st.data())
def test_an_error_at_any_op_stops_every_lane_and_names_the_op(step, data):
    plan = tiny_plan()
    index = data.draw(st.integers(0, len(plan.ops) - 1))
    before = threading.active_count()
    with pytest.raises(
        OpError, match=f"step {step + 1}, lane {plan.ops[index].lane}: {plan.ops[index].name} failed: KeyError"
    ) as caught:
        execute(plan, Failing((step, index), KeyError("boom")), 3)
    assert isinstance(caught.value.__cause__, KeyError)
    assert threading.active_count() == before, "a lane was left running"


def test_an_error_of_the_user_comes_through_as_it_is():
    with pytest.raises(DataError, match="no text"):
        execute(tiny_plan(), Failing((0, 3), DataError("no text in it")), 2)


def test_an_error_in_a_lanes_set_up_stops_the_run():
    class NoLane(NullMachine):
        @contextmanager
        def lane(self, lane):
            if lane is Lane.D2H:
                raise OSError("no stream")
            yield

    with pytest.raises(OpError, match="lane d2h: its set-up failed: OSError: no stream"):
        execute(tiny_plan(), NoLane(), 1)


def test_an_error_in_the_callers_report_stops_the_lanes():
    def report(step):
        raise RuntimeError("the disk is full")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="the disk is full"):
        reported(report, tiny_plan(), NullMachine(), 3)
    assert threading.active_count() == before


def test_a_caller_who_leaves_the_loop_stops_the_lanes():
    before, machine = threading.active_count(), NullMachine()
    with Execution(tiny_plan(), machine, 10**5) as steps:
        for step in steps:
            assert step.result is None
            break
    assert threading.active_count() == before
    assert len(machine.performed) < 10**5 * len(tiny_plan().ops)


def test_after_a_failure_no_lane_begins_another_op():
    """Not even one that waits for nobody: the lane that computes may have hours of work before its next wait."""
    plan = tiny_plan()
    plan = dataclasses.replace(plan, ops=tuple(dataclasses.replace(op, waits=()) for op in plan.ops))
    failed = threading.Event()

    class Slow(NullMachine):
        @contextmanager
        def lane(self, lane):
            try:
                yield
            finally:
                if lane is Lane.D2H:
                    failed.set()

        def perform(self, index, op, step):
            if op.lane is Lane.D2H:
                raise KeyError("boom")
            failed.wait(20)
            time.sleep(0.05)  # the failure is told after the lane's context has ended
            super().perform(index, op, step)

    machine = Slow()
    with pytest.raises(OpError, match="offload"):
        execute(plan, machine, 3)
    assert len(machine.performed) <= 3, "each of the other lanes ends the op that it has begun, and no more"


@pytest.mark.parametrize("where", ["set-up", "report"])
def test_an_interrupt_from_the_keyboard_stops_every_lane(where):
    main = threading.main_thread().ident
    before = threading.active_count()

    class Interrupted(NullMachine):
        @contextmanager
        def lane(self, lane):
            if where == "set-up" and lane is Lane.D2H:
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(0.05)
            yield

    def report(step):
        if where == "report":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        reported(report, tiny_plan(), Interrupted(), 500)
    assert threading.active_count() == before, "a lane was left running"


def test_an_op_that_outlasts_many_looks_is_no_stall(monkeypatch):
    look_every(monkeypatch, 0.005)
    plan = tiny_plan()

    class Slow(NullMachine):
        def perform(self, index, op, step):
            if op.kind in (Kind.LOSS, Kind.NORM):
                time.sleep(0.05)
            super().perform(index, op, step)

    machine = Slow()
    execute(plan, machine, 1)
    assert len(machine.performed) == len(plan.ops)


def test_a_lane_that_wakes_late_is_no_stall(monkeypatch):
    """What it waits for is done: the computer is busy with something else."""
    look_every(monkeypatch, 0.005)

    class Late(SimpleQueue):
        def get(self, block=True, timeout=None):
            try:
                return super().get(block, timeout)
            finally:
                if threading.current_thread().name == "lane-gpu":
                    time.sleep(0.06)

    monkeypatch.setattr(lane_track, "SimpleQueue", Late)
    machine, plan = NullMachine(), tiny_plan()
    execute(plan, machine, 1)
    assert len(machine.performed) == len(plan.ops)


def test_a_run_ends_though_no_bell_is_ever_heard(monkeypatch):
    """Lanes look for themselves from time to time."""
    look_every(monkeypatch, 0.001)

    class Mute(SimpleQueue):
        def put(self, item, block=True, timeout=None):
            pass

    monkeypatch.setattr(lane_track, "SimpleQueue", Mute)
    machine, plan = NullMachine(), tiny_plan()
    execute(plan, machine, 2)
    assert len(machine.performed) == 2 * len(plan.ops)


def test_a_lane_is_woken_only_for_what_it_waits_for(monkeypatch):
    """One bell per wait at most: waking everybody at every op would cost each of them the processor."""
    woken = []

    class Counted(SimpleQueue):
        def get(self, block=True, timeout=None):
            found = super().get(block, timeout)
            woken.append(threading.current_thread())
            return found

    monkeypatch.setattr(lane_track, "SimpleQueue", Counted)
    plan = plan_of(tiny_config("llama", num_hidden_layers=8), semantics_of("llama"), Policy(prefetch_depth=4, accumulation_group=4))
    execute(plan, Jittery(Lane.GPU), 10)
    lanes = [thread for thread in woken if thread is not threading.main_thread()]
    n_waits = sum(10 - wait.distance for op in plan.ops for wait in op.waits)
    assert len(lanes) <= n_waits
    assert len(woken) - len(lanes) <= 4 * 10 + 1, "the caller is woken when a lane ends a step"


def test_a_process_that_was_suspended_for_an_hour_has_not_stalled(monkeypatch):
    class Jumping:
        """A clock that leaps an hour while an op is performed."""

        ahead_s = 0.0

        def perf_counter(self):
            return time.perf_counter() + self.ahead_s

    clock = Jumping()
    monkeypatch.setattr(executor, "time", clock)
    look_every(monkeypatch, 0.005)

    class Suspended(NullMachine):
        def perform(self, index, op, step):
            if op.kind is Kind.LOSS:
                time.sleep(0.02)
                clock.ahead_s += 3600.0
                time.sleep(0.02)
            super().perform(index, op, step)

    machine, plan = Suspended(), tiny_plan()
    execute(plan, machine, 1)
    assert len(machine.performed) == len(plan.ops)


def test_a_lane_that_is_long_in_an_op_is_named_after_a_while_and_not_killed(monkeypatch, capsys):
    """A hang cannot be told from an op on a trillion parameters; a person can."""
    look_every(monkeypatch, 0.005)
    said = threading.Event()

    class Long(NullMachine):
        def perform(self, index, op, step):
            if op.kind is Kind.LOSS:
                said.wait(20)
            super().perform(index, op, step)

    def say(words):
        lines.append(words)
        if len(lines) == 3:
            said.set()

    lines, plan = [], tiny_plan()
    monkeypatch.setattr(executor, "say", say)
    machine = Long()
    execute(plan, machine, 1, quiet_s=0.02)
    assert len(machine.performed) == len(plan.ops)
    assert len(lines) >= 3
    for line in lines:
        assert "no op has ended for" in line
        assert "gpu: is at loss gpu b5 m0" in line
        assert "d2h: offload_gradient d2h b5 m0 waits for loss gpu b5 m0" in line


def test_an_error_comes_out_though_another_lane_hangs(monkeypatch, capsys):
    hangs, ended = threading.Event(), threading.Event()

    class Hanging(NullMachine):
        def perform(self, index, op, step):
            if op.kind is Kind.FORWARD and op.block == 2:
                hangs.set()
                ended.wait(20)
            if op.kind is Kind.LOAD and op.block == 3:
                hangs.wait(20)
                raise KeyError("boom")

    try:
        with pytest.raises(OpError, match="load h2d b3 failed"):
            execute(tiny_plan(prefetch_depth=2), Hanging(), 1, quiet_s=0.05)
    finally:
        ended.set()
    assert "gpu: is at forward gpu b2" in capsys.readouterr().err


def test_a_lane_that_is_long_in_its_end_is_waited_for_and_named(monkeypatch):
    """What it gives back there may still be in use."""
    lines, said = [], threading.Event()

    def say(words):
        lines.append(words)
        said.set()

    class Lingers(NullMachine):
        @contextmanager
        def lane(self, lane):
            yield
            if lane is Lane.D2H:
                said.wait(20)
                ended.append(lane)

    ended: list[Lane] = []
    monkeypatch.setattr(executor, "say", say)
    execute(tiny_plan(), Lingers(), 1, quiet_s=0.02)
    assert ended == [Lane.D2H]
    assert "lane-d2h does not end" in lines[0]


def test_the_last_step_is_reported_though_nothing_moves_after_it(monkeypatch):
    """The signal of its last op came while the caller was still busy with the step before."""
    look_every(monkeypatch, 1e6)
    plan, told = tiny_plan(), threading.Event()

    class Lingering(NullMachine):
        @contextmanager
        def lane(self, lane):
            yield
            told.wait(20)  # all lanes are alive, and none will signal again

    machine, seen = Lingering(), []

    def report(step):
        while not seen and len(machine.performed) < 2 * len(plan.ops):
            time.sleep(0.001)
        if not seen:
            time.sleep(0.05)
        seen.append(step.number)
        if len(seen) == 2:
            told.set()

    run = threading.Thread(target=reported, args=(report, plan, machine, 2), daemon=True)
    run.start()
    run.join(10)
    late = run.is_alive()
    told.set()
    assert not late
    assert seen == [0, 1]


# -- an end before the end


class Asks(Jittery):
    """Some lane asks for the end while it is at an op."""

    def __init__(self, at: tuple[int, int], slow: Lane | None = None) -> None:
        super().__init__(slow)
        self.at, self.stop, self.furthest = at, Stop(), 0

    def perform(self, index, op, step):
        super().perform(index, op, step)
        if (step, index) == self.at:
            self.furthest = max(step for step, _ in self.began)
            self.stop.request()


@pytest.mark.drawn
@settings(max_examples=40, deadline=None)
@given(plans(), st.sampled_from([None, *Lane]), st.integers(0, 3), st.data())
def test_all_lanes_end_after_the_same_step_when_somebody_asks_for_the_end(plan, slow, step, data):
    """The step is the furthest that any lane had begun, or the one after it if a lane was just about to begin that."""
    machine = Asks((step, data.draw(st.integers(0, len(plan.ops) - 1))), slow)
    told = []
    timeline = reported(lambda step: told.append(step.number), plan, machine, 50, stop=machine.stop)
    n_steps = len(told)
    assert sorted(machine.performed) == [(step, i) for step in range(n_steps) for i in range(len(plan.ops))]
    assert told == list(range(n_steps))
    assert machine.furthest + 1 <= n_steps <= machine.furthest + 2
    assert [(s.step, s.op) for s in timeline.spans] == sorted(machine.performed)


def test_a_lane_that_is_a_step_ahead_of_the_others_ends_its_step_and_they_follow(monkeypatch):
    """Under a deferred update the lane that computes is in the next step while the optimizer is still in this one."""
    plan = tiny_plan(update=Update.DEFERRED)
    is_ahead = threading.Event()

    class Ahead(Asks):
        def perform(self, index, op, step):
            if step == 1 and op.lane is Lane.GPU:
                is_ahead.set()
            if step == 0 and index == len(plan.ops) - 1:
                assert is_ahead.wait(20)
            super().perform(index, op, step)

    machine = Ahead((0, len(plan.ops) - 1))
    execute(plan, machine, 50, stop=machine.stop)
    assert {step for step, _ in machine.performed} == {0, 1}
    assert len(machine.performed) == 2 * len(plan.ops)


def test_the_last_step_is_the_furthest_that_any_lane_has_begun_however_far_behind_the_others_are():
    """A lane that begins an earlier step meanwhile changes nothing."""
    stop = Stop()
    board = executor._Board([], 0, 50, stop)
    assert all(board.begins(turn) for turn in (0, 0, 1, 2, 1))
    stop.request()
    assert not board.begins(3)
    assert board.begins(2)
    assert board.n_steps == 3


def test_a_run_that_is_asked_to_end_before_it_begins_does_nothing():
    machine, stop, told = NullMachine(), Stop(), []
    stop.request()
    timeline = reported(told.append, tiny_plan(), machine, 3, stop=stop)
    assert machine.performed == told == list(timeline.spans) == []


def test_an_end_that_is_asked_for_in_the_last_step_changes_nothing():
    plan = tiny_plan()
    machine = Asks((2, len(plan.ops) - 1))
    execute(plan, machine, 3, stop=machine.stop)
    assert len(machine.performed) == 3 * len(plan.ops)


def test_lanes_that_wait_for_each_other_are_seen_after_an_end_was_asked_for(monkeypatch):
    """Those that have ended are not mistaken for busy ones."""
    look_every(monkeypatch, 0.01)
    plan = tiny_plan()
    load = next(i for i, op in enumerate(plan.ops) if op.kind is Kind.LOAD)
    forward = next(i for i, op in enumerate(plan.ops) if op.kind is Kind.FORWARD)
    ops = list(plan.ops)
    ops[load] = dataclasses.replace(ops[load], waits=(Wait(forward),))
    stop = Stop()
    threading.Timer(0.05, stop.request).start()
    with pytest.raises(StallError):
        execute(dataclasses.replace(plan, ops=tuple(ops)), NullMachine(), 2, stop=stop)


def test_each_step_says_how_long_each_lane_was_at_its_ops():
    """As its spans say, in the order of the steps."""
    said, plan = [], tiny_plan(update=Update.DEFERRED)
    timeline = reported(said.append, plan, Jittery(Lane.GPU), 4, first_step=3)
    assert [step.number for step in said] == [3, 4, 5, 6]
    for step in said:
        spans = [span for span in timeline.spans if span.step == step.number]
        assert step.busy_s == pytest.approx(
            {lane: sum(s.end_s - s.start_s for s in spans if plan.ops[s.op].lane is lane) for lane in plan.lanes}
        )


def test_steps_that_were_done_when_a_lane_failed_are_reported():
    """Though the caller was busy with an earlier one."""
    plan, told, failed = tiny_plan(), [], threading.Event()

    class Late(Failing):
        def perform(self, index, op, step):
            if (step, index) == self.at:
                failed.set()
            super().perform(index, op, step)

    def report(step):
        failed.wait(20)
        told.append(step.number)

    with pytest.raises(OpError, match="step 4"):
        reported(report, plan, Late((3, len(plan.ops) - 1), KeyError("boom")), 9)
    assert told == [0, 1, 2]


def test_lanes_that_wait_for_each_other_are_seen_and_named():
    plan = tiny_plan()
    load = next(i for i, op in enumerate(plan.ops) if op.kind is Kind.LOAD)
    forward = next(i for i, op in enumerate(plan.ops) if op.kind is Kind.FORWARD)
    ops = list(plan.ops)
    ops[load] = dataclasses.replace(ops[load], waits=(Wait(forward),))
    with pytest.raises(StallError, match="h2d: load h2d b0 waits for forward gpu b0 m0"):
        execute(dataclasses.replace(plan, ops=tuple(ops)), NullMachine(), 2)


def test_tokens_of_an_op_reach_the_lanes_that_wait_for_it():
    """The seam for CUDA events: whoever waits for an op follows the token that its lane left."""

    class WithEvents(NullMachine):
        def __init__(self):
            super().__init__()
            self.followed = []

        def mark(self, op):
            return f"event of {op.name}"

        def follow(self, lane, token):
            self.followed.append((lane, token))

    machine = WithEvents()
    plan = tiny_plan()
    execute(plan, machine, 1)
    expected = {(op.lane, f"event of {plan.ops[w.op].name}") for op in plan.ops for w in op.waits if w.distance == 0}
    assert set(machine.followed) == expected


def test_tokens_are_forgotten_when_no_lane_can_ask_for_them_any_more():
    """A CUDA event per op of a long run would be a leak."""
    alive, most = set(), 0

    class Token:
        def __init__(self):
            nonlocal most
            alive.add(id(self))
            most = max(most, len(alive))

        def __del__(self):
            alive.discard(id(self))

    class WithEvents(NullMachine):
        def mark(self, op):
            return Token()

        def follow(self, lane, token):
            followed.append(lane)

    plan, followed = tiny_plan(), []
    execute(plan, WithEvents(), 40)
    assert len(followed) == sum(40 - wait.distance for op in plan.ops for wait in op.waits), "one was forgotten too early"
    assert most <= 4 * len(plan.ops)
    assert not alive


def test_a_signal_while_a_lane_is_being_started_is_the_error_that_comes_out(monkeypatch):
    """A thread whose start was interrupted cannot be joined."""
    start, started = threading.Thread.start, []

    def interrupted(thread):
        if started:
            raise KeyboardInterrupt
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(tiny_plan(), NullMachine(), 2)
    assert not started[0].is_alive(), "a lane was left running"
