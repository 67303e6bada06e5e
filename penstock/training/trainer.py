"""What happens between steps?

`Training.run` is the loop: train, log, save, evaluate. Lanes run through from one pause to the next: an evaluation, or the end.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.checkpoint.adapter_files import read_adapter
from penstock.checkpoint.background import Saver
from penstock.checkpoint.checkpoint import State, load_weights
from penstock.checkpoint.packed_base import packed_base
from penstock.checkpoint.resuming import identity, put_back, refuse_another
from penstock.checkpoint.retention import clean
from penstock.checkpoint.room import NoRoomError
from penstock.settings import CheckpointSettings
from runtime.compute.inference import Abandoned
from runtime.errors import CheckpointError, PenstockError
from runtime.executor import Execution, OpError, Step, Stop, say
from runtime.files import sync, write_whole
from runtime.host.slabs import give_back_freed
from runtime.machine import Machine
from runtime.machines.torch_machine import TorchMachine
from runtime.plan import Lane, Plan
from runtime.plan.timeline import Timeline
from runtime.plan.train import Train, is_adapter

from .log import add_lines, keep_lines_up_to, lines_of, writing

if TYPE_CHECKING:
    from penstock.data.data import Data

    from .crew import Lead
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
    first: bool = False  # before the first step too

    def was_performed(self, folder: Path, done: int) -> bool:
        """Whether the log tells of it."""
        return any(said.get("step") == done and self.field in said for _, said in lines_of(folder / self.log))


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
    frozen: str | None = None  # what tells the weights that are not trained from others
    looks: Sequence[Look] = ()
    evaluate_every: int | None = None  # steps; None: only at the end
    monitors: "Sequence[Monitor]" = ()  # whoever opened them closes them
    stop: Stop = field(default_factory=Stop)
    predicted_step_s: float | None = None  # for the log
    lead: "Lead | None" = None  # of other ranks, if there are any
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
        with writing(self.folder / "timeline.json"):
            (self.folder / "timeline.json").unlink(missing_ok=True)  # of an earlier run, whose steps were not these
        longest, times_s, done = Timeline(()), list[float](), first_step
        saver = self._saver(self.checkpoint, first_step) if self.saves else None
        with device_memory_named():
            with saver.at_work() if saver is not None else nullcontext():
                self._look(missing, done)
                while done < n_steps and not self.stop.is_requested:
                    pause = Stop(self.stop)
                    with self._stretch(done, n_steps, saver, pause) as stretch:
                        for step in stretch:  # trained; what is due is saved meanwhile, where that is done in the background
                            done = step.number + 1
                            on_step(self._logged(step, saver))
                            if saver is not None and not self.checkpoint.background and saver.is_time():
                                pause.request()
                    longest = max(stretch.timeline, longest, key=lambda timeline: len(timeline.spans))  # the later one of equals
                    times_s += settled(stretch.timeline.step_times_s)
                    if saver is not None and saver.is_due(done):
                        saver.save(done)
                    if done < n_steps:
                        self._look(self._looks_after(done, n_steps), done)
                if saver is not None:
                    saver.save(done)
            self.keep_timeline(longest)
            self._look(self._looks_after(done, n_steps), done)  # all is on the disk
        return longest, times_s

    def keep_timeline(self, timeline: Timeline) -> None:
        """Beside the checkpoints, if there is room: it is worth no wait."""
        try:
            write_timeline(self.folder / "timeline.json", timeline)
        except NoRoomError as error:
            self.say(str(error))

    def _leave_what_followed(self, first_step: int) -> None:
        """No checkpoint and no line in the folder is of a later step than that which is gone on from."""
        clean(self.folder)
        if self.saves:
            set_aside(self.folder, first_step, self.say)
        for name in ("metrics.jsonl", "samples.jsonl"):
            keep_lines_up_to(self.folder / name, first_step or -1)  # nothing of another run, not even what it was before it began

    # -- training ---------------------------------------------------------------------------------------------------

    def _stretch(self, done: int, n_steps: int, saver: Saver | None, pause: Stop) -> Execution:
        """The steps from those that are done to the next pause, before which the lanes are drained; or until one is asked for."""
        every = [self.evaluate_every if self.looks else None]
        every += [self.checkpoint.every if self.saves and not self.checkpoint.background else None]
        until = min([n_steps, *(done + n - done % n for n in every if n is not None)])
        let_go = saver.snapshots.end if saver is not None else lambda: None
        stop = pause if self.lead is None else self.lead.stretch(done, until - done, pause)
        return Execution(self.plan, self.machine, until - done, done, stop=stop, on_interrupt=let_go)

    def _logged(self, step: Step, saver: Saver | None) -> Metrics:
        metrics = self._metrics(step)
        # A checkpoint on the disk has its line there too.
        to_disk = saver is not None and saver.is_due_meanwhile(metrics.step)
        add_lines(self.folder / "metrics.jsonl", [asdict(metrics)], self.say, self.stop, to_disk)
        for monitor in self.monitors:
            monitor.log(metrics.step, metrics.values())
        if saver is not None:
            saver.is_logged(metrics.step)
        return metrics

    def _metrics(self, step: Step) -> Metrics:
        assert step.result is not None
        step_s, n_tokens = max(step.seconds, 1e-9), self.plan.semantics.tokens_per_step
        # On a device that only gets its work from its lanes, their threads do not know how long it takes.
        is_known = self.store.device_name() is None
        return Metrics(
            step=step.number + 1,
            loss=step.result.loss,
            grad_norm=step.result.grad_norm,
            lr=self.store.settings(step.number).lr,
            tokens=n_tokens,
            supervised_tokens=step.result.n_supervised,
            step_s=step_s,
            tokens_per_s=n_tokens / step_s,
            skipped=step.result.skipped,
            busy_s={str(lane): s for lane, s in step.busy_s.items() if is_known or lane is Lane.CPU},
            predicted_step_s=self.predicted_step_s,
        )

    # -- evaluation -------------------------------------------------------------------------------------------------

    def lacks_evaluation(self, done: int, n_steps: int) -> bool:
        """Whether the state after so many steps is to be looked at, and a log does not tell of it."""
        return bool(self._missing(done, n_steps))

    def _looks_after(self, done: int, n_steps: int) -> Sequence[Look]:
        every = self.evaluate_every
        if done == 0:
            return [look for look in self.looks if look.first]
        return self.looks if done == n_steps or (every is not None and done % every == 0) else ()

    def _missing(self, done: int, n_steps: int) -> Sequence[Look]:
        return [look for look in self._looks_after(done, n_steps) if not look.was_performed(self.folder, done)]

    def _look(self, looks: Sequence[Look], done: int) -> None:
        """While all lanes are idle; not if somebody asks for the end."""
        with suppress(Abandoned):
            for look in looks:
                if self.stop.is_requested:
                    break
                look.perform(done)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _saver(self, settings: CheckpointSettings, first_step: int | None = None) -> Saver:
        shared = identity(self.plan, self.data, self.seed, self.optimizer, self.frozen)

        def fields(step: int) -> dict[str, Any]:
            return shared | {"data_position": self.data.position(step)}

        state = self.store.host if self.lead is None else self.lead.state()
        return Saver(state, self.folder, settings, fields, self.tokenizer_from, self.say, first_step, self.stop)

    def save(self, step: int) -> Path:
        """Write `checkpoint-<step>` from the state on the host, while nothing changes it."""
        self._saver(replace(self.checkpoint, background=False)).save(step)
        return self.folder / f"checkpoint-{step}"

    def resume(self, state: State) -> None:
        """Put a checkpoint's state onto the host; CheckpointError when it is of another model, data, seed, optimizer or meaning."""
        refuse_another(state, identity(self.plan, self.data, self.seed, self.optimizer, self.frozen))
        put_back(state, self.store.host, self.data)


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


def load_model(
    store: TorchMachine, folder: Path, report: Callable[[str], None] = lambda words: None, cache: Path | None = None
) -> None:
    """Put a Hugging Face model's weights into the host store, one tensor at a time; those that lie packed are packed once, and kept
    in `cache`. Adapters stay what they are."""
    plan, host = store.plan, store.host
    packed_shapes = {p.name: p.shape for p in host.all_owned() if plan.is_packed(p)}
    packed: Mapping[str, torch.Tensor] = {}
    if packed_shapes:
        assert cache is not None, "packed weights are kept somewhere"
        report(f"packing weights in {plan.semantics.base}, if they are not yet")
        packed = packed_base(folder, plan.model.config, packed_shapes, plan.semantics.base, cache)
    for number, block in enumerate(plan.workload.blocks):
        report(f"loading weights: {number} of {len(plan.workload.blocks)} blocks")
        owned = {p.name: p for p in block.parameters if p.tied_to is None and not is_adapter(p.name)}
        for name in owned.keys() & packed_shapes.keys():
            host.set_weight(owned.pop(name), packed[name])
        for name, weight in load_weights(folder, owned, {name: p.shape for name, p in owned.items()}):
            host.set_weight(owned[name], weight)
    give_back_freed()


def load_adapter(store: TorchMachine, folder: Path) -> None:
    """Put an adapter, as PEFT saves it, beside the model; CheckpointError where it is not the plan's, or of another base."""
    planned = store.plan.semantics.train.lora
    owned = {p.name: p for p in store.host.all_owned()}
    lora, factors = read_adapter(folder, {name: p.shape for name, p in owned.items() if not is_adapter(name)})
    if planned is None:
        raise CheckpointError(f"{folder}: an adapter, but the plan trains none; plan with --train {Train(lora=lora)}")
    if replace(lora, dropout=planned.dropout) != replace(planned, targets=lora.targets) or factors.names != _adapters_of(owned):
        raise CheckpointError(f"{folder}: another adapter than the plan's; plan with --train {Train(lora=lora)}")
    for name, factor in factors.items():
        store.host.set_weight(owned[name], factor)
    for block in range(len(store.plan.workload.blocks)):
        store.host.settle(block)


def _adapters_of(names: Iterable[str]) -> set[str]:
    return {name for name in names if is_adapter(name)}


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
            say(f"{path.name} is of a later step than the one resumed from: kept aside as {left.name}, and counted by --keep")
        if later:
            sync(folder)  # before the log is cut
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be set aside ({error.strerror}); choose another --out") from None


def settled(times_s: list[float]) -> list[float]:
    """The times of a stretch's steps but the first ones, whose own first time is the second step's; all if there are no others."""
    return times_s[WARM_UP_STEPS - 1 :] or times_s


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write the spans as JSON, whole or not at all."""
    with writing(path):
        write_whole(path, json.dumps({"spans": [asdict(span) for span in timeline.spans]}))


def scaled(timeline: Timeline, time_scale: float) -> Timeline:
    """The timeline in the seconds of the machine that was emulated."""
    return Timeline(tuple(replace(s, start_s=s.start_s / time_scale, end_s=s.end_s / time_scale) for s in timeline.spans))
