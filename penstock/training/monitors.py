"""Monitors: TensorBoard, Weights & Biases and MLflow, each through its own client, imported when a run asks for it.

What goes wrong there is said once, and training goes on without the monitor: `metrics.jsonl` holds everything.
"""

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.run_config import RunConfigError

PROJECT = "penstock"


@dataclass(frozen=True, slots=True)
class Monitor:
    """Shows a run as it goes. A step is the number of those that are done."""

    log: Callable[[int, Mapping[str, float]], Any]  # step, values by name
    text: Callable[[int, str, str], Any]  # step, name, text
    close: Callable[[], Any]


def tensorboard(folder: Path, run: Mapping[str, Any], first_step: int) -> Monitor:
    """Event files in the run's folder, those of a resumed run without what was logged after the checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else None)
    writer.add_text("run", "```\n" + json.dumps(run, indent=1, ensure_ascii=False) + "\n```", first_step)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in in_groups(values).items():
            writer.add_scalar(name, value, step)
        writer.flush()  # the run may be killed

    return Monitor(log, lambda step, name, text: writer.add_text(name, text, step), writer.close)


def wandb(folder: Path, run: Mapping[str, Any], first_step: int) -> Monitor:
    """A run of W&B: uploaded where the environment has an API key, else kept in files for `wandb sync`; no login is asked for."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    settings = wandb.Settings(silent=True, console="off", save_code=False, disable_git=True, disable_code=True)
    mode, name = None if "WANDB_API_KEY" in os.environ else "offline", folder.resolve().name  # None: as WANDB_MODE says
    of_run = wandb.init(project=PROJECT, name=name, dir=str(folder), config=dict(run), mode=mode, settings=settings)

    def text(step: int, name: str, text: str) -> None:
        of_run.log({name: wandb.Table(columns=["step", "text"], data=[[step, text]])}, step=step)

    return Monitor(lambda step, values: of_run.log(in_groups(values), step=step), text, of_run.finish)


def mlflow(folder: Path, run: Mapping[str, Any], first_step: int) -> Monitor:
    """A run of MLflow, in a database of the run's own folder: `mlflow ui --backend-store-uri sqlite:///OUT/mlflow.db`."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    folder = folder.resolve()
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    if mlflow.get_experiment_by_name(PROJECT) is None:
        mlflow.create_experiment(PROJECT, artifact_location=(folder / "mlartifacts").as_uri())
    mlflow.set_experiment(PROJECT)
    mlflow.start_run(run_name=f"{folder.name} from step {first_step + 1}")
    mlflow.log_params({name: value[:500] for name, value in _flat(run)})
    return Monitor(
        lambda step, values: mlflow.log_metrics(dict(values), step=step),
        lambda step, name, text: mlflow.log_text(text, f"{name}/step-{step}.txt"),
        mlflow.end_run,
    )


CLIENTS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


def in_groups(values: Mapping[str, float]) -> dict[str, float]:
    """Names as transformers' trainer has them, so that curves of both are in one chart: `train/loss`, `eval/loss`."""
    return {f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value for name, value in values.items()}


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings by dotted names, as text."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)


def refuse_missing(names: Sequence[str]) -> None:
    """RunConfigError for the first monitor that is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise RunConfigError(f"--monitor {name}: {name} is not installed here; pip install {name}, or leave the monitor out")


class Monitors:
    """The monitors of a run, opened as a context. One that fails is told no more."""

    def __init__(self, names: Sequence[str], of_run: tuple[Path, Mapping[str, Any], int], say: Callable[[str], None]) -> None:
        """`of_run`: its folder, the settings to show, and the number of steps that are done already."""
        self._names, self._of_run, self._say = dict.fromkeys(names), of_run, say
        self._open = dict[str, Monitor]()

    def __enter__(self) -> None:
        self._each(self._names, lambda name: self._open.update({name: CLIENTS[name](*self._of_run)}))

    def __exit__(self, *_: object) -> None:
        self._each(self._open, lambda name: self._open[name].close())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(self._open, lambda name: self._open[name].log(step, values))

    def text(self, step: int, title: str, text: str) -> None:
        self._each(self._open, lambda name: self._open[name].text(step, title, text))

    def _each(self, names: Iterable[str], work: Callable[[str], Any]) -> None:
        for name in list(names):
            try:
                work(name)
            except Exception as error:  # a client may raise anything, and the run is worth more than its picture
                self._open.pop(name, None)
                self._say(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}; the run goes on without it")
