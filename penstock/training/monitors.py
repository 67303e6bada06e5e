"""Monitors: TensorBoard, Weights & Biases and MLflow, each with its client library, imported on demand.

A failure is reported once; training continues without that monitor. `metrics.jsonl` holds all values.
"""

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.run_config import RunConfigError

PROJECT = "penstock"


@dataclass(frozen=True, slots=True)
class Monitor:
    """Callbacks that show a run in progress. `step` is the number of finished steps."""

    log: Callable[[int, Mapping[str, float]], Any]  # step, values by name
    text: Callable[[int, str, str], Any]  # step, name, text
    close: Callable[[], Any]


def tensorboard(folder: Path, run: Mapping[str, Any], first_step: int) -> Monitor:
    """Write event files to the run's folder. A resumed run drops events after its checkpoint."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1 if first_step else None)
    writer.add_text("run", "```\n" + json.dumps(run, indent=1, ensure_ascii=False) + "\n```", first_step)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in in_groups(values).items():
            writer.add_scalar(name, value, step)
        writer.flush()  # in case the run is killed

    return Monitor(log, lambda step, name, text: writer.add_text(name, text, step), writer.close)


def wandb(folder: Path, run: Mapping[str, Any], first_step: int) -> Monitor:
    """Start a W&B run: uploaded with an API key in the environment, otherwise offline for `wandb sync`. It never asks to log in."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    settings = wandb.Settings(silent=True, console="off", save_code=False, disable_git=True, disable_code=True)
    mode, name = None if "WANDB_API_KEY" in os.environ else "offline", folder.resolve().name  # None: use WANDB_MODE
    of_run = wandb.init(project=PROJECT, name=name, dir=str(folder), config=dict(run), mode=mode, settings=settings)

    def text(step: int, name: str, text: str) -> None:
        of_run.log({name: wandb.Table(columns=["step", "text"], data=[[step, text]])}, step=step)

    return Monitor(lambda step, values: of_run.log(in_groups(values), step=step), text, of_run.finish)


def mlflow(folder: Path, run: Mapping[str, Any], first_step: int) -> Monitor:
    """Start an MLflow run in a database in the run's folder. Show it: `mlflow ui --backend-store-uri sqlite:///OUT/mlflow.db`."""
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
    """Prefix names like transformers' Trainer, for shared charts. Example: `train/loss`, `eval/loss`."""
    return {f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value for name, value in values.items()}


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten nested settings to dotted names and text."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, str(value)


def _is_installed(name: str) -> bool:
    return (sys.modules[name] if name in sys.modules else importlib.util.find_spec(name)) is not None


def chosen(names: Sequence[str]) -> list[str]:
    """Return the monitors of the settings, with `all` those that are installed here. RunConfigError for one that is not."""
    if {"all", "none"} & set(names) and len(set(names)) > 1:
        raise RunConfigError(f"--monitor {', '.join(names)}: all and none exclude others; give one of them alone, or names")
    if "all" in names:
        names = [name for name in CLIENTS if _is_installed(name)]
        if not names:
            raise RunConfigError(f"--monitor all: none of {', '.join(CLIENTS)} is installed here; pip install one, or leave it out")
    names = [name for name in dict.fromkeys(names) if name != "none"]
    for name in names:
        if not _is_installed(name):
            raise RunConfigError(f"--monitor {name}: {name} is not installed here; pip install {name}, or leave the monitor out")
    return names


class Monitors:
    """Monitors of a run, as a context manager. A monitor is dropped after its first failure."""

    def __init__(
        self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], first_step: int, say: Callable[[str], None]
    ) -> None:
        self._names, self._run, self._say = chosen(names), (folder, settings, first_step), say
        self._open = dict[str, Monitor]()

    def __enter__(self) -> None:
        self._call_each(self._names, lambda name: self._open.update({name: CLIENTS[name](*self._run)}))

    def __exit__(self, *_: object) -> None:
        self._call_each(self._open, lambda name: self._open[name].close())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call_each(self._open, lambda name: self._open[name].log(step, values))

    def text(self, step: int, title: str, text: str) -> None:
        self._call_each(self._open, lambda name: self._open[name].text(step, title, text))

    def _call_each(self, names: Iterable[str], work: Callable[[str], Any]) -> None:
        for name in list(names):
            try:
                work(name)
            except Exception as error:  # a client may raise anything; the run must continue
                self._open.pop(name, None)
                self._say(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:160]}; the run continues without it")
