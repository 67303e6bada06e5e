"""Which files does a run read and leave behind, by which functions, and what is a good one of each?

Settings and checkpoints; and the logs that a report is drawn from. The readers are those that the
commands call.
"""

import hashlib
import json
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors

from penstock.checkpoint.checkpoint import FORMAT_VERSION, load_state, sum_of
from penstock.checkpoint.model_files import load_weights, refuse_quantised
from penstock.cli.run_files import read_logged_run as read_logs
from penstock.run_config import read_run, run_text, write_run
from penstock.settings import DataSettings, EvaluationSettings, RunSettings
from planner.show.report import report
from runtime.plan import PlanFile

from .fuzz_formats import N_SCRIPTS, Format, as_json, plan_files
from .fuzz_mutations import mutate_json, mutate_lines, mutate_tensors
from .fuzz_texts import TOML, YAML, mutate_toml, mutate_yaml

TENSORS = {"model.a.weight": torch.arange(12.0).reshape(3, 4), "model.b.weight": torch.ones(5, dtype=torch.bfloat16)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


# -- settings -----------------------------------------------------------------------------------------------------------


@cache
def _settings() -> RunSettings:
    evaluation = EvaluationSettings(prompts=("Hello", "two\nlines"))
    return RunSettings(DataSettings("data"), plan="plan.json", steps=100, evaluation=evaluation, monitors=("wandb",))


def _read_settings(name: str, folder: Path) -> None:
    """What was understood is written, and then read as the same."""
    settings = read_run(folder / name, {})
    write_run(folder / "again.yaml", settings)
    assert read_run(folder / "again.yaml", {}) == settings


# -- checkpoints --------------------------------------------------------------------------------------------------------

INDEX = {"metadata": {"total_size": 58}, "weight_map": dict.fromkeys(TENSORS, "model-00001-of-00001.safetensors")}


def _weights() -> list[bytes]:
    return [save_tensors(TENSORS, {"format": "pt"}), save_tensors(TENSORS)]


def _read_weights(folder: Path) -> None:
    refuse_quantised(folder, {}, TENSORS)
    for name, tensor in load_weights(folder, TENSORS, SHAPES):
        assert tuple(tensor.shape) == SHAPES[name]
        tensor.double().sum()


def _state(files: dict[str, bytes]) -> dict[str, Any]:
    sums = {name: {"n_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
    position = {"epoch": 0, "sequence": 4}
    state = {"seed": 1, "n_updates": 2, "data_fingerprint": "0" * 64, "data_position": position, "semantics": {"seq_len": 8}}
    fields = {"format_version": FORMAT_VERSION, "step": 2, "state": state, "files": sums}
    return fields | {"sha256": sum_of(fields)}


@cache
def _optimizer_files() -> dict[str, bytes]:
    tensors = {f"{kind}.{name}": tensor.clone() for kind in ("master", "exp_avg") for name, tensor in TENSORS.items()}
    return {"optimizer-00000.safetensors": save_tensors(tensors), "config.json": b"{}"}


def _read_state(folder: Path) -> None:
    state = load_state(folder)
    assert all(isinstance(tensor, torch.Tensor) for tensor in state.optimizer.values())


def _read_optimizer(folder: Path) -> None:
    """As if the one who changed the file had known how to change the sums."""
    files = {name: (folder / name).read_bytes() for name in _optimizer_files()}
    (folder / "trainer_state.json").write_bytes(as_json(_state(files)))
    for tensor in load_state(folder).optimizer.values():
        tensor.double().sum()


# -- what a run left ----------------------------------------------------------------------------------------------------


def _metrics() -> list[bytes]:
    line = {"loss": 3.0, "grad_norm": 1.0, "lr": 1e-5, "tokens": 16, "supervised_tokens": 15, "step_s": 0.1, "tokens_per_s": 160.0}
    line |= {"skipped": False, "busy_s": {"gpu": 0.1}, "predicted_step_s": 0.1}
    evaluated = {"eval_loss": 3.0, "eval_perplexity": 20.1, "eval_tokens": 30, "eval_s": 0.1}
    lines = [{"step": step} | (evaluated if step % 4 == 0 else line) for step in range(1, 13)]
    return [b"".join(as_json(line) + b"\n" for line in lines)]


def _samples() -> list[bytes]:
    lines = [{"step": step, "prompt": prompt, "text": f"{prompt} <b>&amp;"} for step in (2, 4) for prompt in ("Hello", "</script>")]
    return [b"".join(as_json(line) + b"\n" for line in lines)]


@cache
def _timelines() -> list[bytes]:
    n_ops = len(json.loads(plan_files()[0])["ops"])
    spans = [
        {"op": op, "step": step, "start_s": step + op / n_ops, "end_s": step + (op + 1) / n_ops}
        for step in range(4)
        for op in range(n_ops)
    ]
    return [as_json({"spans": spans})]


def _beside_a_log() -> dict[str, bytes]:
    named = {"metrics.jsonl": _metrics, "samples.jsonl": _samples, "timeline.json": _timelines}
    return {name: make()[0] for name, make in named.items()} | {"plan.json": plan_files()[0]}


def _read_logs(folder: Path) -> None:
    file = PlanFile.read(folder / "plan.json")
    page = report(file, "plan.json", read_logs(folder, len(file.plan.ops)))
    assert page.count("</script>") == N_SCRIPTS, "what a file says has become a part of the page's program"


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            "run (YAML)",
            "run.yaml",
            lambda: [YAML, run_text(_settings()).encode(), as_json(asdict(_settings()))],
            mutate_yaml,
            partial(_read_settings, "run.yaml"),
        ),
        Format("run (TOML)", "run.toml", lambda: [TOML], mutate_toml, partial(_read_settings, "run.toml")),
        Format("safetensors", "model.safetensors", _weights, mutate_tensors, _read_weights),
        Format(
            "safetensors index",
            "model.safetensors.index.json",
            lambda: [as_json(INDEX)],
            mutate_json,
            _read_weights,
            lambda: {"model-00001-of-00001.safetensors": _weights()[0]},
        ),
        Format(
            "trainer state",
            "trainer_state.json",
            lambda: [as_json(_state(_optimizer_files()))],
            mutate_json,
            _read_state,
            _optimizer_files,
        ),
        Format(
            "optimizer state",
            "optimizer-00000.safetensors",
            lambda: [_optimizer_files()["optimizer-00000.safetensors"]],
            mutate_tensors,
            _read_optimizer,
            _optimizer_files,
        ),
        Format("metrics.jsonl", "metrics.jsonl", _metrics, mutate_lines, _read_logs, _beside_a_log),
        Format("samples.jsonl", "samples.jsonl", _samples, mutate_lines, _read_logs, _beside_a_log),
        Format("timeline.json", "timeline.json", _timelines, mutate_json, _read_logs, _beside_a_log),
    )
}
