"""Runs that replan: the same bits as a run with one plan, also killed around the change; who decides, and when they do not."""

import subprocess
import sys
import weakref

import pytest

import penstock
from penstock import replanning
from penstock.checkpoint.checkpoint import load_state
from penstock.replanning import REPLAN_FILE, Replanning
from penstock.run_files import MEASURED_FILE, policy_fields
from penstock.runtime.errors import PlanError
from penstock.runtime.host import memory
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import PlanFile
from tests.accidents import ENDED_S, bits, instant
from tests.forks import Forked
from tests.rank_runs import BATCH, by_hand, command_with, words
from tests.running import one_line, plan_in, succeeded, train
from tests.tour import ROOT


@pytest.fixture
def plans(home):
    return plan_in(home, "--policy", "megatrain", name="plan-0.json"), plan_in(home, name="plan-1.json")


@pytest.fixture
def quick(plans, monkeypatch):
    monkeypatch.setattr(replanning, "subprocess", instant(plans[1]))


def policy_of(path):
    return policy_fields(PlanFile.read(path).plan)


REPLANS = ("--replan", 2, "--save-every", 3)


def test_a_search_beside_the_run_changes_its_plan_and_no_bit(home, monkeypatch):
    """With the real search, for which the run waits here. Memory of the first plan is released before the second has any."""
    plan, arenas, usual = plan_in(home, "--policy", "megatrain"), list[weakref.ref](), TorchMachine.__init__

    def paused(self, timeline):
        begun(self, timeline)
        if self._process is not None:
            self._process.wait()

    def allocated(self, *args, **options):
        assert [ref() for ref in arenas] == [None] * len(arenas)
        usual(self, *args, **options)
        arenas.append(weakref.ref(self.arenas))

    begun = Replanning.paused
    monkeypatch.setattr(TorchMachine, "__init__", allocated)
    monkeypatch.setattr(Replanning, "paused", paused)
    result = succeeded(train(home, plan, *REPLANS, steps=24))
    assert len(arenas) in (2, 4), "one of each plan, and of each self-test that this process had not done"
    monkeypatch.undo()
    assert result.stderr.count("replanned after step ") == 1, result.stderr
    assert result.stderr.count(" a step (") == 2, "predicted and measured"
    succeeded(train(home, plan, "--save-every", 3, steps=24, out="plain"))
    assert bits(home / "out") == bits(home / "plain")
    plan_file = PlanFile.read(home / "out" / "run-plan.json")
    assert plan_file.plan.profile["op_ratios"]
    assert "claim recomputed" in penstock.check(plan_file)
    assert not (home / "out" / REPLAN_FILE).exists()


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_names_the_plan_and_a_resumed_run_takes_it(home, plans):
    old, new = map(policy_of, plans)
    succeeded(train(home, plans[0], *REPLANS, steps=7))
    named = {"former": old, "policy": new}
    assert load_state(home / "out" / "checkpoint-6").fields["replanned"] == named
    assert "replanned" not in load_state(home / "out" / "checkpoint-3").fields
    result = succeeded(train(home, plans[0], "--save-every", 3, "--resume", steps=9))
    assert "run-plan.json replaced the given plan during the run" in result.stderr
    assert policy_of(home / "out" / "run-plan.json") == new
    assert load_state(home / "out" / "checkpoint-9").fields["replanned"] == named
    third = plan_in(home, "--policy", "slideformer", name="third.json")
    succeeded(train(home, third, "--save-every", 3, "--resume", steps=12))
    assert policy_of(home / "out" / "run-plan.json") == policy_of(third), "the user's choice"
    succeeded(train(home, plans[0], "--save-every", 3, steps=12, out="plain"))
    assert bits(home / "out") == bits(home / "plain")


def test_a_run_pauses_once_to_measure_once_when_a_plan_is_found_and_once_to_change(home, plans, monkeypatch):
    monkeypatch.setattr(replanning, "subprocess", instant(plans[1], n_looks=4))
    n_pauses, begins = list[int](), Replanning.begins
    monkeypatch.setattr(Replanning, "begins", lambda self, n_done: n_pauses.append(n_done) or begins(self, n_done))
    succeeded(train(home, plans[0], "--replan", 2, "--save-every", 40, steps=45))
    assert n_pauses[:2] == [0, 4]
    assert n_pauses[3:] == [40]
    assert policy_of(home / "out" / "run-plan.json") == policy_of(plans[1])


def test_runs_killed_around_the_change_go_on_to_the_same_bits(home, plans):
    """SIGKILL within ops and files, before, at and after the change; resumed with the first plan, with and without `--replan`."""
    command = [sys.executable, "-m", "tests.accidents", "replanned", str(home), "3", "8"]
    process = Forked(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output = process.communicate(timeout=ENDED_S)
    assert process.returncode == 0, output
    assert "killed" in output[0]


@pytest.mark.slow
def test_the_first_rank_changes_the_plan_of_all(home):
    plan, new = (plan_in(home, "--policy", p, *BATCH, "--gpus", 2, name=f"{p}.json") for p in ("megatrain", "slideformer"))
    lines = "from penstock import replanning", "from tests.accidents import instant"
    stand_in = command_with(*lines, f"replanning.subprocess = instant({str(new)!r})")
    arguments = [words(home, plan, *REPLANS, steps=10, out="out"), words(home, plan, "--save-every", 3, steps=10, out="plain")]
    for command in arguments:
        outcomes = by_hand([command] * 2, commands=[stand_in] * 2)
        assert [code for _, code in outcomes] == [0, 0], outcomes
    assert bits(home / "out") == bits(home / "plain")
    assert policy_of(home / "out" / "run-plan.json") == policy_of(new) != policy_of(plan)
    resumed = words(home, plan, "--resume", steps=12)
    outcomes = by_hand([resumed] * 2)
    assert [code for _, code in outcomes] == [0, 0], outcomes
    assert "replaced the given plan" in outcomes[0][0][1]


@pytest.mark.parametrize(
    ("search", "line"),
    [
        ({"predicted": {"former_s": 1.0, "step_s": 0.99}}, "1 s -> 990 ms a step (-1.0%) by the measured times"),
        ({"code": 1, "errors": "Traceback\nMemoryError: no memory"}, "MemoryError: no memory"),
        ({"predicted": []}, "indices must be"),
        ({}, "more than are free"),
    ],
)
def test_a_search_without_a_plan_leaves_the_run_as_it_is(home, plans, monkeypatch, search, line):
    monkeypatch.setattr(replanning, "subprocess", instant(plans[1], **search))
    if not search:  # memory is short once the run has measured its steps
        is_measured = (home / "out" / MEASURED_FILE).exists
        monkeypatch.setattr(memory, "available_host_bytes", lambda: -(10**9) if is_measured() else 10**12)
    result = succeeded(train(home, plans[0], *REPLANS, steps=8))
    assert result.stderr.count("replanning: ") == 1
    assert line in result.stderr
    assert "the run keeps its plan" in result.stderr
    assert policy_of(home / "out" / "run-plan.json") == policy_of(plans[0])


def test_what_cannot_replan_is_refused_or_says_so(home, plans):
    one_line(train(home, plans[0], "--replan", 2, "--save-minutes", 0), 2, "replan does nothing without checkpoints")
    one_line(train(home, plans[0], *REPLANS, "--weights-only"), 2, "replan does nothing without checkpoints")
    one_line(train(home, plans[0], "--replan", 2, "--device", "emulated"), 2, "keeps its plan")
    with pytest.raises(PlanError, match="replan has no effect in a loop"):
        next(penstock.stream(plans[0], home / "data", settings={"replan": 2}))
    elsewhere = plan_in(home, "--machine", "rtx4090-server", name="elsewhere.json")
    result = succeeded(train(home, elsewhere, *REPLANS, steps=8, out="there"))
    assert "--replan has no effect" in result.stderr
    assert not (home / "there" / MEASURED_FILE).exists()


@pytest.mark.usefixtures("quick")
def test_a_program_replans_too(home, plans):
    settings = {"replan": 2, "tokenizer": "bytes", "checkpoint.every": 3}
    trained = penstock.train(plans[0], home / "data", out=home / "out", steps=9, from_scratch=True, lr=1e-3, settings=settings)
    assert [metrics.step for metrics in trained.metrics] == [*range(1, 10)]
    assert policy_of(home / "out" / "run-plan.json") == policy_of(plans[1])
