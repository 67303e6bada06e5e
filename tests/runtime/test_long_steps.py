"""Is a step that is performed in repetitions the step that is written out?"""

import random
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.check.check import check
from planner.lower.lower import lower_folded, lower_written_out
from runtime.executor import Execution, OpError, StallError, execute
from runtime.plan import Kind, Lane, Plan, PlanFile, Policy, Semantics, Update, Wait, saves
from runtime.plan.repetition import unrolled
from runtime.plan.timeline import is_kept
from tests.null_machine import NullMachine
from tests.running import lines_of, make_home, penstock, plan_in, train, weights_sha
from tests.strategies import MODEL, PROFILE, small_workload
from tests.tiny import tiny_config
from tests.training import (
    N_STEPS,
    Remembering,
    batches_of,
    clip_some_steps,
    differences,
    plain,
    plan_of,
    scheduled,
    semantics_of,
    state_of,
)

from .test_executor import look_every
from .test_repetition import folded, small


class Counting(NullMachine):
    """Remembers how often each op of each step was performed, with which micro-batch, and when it began and ended."""

    def __init__(self, slow: Lane | None = None) -> None:
        super().__init__()
        self.slow = slow
        self.began: dict[tuple[int, int, int], int] = {}
        self.ended: dict[tuple[int, int, int], int] = {}
        self.micro_batches: dict[tuple[int, int, int], int | None] = {}
        self.n: Counter[tuple[int, int]] = Counter()
        self.clock, self.lock = 0, threading.Lock()

    def tick(self) -> int:
        with self.lock:
            self.clock += 1
            return self.clock

    def perform(self, index, op, step):
        key = (step, index, self.n[step, index])
        self.began[key], self.micro_batches[key] = self.tick(), op.micro_batch
        super().perform(index, op, step)
        if op.lane is self.slow:
            time.sleep(0.0002)
        self.n[step, index] += 1
        self.ended[key] = self.tick()


def numbered(plan: Plan) -> list[tuple[int, int]]:
    """Of each op of the plan written out: its number in the plan that repeats, and in which repetition."""
    repeat = plan.repeat
    assert repeat is not None
    before, after = range(repeat.start), range(repeat.end, len(plan.ops))
    inside = [(i, k) for k in range(repeat.times) for i in range(repeat.start, repeat.end)]
    return [*((i, 0) for i in before), *inside, *((i, 0) for i in after)]


@pytest.mark.drawn
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(folded(max_repetitions=2), st.sampled_from([None, *Lane]))
def test_every_repetition_runs_once_after_what_it_waits_for(plan, slow):
    machine = Counting(slow)
    execute(plan, machine, 3)
    written, numbers = unrolled(plan), numbered(plan)
    assert len(machine.ended) == 3 * plan.n_performed
    for step in range(3):
        last_of_lane = {}
        for op, (i, k) in zip(written.ops, numbers, strict=True):
            began = machine.began[step, i, k]
            assert machine.micro_batches[step, i, k] == op.micro_batch
            assert last_of_lane.get(op.lane, 0) < began, "a lane performs its ops in plan order"
            last_of_lane[op.lane] = machine.ended[step, i, k]
            for wait in op.waits:
                if step >= wait.distance:
                    assert machine.ended[(step - wait.distance, *numbers[wait.op])] < began


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(folded())
def test_the_timeline_keeps_the_first_repetitions_and_the_last(plan):
    timeline = execute(plan, NullMachine(), 4, first_step=7, keep_steps=2)
    repeat = plan.repeat
    expected = {(step, i, k) for step in (9, 10) for i, k in numbered(plan) if i not in repeat or is_kept(k, repeat.times)}
    assert [(s.step, s.op, s.repetition) for s in timeline.spans] == sorted(expected)


def test_steps_are_reported_with_what_every_repetition_took():
    plan = small(40)
    machine = Counting(Lane.CPU)
    with Execution(plan, machine, 2) as steps:
        busy = {step.number: step.busy_s for step in steps}
    n_on_host = sum(plan.often(i) for i, op in enumerate(plan.ops) if op.lane is Lane.CPU)
    for step in (0, 1):
        assert busy[step][Lane.CPU] >= n_on_host * 0.0002


class FailingAt(NullMachine):
    """One op fails at one micro-batch."""

    def __init__(self, kind, micro_batch):
        super().__init__()
        self.kind, self.micro_batch = kind, micro_batch

    def perform(self, index, op, step):
        if (op.kind, op.micro_batch) == (self.kind, self.micro_batch):
            raise KeyError("boom")
        super().perform(index, op, step)


@pytest.mark.parametrize("m", [0, 1, 5, 30, 39])
def test_an_error_in_any_repetition_names_its_micro_batch(m):
    with pytest.raises(OpError, match=f"step 1, lane gpu: forward gpu b0 m{m} failed: KeyError"):
        execute(small(40), FailingAt(Kind.FORWARD, m), 2)


def test_a_stall_says_which_repetition_waits_for_which(monkeypatch):
    """The gradient that the last micro-batch's offload would bring is waited for in the step that made it: never."""
    plan = small(12)
    repeat = plan.repeat
    last = next(i for i, op in enumerate(plan.ops) if i >= repeat.end and op.kind is Kind.FORWARD)
    norm = next(i for i, op in enumerate(plan.ops) if op.kind is Kind.NORM)
    ops = list(plan.ops)
    ops[last] = replace(ops[last], waits=(Wait(norm),))
    look_every(monkeypatch, 0.05)
    with pytest.raises(StallError) as caught:
        execute(replace(plan, ops=tuple(ops)), NullMachine(), 2)
    assert "gpu: forward gpu b0 m11 waits for norm cpu b4" in str(caught.value)


def test_tokens_of_repetitions_are_forgotten_when_no_lane_can_ask_for_them():
    """A CUDA event per op of a step of a million micro-batches would be a leak; one forgotten too early, a race."""
    alive, most, followed = set(), 0, Counter()

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
            followed[lane] += 1

    plan = small(400)
    execute(plan, WithEvents(), 3)
    assert most <= 8 * len(plan.ops)
    assert not alive
    repeat = plan.repeat
    n_between = sum(w.op in repeat and not w.distance for op in plan.ops[repeat.start : repeat.end] for w in op.waits)
    assert sum(followed.values()) >= 3 * (repeat.times - 1) * n_between, "one was forgotten too early"


# --- bits -----------------------------------------------------------------------------------------------------------------


class Delayed(Remembering):
    """Lanes are delayed at random."""

    def __init__(self, *args, delay_seed=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.rng = random.Random(delay_seed)

    def perform(self, index, op, step):
        if self.rng.random() < 0.1:
            time.sleep(self.rng.random() * 0.003)
        super().perform(index, op, step)


def folded_plan_of(config, semantics, policy):
    plain_plan = plan_of(config, semantics, policy)
    found = lower_folded(plain_plan.model, plain_plan.workload, semantics, policy, PROFILE)
    assert found is not None
    return found


def trained(plan, config, seed=0, machine_type=Delayed):
    check(plan)
    batches = batches_of(config["vocab_size"], plan.semantics.batch_size, plan.semantics.seq_len)
    machine = machine_type(plan, lambda step: batches[step], scheduled)
    machine.rng = random.Random(seed)
    machine.initialise(7)
    execute(plan, machine, N_STEPS)
    return machine


POLICIES = {
    "lean": Policy(update=Update.DEFERRED),
    "barrier, groups of two": Policy(accumulation_group=2, gradient_slots=2, prefetch_depth=2),
    "groups of three that spill": Policy(accumulation_group=3, spill_blocks=(1, 2), update=Update.DEFERRED, gradient_slots=3),
    "kept, resident, speculating": Policy(
        save=saves(all=(2,)), resident_blocks=(1, 5), speculate_blocks=(0, 2), update=Update.DEFERRED
    ),
    "shared boundaries": Policy(boundary_stride=3, update=Update.DEFERRED),
}


@pytest.mark.fast("some")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_training_in_repetitions_is_the_plain_loop_bit_for_bit(model_type, name):
    config = tiny_config(model_type, num_hidden_layers=4)
    semantics = clip_some_steps(model_type, semantics_of(model_type, batch_size=18, seq_len=8), (("num_hidden_layers", 4),))
    plan = folded_plan_of(config, semantics, POLICIES[name])
    assert plan.repeat.times >= 3
    machine = trained(plan, config, seed=3)
    assert differences(machine, plain(model_type, semantics, (("num_hidden_layers", 4),))) == []


@pytest.mark.soak
def test_hundreds_of_micro_batches_are_performed_as_if_written_out():
    config = tiny_config("llama", num_hidden_layers=1, vocab_size=64)
    semantics = semantics_of("llama", batch_size=200, seq_len=4, loss_tile_tokens=4)
    plan = folded_plan_of(config, semantics, Policy(update=Update.DEFERRED))
    assert len(plan.ops) < 120
    batches = batches_of(64, 200, 4, 1)
    states = []
    for one in (plan, unrolled(plan)):
        machine = Remembering(one, lambda step: batches[step], scheduled)
        machine.initialise(7)
        execute(one, machine, 1)
        states.append((state_of(machine), machine.results[0].loss, machine.results[0].grad_norm))
    (a, *of_a), (b, *of_b) = states
    assert of_a == of_b
    assert all(x[name].equal(y[name]) for x, y in zip(a, b, strict=True) for name in x)


def test_what_repeats_does_not_depend_on_the_number_of_layers():
    for n in (12, 13, 57):
        semantics = Semantics(seq_len=4, batch_size=n, micro_batch=1)
        policy = Policy(update=Update.DEFERRED)
        plan = lower_folded(MODEL, small_workload(3, tied=False), semantics, policy, PROFILE)
        written = lower_written_out(MODEL, small_workload(3, tied=False), semantics, policy, PROFILE)
        assert plan.n_performed == len(written.ops)


# --- as a user does it ------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_a_long_step_is_planned_checked_run_resumed_and_reported(tmp_path, monkeypatch):
    """Begun under the plan that repeats and gone on with under the one that does not, and the other way round: the same files."""
    home = make_home(tmp_path)
    sizes = ("--batch-size", "16", "--micro-batch", "1", "--policy", "megatrain-plus")
    written = plan_in(home, *sizes, name="written.json")
    monkeypatch.setattr("planner.lower.lower.FEWEST_FOLDED", 10)
    repeats = plan_in(home, *sizes, name="repeats.json")
    assert PlanFile.read(written).plan.repeat is None
    assert PlanFile.read(repeats).plan.repeat is not None
    said = [penstock("check", path).output.partition(": ")[2] for path in (written, repeats)]
    assert said[0] == said[1]
    assert said[0].startswith("right: ")
    constant = ("--schedule", "constant")
    for out, first, second in (("a", repeats, written), ("b", written, repeats)):
        for plan, n_steps, more in ((first, 2, ()), (second, 4, ("--resume",))):
            done = train(home, plan, *constant, *more, out=out, steps=n_steps)
            assert done.exit_code == 0, done.output
    files = [home / out / "checkpoint-4" for out in ("a", "b")]
    assert weights_sha(files[0]) == weights_sha(files[1])
    assert [line["loss"] for line in lines_of(home, "a")] == [line["loss"] for line in lines_of(home, "b")]
    for page in ("page.html", "trace.json"):
        done = penstock("report", repeats, home / "b", "-o", home / page)
        assert done.exit_code == 0, done.output


@pytest.mark.soak
def test_a_run_of_a_long_step_corrects_its_machine(tmp_path, monkeypatch):
    home = make_home(tmp_path)
    monkeypatch.setattr("planner.lower.lower.FEWEST_FOLDED", 10)
    plan = plan_in(home, "--batch-size", "16", "--micro-batch", "1", "--policy", "megatrain-plus")
    done = train(home, plan, "--recalibrate", home / "profile.json", steps=4)
    assert done.exit_code == 0, done.output
    assert (home / "profile.json").exists()
