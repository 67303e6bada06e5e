"""The executor: lane order, waits, errors, interrupts, stalls, and requested ends."""

import dataclasses
import gc
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.runtime import executor, lane_track
from penstock.runtime.batch import Batch, PreparedBatches
from penstock.runtime.errors import DataError
from penstock.runtime.executor import Execution, OpError, StallError, Stop, execute
from penstock.runtime.lane_track import Track
from penstock.runtime.plan import Kind, Lane, Plan, Policy, Repeat, Update, Wait
from penstock.runtime.plan.plan import unrolled
from penstock.runtime.plan.timeline import is_kept
from tests.edits import set_op
from tests.lanes import examples
from tests.null_machine import NullMachine
from tests.strategies import plans
from tests.tiny import tiny_config
from tests.training import plan_of, semantics_of

from .test_repetition import folded, small


def tiny_plan(**policy) -> Plan:
    return plan_of(tiny_config("llama", num_hidden_layers=4), semantics_of("llama"), Policy(**policy))


def look_every(monkeypatch, seconds: float) -> None:
    """Set the polling interval of lanes and of the caller's thread."""
    for room in (lane_track, executor):
        monkeypatch.setattr(room, "LOOK_S", seconds)


class Jittery(NullMachine):
    """Record start, end and micro-batch of each repetition of an op; delay ops of some lanes."""

    def __init__(self, slow: Lane | None = None) -> None:
        super().__init__()
        self.slow, self.n_done = slow, Counter[tuple[int, int]]()
        self.began: dict[tuple[int, int, int], int] = {}
        self.ended: dict[tuple[int, int, int], int] = {}
        self.micro_batches: dict[tuple[int, int, int], int | None] = {}
        self.clock, self.lock = 0, threading.Lock()

    def tick(self) -> int:
        with self.lock:
            self.clock += 1
            return self.clock

    def perform(self, index, op, step):
        key = (step, index, self.n_done[step, index])
        self.began[key], self.micro_batches[key] = self.tick(), op.micro_batch
        super().perform(index, op, step)
        if op.lane is self.slow:
            time.sleep(0.0003)
        self.n_done[step, index] += 1
        self.ended[key] = self.tick()


def numbered(plan: Plan) -> list[tuple[int, int]]:
    """Map each op of the unrolled plan to its number in the folded plan and its repetition."""
    repeat = plan.repeat or Repeat(0, 0, 1, 1)
    head, tail = range(repeat.start), range(repeat.end, len(plan.ops))
    inside = [(i, k) for k in range(repeat.times) for i in range(repeat.start, repeat.end)]
    return [*((i, 0) for i in head), *inside, *((i, 0) for i in tail)]


@settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(plans() | folded(max_repetitions=2), st.sampled_from([None, *Lane]))
def test_every_op_runs_once_in_order_after_what_it_waits_for(plan, slow):
    """Each repetition has its own micro-batch; the timeline has a span per retained repetition."""
    machine, numbers = Jittery(slow), numbered(plan)
    timeline = execute(plan, machine, 3)
    assert machine.ended.keys() == {(step, *number) for step in range(3) for number in numbers}
    for step in range(3):
        last_of_lane: dict[Lane, int] = {}
        for op, number in zip(unrolled(plan).ops, numbers, strict=True):
            began = machine.began[step, *number]
            assert machine.micro_batches[step, *number] == op.micro_batch
            assert last_of_lane.get(op.lane, 0) < began, "a lane performs its ops in plan order"
            last_of_lane[op.lane] = machine.ended[step, *number]
            for wait in op.waits:
                if step >= wait.distance:
                    assert machine.ended[step - wait.distance, *numbers[wait.op]] < began
    kept_numbers = [(i, k) for i, k in numbers if not plan.repeat or i not in plan.repeat or is_kept(k, plan.repeat.times)]
    expected = sorted((step, *number) for step in range(3) for number in kept_numbers)
    assert [(span.step, span.op, span.repetition) for span in timeline.spans] == expected


def test_a_deferred_policy_lets_a_lane_run_into_the_next_step():
    """The last update of a step ends after an op of the next step begins."""
    plan, next_began, overlaps = tiny_plan(update=Update.DEFERRED), threading.Event(), list[bool]()
    last = max(i for i, op in enumerate(plan.ops) if op.lane is Lane.CPU)

    class Held(NullMachine):
        def perform(self, index, op, step):
            if step == 1:
                next_began.set()
            if (step, index) == (0, last):
                overlaps.append(next_began.wait(60))
            super().perform(index, op, step)

    execute(plan, Held(), 3)
    assert overlaps == [True]


def test_steps_are_reported_in_order_and_the_last_spans_kept(monkeypatch):
    monkeypatch.setattr(executor, "KEEP_STEPS", 4)
    steps = []
    timeline = reported(steps.append, tiny_plan(), NullMachine(), 10, first_step=5)
    assert [step.number for step in steps] == list(range(5, 15))
    assert {span.step for span in timeline.spans} == {11, 12, 13, 14}


def test_batches_are_prepared_one_step_ahead_on_the_callers_thread():
    """The last op of each step waits for the batch of the next step. No batch is prepared beyond the run."""
    plan, prepared, is_ahead = tiny_plan(), list[tuple[int, int]](), {step: threading.Event() for step in (5, 6, 7, 8)}

    class Preparing(NullMachine):
        def prepare(self, step):
            prepared.append((step, threading.get_ident()))
            is_ahead[step].set()

        def perform(self, index, op, step):
            if step < 8 and index == len(plan.ops) - 1:
                assert is_ahead[step + 1].wait(60)
            super().perform(index, op, step)

    execute(plan, Preparing(), 4, first_step=5)
    assert prepared == [(step, threading.get_ident()) for step in is_ahead]


def test_a_prepared_batch_is_made_once_and_its_error_is_raised_where_it_is_used():
    made_steps, is_making, goes_on = list[int](), threading.Event(), threading.Event()

    def make(step):
        made_steps.append(step)
        if step == 2:
            is_making.set()
            assert goes_on.wait(60)
        if step == 3:
            raise DataError("no such row")
        return Batch(torch.tensor([step]), torch.tensor([step]))

    batches = PreparedBatches(make, lambda batch: batch.moved(lambda tokens: tokens + 10))
    batches.prepare(1)
    batches.prepare(1)
    ahead = threading.Thread(target=batches.prepare, args=(2,))
    ahead.start()
    assert is_making.wait(60)
    assert batches(1).input_ids.tolist() == [11], "a batch that is ready is given while a later one is made"
    goes_on.set()
    ahead.join()
    batches.prepare(3)
    assert batches(2).input_ids.tolist() == [12]
    with pytest.raises(DataError, match="no such row"):
        batches(3)
    assert batches(4).input_ids.tolist() == [14]
    batches.prepare(4)  # emulates a long pause of the caller, during which a lane prepares it
    assert made_steps == [1, 2, 3, 4]


def reported(report, *args, **how):
    with Execution(*args, **how) as steps:
        for step in steps:
            report(step)
    return steps.timeline


class Failing(NullMachine):
    """Fail at an op, selected by its number in the plan or by its name."""

    def __init__(self, place: tuple[int, int | str], error: Exception) -> None:
        super().__init__()
        self.at, self.error = place, error

    def perform(self, index, op, step):
        if self.at in ((step, index), (step, op.name)):
            raise self.error
        super().perform(index, op, step)


@pytest.mark.parametrize("m", [0, 5, 39])
def test_an_error_in_a_repetition_names_its_micro_batch(m):
    name = f"forward gpu b0 m{m}"
    with pytest.raises(OpError, match=f"step 1, lane gpu: {name} failed: KeyError"):
        execute(small(40), Failing((0, name), KeyError("boom")), 2)


def test_an_error_of_the_user_or_of_a_lanes_set_up_comes_out():
    class NoLane(NullMachine):
        @contextmanager
        def lane(self, lane):
            if lane is Lane.D2H:
                raise OSError("no stream")
            yield

    with pytest.raises(DataError, match="no text"):
        execute(tiny_plan(), Failing((0, 3), DataError("no text in it")), 2)
    with pytest.raises(OpError, match="lane d2h: its set-up failed: OSError: no stream"):
        execute(tiny_plan(), NoLane(), 1)


def test_a_caller_who_fails_or_leaves_the_loop_stops_the_lanes():
    def report(step):
        assert step.result is None
        raise RuntimeError("the disk is full")

    n_threads, machine = threading.active_count(), NullMachine()
    with pytest.raises(RuntimeError, match="the disk is full"):
        reported(report, tiny_plan(), machine, 10**5)
    with Execution(tiny_plan(), machine, 10**5) as steps:
        for _ in steps:
            break
    assert threading.active_count() == n_threads
    assert len(machine.performed) < 10**5 * len(tiny_plan().ops)


def test_after_a_failure_no_lane_begins_another_op():
    """Ops without waits do not begin either: compute can have hours of ops before its next wait."""
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
            time.sleep(0.05)  # the failure is reported after the lane's context has ended
            super().perform(index, op, step)

    machine = Slow()
    with pytest.raises(OpError, match="offload"):
        execute(plan, machine, 3)
    assert len(machine.performed) <= 3, "each of the other lanes ends the op that it has begun, and no more"


@pytest.mark.parametrize("where", ["set-up", "report"])
def test_an_interrupt_from_the_keyboard_stops_every_lane(where):
    main = threading.main_thread().ident
    n_threads = threading.active_count()

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
    assert threading.active_count() == n_threads, "a lane was left running"


def performs_all(machine: NullMachine, n_steps: int, **how) -> None:
    plan = tiny_plan()
    execute(plan, machine, n_steps, **how)
    assert len(machine.performed) == n_steps * len(plan.ops)


def test_a_run_ends_though_no_bell_is_ever_heard(monkeypatch):
    """Lanes poll from time to time."""
    look_every(monkeypatch, 0.001)

    class Mute(SimpleQueue):
        def put(self, item, block=True, timeout=None):
            pass

    monkeypatch.setattr(lane_track, "SimpleQueue", Mute)
    performs_all(NullMachine(), 2)


@pytest.fixture
def lane_lines(monkeypatch) -> SimpleQueue:
    """Return the executor's lines about lanes with long ops."""
    lines = SimpleQueue()
    monkeypatch.setattr(executor, "say", lines.put)
    return lines


def test_a_lane_that_is_long_in_an_op_is_named_and_not_killed(monkeypatch, lane_lines):
    """A hang looks like an op on a trillion parameters; the user decides."""
    look_every(monkeypatch, 0.005)

    class Long(NullMachine):
        def perform(self, index, op, step):
            if op.kind is Kind.LOSS:
                lines.extend(lane_lines.get(timeout=20) for _ in range(3 - len(lines)))
            super().perform(index, op, step)

    lines: list[str] = []
    performs_all(Long(), 1, quiet_s=0.02)
    for line in lines:
        assert "gpu: is at loss gpu b5 m0" in line
        assert "d2h: offload_gradient d2h b5 m0 waits for loss gpu b5 m0" in line


class Hanging(NullMachine):
    """Hang the gpu lane at the second layer until `ends` is set; meanwhile another lane fails."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs, self.ends = threading.Event(), threading.Event()

    def perform(self, index, op, step):
        if op.kind is Kind.FORWARD and op.block == 2:
            self.hangs.set()
            self.ends.wait(20)
        if op.kind is Kind.LOAD and op.block == 3:
            self.hangs.wait(20)
            raise KeyError("boom")


def test_an_error_comes_out_though_another_lane_hangs(lane_lines):
    machine = Hanging()
    try:
        with pytest.raises(OpError, match="load h2d b3 failed"):
            execute(tiny_plan(prefetch_depth=2), machine, 1, quiet_s=0.05)
    finally:
        machine.ends.set()
    assert "gpu: is at forward gpu b2" in lane_lines.get()


class Asks(Jittery):
    """Request the end from a lane during an op."""

    def __init__(self, place: tuple[int, int], slow: Lane | None = None) -> None:
        super().__init__(slow)
        self.at, self.stop, self.furthest = place, Stop(), 0

    def perform(self, index, op, step):
        super().perform(index, op, step)
        if (step, index) == self.at:
            self.furthest = max(step for step, *_ in self.began)
            self.stop.request()


@settings(max_examples=examples(40), deadline=None)
@given(plans(), st.sampled_from([None, *Lane]), st.integers(0, 3), st.data())
def test_all_lanes_end_after_the_same_step_when_asked_to_end(plan, slow, step, data):
    """End after the furthest step begun by any lane, or after the next one if a lane is about to begin it."""
    machine = Asks((step, data.draw(st.integers(0, len(plan.ops) - 1))), slow)
    numbers = []
    timeline = reported(lambda step: numbers.append(step.number), plan, machine, 50, stop=machine.stop)
    n_steps = len(numbers)
    assert sorted(machine.performed) == [(step, i) for step in range(n_steps) for i in range(len(plan.ops))]
    assert numbers == list(range(n_steps))
    assert machine.furthest + 1 <= n_steps <= machine.furthest + 2
    assert [(s.step, s.op) for s in timeline.spans] == sorted(machine.performed)


def test_an_end_asked_for_before_the_first_step_or_in_the_last():
    machine, stop, numbers, plan = NullMachine(), Stop(), [], tiny_plan()
    stop.request()
    timeline = reported(numbers.append, plan, machine, 3, stop=stop)
    assert machine.performed == numbers == list(timeline.spans) == []
    machine = Asks((2, len(plan.ops) - 1))
    execute(plan, machine, 3, stop=machine.stop)
    assert len(machine.performed) == 3 * len(plan.ops)


@pytest.mark.parametrize("asked_to_end", [False, True])
def test_lanes_that_wait_for_each_other_are_seen_and_named(asked_to_end, monkeypatch):
    """Detect it after a requested end, too: finished lanes do not count as busy."""
    look_every(monkeypatch, 0.01)
    plan, stop = tiny_plan(), Stop()
    load, forward = (next(i for i, op in enumerate(plan.ops) if op.kind is kind) for kind in (Kind.LOAD, Kind.FORWARD))
    stuck = set_op(plan, load, dataclasses.replace(plan.ops[load], waits=(Wait(forward),)))
    if asked_to_end:
        threading.Timer(0.05, stop.request).start()
    with pytest.raises(StallError, match="h2d: load h2d b0 waits for forward gpu b0 m0"):
        execute(stuck, NullMachine(), 2, stop=stop)


def test_each_step_says_how_long_each_lane_was_at_its_ops():
    """Sum over all repetitions, in the order of the steps."""
    plan, machine = small(40), Jittery(Lane.CPU)
    with Execution(plan, machine, 2, first_step=3) as steps:
        busy_s = {step.number: step.busy_s for step in steps}
    n_on_host = sum(plan.often(i) for i, op in enumerate(plan.ops) if op.lane is Lane.CPU)
    assert [*busy_s] == [3, 4]
    assert all(of_step[Lane.CPU] >= n_on_host * 0.0003 for of_step in busy_s.values())
    plan, finished = tiny_plan(update=Update.DEFERRED), []
    timeline = reported(finished.append, plan, Jittery(Lane.GPU), 4)
    for step in finished:
        spans = [span for span in timeline.spans if span.step == step.number]
        lanes_s = {lane: sum(s.end_s - s.start_s for s in spans if plan.ops[s.op].lane is lane) for lane in plan.lanes}
        assert step.busy_s == pytest.approx(lanes_s)


def test_steps_that_were_done_when_a_lane_failed_are_reported():
    """The caller is busy with an earlier step meanwhile."""
    plan, finished, failed = tiny_plan(), [], threading.Event()

    class Late(Failing):
        def perform(self, index, op, step):
            if (step, index) == self.at:
                failed.set()
            super().perform(index, op, step)

    def report(step):
        failed.wait(20)
        finished.append(step.number)

    with pytest.raises(OpError, match="step 4"):
        reported(report, plan, Late((3, len(plan.ops) - 1), KeyError("boom")), 9)
    assert finished == [0, 1, 2]


@pytest.mark.parametrize(("plan", "n_steps"), [(tiny_plan(), 40), (small(400), 3)], ids=["steps", "repetitions"])
def test_tokens_of_an_op_reach_the_lanes_that_wait_for_it(plan, n_steps):
    """Discard tokens afterwards: a CUDA event per op of a long run is a leak; an early discard is a race."""
    alive, peak, n_followed, followed = set(), 0, Counter(), set()

    class Token:
        def __init__(self, name):
            nonlocal peak
            self.name = name
            alive.add(id(self))
            peak = max(peak, len(alive))

        def __del__(self):
            alive.discard(id(self))

    class WithEvents(NullMachine):
        def mark(self, op):
            return Token(op.name)

        def follow(self, lane, token):
            n_followed[lane] += 1
            followed.add((lane, token.name))

    execute(plan, WithEvents(), n_steps)
    written = unrolled(plan)
    waits = [(op.lane, written.ops[w.op].name, n_steps - w.distance) for op in written.ops for w in op.waits]
    assert n_followed == Counter({lane: sum(n for waiting, _, n in waits if waiting is lane) for lane in plan.lanes})
    assert followed == {(lane, name) for lane, name, _ in waits}
    assert peak <= 8 * len(plan.ops)
    assert not alive


def test_an_interrupt_while_a_lane_is_started_comes_out(monkeypatch):
    """A thread cannot be joined after an interrupted start."""
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


def test_lanes_may_ask_while_an_op_that_is_done_collects_garbage():
    """A garbage collection runs code, during which other lanes run."""
    track, garbage, begun = Track(Lane.GPU, None), [], []
    track._waiters |= {Track(Lane.CPU, None): 10**9 for _ in range(4)}

    def collected(phase, info):
        if begun and len(track._waiters) < 100:
            track._waiters[Track(Lane.H2D, None)] = 10**9

    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    try:
        for n in range(100):
            garbage += [(n, i) for i in range(200)]  # tuples of the free list: later ones are newly allocated
            gc.set_threshold(1, 10**6, 10**6)
            begun.append(n)
            track.advance(None)
            gc.set_threshold(*thresholds)
            begun.clear()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
    assert track.n_done == 100
