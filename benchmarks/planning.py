"""How long does planning take, and how close to its bounds are the plans?

    python benchmarks/planning.py [MODEL ...]

One line per model and machine: wall seconds of the search on one core, ops of the plan, predicted step, gap to the policy bound
and to the machine bound, gain over the best schedule of another system. Without arguments: a small, a large and a sparse model.
"""

import sys
import time

from hwprofiles.schema import read_profile
from planner.micro_batch import with_micro_batch
from planner.search import search
from planner.workload import read_model, supported_attention
from runtime.errors import DoesNotFitError
from runtime.plan import Semantics
from runtime.units import TB, show_seconds

MODELS = ("qwen2.5-7b", "qwen2.5-72b", "gpt-oss-120b")
MACHINES = ("h200-pcie5", "gh200", "h100-sxm", "rtx4090-server", "mi355x")


def main() -> None:
    print(f"{'model':14} {'machine':16} {'search':>8} {'ops':>6} {'step':>8} {'policy gap':>10} {'machine gap':>11} {'gain':>6}")
    for name in sys.argv[1:] or MODELS:
        for machine in MACHINES:
            model, profile = read_model(name), read_profile(machine).with_memory(None, 3 * TB)
            start_s = time.perf_counter()
            semantics = Semantics(4096, 16, 1, attention=supported_attention(model)[0])  # type: ignore[arg-type]
            semantics, workload = with_micro_batch(model, semantics, profile)
            try:
                answer = search(model, workload, semantics, profile, free_micro_batch=True)
            except DoesNotFitError:
                print(f"{name:14} {machine:16} does not fit")
                continue
            took_s = time.perf_counter() - start_s
            step_s, certificate = answer.prediction.step_s, answer.certificate
            others_s = [said["step_s"] for said in answer.baselines.values() if "step_s" in said]
            gain = f"{min(others_s) / step_s:6.2f}" if others_s else "     -"
            print(
                f"{name:14} {machine:16} {took_s:6.1f} s {len(answer.plan.ops):6} {show_seconds(step_s):>8} "
                f"{certificate.gap_fraction:10.1%} {step_s / certificate.machine_bound_s - 1:11.1%} {gain}"
            )


if __name__ == "__main__":
    main()
