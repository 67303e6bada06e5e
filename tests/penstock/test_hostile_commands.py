"""Does a whole command end in one line, whatever file it is given?

The readers are tried by `test_hostile_files.py`; here a few changed files of each kind go through the commands themselves.
"""

import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests import fuzz_formats, fuzz_formats_run
from tests.chats import write_talker
from tests.fuzz_judge import EXECUTED, PLANTED
from tests.fuzz_mutations import OUTSIDE
from tests.running import SCRATCH
from tests.tiny import tiny_config

from .test_hostile import SIZES, answered, refused

FORMATS = fuzz_formats.FORMATS | fuzz_formats_run.FORMATS
N_MUTANTS = 6


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A model with a tokenizer, data, settings, a plan, a finished run, and code that nobody asked for."""
    home = tmp_path_factory.mktemp("home")
    model = home / "model"
    model.mkdir()
    write_talker(model, "chatml")
    (model / "config.json").write_text(json.dumps(tiny_config("qwen3", vocab_size=420)))
    (home / "data.jsonl").write_text(json.dumps({"text": "To be, or not to be, that is the question. " * 9}) + "\n")
    (home / "runs.json").write_bytes(FORMATS["published runs"].seeds()[1])
    (home / "ops.csv").write_bytes(FORMATS["published ops"].seeds()[0])
    for folder in (home, model):
        (folder / "evil.py").write_text(PLANTED)
    done = answered("plan", model, *SIZES, "-o", home / "plan.json")
    assert done.exit_code == 0, done.output
    done = answered("run", home / "plan.json", "--data", home / "data.jsonl", "--out", home / "run", "--steps", 2, "--from-scratch")
    assert done.exit_code == 0, done.output
    said = f"data: {{path: {home / 'data.jsonl'}}}\nsteps: 1\nplan: {home / 'plan.json'}\nfrom_scratch: true\n"
    (home / "run.yaml").write_text(said)
    return home


_RUN = ["run", "plan.json", "--model", "model", "--data", "data.jsonl", "--steps", "1", "--out", "out", "--from-scratch"]
_AGAIN = ["run", "plan.json", "--model", "model", "--data", "data.jsonl", "--out", "run", "--steps", "3", "--resume"]
# The file that is changed, as what, and the command that reads it.
COMMANDS: dict[str, tuple[str, str, list[str]]] = {
    "check": ("plan.json", "plan (JSON)", ["check", "plan.json"]),
    "report": ("plan.json", "plan (JSON)", ["report", "plan.json", "-o", "page.html"]),
    "report of a timeline": ("run/timeline.json", "timeline.json", ["report", "plan.json", "run", "-o", "trace.json"]),
    "report of a log": ("run/metrics.jsonl", "metrics.jsonl", ["report", "plan.json", "run", "-o", "page.html"]),
    "validate": ("runs.json", "published runs", ["validate", "runs.json"]),
    "validate ops": ("ops.csv", "published ops", ["validate", "ops.csv"]),
    "plan": ("model/config.json", "config.json", ["plan", "model", *SIZES, "-o", "new.json"]),
    "run": ("plan.json", "plan (JSON)", _RUN),
    "run with settings": ("run.yaml", "run (YAML)", ["run", "--config", "run.yaml", "--out", "out"]),
    "resume": ("run/checkpoint-2/trainer_state.json", "trainer state", _AGAIN),
    "run from weights": ("run/checkpoint-2/model.safetensors", "safetensors", [*_RUN[:-1], "--model", "run/checkpoint-2"]),
}


@pytest.mark.fast("some")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_a_changed_file_or_refuses_it_in_one_line(house, tmp_path, monkeypatch, command):
    file, name, words = COMMANDS[command]
    rng, original = Random(command), (house / file).read_bytes()
    for i in range(N_MUTANTS):
        home = tmp_path / str(i)
        shutil.copytree(house, home)
        monkeypatch.chdir(home)
        (home / file).write_bytes(FORMATS[name].mutate(original, rng).replace(OUTSIDE.encode(), bytes(tmp_path)))
        before = sorted(p for p in tmp_path.iterdir())
        done = answered(*words)
        assert done.exception is None or isinstance(done.exception, SystemExit), (done.exc_info, (home / file).read_bytes()[:2000])
        if done.exit_code:
            _one_line(done)
        assert sorted(p for p in tmp_path.iterdir()) == before
        assert not list(tmp_path.rglob(EXECUTED))
        shutil.rmtree(home)


def _one_line(done: Any) -> None:
    """The last line is the error, and nothing before it is a traceback."""
    *before, last = done.stderr.splitlines()
    assert done.exit_code in (1, 2, 3), done.stderr
    assert last.startswith("error: "), done.stderr
    assert len(last) < 600
    assert not any("Traceback" in line or "error" in line for line in before), done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "pipe"],
        ["validate", "pipe.csv"],
        ["compare", "qwen2.5-0.5b", "--machine", "pipe"],
        ["run", "--config", "pipe.yaml"],
        ["report", "plan.json", "folder", "-o", "page.html"],
        ["run", "plan.json", "--data", "data.jsonl", "--out", "folder", *SCRATCH],
        ["run", "plan.json", "--data", "data.jsonl", "--model", "folder", "--out", "out"],
        ["run", "plan.json", "--data", "data.jsonl", "--out", "out", *SCRATCH, "--recalibrate", "pipe"],
    ],
    ids=" ".join,
)
def test_a_pipe_where_a_command_reads_is_refused_at_once(house, tmp_path, monkeypatch, words):
    for name in ("plan.json", "data.jsonl"):
        shutil.copy(house / name, tmp_path / name)
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "pipe.yaml", "pipe.csv", "folder/metrics.jsonl", "folder/config.json", "folder/tokenizer.json"):
        os.mkfifo(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    refused(answered(*words))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("machine", ["/dev/zero", "../../../../../../../../dev/zero", "/dev/stdin", "pipe"])
def test_published_runs_that_name_a_machine_without_end_are_answered(house, tmp_path, monkeypatch, machine):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    run = json.loads((house / "runs.json").read_text())[0]
    (tmp_path / "runs.json").write_text(json.dumps([run | {"machine": machine, "model": machine}]))
    done = answered("validate", "runs.json")
    if machine == "pipe":
        assert "not predicted" in done.stdout
    else:
        assert "is a path" in refused(done)


def test_names_of_data_that_would_steer_a_terminal_stay_on_one_line(house, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a\x1b[2J\nb.jsonl").write_text("{broken\n")
    line = refused(answered("run", house / "plan.json", "--data", data, "--out", tmp_path / "out", *SCRATCH))
    assert "a\\x1b[2J\\nb.jsonl" in line
