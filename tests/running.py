"""`penstock` commands in this process, and homes with a tiny model and data."""

import hashlib
import json
from pathlib import Path

from click.testing import CliRunner
from safetensors.torch import load_file

from benchmarks.validate import validate
from penstock.cli.main import cli

from .tiny import tiny_config

SIZES = ["--machine", "cpu-2core", "--seq-len", "32", "--batch-size", "4", "--micro-batch", "2", "--loss-tile-tokens", "16"]
SCRATCH = ["--from-scratch", "--tokenizer", "bytes"]  # for a model folder with a configuration only
# A policy saves the time of a search. It defers updates, as a searched plan would, so that saving and ending occur before updates.
UNSEARCHED = ("--policy", str(Path(__file__).with_name("deferred.json")))


def penstock(*args):
    """Run a command of `penstock`, or `validate` of the benchmarks, with click's CliRunner."""
    command, words = (validate, args[1:]) if args[0] == "validate" else (cli, args)
    return CliRunner().invoke(command, [str(a) for a in words])


def succeeded(result):
    """Assert exit code 0; return the result."""
    assert result.exit_code == 0, result.output
    return result


_PLANNED, _ELSEWHERE = {}, "<home>/"


def plan_in(home, *extra, name="plan.json", model="model"):
    """Write a plan for the model of the home. Equal requests are planned once; only the folder in the plan differs."""
    files = frozenset(path.name for path in (home / model).iterdir())  # a plan names files of weights
    words = [word.read_text() if isinstance(word, Path) else word for word in extra]
    request = model, (home / model / "config.json").read_text(), files, *words
    if request not in _PLANNED:
        _PLANNED[request] = plan_anew(home, *extra, name=name, model=model).read_text().replace(f"{home}/", _ELSEWHERE)
    (home / name).write_text(_PLANNED[request].replace(_ELSEWHERE, f"{home}/"))
    return home / name


def plan_anew(home, *extra, name, model="model"):
    policy = () if "--policy" in extra else UNSEARCHED
    succeeded(penstock("plan", home / model, *SIZES, "-o", home / name, *extra, *policy))
    return home / name


def train(home, plan, *extra, out="out", steps=4, scratch=SCRATCH):
    run = ["run", plan, "--data", home / "data", "--out", home / out, "--steps", steps, "--lr", "1e-3", *scratch]
    return penstock(*run, *extra)


def make_home(tmp_path):
    """Write a byte-level model of a few thousand parameters, and some text."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_config("qwen3", vocab_size=272, num_hidden_layers=3)))
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("To be, or not to be, that is the question. " * 20)
    (data / "b.txt").write_text("Whether 'tis nobler in the mind to suffer. " * 10)
    return tmp_path


def weights_in(folder):
    return {name: weight for path in sorted(folder.glob("model*.safetensors")) for name, weight in load_file(path).items()}


def weights_sha(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("model*.safetensors"))}


def lines_of(home, out, name="metrics.jsonl"):
    return [json.loads(line) for line in (home / out / name).read_text().splitlines()]


def one_line(result, code, *words):
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in lines[0]
