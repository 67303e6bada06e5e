"""Input files of every format, and checks of a command that reads a damaged one.

`tests/penstock/test_hostile.py` truncates each file; `benchmarks/fuzz.py` mutates them at random for hours.
"""

import json
import shutil
import signal
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pyarrow.parquet
from click.testing import Result
from safetensors.torch import load_file, save_file

from .chats import write_talker
from .running import SIZES, penstock, plan_in, succeeded, weights_in
from .tiny import tiny_config
from .tour import ROOT

ENDED_S = 60  # far longer than any command here, so that only a hang exceeds it
EXECUTED = "EXECUTED"  # file that planted code creates when it runs
CODE = f"import pathlib\npathlib.Path(__file__).with_name({EXECUTED!r}).touch()\nclass Evil: pass\n"
SHARD = "model-00001-of-00001.safetensors"
CHAT = {"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is four."}]}

RUN = ["run", "plan.json", "--data", "data.jsonl", "--steps", "1", "--out", "out"]
SCRATCH, REPORT = ["--model", "model", "--from-scratch"], ["report", "plan.json", "run", "-o"]
RESUME = ["run", "plan.json", "--data", "data.jsonl", "--steps", "3", "--out", "run", *SCRATCH, "--resume"]
PLAN = ["plan", "model", *SIZES, "--policy"]
# By format: the file below the home, and the command that reads it
FORMATS: dict[str, tuple[str, list[str]]] = {
    "plan": ("plan.json", ["check", "plan.json"]),
    "plan of a run": ("plan.json", [*RUN, *SCRATCH]),
    "plan of a page": ("plan.json", [*REPORT, "page.html"]),
    "policy": ("policy.json", [*PLAN, "policy.json"]),
    "profile": ("profile.json", [*PLAN, "megatrain", "--machine", "profile.json"]),
    "config.json": ("model/config.json", [*PLAN, "megatrain"]),
    "settings in YAML": ("run.yaml", ["run", "--config", "run.yaml"]),
    "settings in TOML": ("run.toml", ["run", "--config", "run.toml"]),
    "JSONL": ("data.jsonl", ["data", "data.jsonl"]),
    "CSV": ("data.csv", ["data", "data.csv"]),
    "Parquet": ("data.parquet", ["data", "data.parquet"]),
    "tokenizer.json": ("model/tokenizer.json", ["data", "chats.jsonl", "--model", "model"]),
    "tokenizer_config.json": ("model/tokenizer_config.json", ["data", "chats.jsonl", "--model", "model"]),
    "safetensors": ("weights/model.safetensors", [*RUN, "--model", "weights", "--tokenizer", "bytes"]),
    "safetensors index": ("sharded/model.safetensors.index.json", [*RUN, "--model", "sharded", "--tokenizer", "bytes"]),
    "trainer state": ("run/checkpoint-2/trainer_state.json", RESUME),
    "optimizer state": ("run/checkpoint-2/optimizer-00001.safetensors", RESUME),
    "adapter_config.json": ("adapter/adapter_config.json", ["merge", "weights", "adapter", "--out", "merged"]),
    "adapter weights": ("adapter/adapter_model.safetensors", ["merge", "weights", "adapter", "--out", "merged"]),
    "timeline": ("run/timeline.json", [*REPORT, "trace.json"]),
    "log": ("run/metrics.jsonl", [*REPORT, "page.html"]),
    "published runs": ("runs.json", ["validate", "runs.json"]),
    "published ops": ("ops.csv", ["validate", "ops.csv"]),
}


def make_house(home: Path) -> None:
    """Write a valid file of every format, code that must not run, and files outside of the home that must not be opened."""
    model, weights, sharded = (home / name for name in ("model", "weights", "sharded"))
    n_tokens = write_talker(model, "chatml")
    (model / "config.json").write_text(json.dumps(tiny_config("qwen3", vocab_size=n_tokens, eos_token_id=2)))
    rows = [{"text": f"{n} times: to be, or not to be, that is the question. " * 5} for n in range(9)]
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "data.csv").write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), home / "data.parquet")
    (home / "chats.jsonl").write_text((json.dumps(CHAT) + "\n") * 3)
    (home / "policy.json").write_text('{"prefetch_depth": 2, "update": "deferred", "save": {"all": [1]}}')
    (home / "run.yaml").write_text("plan: plan.json\nmodel: model\nfrom_scratch: true\nsteps: 1\ndata: {path: data.jsonl}\n")
    (home / "run.toml").write_text('plan = "plan.json"\nmodel = "model"\nfrom_scratch = true\nsteps = 1\ndata = "data.jsonl"\n')
    shutil.copy(ROOT / "hwprofiles" / "profiles" / "cpu-2core.json", home / "profile.json")
    runs = json.loads((ROOT / "benchmarks" / "published_runs.json").read_text())["runs"]
    (home / "runs.json").write_text(json.dumps({"runs": runs[:2]}))
    (home / "ops.csv").write_text("\n".join((ROOT / "benchmarks" / "published_ops.csv").read_text().splitlines()[:4]))
    plan_in(home)
    plan_in(home, "--train", "lora:r=2", name="lora.json")
    with chdir(home):
        succeeded(penstock("run", "plan.json", "--data", "data.jsonl", "--steps", 2, "--out", "run", *SCRATCH))
    for folder in (weights, sharded):
        folder.mkdir()
        shutil.copy(model / "config.json", folder)
    save_file(weights_in(home / "run" / "checkpoint-2"), weights / "model.safetensors")
    with chdir(home):
        tuned = ["--data", "data.jsonl", "--model", "weights", "--tokenizer", "bytes", "--steps", 1, "--out", "tuned"]
        succeeded(penstock("run", "lora.json", *tuned))
    (home / "tuned" / "checkpoint-1").rename(home / "adapter")
    shutil.copy(weights / "model.safetensors", sharded / SHARD)
    index = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(load_file(sharded / SHARD), SHARD)}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    for folder in (home, model, weights):
        for name in ("evil", "modeling_evil", "configuration_evil", "tokenization_evil"):
            (folder / f"{name}.py").write_text(CODE)
    outside = home.parent / "outside"
    outside.mkdir(exist_ok=True)
    for name in ("secret.json", "secret.safetensors", "secret.jsonl"):
        shutil.copy(home / "weights" / "model.safetensors", outside / name)


# -- judgement ----------------------------------------------------------------------------------------------------------------


class NoEndError(BaseException):
    """A command hung and was interrupted."""


class Watch:
    """Audit hook that records forbidden events while a command runs."""

    def __init__(self) -> None:
        self.outside, self.seen = "", list[str]()
        sys.addaudithook(self.hear)  # cannot be removed again

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.outside:
            return
        is_outside = event == "open" and isinstance(args[0], str | bytes | Path) and self.outside in str(args[0])
        if is_outside or event in ("os.system", "pickle.find_class", "socket.connect"):
            self.seen.append(f"{event} {args!r:.120}")


WATCH = Watch()


def answered(*words: object) -> Result:
    """Run a command in this process; raise NoEndError if it hangs."""

    def fail(*_: object) -> None:
        raise NoEndError(f"{words[0]} waits for ever")

    handler = signal.signal(signal.SIGALRM, fail)
    signal.alarm(ENDED_S)
    try:
        return penstock(*words)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def judged(home: Path, words: list[str]) -> int:
    """Run a command in the home and return its exit code. Raise AssertionError unless it succeeds or fails with an error of one
    line, and touches nothing outside of the home."""
    files = sorted(home.parent.iterdir())
    WATCH.outside, WATCH.seen = str(home.parent / "outside"), []
    with chdir(home):
        result = answered(*words)
    WATCH.outside = ""
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    if result.exit_code:
        *earlier, last = result.stderr.splitlines()
        assert result.exit_code in (1, 2, 3), result.stderr
        assert last.startswith("error: "), result.stderr
        assert len(last) < 600
        assert not any("Traceback" in line or line.startswith("error: ") for line in earlier), result.stderr
    assert not WATCH.seen
    assert sorted(home.parent.iterdir()) == files
    assert not list(home.rglob(EXECUTED)), "code of an input file ran"
    return int(result.exit_code)
