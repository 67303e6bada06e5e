"""How near is a measured step to the predicted one?

`python -m benchmarks.predicted_and_measured` prints a page of Markdown: the demo's model on this CPU with a profile probed just
before, other machines' plans performed by the emulator, and two policies whose checkpoints must have the same SHA-256.
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

from benchmarks.text import standard_library
from demo.demo import CONFIG
from hwprofiles.schema import Profile
from planner.predict.cost import costs, region_of
from planner.predict.simulate import simulate
from runtime.plan import PlanFile
from runtime.plan.timeline import Span, Timeline

PENSTOCK = Path(sys.executable).with_name("penstock")
N_STEPS = 11  # two warm up, nine are compared
EMULATED = (
    ("qwen2.5-0.5b", "h200-pcie5", ("--seq-len", "4096", "--batch-size", "8")),
    ("qwen2.5-7b", "h200-pcie5", ("--seq-len", "1024", "--batch-size", "4")),
    ("qwen3-8b", "rtx4090-server", ("--seq-len", "1024", "--batch-size", "16", "--micro-batch", "8")),
    ("qwen2.5-14b", "gh200", ("--seq-len", "1024", "--batch-size", "8", "--policy", "megatrain")),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """Predicted and measured seconds of a step; `times_s` holds the steps after the warm-up, on the planned machine's clock."""

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


def penstock(*words: object) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run([PENSTOCK, *map(str, words)], check=True, capture_output=True, text=True)
    return done.stdout


def compared(name: str, plan: Path, out: Path) -> Compared:
    """What a finished run says, against the simulation of its plan."""
    described = PlanFile.read(plan).plan
    profile = Profile.from_json(described.profile, str(plan))
    spans = json.loads((out / "timeline.json").read_text())["spans"]
    timeline = Timeline(tuple(_span(fields) for fields in spans))
    predicted_s = simulate(described, costs(described, profile), region_of(profile)).step_s
    return Compared(name, predicted_s, timeline.step_times_s[1:])


def _span(fields: dict[str, float]) -> Span:
    return Span(int(fields["op"]), int(fields["step"]), fields["start_s"], fields["end_s"])


def on_this_cpu(home: Path) -> tuple[list[Compared], dict[str, str]]:
    """The demo's model under the searched policy and the `megatrain` one, and the SHA-256 of each one's weights."""
    model = home / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    standard_library(home / "stdlib.jsonl")
    penstock("probe", "--device", "cpu", "-o", home / "profile.json")
    rows, sums = [], {}
    for policy in ("search", "megatrain"):
        plan, out = home / f"{policy}.json", home / policy
        sizes = ("--seq-len", 256, "--batch-size", 8, "--micro-batch", 4, "--device-memory", "152MB")
        penstock("plan", model, "--machine", home / "profile.json", *sizes, "--policy", policy, "-o", plan)
        penstock("run", plan, "--data", home / "stdlib.jsonl", "--steps", N_STEPS, "--lr", "6e-4", "--out", out)
        rows.append(compared(f"38 M Qwen3 on this CPU, policy {policy}", plan, out))
        weights = out / f"checkpoint-{N_STEPS}" / "model.safetensors"
        sums[policy] = hashlib.sha256(weights.read_bytes()).hexdigest()
    return rows, sums


def emulated(home: Path) -> list[Compared]:
    """Plans for machines that are not here, performed at their pace."""
    rows = []
    for i, (model, machine, options) in enumerate(EMULATED):
        plan, out = home / f"e{i}.json", home / f"e{i}"
        penstock("plan", model, "--machine", machine, "--host-memory", "2TB", *options, "-o", plan)
        said = penstock("run", plan, "--data", home / "stdlib.jsonl", "--steps", N_STEPS, "--out", out, "--device", "emulated")
        slower = next(line for line in said.splitlines() if line.startswith("emulated")).partition(":")[0]
        rows.append(compared(f"{model}, {' '.join(options)}: {slower}", plan, out))
        print(rows[-1].row(), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"commit {commit}; {machine}\n")
    print("| what | predicted, s | measured, s | error | P10 to P90 | steps |\n|---|---:|---:|---:|---|---:|")
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
