"""What happens between steps?

The executor runs from one save to the next; here its steps are counted, logged and saved. Every lane is idle when a checkpoint is
taken, so the state on the host is that of one step.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .checkpoint import State, load_weights, save
from .data import Tokens
from .errors import CheckpointError
from .executor import execute
from .files import write_whole
from .machine import Machine
from .memory import DTYPE
from .optimizer import pieces_of
from .plan import Plan
from .slabs import give_back_freed
from .tensor_files import Made
from .timeline import Timeline
from .torch_machine import TorchMachine
from .workload import Parameter

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

    def to_json(self) -> str:
        """One line; a number that is not finite is null, as JSON knows no other way to say it."""
        fields = asdict(self)
        return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()})


@dataclass(frozen=True, slots=True)
class Training:
    """One run: what performs it, on what, and where its traces go."""

    plan: Plan
    machine: Machine  # performs the ops
    store: TorchMachine  # holds the state; the machine itself, unless that is emulated
    tokens: Tokens
    seed: int
    folder: Path
    saves: bool  # False: the state is a stand-in's, which nobody wants
    save_every: int | None = None
    tokenizer_from: Path | None = None

    def run(self, first_step: int, n_steps: int, on_step: Callable[[Metrics], None]) -> tuple[Timeline, list[float]]:
        """Perform steps first_step .. n_steps - 1. Returns the last stretch's timeline, and step times after the warm-up."""
        log = self.folder / "metrics.jsonl"
        keep_metrics_up_to(log, first_step)
        timeline, times_s = Timeline(()), list[float]()
        while first_step < n_steps:
            stretch = min(self.save_every or n_steps, n_steps - first_step)
            clock = _Clock()

            def finished(step: int, at_s: float, clock: _Clock = clock) -> None:
                metrics = self._metrics(step, clock.lap_s(at_s))
                with _writing(log), log.open("a", encoding="utf-8") as lines:
                    lines.write(metrics.to_json() + "\n")
                on_step(metrics)

            timeline = execute(self.plan, self.machine, stretch, first_step, finished)
            times_s += timeline.step_times_s[max(0, WARM_UP_STEPS - 1) :] or timeline.step_times_s
            first_step += stretch
            if self.saves:
                self.save(first_step)
        write_timeline(self.folder / "timeline.json", timeline)
        return timeline, times_s

    def _metrics(self, step: int, step_s: float) -> Metrics:
        result = self.store.results.pop(step)
        n_tokens = self.plan.semantics.tokens_per_step
        lr = self.store.settings(step).lr
        return Metrics(
            step + 1, result.loss, result.grad_norm, lr, n_tokens, result.n_supervised, step_s, n_tokens / step_s, result.skipped
        )

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, step: int) -> Path:
        """Write `checkpoint-<step>` from the state on the host."""
        weights = {p.name: weight for p, weight in self.store.host.compute_weights()}
        state = {
            "seed": self.seed,
            "n_updates": self.store.host.n_updates,
            "data_fingerprint": self.tokens.fingerprint,
            "data_position": list(self.tokens.position(step)),
            "model_fingerprint": self.plan.model.fingerprint,
            "semantics": asdict(self.plan.semantics),
        }
        return save(self.folder, step, weights, self._optimizer_files(), self.plan.model.config, state, self.tokenizer_from)

    def _optimizer_files(self) -> Iterator[tuple[str, dict[str, torch.Tensor | Made]]]:
        for number in range(len(self.plan.workload.blocks)):
            tensors: dict[str, torch.Tensor | Made] = {}
            for p in self.store.host.owned(number):
                exp_avg, exp_avg_sq = self.store.host.moments(p)
                master, dtype = self.store.host.learned(p).master, DTYPE[self.plan.semantics.master_dtype]
                tensors |= {f"master.{p.name}": Made(dtype, p.shape, partial(pieces_of, master))}
                tensors |= {f"exp_avg.{p.name}": exp_avg.view(p.shape), f"exp_avg_sq.{p.name}": exp_avg_sq.view(p.shape)}
            yield f"{number:05d}", tensors

    def resume(self, state: State) -> None:
        """Put a checkpoint's state onto the host; CheckpointError when it is of another model, data, seed or meaning."""
        expected = {
            "seed": self.seed,
            "data_fingerprint": self.tokens.fingerprint,
            "model_fingerprint": self.plan.model.fingerprint,
            "semantics": asdict(self.plan.semantics),
        }
        for key, value in expected.items():
            if state.fields.get(key) != value:
                raise CheckpointError(
                    f"{state.path}: its {key} is not this run's; resume with the model, data, --seed and semantics it began with"
                )
        n_updates = state.fields.get("n_updates")
        if not isinstance(n_updates, int) or not 0 <= n_updates <= state.step:
            raise CheckpointError(f"{state.path}: `n_updates` is no count; resume from another checkpoint")
        for number in range(len(self.plan.workload.blocks)):
            for p in self.store.host.owned(number):
                self.store.host.set_weight(p, self._stored(state, "master", p))
                for name, moment in zip(("exp_avg", "exp_avg_sq"), self.store.host.moments(p), strict=True):
                    moment.copy_(self._stored(state, name, p).reshape(-1))
        self.store.host.n_updates = n_updates

    @staticmethod
    def _stored(state: State, kind: str, p: Parameter) -> torch.Tensor:
        name = f"{kind}.{p.name}"
        if name not in state.optimizer or tuple(state.optimizer[name].shape) != p.shape:
            raise CheckpointError(f"{state.path}: {name} is missing or of another shape; resume from another checkpoint")
        return state.optimizer[name]


def load_model(store: TorchMachine, folder: Path) -> None:
    """Put a Hugging Face model's weights into the host store, one tensor at a time."""
    for number in range(len(store.plan.workload.blocks)):
        owned = {p.name: p for p in store.host.owned(number)}
        for name, weight in load_weights(folder, owned, {name: p.shape for name, p in owned.items()}):
            store.host.set_weight(owned[name], weight)
    give_back_freed()


class _Clock:
    """Time between calls."""

    def __init__(self) -> None:
        self.before_s = 0.0

    def lap_s(self, at_s: float) -> float:
        self.before_s, lap_s = at_s, at_s - self.before_s
        return max(lap_s, 1e-9)


def keep_metrics_up_to(path: Path, n_steps: int) -> None:
    """Drop what a run that was stopped logged after the checkpoint it now resumes from."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            fields: Any = json.loads(line)
        except ValueError:
            continue  # the line that was being written when the run was stopped
        if isinstance(fields, dict) and isinstance(fields.get("step"), int) and fields["step"] <= n_steps:
            kept.append(line + "\n")
    with _writing(path):
        write_whole(path, "".join(kept))


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
