"""Planning time against the number of layers.

    python benchmarks/planning.py > docs/benchmarks/planning_DATE.md

Each figure is the median of fresh processes, start-up included; memory is the process's peak. The model is qwen2.5-72b with more or
fewer layers, on h200-pcie5 with enough host memory, 65,536 tokens a step. Two to four minutes.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock.hwprofiles.schema import read_profile
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.simulate import simulate
from penstock.runtime.plan import Policy, Semantics, Update
from penstock.runtime.units import MB

MODEL, MACHINE = "qwen2.5-72b", "h200-pcie5"
LAYERS = (20, 40, 80, 120, 160)
N_RUNS = 3
POLICIES = ("search", "megatrain", "slideformer")
CHILD = (
    "import resource\nfrom penstock.cli.main import main\ntry: main()\n"
    "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
)


def timed(model: Path, policy: str) -> tuple[float, float]:
    """Return wall seconds and peak bytes of one `penstock plan`, medians of fresh processes."""
    words = ["plan", str(model), "--machine", MACHINE, "--host-memory", "4TB", "--tokens-per-step", "65536"]
    words += ["--policy", policy, "--json"]
    seconds, peaks = [], []
    for _ in range(N_RUNS):
        start_s = time.perf_counter()
        process = subprocess.run([sys.executable, "-c", CHILD, *words], check=True, capture_output=True, text=True)
        seconds.append(time.perf_counter() - start_s)
        peaks.append(int(process.stdout.splitlines()[-1]) * 1024)
    return statistics.median(seconds), statistics.median(peaks)


def simulation() -> str:
    """Format the seconds of simulating a step of 80 layers and 8 micro-batches."""
    model, profile = read_model(MODEL), read_profile(MACHINE)
    semantics = Semantics(4096, 8, 1)
    workload = build_workload(model, semantics)
    lines = []
    for group in (8, 1):
        policy = Policy(2, 2, 0, group, update=Update.DEFERRED)
        plan = lower(model, workload, semantics, policy, profile.to_json())
        demands, region = CostModel(profile).demands(plan), region_of(profile)
        times_s = []
        for _ in range(9):
            start_s = time.perf_counter()
            simulate(plan, demands, region)
            times_s.append(time.perf_counter() - start_s)
        lines.append(f"| {group} | {len(plan.ops)} | {statistics.median(times_s) * 1e3:.0f} | {max(times_s) / min(times_s):.2f} |")
    return "\n".join(lines)


def main() -> None:
    config = read_model(MODEL).config
    print("# How long does planning take?\n")
    print(__doc__.split("\n\n", 2)[2])
    print("| layers | policy | seconds | seconds per layer | peak MB |\n|---:|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for n_layers in LAYERS:
            path = Path(folder) / f"{n_layers}.json"
            path.write_text(json.dumps(config | {"num_hidden_layers": n_layers, "layer_types": None}))
            for policy in POLICIES:
                seconds, peak_bytes = timed(path, policy)
                print(f"| {n_layers} | {policy} | {seconds:.2f} | {seconds / n_layers:.3f} | {peak_bytes / MB:.0f} |", flush=True)
    print("\nOne simulation of a step of 80 layers and 8 micro-batches, median of 9 (spread: slowest over fastest):\n")
    print("| group | ops | ms | spread |\n|---:|---:|---:|---:|")
    print(simulation())


if __name__ == "__main__":
    main()
