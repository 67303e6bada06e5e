"""Overhead of the executor per op.

`python -m benchmarks.executor` prints a page of Markdown: plans of 24 and 80 layers run on a machine that does nothing, interleaved
with bare hand-overs between two threads, the least cost of waking a lane. A minute on a quiet computer.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from statistics import median

from benchmarks.common import middle_and_range, provenance
from penstock.hwprofiles.schema import read_profile
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.runtime.executor import execute
from penstock.runtime.plan import Plan, Policy, Semantics, Update
from tests.null_machine import NullMachine

MOST_US_PER_OP = 40.0
N_MICRO_BATCHES = 4
MODELS = ("qwen2.5-0.5b", "qwen2.5-72b")  # 24 and 80 layers


def plans() -> dict[str, Plan]:
    """Return row-major and layer-major plans by name."""
    profile, result = read_profile("h200-pcie5").to_json(), {}
    semantics = Semantics(seq_len=4096, batch_size=N_MICRO_BATCHES, micro_batch=1)
    for name in MODELS:
        model = read_model(name)
        workload = build_workload(model, semantics)
        policies = {
            "row-major": Policy(update=Update.DEFERRED),
            "layer-major": Policy(update=Update.DEFERRED, accumulation_group=N_MICRO_BATCHES),
        }
        for order, policy in policies.items():
            result[f"{len(workload.blocks) - 2} layers, {order}"] = lower(model, workload, semantics, policy, profile)
    return result


def hand_over_us(n: int, cores: list[int] | None = None) -> float:
    """Return the microseconds of one of n hand-overs by queues, like those of the executor, between two threads: one per core, or
    unpinned."""
    forth, back, ready = SimpleQueue[None](), SimpleQueue[None](), threading.Event()

    def responder() -> None:
        if cores:
            os.sched_setaffinity(0, {cores[0]})
        ready.set()
        for _ in range(n // 2):
            forth.get(timeout=0.5)
            back.put(None)

    def this() -> None:
        if cores:
            os.sched_setaffinity(0, {cores[1]})
        ready.wait()
        began_s = time.perf_counter()
        for _ in range(n // 2):
            forth.put(None)
            back.get(timeout=0.5)
        took_s.append(time.perf_counter() - began_s)

    took_s: list[float] = []
    threads = [threading.Thread(target=responder), threading.Thread(target=this)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took_s[0] / n * 1e6


def op_us(plan: Plan, n_ops: int) -> float:
    """Return the microseconds per op in a run of about `n_ops`, thread start and end included."""
    n_steps = max(2, n_ops // len(plan.ops))
    began_s = time.perf_counter()
    execute(plan, NullMachine(), n_steps)
    return (time.perf_counter() - began_s) / n_steps / len(plan.ops) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--ops", type=int, default=10_000, help="ops, or hand-overs, in each run")
    options = parser.parse_args()
    named, cores = plans(), sorted(os.sched_getaffinity(0))[:2]
    jobs: dict[str, Callable[[], float]] = {"hand-over by a queue": lambda: hand_over_us(options.ops)}
    if len(cores) == 2:
        jobs["hand-over by a queue, between two cores"] = lambda: hand_over_us(options.ops, cores)
    for name, plan in named.items():
        jobs[f"an op: {name}, {len(plan.ops)} ops"] = lambda plan=plan: op_us(plan, options.ops)  # type: ignore[misc]
    times_us: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(options.runs):  # interleaved, so that a disturbance affects all
        for name, job in jobs.items():
            times_us[name].append(job())
    print(f"{provenance()}; median of {options.runs} interleaved runs of about {options.ops}\n")
    print("| quantity | µs, median | P10 to P90 |\n|---|---:|---|")
    for name, times in times_us.items():
        middle, low, high = middle_and_range(times)
        print(f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} |")
    most_us = max(median(times) for name, times in times_us.items() if name.startswith("an op"))
    print(f"\nThe dearest: {most_us:.1f} µs per op; asked: at most {MOST_US_PER_OP:.0f}.")
    sys.exit(most_us > MOST_US_PER_OP)


if __name__ == "__main__":
    main()
