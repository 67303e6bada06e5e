"""Python functions of `penstock`, from a model to a checkpoint, compared with the commands."""

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import penstock
from penstock.data.data import DataRequest, read_data
from penstock.data.user_batches import UserBatches
from penstock.run_config import RunConfigError
from penstock.runtime.batch import Batch
from penstock.runtime.errors import CheckpointError, DataError, PlanError, WrongPlanError
from penstock.settings import DataSettings
from tests.lanes import mostly_slow
from tests.running import SIZES as FLAGS
from tests.running import UNSEARCHED, succeeded, train, weights_sha
from tests.running import penstock as command

SIZES = {"seq_len": 32, "batch_size": 4, "micro_batch": 2}
DEFERRED = json.loads(Path(UNSEARCHED[1]).read_text())


class Batches:
    """Random batches by step, optionally with wrong targets or documents."""

    def __init__(self, first_target: int = 0, documents: tuple[tuple[int, ...], ...] | None = None) -> None:
        self.first_target, self.documents = first_target, documents

    def batch(self, step: int) -> Batch | tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(step))
        pair = ids[:, :-1].contiguous(), ids[:, 1:] + self.first_target
        return pair if step % 2 and self.documents is None else Batch(*pair, self.documents)


def planned(home: Path, policy: dict[str, Any] | None = DEFERRED) -> "penstock.results.Planned":
    return penstock.plan(home / "model", "cpu-2core", **SIZES, policy=policy)


def train_new(plan: Any, data: Any, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    return penstock.train(plan, data, from_scratch=True, settings={"tokenizer": "bytes"} | (settings or {}), **options)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_names_are_these_and_planning_imports_no_torch() -> None:
    types = ["Batch", "Batches", "PenstockError", "Plan", "Policy", "Profile", "Semantics", "Stop"]
    names = [*types, "check", "forward", "plan", "predict", "probe", "stream", "train"]
    assert penstock.__all__ == names
    assert all(getattr(penstock, name) is not None for name in names)
    code = (
        "import sys, penstock\nassert not {'torch', 'scipy', 'pydantic'} & {*sys.modules}\n"
        "found = penstock.plan('qwen2.5-0.5b', 'cpu-2core', seq_len=512, batch_size=4, micro_batch=2, policy='megatrain')\n"
        "penstock.check(found), penstock.predict(found), str(found), found._repr_html_()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert re.match(r"\d+\.\d+|unknown", penstock.__version__)
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        _ = penstock.plann


def test_a_plan_is_the_commands_in_words_and_in_its_file(home: Path) -> None:
    plan = planned(home, policy=None)
    result = command("plan", home / "model", *FLAGS[:-2], "-o", home / "a")
    assert str(plan) == result.stdout.rstrip()
    assert plan.save(home / "b").read_bytes() == (home / "a").read_bytes()
    assert penstock.predict(home / "b").step_s == plan.step_s
    assert penstock.predict(home / "b", "h100-sxm").step_s < plan.step_s
    assert penstock.check(home / "b") == penstock.check(plan)
    assert 'sandbox="allow-scripts"' in plan._repr_html_()
    fields = json.loads((home / "b").read_text())
    fields["claim"]["prediction"]["step_s"] /= 2
    (home / "b").write_text(json.dumps(fields))
    with pytest.raises(WrongPlanError, match="b: "):
        penstock.check(home / "b")


def test_a_request_that_cannot_be_is_refused_in_one_line(home: Path) -> None:
    for name, wrong, message in (
        ("micro_batch", 8, "a micro-batch of 8 is more than the batch of 4"),
        ("dtype", "bf16", "no argument 'dtype'; did you mean compute_dtype?"),
        ("policy", penstock.Policy(prefetch_depth=-1), "policy: prefetch_depth: "),
        ("policy", home / "none.json", "no policy or file"),
        ("policy", home / "data" / "a.txt", "a.txt: not JSON"),
        ("gpus", 0, "gpus=0 and hosts=1: give at least 1"),
        ("gpus", "2", "plan: gpus='2': give int"),
        ("train", 3, "plan: train=3: give str or None"),
        ("deterministic", 1, "plan: deterministic=1: give bool"),
        ("host_memory_bytes", "64GB", "plan: host_memory_bytes='64GB': give int or None"),
        ("compute_dtype", torch.bfloat16, "compute_dtype: should be bf16, fp32, fp8, found torch.bfloat16"),
    ):
        with pytest.raises(penstock.PenstockError, match=re.escape(message)) as refused:
            penstock.plan(home / "model", "cpu-2core", **(SIZES | {name: wrong}))
        assert "\n" not in str(refused.value)


def test_a_policy_is_read_from_a_file_as_by_the_command(home: Path) -> None:
    saved = planned(home).save(home / "plan.json")
    for policy in (UNSEARCHED[1], Path(UNSEARCHED[1]), saved, str(saved)):
        assert planned(home, policy).plan == planned(home).plan  # type: ignore[arg-type]


def test_arguments_of_another_type_are_refused_in_one_line(home: Path) -> None:
    for plan, options, message in (
        (3, {}, "plan is a int; give"),
        ("plan", {"settings": [1]}, "settings is a list"),
        ("plan", {"resume": "yes"}, "train: resume='yes': give bool"),
    ):
        with pytest.raises(PlanError, match=re.escape(message)):
            penstock.train(planned(home) if plan == "plan" else plan, home / "data", **options)  # type: ignore[arg-type]


def test_training_leaves_the_bytes_of_the_command(home: Path) -> None:
    plan, steps = planned(home), list[int]()
    trained = train_new(plan, home / "data", out=home / "a", steps=3, lr=1e-3, on_step=lambda metrics: steps.append(metrics.step))
    assert steps == [1, 2, 3] == [metrics.step for metrics in trained.metrics]
    succeeded(train(home, plan.save(home / "plan.json"), out="b", steps=3))
    assert weights_sha(trained.checkpoint) == weights_sha(home / "b" / "checkpoint-3")
    dataset = read_data(DataRequest(DataSettings(str(home / "data")), None, 272, 32, 4, 0, home / "cache"))
    of_batches = train_new(plan, SimpleNamespace(batch=dataset.batch), out=home / "c", steps=3, lr=1e-3)
    assert weights_sha(of_batches.checkpoint) == weights_sha(trained.checkpoint)
    assert command("report", home / "plan.json", home / "b", "-o", home / "b.html").exit_code == 0
    for page in (trained.page(), (home / "b.html").read_text()):
        assert [words in page for words in ("<dt>measured</dt>", "a run of")] == [True] * 2
    assert AutoModelForCausalLM.from_pretrained(trained.checkpoint, dtype="auto").dtype == torch.bfloat16


def test_a_stopped_run_on_own_batches_resumes_to_the_bits(home: Path) -> None:
    plan, stop = planned(home), penstock.Stop()
    unbroken = train_new(plan, Batches(), out=home / "whole", steps=4, lr=1e-3)
    part = train_new(plan, Batches(), out=home / "part", steps=4, lr=1e-3, on_step=lambda _: stop.request(), stop=stop)
    assert 1 <= part.n_done < 4
    rest = train_new(plan, Batches(), out=home / "part", steps=4, lr=1e-3, resume=True)
    assert rest.n_done == 4
    assert weights_sha(rest.checkpoint) == weights_sha(unbroken.checkpoint)
    assert losses(home / "part") == losses(home / "whole")


def test_a_command_goes_on_with_a_programs_run(home: Path) -> None:
    plan = planned(home)
    unbroken = train_new(plan, home / "data", out=home / "whole", steps=4)
    train_new(plan, home / "data", out=home / "part", steps=2)
    succeeded(command("run", "--config", home / "part" / "run.yaml", "--resume", "--steps", 4))
    assert weights_sha(home / "part" / "checkpoint-4") == weights_sha(unbroken.checkpoint)
    (home / "out").mkdir()
    (home / "out" / "run-plan.json").write_text("mine")
    with pytest.raises(CheckpointError, match="not written by a run"):
        train_new(plan, home / "data", out=home / "out", steps=1)
    assert (home / "out" / "run-plan.json").read_text() == "mine"


@mostly_slow(
    ("batches", "message"),
    [
        (Batches(300), "the model has ids 0 to 271"),
        (type("Short", (), {"batch": lambda self, step: (torch.zeros(4, 8).long(),) * 2})(), r"are \(4, 8\) torch.int64"),
        (Batches(documents=((5, 5),) * 4), r"have \[10, 10, 10, 10\] tokens"),
        (type("Texts", (), {"batch": lambda self, step: ["a", "b"]})(), "gave a list; give a Batch, or input ids and targets"),
    ],
)
def test_a_wrong_batch_is_refused_by_its_step(home: Path, batches: penstock.Batches, message: str) -> None:
    with pytest.raises(DataError, match=message):
        train_new(planned(home), batches, out=home / "out", steps=2)


class Faulty(Batches):
    """Batches with an error at step 3 (counted from 0): an exception, or nothing to learn."""

    fault: str | None = None

    def batch(self, step: int) -> Any:
        if step == 3 and self.fault == "raises":
            raise KeyError("my bug")
        ids, targets = super().batch(2 * step + 1)
        return ids, torch.full_like(targets, -100) if step == 3 and self.fault == "empty" else targets


N_CALLS = list[int]()  # of `careless`: it raises in the last


def careless(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if N_CALLS and not N_CALLS.append(N_CALLS.pop() - 1) and N_CALLS == [0]:
        raise KeyError("my bug")
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")


@mostly_slow(
    ("fault", "message", "n_whole", "settings"),
    [
        ("loss", "the loss python:careless raised KeyError: 'my bug'; correct it", {2}, {}),
        ("raises", r"batch\(3\) raised KeyError: 'my bug'; correct it", {3}, {"checkpoint.every": 1}),
        ("empty", r"batch\(3\) has nothing to learn: all its targets are -100; give one with targets", {3}, {}),
        ("on_step", "on_step, after step 2, raised KeyError: 'my bug'; correct it", {2, 3}, {}),
    ],
)
def test_an_error_of_the_users_code_is_named_and_the_last_whole_step_saved(
    home: Path, fault: str, message: str, n_whole: set[int], settings: dict[str, Any]
) -> None:
    """The resumed run has the bits of one without the error."""
    loss = careless if fault == "loss" else None
    plan = penstock.plan(home / "model", "cpu-2core", **SIZES, loss=loss, loss_tile_tokens=64, policy=DEFERRED)
    options: dict[str, Any] = {"steps": 5, "lr": 1e-3, "settings": settings, "loss": loss}

    def on_step(metrics: Any) -> None:
        assert metrics.step <= 2, "it is not called after its error"
        if metrics.step == 2:
            raise KeyError("my bug")

    faulty = Faulty()
    N_CALLS[:] = [2 + 3 * 2] if fault == "loss" else []  # two to check it, then the second micro-batch of step 3
    faulty.fault = fault
    with pytest.raises(penstock.PenstockError, match=f"^{message}; the state after step . is saved, to resume from$") as caught:
        train_new(plan, faulty, out=home / "out", **options, **({"on_step": on_step} if fault == "on_step" else {}))
    assert isinstance(caught.value.__cause__, KeyError) or fault == "empty"
    assert (n_logged := len(losses(home / "out"))) in n_whole
    assert (home / "out" / f"checkpoint-{n_logged}").is_dir()
    faulty.fault = None
    N_CALLS.clear()
    resumed, expected = (train_new(plan, faulty, out=home / out, resume=out == "out", **options) for out in ("out", "expected"))
    assert weights_sha(resumed.checkpoint) == weights_sha(expected.checkpoint)
    assert losses(home / "out") == losses(home / "expected")


def test_settings_go_by_their_dotted_names(home: Path) -> None:
    settings = {"checkpoint.every": 1, "evaluation.data": str(home / "data"), "optimizer.weight_decay": 0.1}
    trained = train_new(planned(home), home / "data", out=home / "out", steps=2, settings=settings)
    assert (trained.folder / "checkpoint-1").is_dir()
    assert "weight_decay: 0.1" in (trained.folder / "run.yaml").read_text()
    assert any("eval_loss" in line for line in (trained.folder / "metrics.jsonl").read_text().splitlines())
    with pytest.raises(PlanError, match="settings: out is an argument; give it as out="):
        train_new(planned(home), home / "data", out=home / "other", settings={"out": "elsewhere"})


def test_batches_are_refused_where_they_cannot_be_used(home: Path) -> None:
    with pytest.raises(penstock.PenstockError, match="give it files, not batches"):
        penstock.train(planned(home), Batches(), out=home / "out", steps=1, device="emulated")
    assert not (home / "out").exists()
    packed = Batches(documents=((16, 16),) * 4)
    with pytest.raises(DataError, match="leave document_tokens out"):
        UserBatches(packed, 32, 4, 272, "attention by document is not there").batch(0)
    assert UserBatches(packed, 32, 4, 272).batch(0).document_tokens == ((16, 16),) * 4


def test_a_loop_of_ones_own_trains_the_bytes_of_train(home: Path) -> None:
    """Inspect, evaluate and save after every step under deferred updates; a new rate applies from the next step."""
    plan = penstock.plan(home / "model", "cpu-2core", **SIZES, policy={"update": "deferred", "accumulation_group": 2})
    how = {"from_scratch": True, "settings": {"tokenizer": "bytes", "evaluation.data": str(home / "data")}, "lr": 1e-2}
    session = penstock.train(plan, home / "data", out=home / "train", steps=5, **how)
    weights, loss = dict[str, torch.Tensor](), 0.0
    turns, logged = penstock.stream(plan, home / "data", out=home / "stream", steps=9, every=2, **how), list[dict[str, Any]]()
    for turn in turns:
        logged += [asdict(metrics) for metrics in turn.metrics]
        evaluated = turn.evaluate()
        if turn.step == 2:
            held_weights = dict(turn.weights())
            saved = AutoModelForCausalLM.from_pretrained(turn.save()).state_dict()
            assert held_weights
            assert all(torch.equal(weight, saved[name]) for name, weight in held_weights.items())
            first = turn
            norms, by_view = turn.gradient_norms(), turn.weights(copy=False)
            assert math.hypot(*norms.values()) == pytest.approx(turn.metrics[-1].grad_norm, rel=1e-9)
            assert norms.keys() == held_weights.keys()
            assert all(torch.equal(weight, held_weights[name]) for name, weight in turn.weights(copy=False))
            next(by_view)[1].mul_(1.0)
            with pytest.raises(RunConfigError, match="was written to: weights are views"):
                next(by_view)
        if turn.step == 4:
            turn.lr = torch.tensor(0.0)
            for late in (first.save, first.evaluate, first.weights().__next__, partial(setattr, first, "lr", 1.0)):
                with pytest.raises(RunConfigError, match="the turn after step 2 is over"):
                    late()
        if turn.step == 6:
            assert turn.lr == 0.0
            assert all(torch.equal(weight, weights[name]) for name, weight in turn.weights())
            assert evaluated["eval_loss"] == loss
            turn.save()
            turn.lr = 0.5  # after the step's checkpoint
            turn.stop()
        weights, loss = dict(turn.weights()), evaluated["eval_loss"]
    assert [line["loss"] for line in logged[:5]] == [line.loss for line in session.metrics]
    assert (len(logged), [line["lr"] for line in logged]) == (6, [1e-2] * 4 + [0.0] * 2)
    assert {path.name for path in (home / "stream").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-6"}
    looks = dict(how["settings"]) | {"evaluation.every": 7}
    later = penstock.stream(plan, home / "data", out=home / "stream", steps=9, every=2, **how | {"resume": True, "settings": looks})
    assert [(turn.step, len(turn.metrics), turn.lr) for turn in later] == [(8, 2, 0.5), (9, 1, 0.5)], "the rate survives a resume"
    background = {"settings": {"checkpoint.background": True}}
    odd = {
        "every is 0": {"every": 0},
        "every=2.5: give int": {"every": 2.5},
        "argument 'step'": {"step": 1},
        "between steps": background,
    }
    for message, request in odd.items():
        with pytest.raises(PlanError, match=message):
            next(penstock.stream(plan, home / "data", **request))
