"""Does a run show itself where it was asked to, and go on when that fails?"""

import errno
import importlib.util
import math
import sqlite3
import sys
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.run_config import RunConfigError
from penstock.training.monitors import TensorBoard, in_groups, open_monitors

SETTINGS = {"seed": 0, "optimizer": {"lr": 1e-5, "no_decay": ("a", "b")}}


def never(words):
    raise AssertionError(words)


def scalars(folder):
    """What TensorBoard itself reads: {tag: [(step, value)]}."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, pytest.approx(e.value)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_back_what_a_run_logged(tmp_path):
    (monitor,) = open_monitors(["tensorboard"], tmp_path, SETTINGS, 0, never)
    for step in range(1, 4):
        monitor.log(step, {"loss": 1 / step, "lr": 1e-5 * step})
    monitor.log(2, {"eval_loss": 0.25})
    monitor.text(2, "samples/0", "Ünder the <bridge>\nand on")
    monitor.close()
    assert scalars(tmp_path / "tensorboard") == {
        "train/loss": [(1, 1.0), (2, 0.5), (3, 1 / 3)],
        "train/lr": [(1, 1e-5), (2, 2e-5), (3, 3e-5)],
        "eval/loss": [(2, 0.25)],
    }
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    texts = {tag: [e.tensor_proto.string_val[0].decode() for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    assert texts["samples/0/text_summary"] == ["Ünder the <bridge>\nand on"]
    assert '"lr": 1e-05' in texts["run/text_summary"][0]


def test_tensorboard_forgets_what_was_logged_after_the_checkpoint_that_a_run_resumed_from(tmp_path):
    for first_step, steps, loss in ((0, range(1, 6), 1.0), (3, range(4, 8), 2.0)):
        (monitor,) = open_monitors(["tensorboard"], tmp_path, SETTINGS, first_step, never)
        for step in steps:
            monitor.log(step, {"loss": loss})
        monitor.close()
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [*((s, 1.0) for s in (1, 2, 3)), *((s, 2.0) for s in (4, 5, 6, 7))]


def test_a_loss_that_is_no_number_stops_no_monitor(tmp_path):
    (monitor,) = open_monitors(["tensorboard"], tmp_path, SETTINGS, 0, never)
    monitor.log(1, {"loss": math.nan, "grad_norm": math.inf})
    monitor.log(2, {"loss": 1.0})
    monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2]


def test_evaluation_and_training_have_groups_of_their_own():
    assert in_groups({"loss": 1.0, "eval_loss": 2.0, "eval_tokens": 3}) == {"train/loss": 1.0, "eval/loss": 2.0, "eval/tokens": 3}


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_monitor_that_is_not_installed_is_one_line_that_says_what_to_install(tmp_path, monkeypatch, name):
    for module in [name, *(m for m in sys.modules if m.startswith(name + "."))]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RunConfigError, match=f"{name} is not installed here.*pip install {name}"):
        open_monitors([name], tmp_path, SETTINGS, 0, never)


def test_a_monitor_that_cannot_begin_is_said_and_the_run_goes_on(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    said = []
    assert open_monitors(["tensorboard"], tmp_path, SETTINGS, 0, said.append) == ()
    assert len(said) == 1
    assert said[0].startswith("tensorboard: FileExistsError")


@pytest.mark.parametrize("failing", ["write", "flush"])
def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path, monkeypatch, failing):
    said = []
    (monitor,) = open_monitors(["tensorboard"], tmp_path, SETTINGS, 0, said.append)

    class Full:
        def __getattr__(self, name):
            def do(*_):
                if name == failing:
                    raise OSError(errno.ENOSPC, "No space left on device")

            return do

    monitor.monitor._file = Full()
    monitor.monitor._records._writer = Full()
    for step in range(1, 5):
        monitor.log(step, {"loss": 1.0})
        monitor.text(step, "samples/0", "words")
    monitor.close()
    assert len(said) == 1
    assert "tensorboard: OSError: [Errno 28] No space left on device; the run goes on without it" in said[0]


def test_one_monitor_that_fails_does_not_keep_others_from_being_told(tmp_path, monkeypatch):
    said = []
    logged = recorded(monkeypatch, "wandb", failing_log=True)
    two = open_monitors(["wandb", "tensorboard", "wandb"], tmp_path, SETTINGS, 0, said.append)
    assert len(two) == 2
    for step in (1, 2):
        for monitor in two:
            monitor.log(step, {"loss": 1.0})
    for monitor in two:
        monitor.close()
    assert [words.partition(":")[0] for words in said] == ["wandb"]
    assert [call[0] for call in logged] == ["init", "log", "finish"]
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(1, 1.0), (2, 1.0)]


# -- clients that need not be installed: what is asked of them is written down --------------------------------------------


def recorded(monkeypatch, name, failing_log=False):
    """Stand-ins with the few names of the client that are used; every call is kept."""
    calls = []
    if name == "wandb":

        class Run:
            def log(self, values, step):
                calls.append(("log", values, step))
                if failing_log:
                    raise ConnectionError("no route\nto host")

            def finish(self):
                calls.append(("finish",))

        wandb = ModuleType("wandb")
        wandb.Settings = lambda **settings: settings
        wandb.Table = lambda columns, data: (columns, data)
        wandb.init = lambda **asked: calls.append(("init", asked)) or Run()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        return calls

    class Client:
        def __init__(self, tracking_uri):
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name, artifact_location):
            calls.append(("experiment", name, artifact_location))
            return "7"

        def create_run(self, experiment_id, run_name):
            calls.append(("run", experiment_id, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_batch(self, run_id, metrics=(), params=()):
            calls.append(("batch", [(m[0], m[1], m[3]) for m in metrics], list(params)))

        def log_text(self, run_id, text, artifact_file):
            calls.append(("text", text, artifact_file))

        def set_terminated(self, run_id):
            calls.append(("terminated",))

    mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    mlflow.MlflowClient, mlflow.entities = Client, entities
    entities.Metric, entities.Param = (lambda *of: of), (lambda *of: of)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return calls


@pytest.mark.parametrize(("online", "mode"), [(False, "offline"), (True, "online")])
def test_wandb_is_asked_for_a_run_that_needs_no_login_and_sends_no_code(tmp_path, monkeypatch, online, mode):
    calls = recorded(monkeypatch, "wandb")
    (monitor,) = open_monitors(["wandb"], tmp_path, SETTINGS, 0, never, online)
    monitor.log(3, {"loss": 1.5, "eval_loss": 2.0})
    monitor.text(3, "samples/0", "words")
    monitor.close()
    (_, asked), *others = calls
    assert (asked["mode"], asked["dir"], asked["config"]) == (mode, str(tmp_path), SETTINGS)
    assert asked["settings"] == {"silent": True, "console": "off", "save_code": False, "disable_git": True, "disable_code": True}
    assert others == [
        ("log", {"train/loss": 1.5, "eval/loss": 2.0}, 3),
        ("log", {"samples/0": (["step", "text"], [[3, "words"]])}, 3),
        ("finish",),
    ]


def test_mlflow_is_asked_for_a_run_in_the_runs_own_folder(tmp_path, monkeypatch):
    calls = recorded(monkeypatch, "mlflow")
    out = tmp_path / "out put"
    (monitor,) = open_monitors(["mlflow"], out, SETTINGS, 0, never)
    monitor.log(3, {"loss": 1.5})
    monitor.text(3, "samples/0", "words")
    monitor.close()
    assert calls == [
        ("client", f"sqlite:///{out}/mlflow.db"),
        ("experiment", "penstock", (out / "mlartifacts").as_uri()),
        ("run", "7", "out put from step 1"),
        ("batch", [], [("seed", "0"), ("optimizer.lr", "1e-05"), ("optimizer.no_decay", "('a', 'b')")]),
        ("batch", [("loss", 1.5, 3)], []),
        ("text", "words", "samples/0/step-3.txt"),
        ("terminated",),
    ]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_real_wandb_keeps_a_run_without_a_network(tmp_path):
    (monitor,) = open_monitors(["wandb"], tmp_path, SETTINGS, 0, never)
    monitor.log(1, {"loss": 1.5})
    monitor.log(1, {"eval_loss": 2.5})
    monitor.text(1, "samples/0", "words")
    monitor.close()
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in kept.read_bytes()
    assert b"eval/loss" in kept.read_bytes()


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_the_real_mlflow_keeps_two_stretches_of_a_run(tmp_path):
    for first_step in (0, 2):
        (monitor,) = open_monitors(["mlflow"], tmp_path, SETTINGS, first_step, never)
        monitor.log(first_step + 1, {"loss": 1.5, "grad_norm": math.nan})
        monitor.text(first_step + 1, "samples/0", "words")
        monitor.close()
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        found = database.execute("select key, value, step, is_nan from metrics order by step, key").fetchall()
    assert [(key, step) for key, _, step, _ in found] == [("grad_norm", 1), ("loss", 1), ("grad_norm", 3), ("loss", 3)]
    assert {value for key, value, _, _ in found if key == "loss"} == {1.5}
    assert sorted(path.name for path in (tmp_path / "mlartifacts").rglob("*.txt")) == ["step-1.txt", "step-3.txt"]


def test_what_a_monitor_says_is_one_line(tmp_path, monkeypatch):
    recorded(monkeypatch, "wandb", failing_log=True)
    said = []
    (monitor,) = open_monitors(["wandb"], tmp_path, SETTINGS, 0, said.append)
    monitor.log(1, {"loss": 1.0})
    assert said == [
        "wandb: ConnectionError: no route to host; the run goes on without it, and metrics.jsonl holds what it lacks",
    ]


def test_the_events_are_whole_after_every_call_for_a_run_may_be_killed(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    monitor = TensorBoard(tmp_path / "tensorboard", SETTINGS, 0)
    monitor.log(1, {"loss": 0.5})
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(1, 0.5)]}
    monitor.close()
