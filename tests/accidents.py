"""Fault injection: errors, NaN, skipped updates, kills, SIGTERM and full disks in a run."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock import replanning
from penstock.checkpoint import checkpoint, retention
from penstock.replanning import REPLAN_FILE
from penstock.run_files import read_measured
from penstock.runtime.host.updates import CHANGES
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Kind, Lane, Op, Plan
from tests.running import SCRATCH, penstock, succeeded
from tests.training import poison

ENDED_S = 120  # far longer than any of these runs, so that only a hang exceeds it
# Arenas that a step rewrites and the next step does not read, so that NaN in them affects one step.
PASSING = ("weights", "activations", "spilled", "gradients", "sums", "host_gradients", "staging")


def in_time(work: Callable[[], Any]) -> Any:
    """Return or raise the outcome of `work` on a new thread; raise AssertionError if it hangs."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(ENDED_S)
    assert not thread.is_alive(), "the call hangs"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


class Struck(TorchMachine):
    """Machine that raises `error` once in an op of a step: before, during or after its work, or at an event."""

    at: tuple[int, int]  # step, op
    where: str  # before, middle, after, mark, follow
    error: BaseException

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_over = False
        self._here = threading.local()

    def _strike(self, where: str, at: object) -> None:
        if (where, at) == (self.where, self.at) and not self.is_over:
            self.is_over = True
            raise self.error

    def perform(self, index: int, op: Op, step: int) -> None:
        self._here.at = (step, index)
        self._strike("before", (step, index))
        super().perform(index, op, step)
        if self.where == "middle" and self.at == (step, index) and not self.is_over:
            for slot in op.writes:
                poison(self.arenas, slot)  # partly done: the outputs are undefined
        self._strike("middle", (step, index))
        self._strike("after", (step, index))

    def mark(self, op: Op) -> object:
        self._strike("mark", self._here.at)
        return self._here.at

    def follow(self, lane: Lane, token: object) -> None:
        self._strike("follow", token)


class Poisoned(TorchMachine):
    """Machine that fills the outputs of one op of one step with NaN."""

    at: tuple[int, int]

    def perform(self, index: int, op: Op, step: int) -> None:
        super().perform(index, op, step)
        if (step, index) == self.at:
            for slot in op.writes:
                poison(self.arenas, slot)


def can_be_poisoned(plan: Plan) -> list[int]:
    """Return ops with outputs that are read in the same step only, and before the gradient norm is computed."""
    squared = plan.squared  # on the device, before the offload: the norm does not see NaN from the copy to the host
    in_time = [i for i, op in enumerate(plan.ops) if not (op.kind is Kind.OFFLOAD_GRADIENT and op.block in squared)]
    return [i for i in in_time if plan.ops[i].writes and all(slot.arena in PASSING for slot in plan.ops[i].writes)]


class LeavesOut(TorchMachine):
    """Machine that skips all updates of one step."""

    left_out: int

    def perform(self, index: int, op: Op, step: int) -> None:
        if step != self.left_out or op.kind not in CHANGES:
            super().perform(index, op, step)


# -- whole processes ----------------------------------------------------------------------------------------------------
# Run by itself: `python -m tests.accidents killed|full_disk|replanned FOLDER SEED N_TRIALS`. The folder holds
# plans (plan-*.json) and a folder `data`, and receives the outputs.

N_STEPS = 4
PREDICTED = {"former_s": 2.0, "step_s": 1.0}  # by a search
PAGE_BYTES = 4096  # tmpfs allocates whole pages


def forked(args: list[object], event: str = "op", n: int | None = None, signal_number: int = signal.SIGKILL) -> bool:
    """Run a command in a forked process that sends itself a signal within 2 ms of its n-th op or n-th fsync. Return True if SIGKILL
    ended it, and False if it ended by itself, with exit code 0."""
    _imported_once()
    child = os.fork()
    if child == 0:
        code, output = 1, ""
        try:
            owner, name = (TorchMachine, "perform") if event == "op" else (os, "fsync")
            soon = threading.Timer(random.random() * 0.002, lambda: os.kill(os.getpid(), signal_number))
            setattr(owner, name, _counted(getattr(owner, name), -1 if n is None else n, soon.start))
            result = penstock(*args)
            code, output = result.exit_code, result.output
        finally:
            print(output if code else "", end="", flush=True)
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


IMPORTED_BY_A_RUN = ("datasets", "transformers.models.qwen3.modeling_qwen3", "penstock.cli.progress", "penstock.training.follower")


@cache
def _imported_once() -> None:
    """Import the modules of a run before forking, because this takes seconds."""
    for name in IMPORTED_BY_A_RUN:
        import_module(name)


def _counted(work: Callable[..., Any], n: int, happens: Callable[[], object]) -> Callable[..., Any]:
    """Wrap `work` so that its call number n, counted from 0, first calls `happens`."""
    calls = count()

    def begun(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == n:
            happens()
        return work(*args, **kwargs)

    return begun


def forked_to_die(work: Callable[[], object], where: tuple[Any, str], n: int) -> None:
    """Do some work in a forked process that kills itself at its n-th call of a function."""
    child = os.fork()
    if child == 0:
        try:
            owner, name = where
            setattr(owner, name, _counted(getattr(owner, name), n, lambda: os.kill(os.getpid(), signal.SIGKILL)))
            work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def whole_checkpoints(out: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder; all must be complete."""
    paths = [path for path in out.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(checkpoint.load_state(path).step for path in paths)


def left_by(out: Path) -> dict[str, object]:
    """Return the outputs that faults must not change: hashes of the last checkpoint's files, and the logged steps."""
    last = checkpoint.latest(out)
    assert last is not None
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in last.iterdir()}
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {**sums, "logged": [(line["step"], line["loss"], line["grad_norm"], line["skipped"]) for line in logged]}


def run_of(plan: Path, out: Path, *options: object) -> list[object]:
    data = plan.with_name("data")
    return ["run", plan, "--data", data, "--out", out, "--steps", N_STEPS, "--lr", "1e-3", "--save-every", 1, *SCRATCH, *options]


def killed(home: Path, rng: random.Random, n_trials: int) -> None:
    """Send SIGKILL or SIGTERM at random times, also after resuming, then resume under another plan; the result must equal an
    undisturbed run. After SIGTERM a run saves its step and exits with 0."""
    plans, ever, n_stopped = sorted(home.glob("plan-*.json")), 0, 0
    forked(run_of(plans[0], home / "undisturbed"))
    expected = left_by(home / "undisturbed")
    for trial in range(n_trials):
        out = home / f"killed-{trial}"
        for _ in range(2):
            event, number = rng.choice([("op", signal.SIGKILL), ("file", signal.SIGKILL), ("op", signal.SIGTERM)])
            every = N_STEPS if number == signal.SIGTERM else 1  # the checkpoint after SIGTERM is then due to the signal only
            again = run_of(rng.choice(plans), out, "--resume", "--keep", 2, "--save-every", every)
            died = forked(again, event, rng.randrange(10, 200) if event == "op" else rng.randrange(20), number)
            stands, ever = whole_checkpoints(out), ever + died
            if not died:
                assert stands[-1] == json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"], "a step was lost"
                n_stopped += stands[-1] < N_STEPS
            if stands[-1:] == [N_STEPS]:
                break
        if stands[-1:] != [N_STEPS]:
            forked(run_of(rng.choice(plans), out, "--resume"))
        assert whole_checkpoints(out)[-1] == N_STEPS
        outputs = left_by(out)
        assert outputs == expected, {key for key in expected if expected[key] != outputs.get(key)}
    assert ever + n_stopped > n_trials, "too few signals for a test"
    print(f"killed {ever} times, terminated {n_stopped} times")


def instant(plan: Path, predicted: Any = PREDICTED, code: int = 0, errors: str = "", n_looks: int = 0) -> SimpleNamespace:
    """Return a stand-in for `subprocess` in `penstock.replanning`: a search that finds this plan at once, or after `n_looks`."""
    looks = count()

    class Search:
        def __init__(self, command: list[str], **options: Any) -> None:
            folder = Path(command[-1])
            assert read_measured(folder).ratios
            shutil.copy(plan, folder / REPLAN_FILE)

        def poll(self) -> int | None:
            return code if next(looks) >= n_looks else None

        def communicate(self) -> tuple[str, str]:
            return json.dumps(predicted), errors

        def kill(self) -> None:
            pass

    return SimpleNamespace(Popen=Search, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)


def bits(out: Path) -> dict[str, object]:
    """Return what `left_by` returns, without the file that names the plan."""
    return {name: value for name, value in left_by(out).items() if name != checkpoint.STATE_FILE}


def replanned(home: Path, rng: random.Random, n_trials: int) -> None:
    """Kill runs around the change from plan-0 to plan-1, then resume; the result must equal an undisturbed run with plan-0."""
    replanning.subprocess, n_steps, n_killed, n_named = instant(home / "plan-1.json"), 12, 0, 0  # type: ignore[assignment]

    def run(name: str, *options: object) -> list[object]:
        return run_of(home / "plan-0.json", home / name, "--resume", "--steps", n_steps, *options)

    forked(run("plain"))
    for trial in range(n_trials):
        for event, n in (("op", rng.randrange(200, 500)), ("file", rng.randrange(20, 120))):
            if not (home / f"replanned-{trial}").exists() or whole_checkpoints(home / f"replanned-{trial}")[-1:] != [n_steps]:
                n_killed += forked(run(f"replanned-{trial}", "--replan", 1), event, n)
        out = home / f"replanned-{trial}"
        if whole_checkpoints(out)[-1:] != [n_steps]:
            forked(run(out.name, *(() if trial % 2 else ("--replan", 1))))
        assert bits(out) == bits(home / "plain")
        n_named += "replanned" in checkpoint.load_state(out / f"checkpoint-{n_steps}").fields
    assert n_killed >= n_trials, f"too few kills for a test: {n_killed}"
    assert n_named >= n_trials / 4, f"too few runs that changed their plan: {n_named}"
    print(f"killed {n_killed} times, {n_named} of {n_trials} runs with another plan")


def full_disk(home: Path, rng: random.Random, n_trials: int) -> None:
    """Run on a disk that is full after a random number of bytes. A run must end with an error of one line, and resume to the same
    bits once the disk has space. The check for free space at the start of a run is disabled."""
    plans, mounted, size = sorted(home.glob("plan-*.json")), home / "disk", 16 * 2**20
    names, stood = list[str](), list[list[int]]()
    succeeded(penstock(*run_of(plans[0], home / "undisturbed")))
    expected = left_by(home / "undisturbed")
    sizes = [path.stat().st_size for path in (home / "undisturbed").rglob("*") if path.is_file()]
    needed = sum(-(-n_bytes // PAGE_BYTES) * PAGE_BYTES for n_bytes in sizes)
    mounted.mkdir()
    retention.free_bytes = lambda folder: 2**40
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", mounted], check=True)
    for trial in range(n_trials):
        out, filler = mounted / f"{trial}", mounted / "filler"
        free = {0: 0, 1: needed - PAGE_BYTES}.get(trial, rng.randrange(needed))  # no space for the log; for the timeline; random
        filler.write_bytes(bytes(size - free))
        plan = plans[0] if trial == 1 else rng.choice(plans)  # 1: same size as the undisturbed run
        result = penstock(*run_of(plan, out, "--resume"))
        code, output = result.exit_code, result.output
        line = output.splitlines()[-1]
        assert code == 0 or (code == 2 and line.startswith("error: ") and "make room" in line), output
        skipped = next((row for row in output.splitlines() if "timeline.json: cannot be written" in row), "none")
        names.append((line if code else skipped).removeprefix("error: ").split(":")[0].rsplit("/", 1)[-1])
        assert "Traceback" not in output
        stood.append(stands := whole_checkpoints(out))
        assert not list(out.rglob("*.partial"))
        filler.unlink()
        if stands[-1:] != [N_STEPS]:
            succeeded(penstock(*run_of(rng.choice(plans), out, "--resume")))
        assert left_by(out) == expected
        shutil.rmtree(out)
    assert names[1] == "timeline.json", f"the line names the file: {names}"
    assert stood[:2] == [[], [*range(1, N_STEPS + 1)]], "the timeline is not written last"
    print(f"full at: {', '.join(names)}")


if __name__ == "__main__":
    accidents = {"killed": killed, "full_disk": full_disk, "replanned": replanned}
    accident = accidents[sys.argv[1]]
    accident(Path(sys.argv[2]), random.Random(int(sys.argv[3])), int(sys.argv[4]))
