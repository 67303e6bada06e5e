"""Where can a run be watched, besides its own log?

Each service is written to through its own client, which is imported only when it is asked for. Whatever goes wrong there once the
run has begun is said once, and training goes on without it: `metrics.jsonl` holds everything in any case.
"""

import importlib.util
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from penstock.run_config import RunConfigError

PROJECT = "penstock"


class Monitor(Protocol):
    """Something that shows a run as it goes. Steps are those that are done."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


def open_monitors(
    names: Sequence[str],
    folder: Path,
    run: Mapping[str, Any],
    first_step: int,
    say: Callable[[str], None],
    online: bool = False,
) -> tuple[Monitor, ...]:
    """Those of these names; what they keep lies in `folder`. RunConfigError for one that is not installed.

    `run` are the settings to show, `first_step` the steps that are done already. `online`: W&B uploads; else it keeps files that
    `wandb sync` uploads, and asks for no login.
    """
    makers: dict[str, Callable[[], Monitor]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", run, first_step),
        "wandb": lambda: WeightsAndBiases(folder, run, online),
        "mlflow": lambda: MLflow(folder, run, first_step),
    }
    opened: list[Monitor] = []
    try:
        for name in dict.fromkeys(names):
            opened += _opened(name, makers[name], say)
    except BaseException:
        for monitor in opened:
            monitor.close()
        raise
    return tuple(opened)


def refuse_missing(names: Sequence[str]) -> None:
    """RunConfigError for the first of these that is not installed: before long work rather than after it."""
    for name in names:
        try:
            found = importlib.util.find_spec(name) is not None
        except ValueError:  # kept from being imported
            found = False
        if not found:
            raise _missing(name, name)


def _opened(name: str, make: Callable[[], Monitor], say: Callable[[str], None]) -> "list[_SafeMonitor]":
    try:
        return [_SafeMonitor(name, make(), say)]
    except ModuleNotFoundError as error:
        raise _missing(name, error.name) from None
    except Exception as error:
        say(_gone(name, error))
        return []


def _missing(name: str, module: str | None) -> RunConfigError:
    what = f" ({module} is missing)" if module is not None and module.partition(".")[0] != name else ""
    return RunConfigError(f"--monitor {name}: {name} is not installed here{what}; pip install {name}, or leave the monitor out")


class _SafeMonitor:
    """A monitor whose first failure is its last: it is said, and nothing more is asked of it."""

    def __init__(self, name: str, monitor: Monitor, say: Callable[[str], None]) -> None:
        self.name, self.say = name, say
        self.monitor: Monitor | None = monitor

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._try(lambda monitor: monitor.log(step, values))

    def text(self, step: int, name: str, text: str) -> None:
        self._try(lambda monitor: monitor.text(step, name, text))

    def close(self) -> None:
        self._try(lambda monitor: monitor.close())
        self.monitor = None

    def _try(self, ask: Callable[[Monitor], None]) -> None:
        if self.monitor is None:
            return
        try:
            ask(self.monitor)
        except Exception as error:  # another's client may raise anything, and a run is worth more than its picture
            failed, self.monitor = self.monitor, None
            self.say(_gone(self.name, error))
            try:
                failed.close()
            except Exception as again:
                self.say(f"{self.name}: not closed either ({_short(again)})")


def _gone(name: str, error: Exception) -> str:
    return f"{name}: {_short(error)}; the run goes on without it, and metrics.jsonl holds what it lacks"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def in_groups(values: Mapping[str, float]) -> dict[str, float]:
    """As the trainer of transformers names them, so that curves of both lie in one chart: `train/loss`, `eval/loss`."""
    return {f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value for name, value in values.items()}


class TensorBoard:
    """Event files that TensorBoard reads. Written where it is called, without the thread that would end in a traceback."""

    def __init__(self, folder: Path, run: Mapping[str, Any], first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        self._event = Event
        path = folder / f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{first_step}"
        self._file = path.open("ab")
        self._records = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2"))
        if first_step:  # what an earlier run logged after the checkpoint that this one resumed from did not happen
            self._write(Event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self.text(first_step, "run", "```\n" + json.dumps(run, indent=1, ensure_ascii=False) + "\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from torch.utils.tensorboard.summary import scalar

        for name, value in in_groups(values).items():
            self._write(self._event(step=step, summary=scalar(name, value)))

    def text(self, step: int, name: str, text: str) -> None:
        from torch.utils.tensorboard.summary import text as summary

        self._write(self._event(step=step, summary=summary(name, text)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._file.flush()


class WeightsAndBiases:
    """A run of Weights & Biases."""

    def __init__(self, folder: Path, run: Mapping[str, Any], online: bool) -> None:
        import wandb

        self._table = wandb.Table
        settings = wandb.Settings(silent=True, console="off", save_code=False, disable_git=True, disable_code=True)
        name, mode = folder.resolve().name, "online" if online else "offline"
        self._run = wandb.init(project=PROJECT, name=name, dir=str(folder), config=dict(run), mode=mode, settings=settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(in_groups(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._table(columns=["step", "text"], data=[[step, text]])}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, in a database of the run's own folder: `mlflow ui --backend-store-uri sqlite:///OUT/mlflow.db`."""

    def __init__(self, folder: Path, run: Mapping[str, Any], first_step: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        folder = folder.resolve()
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self._client.create_experiment(PROJECT, (folder / "mlartifacts").as_uri())
        self._id = self._client.create_run(experiment, run_name=f"{folder.name} from step {first_step + 1}").info.run_id
        self._client.log_batch(self._id, params=[Param(name, value[:500]) for name, value in _flat(run)])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        at_ms = time.time_ns() // 10**6
        self._client.log_batch(self._id, metrics=[self._metric(name, value, at_ms, step) for name, value in values.items()])

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{name}/step-{step}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _flat(fields: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings by dotted names, as text."""
    flat: list[tuple[str, str]] = []
    for name, value in fields.items():
        flat += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, str(value))]
    return flat
