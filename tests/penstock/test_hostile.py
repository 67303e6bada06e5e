"""Does every mistake, accident and trick end in one line and an exit code, with nothing half-written and nothing waiting?"""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hwprofiles.schema import read_profile, shipped_profiles
from planner.model.workload import shipped_models
from runtime.files import read_whole, write_whole
from runtime.units import on_one_line, show_count
from tests.running import SCRATCH, penstock
from tests.tiny import tiny_config
from tests.tour import ROOT

SIZES = ["--machine", "cpu-2core", "--seq-len", "32", "--batch-size", "4", "--micro-batch", "2", "--loss-tile-tokens", "16"]
ENDED_S = 60  # far beyond what any of these commands takes: only waiting for ever is longer


def process(*args, **options):
    """The command as a process of its own: what waits for ever in it is ended, and fails the test."""
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, args)]
    options = {"capture_output": True, "text": True} | options
    return subprocess.run(command, cwd=ROOT, timeout=ENDED_S, check=False, **options)


def answered(*args):
    """The command in this process: what waits for ever in it is interrupted, and fails the test."""

    def fail(*_):
        raise AssertionError(f"{args[0]} waits for ever")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(ENDED_S)
    try:
        return penstock(*args)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(done, code=2):
    """One line, no more, the exit code; returns the line."""
    exit_code = done.returncode if isinstance(done, subprocess.CompletedProcess) else done.exit_code
    assert exit_code == code, (exit_code, done.stdout, done.stderr)
    assert not done.stdout
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 600
    return done.stderr


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A tiny model, some text and a plan."""
    home = tmp_path_factory.mktemp("home")
    (home / "model").mkdir()
    (home / "model" / "config.json").write_text(json.dumps(tiny_config("qwen3", vocab_size=272)))
    (home / "data").mkdir()
    (home / "data" / "a.txt").write_text("To be, or not to be, that is the question. " * 20)
    done = penstock("plan", home / "model", *SIZES, "-o", home / "p.json")
    assert done.exit_code == 0, done.output
    return home


def run_args(house, out, *extra, scratch=SCRATCH):
    return ["run", house / "p.json", "--data", house / "data", "--out", out, "--steps", 2, *scratch, *extra]


# -- files that are none ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["plan", "profile", "policy", "model", "run's plan", "timeline", "data", "-o"])
def test_a_pipe_where_a_file_belongs_is_refused_at_once(house, tmp_path, where):
    pipe = tmp_path / "timeline.json"
    os.mkfifo(pipe)
    plan, model = house / "p.json", house / "model"
    args = {
        "plan": ["check", pipe],
        "profile": ["plan", model, "--machine", pipe],
        "policy": ["plan", model, *SIZES, "--policy", pipe],
        "model": ["plan", pipe, *SIZES],
        "run's plan": ["run", pipe, "--data", house / "data", "--out", tmp_path / "out", *SCRATCH],
        "timeline": ["report", plan, tmp_path, "-o", tmp_path / "t.json"],
        "data": ["run", plan, "--data", pipe, "--out", tmp_path / "out", *SCRATCH],
        "-o": ["report", plan, "-o", pipe],
    }[where]
    refused(answered(*args))
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.json"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.jsonl.partial", "timeline.json", "timeline.json.partial"])
def test_a_pipe_where_a_run_writes_a_log_is_refused_before_it_trains(house, tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert name in refused(answered(*run_args(house, tmp_path)))


def test_a_pipe_named_as_the_trial_file_holds_up_no_run(house, tmp_path):
    os.mkfifo(tmp_path / ".penstock-writable")
    assert answered(*run_args(house, tmp_path)).exit_code == 0


def test_a_link_laid_beside_the_output_leads_nowhere(house, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "p.json.partial").symlink_to(tmp_path / "precious")
    assert penstock("plan", house / "model", *SIZES, "-o", tmp_path / "p.json").exit_code == 0
    assert (tmp_path / "precious").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json", "precious"]


def test_an_output_that_is_a_link_stays_one_and_what_it_names_is_written(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a" / "file")
    write_whole(tmp_path / "link", "x")
    assert (tmp_path / "link").is_symlink()
    assert read_whole(tmp_path / "a" / "file", 1) == b"x"
    with pytest.raises(OSError, match="larger"):
        read_whole(tmp_path / "a" / "file", 0)


def test_a_circle_of_links_among_the_data_is_left_out(house, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "loop").symlink_to(data / "loop")
    (data / "a.txt").write_text("some text " * 50)
    assert penstock("run", house / "p.json", "--data", data, "--out", tmp_path / "o", "--steps", 1, *SCRATCH).exit_code == 0


# -- full, closed and odd outputs ---------------------------------------------------------------------------------------


@pytest.mark.fast("some")
@pytest.mark.parametrize("command", ["plan", "report"])
def test_a_disk_that_is_full_leaves_nothing_half_written(house, tmp_path, command):
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)"
    limit += "; resource.setrlimit(resource.RLIMIT_FSIZE, (999, 999))"
    first = ["plan", house / "model", *SIZES] if command == "plan" else ["report", house / "p.json"]
    code = f"{limit}; from penstock.cli.main import cli; cli({[*map(str, first), '-o', str(tmp_path / 'x.json')]!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=ENDED_S, check=False, capture_output=True, text=True)
    assert "cannot be written" in refused(done)
    assert not list(tmp_path.iterdir())


@pytest.mark.fast("some")
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs a device that is always full")
@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_standard_output_that_is_full_is_one_line(house, json_too):
    with open("/dev/full", "w") as full:
        done = process("plan", house / "model", *SIZES, *json_too, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_terminal_that_knows_only_ascii_gets_an_answer(house):
    done = process("plan", house / "model", *SIZES, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout


def test_names_with_newlines_or_no_encoding_stay_on_one_line(house, tmp_path):
    assert "a\\nb" in refused(process("check", tmp_path / "a\nb"))
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json")
    done = process("plan", house / "model", *SIZES, "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert penstock("check", out).exit_code == 0
    assert on_one_line("\x1b[31m\udcff") == "\\x1b[31m\\udcff"
    for args in (["check", "x" * 5000], ["plan", house / "model", *SIZES, "--policy", "x" * 5000]):
        refused(penstock(*args))


def test_the_same_one_line_comes_from_a_checker_that_says_no(house, tmp_path):
    fields = json.loads((house / "p.json").read_text())
    first_forward = next(i for i, op in enumerate(fields["ops"]) if op.startswith("forward") and "^" in op)
    fields["ops"][first_forward] = fields["ops"][first_forward].split(" ^ ")[0]
    (tmp_path / "a\nb").write_text(json.dumps(fields))
    refused(process("check", tmp_path / "a\nb"), code=1)


# -- content ------------------------------------------------------------------------------------------------------------


def test_a_plan_in_which_a_key_stands_twice_is_refused(house, tmp_path):
    text = (house / "p.json").read_text()
    path = tmp_path / "p.json"
    path.write_text(text.rstrip()[:-1] + ', "ops": []}')
    assert "`ops` stands twice" in refused(penstock("check", path))
    path.write_text(text.replace('"step_s":', '"step_s": 1.0, "step_s":', 1))
    assert "`step_s` stands twice" in refused(penstock("check", path))


def test_a_plan_without_any_one_of_its_keys_is_refused(house, tmp_path):
    fields = json.loads((house / "p.json").read_text())
    for key in fields:
        (tmp_path / "p.json").write_text(json.dumps({k: v for k, v in fields.items() if k != key}))
        assert key in refused(penstock("check", tmp_path / "p.json"))


@pytest.mark.fast("some")
@pytest.mark.parametrize("size", [["--micro-batch", "1000000000"], []])
@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "gpt-oss-120b"])
def test_a_batch_beyond_all_measure_is_answered(model, size):
    """A remedy of a billion micro-batches is not even tried."""
    done = answered("plan", model, "--machine", "cpu-2core", "--batch-size", 1_000_000_000, *size)
    refused(done, code=3 if size else 2)


@pytest.mark.parametrize("option", ["--lr", "--weight-decay", "--time-scale"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_number_that_is_none_starts_no_run(house, tmp_path, option, value):
    assert option in refused(penstock(*run_args(house, tmp_path / "o", "--device", "emulated", option, value)))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("extra", [["--resume"], ["--save-every", "1"]])
def test_an_emulated_run_that_is_to_save_is_refused_before_it_starts(house, tmp_path, extra):
    refused(penstock(*run_args(house, tmp_path / "o", "--device", "emulated", *extra)))
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_weights_that_are_garbage_leave_no_folder(house, tmp_path, file):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((house / "model" / "config.json").read_bytes())
    (model / file).write_bytes(b"\xff" * 100)
    refused(answered(*run_args(house, tmp_path / "o", "--model", model, scratch=SCRATCH[1:])))
    assert not (tmp_path / "o").exists()


@pytest.mark.soak
def test_a_tokenizer_on_which_its_library_panics_is_one_line(house, tmp_path):
    fields = {"version": "1.0", "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "added_tokens": []}
    fields |= {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]], "byte_fallback": False}}
    (tmp_path / "config.json").write_bytes((house / "model" / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    done = process(*run_args(house, tmp_path / "o", "--model", tmp_path, scratch=SCRATCH[:1]))
    assert "not a tokenizer" in done.stderr.splitlines()[-1]
    assert done.returncode == 2


# -- signals ------------------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize(("number", "said", "code"), [(signal.SIGINT, "interrupted", 130), (signal.SIGTERM, "terminated", 0)])
def test_a_run_that_is_stopped_ends_with_one_line_and_only_whole_checkpoints(house, tmp_path, number, said, code):
    args = [*run_args(house, tmp_path, "--save-every", 1), "--steps", 10_000]
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, args)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        began_s = time.monotonic()
        while not list(tmp_path.glob("checkpoint-2")) and running.poll() is None and time.monotonic() < began_s + ENDED_S:
            time.sleep(0.01)
        running.send_signal(number)
        _, stderr = running.communicate(timeout=ENDED_S)
    assert running.returncode == code, stderr
    assert stderr.splitlines()[-1].startswith(f"{said}: stopped after step ")
    assert "Traceback" not in stderr
    assert not [p.name for p in tmp_path.iterdir() if p.name.endswith((".partial", ".replaced", ".removed"))]
    for checkpoint in tmp_path.glob("checkpoint-*"):
        assert (checkpoint / "trainer_state.json").is_file()


# -- words --------------------------------------------------------------------------------------------------------------


def test_a_version_is_named_even_where_nothing_is_installed(monkeypatch):
    assert penstock("--version").exit_code == 0

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    done = penstock("--version")
    assert (done.exit_code, done.stdout.count("\n")) == (0, 1)
    assert "unknown" in done.stdout


def test_help_names_every_shipped_machine_and_model_and_no_absurd_range():
    text = penstock("plan", "--help").stdout
    unbroken = "".join(text.split())  # a name may be broken at its hyphen
    for name in (*shipped_profiles(), *shipped_models()):
        assert name in unbroken
    assert "000000" not in text
    assert "000000" not in penstock("run", "--help").stdout


def test_what_binds_is_what_the_step_is_full_of(house):
    """A lane at work for all of the step binds it, whatever chain of ops is as long."""
    args = ["plan", house / "model", *SIZES]
    said = json.loads(penstock(*args, "--json").stdout)
    assert said["prediction"]["busy_s"]["gpu"] > 0.9 * said["prediction"]["step_s"]
    assert said["certificate"]["binding"] == "device compute"
    assert re.search("^binding +device compute$", penstock(*args).stdout, re.M)


@pytest.mark.soak
def test_what_binds_a_step_that_is_full_of_nothing_is_what_waits():
    large = ["plan", "gpt-oss-120b", "--machine", "h200-pcie5", "--batch-size", 64, "--seq-len", 1024, "--master", "bf16", "--json"]
    said = json.loads(penstock(*large).stdout)
    assert max(said["prediction"]["busy_s"].values()) < 0.9 * said["prediction"]["step_s"]
    assert "waits for" in said["certificate"]["binding"]


def test_a_resource_that_is_used_up_binds_before_the_lanes_that_wait_for_it(house):
    fields = read_profile("cpu-2core").to_json()
    fields["host"]["dram_bytes_per_s"]["value"] /= 1000
    path = house / "slow.json"
    path.write_text(json.dumps(fields))
    done = penstock("plan", house / "model", *SIZES, "--machine", path, "--json")
    assert json.loads(done.stdout)["certificate"]["binding"] == "host DRAM", done.stdout


def test_measuring_is_advised_only_where_much_is_not_measured(house):
    assert "penstock probe" not in penstock("plan", house / "model", *SIZES).stdout
    for machine, is_advised in (("h100-sxm", False), ("rtx3090-desktop", True), ("mi355x", True)):
        said = penstock("plan", "qwen2.5-0.5b", "--machine", machine, "--seq-len", 2048, "--policy", "megatrain").stdout
        assert ("measure the machine with `penstock probe`" in " ".join(said.split())) is is_advised


def test_an_emulated_run_counts_the_tokens_of_the_planned_model_in_the_time_of_its_machine(house, tmp_path):
    done = penstock(*run_args(house, tmp_path, "--device", "emulated", "--time-scale", 40))
    assert done.exit_code == 0, done.output
    shown = [float(found.replace(",", "")) for found in re.findall(r"^step .* ([0-9,]+) tokens/s", done.stderr, re.M)]
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    stretched_s = [line["tokens"] / line["tokens_per_s"] for line in logged]  # the log is the stand-in's, forty times slower
    assert shown == pytest.approx([4 * 32 / (seconds / 40) for seconds in stretched_s], rel=0.01)
    assert "stand-in" in done.stderr


@pytest.mark.parametrize(("n", "text"), [(116_829_156_672, "116.8 G"), (494_032_768, "494 M"), (54_592, "54.59 k"), (7, "7")])
def test_counts_are_shown_in_their_own_size(n, text):
    assert show_count(n) == text
