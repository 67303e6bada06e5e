"""Monitors: values sent to TensorBoard, W&B and MLflow, and runs that continue after their errors."""

import math
import sys
from unittest.mock import MagicMock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.training.monitors import Monitors

SETTINGS = {"seed": 0, "optimizer": {"lr": 1e-5, "no_decay": ("a", "b")}}


def never(words):
    raise AssertionError(words)


def log_to(tmp_path, *names, first_step=0, steps=(1,), values={"loss": 1.5}, say=never):  # noqa: B006
    monitors = Monitors(names, (tmp_path, SETTINGS, first_step), say)
    with monitors:
        for step in steps:
            monitors.log(step, values)
            monitors.text(step, "samples/0", "Ünder the <bridge>\nand on")


def events_of(folder):
    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_tensorboard_reads_back_what_a_run_logged(tmp_path):
    """A resumed run, without the log after its checkpoint."""
    log_to(tmp_path, "tensorboard", steps=range(1, 6), values={"loss": 1.0, "eval_loss": math.nan})
    log_to(tmp_path, "tensorboard", first_step=3, steps=range(4, 8), values={"loss": 2.0})
    events = events_of(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(s, 1.0 if s < 4 else 2.0) for s in range(1, 8)]
    assert [e.step for e in events.Scalars("eval/loss")] == [1, 2, 3]
    texts = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/0/text_summary")]
    assert texts[-1] == "Ünder the <bridge>\nand on"
    assert '"lr": 1e-05' in events.Tensors("run/text_summary")[0].tensor_proto.string_val[0].decode()


def test_a_monitor_that_cannot_begin_is_said_and_left_out(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    messages = []
    log_to(tmp_path, "tensorboard", say=messages.append)
    assert len(messages) == 1
    assert messages[0].startswith("tensorboard: FileExistsError: ")
    assert messages[0].endswith("; the run continues without it")


def stand_in(monkeypatch, name):
    client = MagicMock()
    monkeypatch.setitem(sys.modules, name, client)
    return client


def test_a_monitor_that_fails_is_said_once_and_others_go_on(tmp_path, monkeypatch):
    messages, run = [], stand_in(monkeypatch, "wandb").init.return_value
    run.log.side_effect = ConnectionError("no route\nto host")
    log_to(tmp_path, "wandb", "tensorboard", "wandb", steps=(1, 2), say=messages.append)
    assert messages == ["wandb: ConnectionError: no route to host; the run continues without it"]
    assert run.log.call_count == 1
    assert [e.step for e in events_of(tmp_path).Scalars("train/loss")] == [1, 2]


@pytest.mark.parametrize(("key", "mode"), [(None, "offline"), ("secret", None)])
def test_wandb_needs_no_login_and_is_sent_no_code(tmp_path, monkeypatch, key, mode):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    client = stand_in(monkeypatch, "wandb")
    log_to(tmp_path, "wandb", steps=(3,), values={"loss": 1.5, "eval_loss": 2.0})
    init_options, off = client.init.call_args.kwargs, client.Settings.call_args.kwargs
    assert (init_options["mode"], init_options["dir"], init_options["config"]) == (mode, str(tmp_path), SETTINGS)
    assert (off["save_code"], off["disable_git"], off["disable_code"]) == (False, True, True)
    run = client.init.return_value
    run.log.assert_any_call({"train/loss": 1.5, "eval/loss": 2.0}, step=3)
    run.finish.assert_called_once()


def test_mlflow_keeps_a_run_in_the_runs_own_folder(tmp_path, monkeypatch):
    client, out = stand_in(monkeypatch, "mlflow"), tmp_path / "out put"
    log_to(out, "mlflow", steps=(3,))
    client.set_tracking_uri.assert_called_once_with(f"sqlite:///{out}/mlflow.db")
    client.log_params.assert_called_once_with({"seed": "0", "optimizer.lr": "1e-05", "optimizer.no_decay": "('a', 'b')"})
    client.log_metrics.assert_called_once_with({"loss": 1.5}, step=3)
    client.log_text.assert_called_once_with("Ünder the <bridge>\nand on", "samples/0/step-3.txt")
    client.end_run.assert_called_once()
