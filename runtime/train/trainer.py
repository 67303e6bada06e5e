"""What happens between steps?

The executor runs from one pause to the next: an evaluation, or the end. On the way its steps are counted, logged and shown, and
states are saved that are due.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from runtime.checkpoint.background import Saver
from runtime.checkpoint.checkpoint import State, load_weights
from runtime.checkpoint.resuming import identity, put_back, refuse_another
from runtime.checkpoint.retention import clean
from runtime.compute.inference import Abandoned
from runtime.errors import CheckpointError, PenstockError
from runtime.executor import OpError, Stop, execute, say
from runtime.files import write_whole
from runtime.host.slabs import give_back_freed
from runtime.machine import Machine
from runtime.machines.torch_machine import TorchMachine
from runtime.plan import Lane, Plan
from runtime.plan.timeline import Timeline
from runtime.settings import CheckpointSettings

if TYPE_CHECKING:
    from runtime.data.data import Data

    from .monitors import Monitor

WARM_UP_STEPS = 2  # the first steps fill caches and the pipeline; they are not compared with the prediction


@dataclass(frozen=True, slots=True)
class Metrics:
    """One line of metrics.jsonl."""

    step: int  # counted from 1
    loss: float  # mean over the step's supervised tokens
    grad_norm: float  # before clipping
    lr: float
    tokens: int
    supervised_tokens: int
    step_s: float
    tokens_per_s: float
    skipped: bool
    busy_s: Mapping[str, float]  # by lane, where that is known at once
    predicted_step_s: float | None = None

    def to_json(self) -> str:
        """One line; a number that is not finite is null, as JSON knows no other way to say it."""
        fields = asdict(self)
        return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()})

    def values(self) -> dict[str, float]:
        """What there is to draw over the steps."""
        drawn = {"loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr, "step_s": self.step_s}
        drawn |= {"tokens_per_s": self.tokens_per_s, "skipped": float(self.skipped)}
        drawn |= {f"busy_fraction/{lane}": share for lane, share in self.busy_fractions().items()}
        return drawn | ({} if self.predicted_step_s is None else {"predicted_step_s": self.predicted_step_s})

    def busy_fractions(self) -> dict[str, float]:
        """Of the step's time, by lane."""
        # Lanes run ahead: ops of this step began while the one before was still going on, and all their time counts here.
        return {lane: min(1.0, s / self.step_s) for lane, s in self.busy_s.items()}


class DeviceMemoryError(PenstockError):
    """The device had less memory left than an op needed."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Look:
    """An evaluation hook: runs every N steps and logs what it found, a loss or samples."""

    log: str  # the file in the run's folder that it adds lines to
    field: str  # which its lines have, and no others there
    perform: Callable[[int], None]  # given the number of steps done, while all lanes are idle; Abandoned when asked to stop

    def was_performed(self, folder: Path, done: int) -> bool:
        """Whether the log tells of it."""
        return any(said.get("step") == done and self.field in said for _, said in _lines(folder / self.log))


@dataclass(frozen=True, slots=True)
class Training:
    """One run: what performs it, on what, and where its traces go."""

    plan: Plan
    machine: Machine  # performs the ops
    store: TorchMachine  # holds the state; the machine itself, unless that is emulated
    data: "Data"
    seed: int
    folder: Path
    saves: bool  # False: the state is a stand-in's, which nobody wants
    tokenizer_from: Path | None = None
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # what its steps depend on, as JSON: who goes on has the same
    looks: Sequence[Look] = ()
    evaluate_every: int | None = None  # steps; None: only at the end
    monitors: "Sequence[Monitor]" = ()  # whoever opened them closes them
    stop: Stop = field(default_factory=Stop)
    predicted_step_s: float | None = None  # for the log
    say: Callable[[str], None] = say

    def run(self, first_step: int, n_steps: int, on_step: Callable[[Metrics], None]) -> tuple[Timeline, list[float]]:
        """Perform steps first_step .. n_steps - 1, or fewer after `stop.request()`: the step in progress is then the last.

        The state is saved at the end, and on the way when that is due; lanes are drained for it only where nothing is to be written
        in the background. A checkpoint is written before the evaluation, so a kill loses no step; on resume a missing evaluation is
        made first, and where first_step is n_steps that is all there is to do. Returns the timeline of the longest stretch between
        two pauses, and step times after the warm-up.
        """
        self._leave_what_followed(first_step)
        missing = self._missing(first_step, n_steps)
        if first_step == n_steps:
            with device_memory_named():
                self._look(missing, n_steps)
            return Timeline(()), []
        with _writing(self.folder / "timeline.json"):
            (self.folder / "timeline.json").unlink(missing_ok=True)  # of an earlier run, whose steps were not these
        timeline, times_s, done = Timeline(()), list[float](), first_step
        saver = self._saver(self.checkpoint) if self.saves else None
        with device_memory_named():
            with saver.at_work() if saver is not None else nullcontext():
                while True:
                    is_last = done == n_steps or self.stop.is_requested
                    is_due = saver is not None and done > first_step and (is_last or saver.is_due(done))
                    if saver is not None and is_due and saver.saved != done:
                        saver.save_now(done)
                    if is_last:
                        break
                    if missing:
                        self._look(missing, done)
                        missing = ()
                        continue  # perhaps somebody asked to stop meanwhile
                    stretch = _Stretch(self, saver, on_step, self._pause(done, n_steps))
                    found = stretch.run(done)
                    times_s += found.step_times_s[max(0, WARM_UP_STEPS - 1) :] or found.step_times_s
                    timeline = max(found, timeline, key=lambda t: len(t.spans))  # the later one of equals
                    done = stretch.n_done or done
                    missing = self.looks if self._is_evaluated(done, n_steps) else ()
            write_timeline(self.folder / "timeline.json", timeline)
            self._look(missing, done)  # all is on the disk
        return timeline, times_s

    def _leave_what_followed(self, first_step: int) -> None:
        """No checkpoint and no line in the folder is of a later step than that which is gone on from."""
        clean(self.folder)
        if self.saves:
            set_aside(self.folder, first_step, self.say)
        for name in ("metrics.jsonl", "samples.jsonl"):
            keep_metrics_up_to(self.folder / name, first_step)

    def _pause(self, done: int, n_steps: int) -> int:
        """Before which step the lanes are drained next."""
        every = [self.evaluate_every if self.looks else None]
        every += [self.checkpoint.every if self.saves and not self.checkpoint.background else None]
        return min([n_steps, *(done + n - done % n for n in every if n is not None)])

    # -- evaluation -------------------------------------------------------------------------------------------------

    def lacks_evaluation(self, done: int, n_steps: int) -> bool:
        """Whether the state after so many steps is to be looked at, and a log does not tell of it."""
        return bool(self._missing(done, n_steps))

    def _is_evaluated(self, done: int, n_steps: int) -> bool:
        every = self.evaluate_every
        return done == n_steps or (every is not None and done > 0 and done % every == 0)

    def _missing(self, done: int, n_steps: int) -> Sequence[Look]:
        looks = self.looks if self._is_evaluated(done, n_steps) else ()
        return [look for look in looks if not look.was_performed(self.folder, done)]

    def _look(self, looks: Sequence[Look], done: int) -> None:
        with suppress(Abandoned):
            for look in looks:
                if self.stop.is_requested:
                    break
                look.perform(done)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _saver(self, settings: CheckpointSettings) -> Saver:
        shared = identity(self.plan, self.data, self.seed, self.optimizer)

        def fields(step: int) -> dict[str, Any]:
            return shared | {"data_position": self.data.position(step)}

        return Saver(self.store.host, self.folder, settings, fields, self.tokenizer_from, self.say)

    def save(self, step: int) -> Path:
        """Write `checkpoint-<step>` from the state on the host, while nothing changes it."""
        self._saver(replace(self.checkpoint, background=False)).save_now(step)
        return self.folder / f"checkpoint-{step}"

    def resume(self, state: State) -> None:
        """Put a checkpoint's state onto the host; CheckpointError when it is of another model, data, seed, optimizer or meaning."""
        refuse_another(state, identity(self.plan, self.data, self.seed, self.optimizer))
        put_back(state, self.store.host, self.data)


class _Stretch:
    """Steps from one pause to the next, as they are reported."""

    def __init__(self, training: Training, saver: Saver | None, on_step: Callable[[Metrics], None], until: int) -> None:
        """`until`: the pause."""
        self._training, self._saver, self._on_step, self._until = training, saver, on_step, until
        self._before_s = 0.0
        self._busy_s: dict[str, float] = {}
        self.n_done: int | None = None  # steps of the run, once one of the stretch is done

    def run(self, done: int) -> Timeline:
        """Perform the steps that follow those that are done."""
        training, let_go = self._training, self._saver.snapshots.end if self._saver is not None else None
        return execute(
            training.plan,
            training.machine,
            self._until - done,
            done,
            self.step,
            stop=training.stop,
            on_busy=self.busy,
            on_interrupt=let_go,
        )

    def busy(self, step: int, busy_s: Mapping[Lane, float]) -> None:
        """On a device that only gets its work from its lanes, their threads do not know how long it takes."""
        is_known = self._training.store.device_name() is None
        self._busy_s = {str(lane): s for lane, s in busy_s.items() if is_known or lane is Lane.CPU}

    def step(self, step: int, at_s: float) -> None:
        training, saver = self._training, self._saver
        metrics = self._metrics(step, max(at_s - self._before_s, 1e-9))
        self._before_s, self.n_done = at_s, step + 1
        log = training.folder / "metrics.jsonl"
        is_saved = saver is not None and saver.is_due_meanwhile(step + 1)
        with _writing(log), log.open("a", encoding="utf-8") as lines:
            lines.write(metrics.to_json() + "\n")
            if is_saved:  # a checkpoint on the disk has its line there too
                lines.flush()
                os.fsync(lines.fileno())
        for monitor in training.monitors:
            monitor.log(metrics.step, metrics.values())
        if saver is not None:
            saver.raise_failure()
        if saver is not None and is_saved:
            saver.permit(step + 1)
        self._on_step(metrics)

    def _metrics(self, step: int, step_s: float) -> Metrics:
        training = self._training
        result, n_tokens = training.store.results.pop(step), training.plan.semantics.tokens_per_step
        return Metrics(
            step=step + 1,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=training.store.settings(step).lr,
            tokens=n_tokens,
            supervised_tokens=result.n_supervised,
            step_s=step_s,
            tokens_per_s=n_tokens / step_s,
            skipped=result.skipped,
            busy_s=self._busy_s,
            predicted_step_s=training.predicted_step_s,
        )


@contextmanager
def device_memory_named() -> Iterator[None]:
    """One line where the device ran out of memory: no plan counts what kernels and other processes take."""
    try:
        yield
    except OpError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        at, what = str(error).partition(" failed: ")[0], (str(error.__cause__).splitlines() or ["no memory"])[0][:200]
        raise DeviceMemoryError(
            f"{at}: the device is out of memory ({what}); free what other processes hold of it, or plan again for less with "
            "--device-memory, and go on with --resume"
        ) from error


def load_model(store: TorchMachine, folder: Path) -> None:
    """Put a Hugging Face model's weights into the host store, one tensor at a time."""
    for number in range(len(store.plan.workload.blocks)):
        owned = {p.name: p for p in store.host.owned(number)}
        for name, weight in load_weights(folder, owned, {name: p.shape for name, p in owned.items()}):
            store.host.set_weight(owned[name], weight)
    give_back_freed()


def keep_metrics_up_to(path: Path, n_steps: int) -> None:
    """Drop what a run that was stopped logged after the checkpoint it now resumes from."""
    if not path.exists():
        return
    kept = [line + "\n" for line, fields in _lines(path) if isinstance(fields.get("step"), int) and fields["step"] <= n_steps]
    with _writing(path):
        write_whole(path, "".join(kept))


def set_aside(folder: Path, step: int, say: Callable[[str], None] = say) -> None:
    """Checkpoints of later steps become `checkpoint-N.left`: who went on from the last one would find a hole in the log."""
    try:
        later = [p for p in folder.iterdir() if (m := re.fullmatch(r"checkpoint-([0-9]+)", p.name)) and int(m[1]) > step]
        for path in sorted(later):
            left = path.with_name(path.name + ".left")
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink(missing_ok=True)
            path.rename(left)
            say(f"{path.name} belongs to an abandoned run; renamed {left.name}")
        if later:  # on the disk before the log is cut
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be set aside ({error.strerror}); choose another --out") from None


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a log, and what they say; without the one that was being written when the run was stopped."""
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                fields = json.loads(line)
                if isinstance(fields, dict):
                    yield line, fields


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write the spans as JSON, whole or not at all."""
    with _writing(path):
        write_whole(path, json.dumps({"spans": [asdict(span) for span in timeline.spans]}))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}); make room, or choose another --out") from None


def scaled(timeline: Timeline, time_scale: float) -> Timeline:
    """The timeline in the seconds of the machine that was emulated."""
    return Timeline(tuple(replace(s, start_s=s.start_s / time_scale, end_s=s.end_s / time_scale) for s in timeline.spans))
