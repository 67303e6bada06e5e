"""Training loop of a session: train, log, save, validate."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.best import BEST_FILE, best_of, is_of_other_data, refuse_another_log, write_best
from penstock.checkpoint.disk import writing
from penstock.checkpoint.retention import clean
from penstock.checkpoint.saver import Contents, Saver
from penstock.planner.predict.abridged import WARM_UP_STEPS
from penstock.replanning import Replanning
from penstock.run_config import PLAN_FILE, RunConfigError, RunRequest
from penstock.runtime.errors import CheckpointError, PenstockError, StepError
from penstock.runtime.executor import Execution, OpError, Step, Stop
from penstock.runtime.files import write_whole
from penstock.runtime.machines.torch_machine import Abandoned
from penstock.runtime.plan import Lane
from penstock.runtime.plan.objective import ADVANTAGE
from penstock.runtime.plan.timeline import Timeline
from penstock.runtime.units import on_one_line

from .device import refuse_what_does_not_fit
from .monitors import Monitors
from .run_folder import add_lines, keep_lines_up_to, lines_of
from .session import Session
from .validation import Validation, held_out_loss, report_ratio, validations_of

LOST_TIMES = 10  # x the first loss
LEAST_LOSS = 1.0  # minimum of the first loss, in nats per token: a lower one may be an easy batch
LOST_STEPS = 3  # consecutive


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
    busy_s: Mapping[str, float]  # by lane, if measured on the host
    predicted_step_s: float | None = None  # None: the prediction is for another kind of machine
    device: str = ""  # that performed the step

    def values(self) -> dict[str, float]:
        """Return the values to plot over steps."""
        curves = {"loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr, "step_s": self.step_s}
        curves |= {"tokens_per_s": self.tokens_per_s, "skipped": float(self.skipped)}
        curves |= {f"busy_fraction/{lane}": share for lane, share in self.busy_fractions().items()}
        return curves | ({} if self.predicted_step_s is None else {"predicted_step_s": self.predicted_step_s})

    def busy_fractions(self) -> dict[str, float]:
        """Return the busy fraction of the step, by lane."""
        # Lanes run ahead: an op of this step may start during the previous step; its whole time counts here.
        return {lane: min(1.0, s / self.step_s) for lane, s in self.busy_s.items()}


class LostError(PenstockError):
    """A run that cannot recover."""

    exit_code = 4


@dataclass(slots=True)
class Watch:
    """Detector of a diverged run. Stores the first finding as text."""

    first_loss: float | None = None
    n_without_gradient: int = 0
    finding: str | None = None
    may_be_flat: bool = False  # for rollouts with equal rewards

    def look(self, metrics: Metrics) -> bool:
        """Return True if a run is lost at this step, for the first time. NaN loss compares as too large."""
        self.first_loss = first = metrics.loss if self.first_loss is None else self.first_loss
        self.n_without_gradient = self.n_without_gradient + 1 if metrics.grad_norm == 0 and not self.may_be_flat else 0
        signs = {
            f"the loss is {metrics.loss:.4g}, and began at {first:.4g}": not metrics.loss < LOST_TIMES * max(first, LEAST_LOSS),
            f"the gradient has been exactly 0 for {LOST_STEPS} steps": self.n_without_gradient == LOST_STEPS,
        }
        words = next((sign for sign, is_there in signs.items() if is_there), None)
        if words is None or self.finding is not None:
            return False
        self.finding = f"step {metrics.step}: {words}; the run is lost: lower --lr"
        return True


class DeviceMemoryError(PenstockError):
    """The device had less free memory than an op needed."""

    exit_code = 3


class Trainer:
    """Trains a session to its end, or until `session.stop.request()` makes the current step the last."""

    def __init__(
        self,
        session: Session,
        on_step: Callable[[Metrics], None] = lambda metrics: None,
        validations: Sequence[Validation] | None = None,
        every: int | None = None,
    ) -> None:
        """CheckpointError if no step remains. `validations`: default: those of the settings. `every`: steps between turns."""
        self.session, self.on_step, self.every = session, on_step, every
        settings, first_step = session.settings, session.first_step
        self.monitors = Monitors(settings.monitors, session.folder, asdict(settings), first_step, session.say)
        self.validations = validations_of(session, self.monitors) if validations is None else validations
        self.timeline, self.times_s = Timeline(()), list[float]()
        self.watch = Watch(may_be_flat=ADVANTAGE.name in session.plan.semantics.objective.extras)
        self._made = list[Metrics]()  # since the last turn
        self.following: RunRequest | None = None  # of the next session, under another plan
        self._replanning = Replanning(session.inputs.request, first_step, session.is_comparable, session.say)
        self.rests_after: int | None = None  # number of steps, while no lane is busy
        self._callback_error: Exception | None = None  # of `on_step`
        self.best, self._n_without_gain = best_of(self._log_up_to(first_step), settings.evaluation, session.inputs.held_out_digest)
        if first_step > session.n_steps or (first_step == session.n_steps and not self.due_validations(first_step)):
            advice = f"ask for more than {session.n_steps} with --steps"
            raise CheckpointError(f"{session.folder}: holds step {first_step} already; {advice}")
        if self.is_settled and not self.due_validations(first_step):
            problem = f"its last {self._n_without_gain} evaluations brought no gain"
            raise CheckpointError(f"{session.folder}: holds step {first_step}, and {problem}; go on with a higher --patience")

    def train(self) -> tuple[Timeline, list[float]]:
        """Train. Return the longest timeline between two pauses, and the seconds of each step after warm-up."""
        for _ in self.turns():
            pass
        return self.timeline, self.times_s

    def turns(self) -> Iterator["Turn"]:
        """Train lazily: yield a turn after each `every` steps. Without `every`, no turn is yielded.

        Lanes run without a break until a validation, the end, a turn, or a foreground save. The last checkpoint is written before
        the last validation; a resumed run repeats a missing validation.
        """
        self._leave_what_followed()
        saver = self.saver() if self.session.saves else None
        with device_memory_named(), self.monitors, self._replanning, nullcontext() if saver is None else saver.at_work():
            try:
                yield from self._turns(saver)
            except Exception as error:
                # Other ranks have ended after an error in their batch: nothing can be gathered from them.
                ends_alone = error is self._callback_error or (isinstance(error, StepError) and self.session.leader is None)
                if saver is None or not ends_alone or not self.rests_after:
                    raise
                saver.save(self.rests_after)
                saver.wait()
                if not isinstance(error, StepError):
                    raise
                raise StepError(f"{error}; the state after step {self.rests_after} is saved, to resume from") from error.__cause__

    def _turns(self, saver: Saver | None) -> Iterator["Turn"]:
        session, n_done = self.session, self.session.first_step
        if n_done == 0:
            with suppress(Abandoned):
                report_ratio(session)
        self._validate(n_done, saver)
        while n_done < session.n_steps and not session.stop.is_requested and not self.is_settled:
            self.rests_after = None
            saves_now = saver is not None and (saver.waits_for_pause or not session.checkpoint.background)
            n_done = self._train_until_pause(n_done, saver)
            if saver is not None and saver.is_due(n_done):
                self.following = self._following(n_done) if saves_now else None
                saver.save(n_done)
                if self.following is not None:
                    saver.wait()
                    return
            if n_done < session.n_steps:
                self._validate(n_done, saver)
            is_over = n_done == session.n_steps or session.stop.is_requested or self.is_settled
            if self._made and self.every is not None and (is_over or n_done % self.every == 0):
                metrics, self._made = tuple(self._made), []
                yield Turn(self, saver, metrics)
        if self.watch.finding is not None and session.settings.stop_if_lost:
            raise LostError(f"{self.watch.finding}, and begin again from a checkpoint before it")
        if saver is not None:
            saver.save(n_done)
            saver.wait()
        if n_done > session.first_step:
            self._keep_timeline()
            self._validate(n_done, saver)
        if self.is_settled and n_done < session.n_steps:
            n, metric = self._n_without_gain, session.settings.evaluation.metric
            session.say(f"no gain in {metric} in {n} evaluations: the run ends after step {n_done} of {session.n_steps}")

    def _leave_what_followed(self) -> None:
        """Remove log lines after the resumed step, and incomplete checkpoints."""
        session = self.session
        clean(session.folder)
        for name in ("metrics.jsonl", "samples.jsonl"):
            keep_lines_up_to(session.folder / name, session.first_step or -1)  # a run from the beginning drops all old lines
        if session.first_step < session.n_steps:
            with writing(session.folder / "timeline.json"):
                (session.folder / "timeline.json").unlink(missing_ok=True)
        if session.settings.evaluation.metric is not None or not session.first_step:
            self._leave_best()
        elif (path := session.folder / BEST_FILE).exists():  # its checkpoint is no longer kept
            with writing(path):
                path.unlink()
            session.say(f"evaluation.best is not set: {BEST_FILE} is removed, and the checkpoint that it named is kept no longer")

    def _leave_best(self) -> None:
        """Name the best checkpoint up to the resumed step. The file may name a later one, or be of another run."""
        folder, first_step = self.session.folder, self.session.first_step
        log, held_out = self._log_up_to(first_step), self.session.inputs.held_out_digest
        refuse_another_log(folder, log, first_step)
        if n := sum(is_of_other_data(fields, held_out) for fields in log):
            how = f"the best is that of evaluations from now on, without {n:,} earlier ones"
            self.session.say(f"other held-out data than before: {how}")
        if self.best is None:
            with writing(folder / BEST_FILE):
                (folder / BEST_FILE).unlink(missing_ok=True)
            return
        write_best(folder, self.best)
        if not (folder / f"checkpoint-{self.best.step}").is_dir():
            self.session.say(f"best so far: {self.best}, a checkpoint that is no longer in {on_one_line(str(folder))}")

    # -- train, log -------------------------------------------------------------------------------------------------

    def _train_until_pause(self, n_done: int, saver: Saver | None) -> int:
        """Train and log each step until a pause, where lanes are drained. Return the number of finished steps, and set
        `rests_after` to it. An error of `on_step` makes the current step the last."""
        session, checkpoint = self.session, self.session.checkpoint
        saves_in_pauses = saver is not None and (saver.waits_for_pause or not checkpoint.background)
        validates = session.settings.evaluation.every if self.validations else None
        every = [validates, checkpoint.every if saves_in_pauses else None, self.every]
        pauses = [n_done + n - n_done % n for n in every if n is not None]
        pauses += [] if (measured := self._replanning.begins(n_done)) is None else [measured]
        until = min([session.n_steps, *pauses])
        pause = Stop(session.stop)
        stop = pause if session.leader is None else session.leader.train(n_done, until - n_done, pause, session.rates.fixed_lr)
        let_go = saver.snapshots.end if saver is not None else lambda: None
        steps = Execution(session.store.plan, session.machine, until - n_done, n_done, stop=stop, on_interrupt=let_go)
        try:
            with steps:
                for step in steps:
                    n_done = step.number + 1
                    self._log(step, saver)
                    is_due = saver is not None and (saver.is_time() if saves_in_pauses else self._replanning.finds())
                    if self._callback_error is not None or is_due:
                        pause.request()
        finally:
            self.rests_after = n_done if steps.is_whole else None
        if self._callback_error is not None:
            raise self._callback_error
        # convert an emulated run to seconds of the plan's machine
        spans = (replace(s, start_s=s.start_s / session.scale, end_s=s.end_s / session.scale) for s in steps.timeline.spans)
        timeline = Timeline(tuple(spans))
        self._replanning.paused(timeline)
        if saver is not None:  # not before: the lanes may have begun to save a later step
            saver.waits_for_pause = self._replanning.finds()
        times_s = timeline.step_times_s  # from the second step on, without warm-up steps
        self.times_s += times_s[WARM_UP_STEPS - 1 :] or times_s
        self.timeline = max(timeline, self.timeline, key=lambda timeline: len(timeline.spans))  # the last of equals
        return n_done

    def _log(self, step: Step, saver: Saver | None) -> None:
        metrics = self._metrics(step)
        to_disk = saver is not None and saver.is_due_in_background(metrics.step)  # sync the log line of a checkpoint's step
        add_lines(self.session.folder / "metrics.jsonl", [asdict(metrics)], to_disk)
        self.monitors.log(metrics.step, metrics.values())
        if saver is not None:
            saver.is_logged(metrics.step)
        try:
            if self._callback_error is None:
                self.on_step(metrics)
        except Exception as error:  # the step in progress shall end
            self._callback_error = error
        self._replanning.logged(metrics.step, metrics.step_s)
        if self.every is not None:
            self._made.append(metrics)
        if self.watch.look(metrics):
            if self.session.settings.stop_if_lost:
                self.session.stop.request()
            else:
                self.session.say(f"{self.watch.finding}, or end such runs with --stop-if-lost")

    def _metrics(self, step: Step) -> Metrics:
        assert step.result is not None
        session, store = self.session, self.session.store
        step_s, n_tokens = max(step.seconds, 1e-9), store.plan.semantics.tokens_per_step
        is_known = store.device_name() is None  # device lanes only issue work; its duration is unknown here
        return Metrics(
            step=step.number + 1,
            loss=step.result.loss,
            grad_norm=step.result.grad_norm,
            lr=store.settings(step.number).lr,
            tokens=n_tokens,
            supervised_tokens=step.result.n_supervised,
            step_s=step_s,
            tokens_per_s=n_tokens / step_s,
            skipped=step.result.skipped,
            busy_s={str(lane): s for lane, s in step.busy_s.items() if is_known or lane is Lane.CPU},
            predicted_step_s=session.predicted_step_s,
            device=session.device_name,
        )

    def _keep_timeline(self) -> None:
        """Write the timeline. A disk error is not fatal: the checkpoint is saved by then."""
        path = self.session.folder / "timeline.json"
        self._replanning.store()
        try:
            with writing(path):
                write_whole(path, json.dumps({"spans": [asdict(span) for span in self.timeline.spans]}))
        except CheckpointError as error:
            self.session.say(str(error))

    # -- save -------------------------------------------------------------------------------------------------------

    def saver(self) -> Saver:
        """Return the saver of the session's checkpoints."""
        session, inputs, identity = self.session, self.session.inputs, self.session.inputs.identity

        def fields(step: int) -> dict[str, Any]:
            named = (self.following or inputs.request).replanned
            optional: dict[str, Any] = {} if inputs.reference is None else {"reference": dict(inputs.reference)}
            optional |= {} if named is None else {"replanned": named}
            optional |= {} if session.fixed_lr is None else {"fixed_lr": session.fixed_lr}
            return {**identity, "data_position": inputs.data.position(step), **optional}

        contents = Contents(fields, inputs.kept_files, inputs.ends, inputs.chat_template, inputs.towers_from, inputs.saved_config)
        state, settings = session.store.host, session.checkpoint
        return Saver(state, session.reader, session.folder, settings, contents, session.say, session.first_step, self.best)

    def _following(self, n_done: int) -> RunRequest | None:
        """Return the run that continues from the next checkpoint under the plan that was found, and write that plan; or None."""
        session = self.session
        plan, device, device_name = session.inputs.request.file.plan, session.device, session.settings.device
        if n_done == session.n_steps or session.stop.is_requested:
            return None
        n_here = 1 if session.leader is None else session.leader.n_here
        request = self._replanning.following(lambda new: refuse_what_does_not_fit(new, device, device_name, n_here, former=plan))
        if request is not None:
            request.file.write(session.folder / PLAN_FILE)  # before the checkpoint that names it
            if session.leader is not None:
                session.leader.begins_again = True
        return request

    # -- validate ---------------------------------------------------------------------------------------------------

    def due_validations(self, n_done: int) -> list[Validation]:
        """Return validations due after `n_done` steps and not logged yet. A resumed run repeats missing ones."""
        every, is_last = self.session.settings.evaluation.every, n_done == self.session.n_steps
        is_due = is_last or (every is not None and n_done % every == 0)
        due = [validation for validation in self.validations if (is_due if n_done else validation.first)]
        return [validation for validation in due if not validation.is_logged(self.session, n_done)]

    def _validate(self, n_done: int, saver: Saver | None) -> None:
        """Run due validations while all lanes are idle, unless a stop is requested. Save a step that is the best so far."""
        due = self.due_validations(n_done)
        with suppress(Abandoned):
            for validation in due:
                if self.session.stop.is_requested:
                    break
                validation.perform(n_done)
        if due and self.session.settings.evaluation.metric is not None:
            session = self.session
            log, held_out = self._log_up_to(n_done), session.inputs.held_out_digest
            self.best, self._n_without_gain = best_of(log, session.settings.evaluation, held_out)
            if saver is not None and self.best is not None and self.best.step == n_done:
                saver.keep_best(self.best)

    def _log_up_to(self, step: int) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl up to a step."""
        lines = (fields for _, fields in lines_of(self.session.folder / "metrics.jsonl"))
        return [fields for fields in lines if isinstance(fields.get("step"), int) and fields["step"] <= step]

    @property
    def is_settled(self) -> bool:
        """True if the last evaluations, as many as the patience, brought no gain."""
        patience = self.session.settings.evaluation.patience
        return patience is not None and self._n_without_gain >= patience


@dataclass(slots=True)
class Turn:
    """A pause of a run with idle lanes. Changes take effect from the next step."""

    trainer: Trainer = field(repr=False)
    _saver: Saver | None = field(repr=False)
    metrics: tuple[Metrics, ...]  # one per step since the previous turn

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.metrics[-1].step

    @property
    def loss(self) -> float:
        """Loss of the last finished step."""
        return self.metrics[-1].loss

    @property
    def lr(self) -> float:
        """Learning rate of the next step. Setting it disables the schedule. Checkpoints hold it, also that of this step if it is
        already saved, and a resumed run continues with it."""
        lr = self.trainer.session.rates(self.step).lr
        assert lr is not None, "a run has one"
        return lr

    @lr.setter
    def lr(self, rate: float) -> None:
        if not 0 <= rate < math.inf:
            raise RunConfigError(f"lr is {rate}; a learning rate is a number from 0 up")
        self._refuse_if_over()
        self.trainer.session.rates.fixed_lr = float(rate)
        if self._saver is not None:
            self._saver.save_again(self.step)

    def _refuse_if_over(self) -> None:
        if self.trainer.rests_after != self.step:
            actions = "set the rate, save, evaluate and take weights"
            raise RunConfigError(f"the turn after step {self.step} is over; {actions} before the next step")

    @property
    def _session(self) -> Session:
        """Return the session. RunConfigError if the run has moved on, or is emulated."""
        if not self.trainer.session.saves:
            raise RunConfigError("an emulated run has the state of a stand-in, not the model's; run on another device")
        self._refuse_if_over()
        return self.trainer.session

    def evaluate(self) -> dict[str, float]:
        """Return the loss on the run's held-out data, the setting `evaluation.data`, with the names of metrics.jsonl."""
        return held_out_loss(self._session)

    def save(self) -> Path:
        """Write a checkpoint and return its folder. It is not removed later, unless `checkpoint.keep` sets a limit."""
        session = self._session
        assert self._saver is not None, "a session that saves has a saver"
        self._saver.save(self.step, stays=True)
        return session.folder / f"checkpoint-{self.step}"

    def weights(self, copy: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, weight) in compute precision, without packed weights. With `copy`: a copy on the host. Otherwise a read-only
        view of the slot, free of cost, valid until the turn ends. With several ranks, which hold shards: always a copy."""
        session = self._session
        host = session.store.host
        for p in host.all_owned():
            if not host.plan.is_packed(p):
                host.settle(host.block_of(p))
                weight = session.reader.compute_weight(p)
                version = weight._version
                yield p.name, weight.to("cpu", copy=True) if copy else weight.detach()
                if weight._version != version:
                    raise RunConfigError(f"{p.name} was written to: weights are views; change a copy, and resume a checkpoint")

    def gradient_norms(self) -> dict[str, float]:
        """Return the gradient norm per weight in the last step, before clipping: the terms of the global norm, free of cost."""
        return self._session.store.gradient_norms()

    def stop(self) -> None:
        """Stop after this step, and save."""
        self.trainer.session.stop.request()


@contextmanager
def device_memory_named() -> Iterator[None]:
    """Report an out-of-memory error of the device in one line. No plan counts memory of kernels and other processes."""
    try:
        yield
    except OpError as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
        place, reason = str(error).partition(" failed: ")[0], (str(error.__cause__).splitlines() or ["no memory"])[0][:200]
        raise DeviceMemoryError(
            f"{place}: the device is out of memory ({reason}); free memory of other processes, or plan again for less with "
            "--device-memory, and go on with --resume"
        ) from error
