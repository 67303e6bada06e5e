"""Signals and damaged checkpoints: a run loses nothing."""

import re
import signal

from penstock.cli.progress import Progress
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.training import inputs
from tests.lanes import mostly_slow
from tests.running import lines_of, one_line, penstock, plan_in, succeeded, train, weights_sha

SIGNALS = [(signal.SIGTERM, 0, "terminated"), (signal.SIGINT, 130, "interrupted"), (signal.SIGHUP, 0, "hung up")]


N_STEPS = 25  # lanes are ahead of the printed line, by several steps on a busy machine


def signalled_after(monkeypatch, step, *numbers):
    """Send these signals to the process after the line of a step is printed."""
    shown = Progress.step

    def show(self, metrics):
        shown(self, metrics)
        if metrics.step == step:
            for number in numbers:
                signal.raise_signal(number)

    monkeypatch.setattr(Progress, "step", show)


@mostly_slow(("number", "code", "word"), SIGNALS)
def test_a_signal_finishes_the_step_and_saves(home, monkeypatch, number, code, word):
    plan = plan_in(home)
    succeeded(train(home, plan, out="whole", steps=N_STEPS))
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        signalled_after(patched, 3, *[number] * (2 if number == signal.SIGHUP else 1))  # shells send it a second time
        result = train(home, plan, out="broken", steps=N_STEPS)
    assert result.exit_code == code, result.output
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert "Traceback" not in result.stderr
    assert "error" not in result.stderr
    resume = r"resume with: penstock run --config .*/broken/run\.yaml --resume\n"
    words = rf"{word}: stopped after step (\d+) of {N_STEPS}, saved; {resume}"
    stopped = int(re.search(words, result.stderr)[1])
    assert 3 <= stopped < N_STEPS
    assert [path.name for path in (home / "broken").glob("checkpoint-*")] == [f"checkpoint-{stopped}"]
    assert [line["step"] for line in lines_of(home, "broken")] == list(range(1, stopped + 1))
    succeeded(penstock("run", "--config", home / "broken" / "run.yaml", "--resume"))
    assert weights_sha(home / "whole" / f"checkpoint-{N_STEPS}") == weights_sha(home / "broken" / f"checkpoint-{N_STEPS}") != {}


@mostly_slow(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(home, monkeypatch, number, code):
    plan = plan_in(home)
    with monkeypatch.context() as patched:
        signalled_after(patched, 2, number, number)
        result = train(home, plan, steps=9)
    one_line(result, code, "terminated" if code == 143 else "interrupted")
    assert not list((home / "out").glob("checkpoint-*"))


def test_a_signal_before_the_first_step_ends_at_once(home, monkeypatch):
    plan = plan_in(home)
    monkeypatch.setattr(inputs, "read_data", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    one_line(train(home, plan, out="o"), 143, "terminated")
    assert not (home / "o").exists()


@mostly_slow("looks_by", ["evaluate", "_next_logits"])
def test_a_signal_in_a_validation_leaves_it_for_the_next_run(home, monkeypatch, looks_by):
    """Training is already saved; the resumed run makes up for missing validations."""
    plan, saved, forward = plan_in(home), list[bool](), TorchMachine.forward
    (home / "held-out.txt").write_text("The slings and arrows of outrageous fortune, or to take arms. " * 3)
    looks = ["--eval-data", home / "held-out.txt", "--prompt", "To be", "--prompt", "Why?"]

    def interrupted(machine, plan, batches, head, *args):
        is_its = getattr(head, "__qualname__", "").startswith(looks_by)
        if is_its and (home / "out" / "metrics.jsonl").exists():  # not before the first step
            saved.append((home / "out" / "checkpoint-3").is_dir())
            signal.raise_signal(signal.SIGTERM)
        return forward(machine, plan, batches, head, *args)

    with monkeypatch.context() as patched:
        patched.setattr(TorchMachine, "forward", interrupted)
        succeeded(train(home, plan, *looks, steps=3))
    assert saved == [True], "one pass"
    looked_at = [0, 3] if looks_by == "_next_logits" else [0]
    assert [line["step"] for line in lines_of(home, "out") if "eval_loss" in line] == looked_at
    assert not (home / "out" / "samples.jsonl").exists()
    succeeded(train(home, plan, *looks, "--resume", steps=3))
    assert [line["step"] for line in lines_of(home, "out") if "eval_loss" in line] == [0, 3]
    assert [line["prompt"] for line in lines_of(home, "out", "samples.jsonl")] == ["To be", "Why?"]
    assert [line["step"] for line in lines_of(home, "out") if "loss" in line] == [1, 2, 3]
