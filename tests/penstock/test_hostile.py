"""Damaged files, pipes, full disks, odd names: commands succeed or fail with one line, and never hang."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.files import read_whole, write_whole
from penstock.runtime.units import on_one_line
from tests.forks import Forked
from tests.hostile import ENDED_S, FORMATS, PLAN, RUN, SCRATCH, answered, judged
from tests.running import penstock, succeeded


def refused(result, code=2):
    """Return the only error line of a command that ended with this exit code."""
    exit_code = result.returncode if isinstance(result, subprocess.CompletedProcess) else result.exit_code
    assert exit_code == code, (exit_code, result.stdout, result.stderr)
    assert not result.stdout
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 600
    return result.stderr


@pytest.mark.parametrize("name", FORMATS)
def test_a_good_file_is_taken_and_half_of_one_is_judged(house, name):
    file, words = FORMATS[name]
    content = (house / file).read_bytes()
    if name not in ("tokenizer.json", "published runs"):  # slow, tested separately
        shutil.copytree(house.parent, house.parent.parent / "second")
        assert judged(house.parent.parent / "second" / "house", words) == 0
    (house / file).write_bytes(content[: len(content) // 2])
    code = judged(house, words)
    assert code if name not in ("log", "CSV") else code == 0 or code == 2


def test_a_judge_notices_what_must_not_happen(house, monkeypatch):
    def does(work):
        monkeypatch.setattr("tests.hostile.penstock", lambda *_: (work(), penstock("--version"))[1])
        return lambda: judged(house, ["x"])

    assert does(lambda: None)() == 0
    for work in (
        (house.parent / "outside" / "secret.json").read_bytes,
        lambda: (house.parent / "new").write_text(""),
        lambda: os.system("true"),
        lambda: (house / "EXECUTED").write_text(""),
    ):
        with pytest.raises(AssertionError):
            does(work)()
        (house.parent / "new").unlink(missing_ok=True)


def test_a_plan_lacking_a_key_is_refused(house):
    fields = json.loads((house / "plan.json").read_text())
    for key in fields:
        (house / "less.json").write_text(json.dumps({k: v for k, v in fields.items() if k != key}))
        assert key in refused(penstock("check", house / "less.json"))


@pytest.mark.parametrize("part", ["blocks", "parameters", "dimensions"])
def test_a_plan_of_more_parts_than_any_model_is_refused(house, part):
    fields = json.loads((house / "plan.json").read_text())
    blocks = fields["workload"]["blocks"]
    if part == "blocks":
        blocks[1:1] = [blocks[1]] * 10_003
    elif part == "parameters":
        blocks[1]["parameters"] = [{"name": f"p{i}", "shape": [1]} for i in range(50_000)]
    else:
        blocks[1]["parameters"][0]["shape"] = [2**53 - 1] * 20_000
    (house / "large.json").write_text(json.dumps(fields))
    refused(answered("check", house / "large.json"), code=2)


def test_a_tokenizer_on_which_its_library_panics_is_refused(house):
    """The line follows the library's panic output."""
    fields = {"version": "1.0", "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "added_tokens": []}
    fields |= {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]], "byte_fallback": False}}
    (house / "model" / "tokenizer.json").write_text(json.dumps(fields))
    result = answered("data", "chats.jsonl", "--model", "model")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: model: its tokenizer.json cannot be used")


@pytest.mark.parametrize(
    "words",
    [
        ["check", "pipe"],
        ["plan", "model", "--machine", "/dev/zero"],
        ["run", "--config", "pipe.yaml"],
        ["run", "plan.json", "--data", "pipe", *SCRATCH],
        [*RUN, "--model", "pipes"],
        ["run", "plan.json", "--data", "data.jsonl", *SCRATCH, "--out", "pipes"],
    ],
    ids=" ".join,
)
def test_a_pipe_or_device_for_a_file_is_refused_at_once(house, words):
    (house / "pipes").mkdir()
    pipes = ["pipe", "pipe.yaml", *(f"pipes/{name}" for name in ("metrics.jsonl", "config.json", "tokenizer.json"))]
    for name in pipes:
        os.mkfifo(house / name)
    refused(answered(*words))
    assert not (house / "out").exists()
    assert all((house / name).is_fifo() for name in pipes)


def test_links_lead_no_output_elsewhere(house, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (house / "p.json.partial").symlink_to(tmp_path / "precious")
    succeeded(penstock(*PLAN, "megatrain", "-o", house / "p.json"))
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (house / "p.json.partial").is_symlink()
    (house / "link").symlink_to(tmp_path / "precious")
    write_whole(house / "link", "x")
    assert (house / "link").is_symlink(), "an output that is a link stays one, and its target is written"
    assert read_whole(tmp_path / "precious", 1) == b"x"
    with pytest.raises(OSError, match="larger"):
        read_whole(tmp_path / "precious", 0)


def test_a_full_disk_leaves_nothing_half_written(house):
    initial = sorted(house.iterdir())
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    limit += "; resource.setrlimit(resource.RLIMIT_FSIZE, (999, 999))"
    code = f"{limit}; from penstock.cli.main import cli; cli({[*PLAN, 'megatrain', '-o', 'x.json']!r})"
    result = Forked([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, errors = result.communicate(timeout=ENDED_S)
    assert "cannot be written" in refused(subprocess.CompletedProcess([], result.returncode, out, errors))
    assert sorted(house.iterdir()) == initial


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs a device that is always full")
def test_a_full_standard_output_is_one_line(house):
    with open("/dev/full", "w") as full:
        result = Forked([sys.executable, "-m", "penstock", *PLAN, "megatrain", "--json"], stdout=full, stderr=subprocess.PIPE)
    _, errors = result.communicate(timeout=ENDED_S)
    assert (result.returncode, errors.count("\n")) == (2, 1)
    assert errors.startswith("error: ")


def test_odd_names_stay_on_one_line(house):
    assert "a\\nb" in refused(penstock("check", house / "a\nb"))
    assert on_one_line("\x1b[31m\udcff") == "\\x1b[31m\\udcff"
    out = os.fsdecode(os.fsencode(house) + b"/\xff.json")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "penstock", "plan", "qwen2.5-0.5b", *PLAN[2:], "megatrain", "-o", out]
    result = subprocess.run(command, env=environment, timeout=ENDED_S, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "it fits" in result.stdout
    assert result.stderr.count("\n") == 1
    succeeded(penstock("check", out))
    (house / "texts").mkdir()
    (house / "texts" / "a\x1b[2J\nb.jsonl").write_text("{broken\n")
    assert "a\\x1b[2J\\nb.jsonl" in refused(answered("data", "texts"))
    for words in (["check", "x" * 5000], [*PLAN, "x" * 5000]):
        refused(penstock(*words))
