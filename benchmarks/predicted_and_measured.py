"""Measured step times on this computer against predictions.

`python -m benchmarks.predicted_and_measured` prints a page of Markdown: the demo's model on this CPU with a freshly probed profile,
other machines' plans run by the emulator, and two policies whose checkpoints must have equal SHA-256.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import penstock
from benchmarks.any_memory import with_any_memory
from benchmarks.small import CONFIG
from benchmarks.text import standard_library
from penstock.hwprofiles.schema import read_profile
from penstock.runtime.units import MB, TB

N_STEPS = 11  # two are warm-up, nine are compared
EMULATED = (
    ("qwen2.5-0.5b", "h200-pcie5", {"seq_len": 4096, "batch_size": 8}),
    ("qwen2.5-7b", "h200-pcie5", {"seq_len": 1024, "batch_size": 4}),
    ("qwen3-8b", "rtx4090-server", {"seq_len": 1024, "batch_size": 16, "micro_batch": 8}),
    ("qwen2.5-14b", "gh200", {"seq_len": 1024, "batch_size": 8, "policy": "megatrain"}),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """Predicted and measured seconds of a step. `times_s`: steps after warm-up, in the planned machine's time."""

    name: str
    predicted_s: float
    times_s: list[float]

    def row(self) -> str:
        measured_s, ordered = median(self.times_s), sorted(self.times_s)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        error = measured_s / self.predicted_s - 1
        return (
            f"| {self.name} | {self.predicted_s:.4g} | {measured_s:.4g} | {error:+.1%} | {low:.4g} to {high:.4g} | {len(ordered)} |"
        )


def on_this_cpu(home: Path) -> tuple[list[Compared], dict[str, str]]:
    """Train the demo's model with the searched policy and with `megatrain`. Return times, and the SHA-256 of the weights."""
    model = home / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    standard_library(home / "stdlib.jsonl")
    profile = penstock.probe("cpu")
    rows, sums = [], {}
    for policy in ("search", "megatrain"):
        named = None if policy == "search" else policy
        sizes = {"seq_len": 256, "batch_size": 8, "micro_batch": 4, "device_memory_bytes": 152 * MB}
        planned = penstock.plan(model, profile, policy=named, **sizes)
        options = {"steps": N_STEPS, "lr": 6e-4, "from_scratch": True, "settings": {"tokenizer": "bytes"}}
        trained = penstock.train(planned, home / "stdlib.jsonl", out=home / policy, **options)
        times_s = trained.timeline.step_times_s[1:]
        rows.append(Compared(f"38 M Qwen3 on this CPU, policy {policy}", planned.step_s, times_s))
        weights = b"".join(path.read_bytes() for path in sorted(trained.checkpoint.glob("model-*.safetensors")))
        sums[policy] = hashlib.sha256(weights).hexdigest()
    return rows, sums


def emulated(home: Path) -> list[Compared]:
    """Run plans for other machines at their pace."""
    rows = []
    for model, machine, options in EMULATED:
        planned = penstock.plan(model, with_any_memory(read_profile(machine), None, 2 * TB), **options)
        trained = penstock.train(planned, home / "stdlib.jsonl", out=home / model, steps=N_STEPS, device="emulated")
        words = ", ".join(f"{name} {value}" for name, value in options.items())
        rows.append(Compared(f"{model}, {words}: emulated {machine}", planned.step_s, trained.timeline.step_times_s[1:]))
        print(rows[-1].row(), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"commit {commit}; {machine}\n")
    print("| quantity | predicted, s | measured, s | error | P10 to P90 | steps |\n|---|---:|---:|---:|---|---:|")
    with tempfile.TemporaryDirectory() as folder:
        rows, sums = on_this_cpu(Path(folder))
        for row in (*rows, *emulated(Path(folder))):
            print(row.row(), flush=True)
    print("\n| policy | SHA-256 of its weights |\n|---|---|")
    for policy, digest in sums.items():
        print(f"| {policy} | `{digest}` |")
    if len(set(sums.values())) != 1:
        sys.exit("two policies left different weights")


if __name__ == "__main__":
    main()
