"""Rates of the host's updates and sums of squares: a run against the probe, in pairs.

`python -m benchmarks.host_rates` prints a table in Markdown. A pair is the probe's kernels on their memory slab, and the ops of a
plan run by the runtime's `Updates` in the arenas of a model with realistic layers, on the same threads and cores, in alternating
order. The target is a median ratio of run to probe within 5 %. Two minutes, 5 GB of memory.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from benchmarks.common import provenance
from penstock.hwprofiles.probe import host_kernels
from penstock.hwprofiles.probe.cpu import CpuDevice, settle
from penstock.hwprofiles.probe.measurements import CPU, Effort
from penstock.hwprofiles.probe.timings import Stopwatch, Timing, Use
from penstock.hwprofiles.schema import read_profile
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.runtime.host.chunks import Scratch
from penstock.runtime.host.host_state import HostState
from penstock.runtime.host.memory import Arenas
from penstock.runtime.host.updates import Updates
from penstock.runtime.host.workers import Workers
from penstock.runtime.plan import Kind, Op, Plan, Policy, Semantics
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.workload import ITEM_BYTES, Model

N_PAIRS = 7
MODEL, N_LAYERS, VOCAB = "qwen2.5-1.5b", 4, 1024  # layers of 46.8 M parameters
WORKS = ("update", "squares")
MOST_OFF = 0.05
Rates = dict[str, float]  # parameters per second, by kernel


def plan_of() -> Plan:
    """Return a plan with layers of realistic size, and a small vocabulary and batch."""
    model = read_model(MODEL)
    model = Model(model.config | {"num_hidden_layers": N_LAYERS, "vocab_size": VOCAB})
    semantics = Semantics(seq_len=16, batch_size=1, micro_batch=1)
    return lower(model, build_workload(model, semantics), semantics, Policy(), read_profile("cpu-2core").to_json())


class Run:
    """State and gradients of a plan in arenas, with the runtime's updates."""

    def __init__(self, plan: Plan, workers: Workers[Scratch], n_threads: int) -> None:
        self.plan, self.step = plan, 0
        arenas = Arenas(plan.arenas, torch.device("cpu"))
        arenas.touch(n_threads)
        self.state = HostState(plan, arenas)
        for p in self.state.all_owned():
            self.state.set_weight(p, torch.randn(p.shape))
        for op in self._ops(Kind.UPDATE):
            arrived = arenas.view(op["arrived"], plan.host_gradient_dtype(op.block))
            arrived.copy_(torch.randn(2**20 + 1).to(arrived.dtype).repeat(arrived.numel() // 2**20 + 1)[: arrived.numel()])
        settings = AdamW(lr=1e-5, weight_decay=0.1)
        self.updates = Updates(self.state, lambda step: settings, workers, torch.device("cpu"), None)

    def _ops(self, kind: Kind) -> list[Op]:
        return [op for op in self.plan.ops if op.kind is kind]

    def rates(self, seconds: float) -> Rates:
        """Return median rates over about `seconds`: parameters of layers over the time of their ops."""
        samples: dict[str, list[float]] = {work: [] for work in WORKS}
        until_s = time.perf_counter() + seconds
        while time.perf_counter() < until_s or len(samples["update"]) < 3:
            samples["squares"].append(self._rate(Kind.NORM, self.updates.norm))
            (clip,) = self._ops(Kind.CLIP)
            self.updates.clip(clip, self.step, list)
            samples["update"].append(self._rate(Kind.UPDATE, partial(self.updates.update, step=self.step)))
            self.updates.outcome(self.step)
            self.step += 1
        return {work: median(rates) for work, rates in samples.items()}

    def _rate(self, kind: Kind, perform: Callable[[Op], None]) -> float:
        spent_s, n = 0.0, 0
        for op in self._ops(kind):
            began_s = time.perf_counter()
            perform(op)
            if 0 < op.block <= N_LAYERS:
                spent_s, n = spent_s + time.perf_counter() - began_s, n + self.plan.workload.blocks[op.block].n_trained
        return n / spent_s


def probed(device: CpuDevice, effort: Effort) -> tuple[Rates, dict[str, Use]]:
    """Return the probe's rates of the same kernels on the same number of threads, with their CPU use."""
    n_threads, n_bytes = len(device.host_cores), host_kernels.slab_bytes(device.free_bytes, effort.host_bytes)
    rates, uses = Rates(), dict[str, Use]()
    works = host_kernels.updates(n_threads, n_bytes), host_kernels.squares(n_threads, n_bytes)
    for name, work, item_bytes in zip(WORKS, works, (1, ITEM_BYTES["bf16"]), strict=True):
        with device.prepared(work) as ready:
            timing = Stopwatch(device, effort).timing(ready)
        assert timing.use is not None
        rates[name], uses[name] = work.amount / item_bytes / timing.value, timing.use
    return rates, uses


def pairs(n_pairs: int, effort: Effort) -> list[tuple[Rates, Rates, dict[str, Use], float]]:
    """Return per pair: rates of probe and run, CPU use of the probe, and load average."""
    device, results = CpuDevice(), []
    workers = Workers(len(device.host_cores), Scratch)

    def all_pairs() -> None:
        with workers.helped(partial(settle, device.host_cores, 1)):
            run = Run(plan_of(), workers, len(device.host_cores))
            run.rates(0.0)  # compiles
            for pair in range(n_pairs):
                early = run.rates(effort.sustained_s) if pair % 2 else None
                of_probe, uses = probed(device, effort)
                of_run = early or run.rates(effort.sustained_s)
                results.append((of_probe, of_run, uses, os.getloadavg()[0]))

    device.pool(device.host_cores).submit(all_pairs).result()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=N_PAIRS)
    parser.add_argument("--thorough", action="store_true", help="walk through 12 GB of memory, not 2")
    arguments = parser.parse_args()
    effort = CPU if arguments.thorough else CPU.quick()
    results = pairs(arguments.pairs, effort)
    print(f"{provenance()}\n")
    print("| pair | work | probe, Gparam/s | run, Gparam/s | run / probe | cores used | steal | last third | load |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for i, (of_probe, of_run, uses, load) in enumerate(results, start=1):
        for work in WORKS:
            a, b, use = of_probe[work], of_run[work], uses[work]
            circumstances = f"{use.cores:.2f} | {use.steal_fraction:.0%} | {use.last_third:.2f} | {load:.1f}"
            print(f"| {i} | {work} | {a / 1e9:.3f} | {b / 1e9:.3f} | {b / a:.3f} | {circumstances} |")
    print()
    for work in WORKS:
        ratios = [of_run[work] / of_probe[work] for of_probe, of_run, _, _ in results]
        middle = Timing.from_repeats(ratios)
        verdict = "within" if abs(middle.value - 1) <= MOST_OFF else "not within"
        print(f"{work}: median ratio {middle.value:.3f}, {min(ratios):.3f} to {max(ratios):.3f}: {verdict} {MOST_OFF:.0%}")


if __name__ == "__main__":
    main()
