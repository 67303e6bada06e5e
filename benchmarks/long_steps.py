"""Planning, checking and running steps of thousands of micro-batches.

`python -m benchmarks.long_steps` prints two tables of Markdown. First, time and peak memory of `penstock plan -o` and `penstock
check` for steps of one to four million tokens, each in a fresh process, start-up included. Second, one step of a tiny model in
thousands of micro-batches, planned, checked and trained on this CPU, with the plan folded and unrolled.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.planner.check.check import check
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload
from penstock.runtime.batch import Batch
from penstock.runtime.executor import Execution
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan, PlanFile, Policy, Semantics, Update
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.plan import unrolled
from penstock.runtime.plan.workload import Model
from penstock.runtime.units import MB, show_seconds
from tests.strategies import PROFILE
from tests.tiny import tiny_config

MILLION = 2**20  # tokens
ENOUGH = ("--host-memory", "1.5TB")  # 512 GB are too few for several groups: the host accumulates gradients in fp32
CELLS: tuple[tuple[str, str, int, int | None, tuple[str, ...]], ...] = (  # model, machine, million tokens, micro-batch, more
    *(("qwen2.5-32b", "rtx4090-server", n, b, ENOUGH) for n in (1, 2, 4) for b in (1, 2)),
    ("qwen2.5-72b", "rtx4090-server", 1, 1, ENOUGH),
    ("qwen2.5-32b", "h100-sxm", 4, None, ()),
    ("qwen2.5-7b", "rtx4090-desktop", 4, 1, ("--host-memory", "140GB")),
)
CHILD = """
import resource, penstock.cli.main
try: penstock.cli.main.main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)  # but its peak is that of the process which started this one, if that had more
    [peak_kib] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(peak_kib, used.ru_utime + used.ru_stime)
"""


@dataclass(frozen=True, slots=True)
class Took:
    """Time, memory and output of a command."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    output: str


def took(*words: object) -> Took:
    start_s = time.perf_counter()
    process = subprocess.run([sys.executable, "-c", CHILD, *map(str, words)], capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - start_s
    *lines, last = process.stdout.splitlines() or ["0 0"]
    peak_kib, cpu_s = last.split()
    return Took(wall_s, float(cpu_s), int(peak_kib) * 1024, "\n".join(lines) if process.returncode == 0 else process.stderr)


def row(model: str, machine: str, millions: int, micro_batch: int | None, flags: tuple[str, ...], folder: Path) -> str:
    path = folder / "plan.json"
    sizes = ("--tokens-per-step", millions * MILLION, *(() if micro_batch is None else ("--micro-batch", micro_batch)))
    planned = took("plan", model, "--machine", machine, *sizes, *flags, "-o", path)
    name = f"| {model} | {machine}{' ' + ' '.join(flags) if flags else ''} | {millions} M "
    if not planned.output or planned.output.startswith("error"):
        return f"{name}| {planned.output.strip()} |"
    checked = took("check", path)
    file = PlanFile.read(path)
    claim = file.claim or {}
    step_s, gap = claim["prediction"]["step_s"], claim["certificate"]["gap_fraction"]
    semantics, plan = file.plan.semantics, file.plan
    return (
        f"{name}| {semantics.n_micro_batches} of {semantics.micro_batch} | {plan.policy.accumulation_group} | "
        f"{plan.n_performed:,} | {len(plan.ops):,} | {planned.wall_s:.1f} ({planned.cpu_s:.1f}) | {planned.peak_bytes / MB:.0f} | "
        f"{checked.wall_s:.2f} ({checked.cpu_s:.2f}) | {checked.peak_bytes / MB:.0f} | {show_seconds(step_s)} | {gap:.1%} |"
    )


def tiny(n_micro_batches: int) -> Plan:
    model = Model(tiny_config("llama", num_hidden_layers=2, vocab_size=64))
    semantics = Semantics(16, n_micro_batches, 1, loss_tile_tokens=16)
    policy = Policy(update=Update.DEFERRED, gradient_slots=2, spill_blocks=(0, 1))
    return lower(model, build_workload(model, semantics), semantics, policy, PROFILE)


def performed(plan: Plan, n_steps: int) -> tuple[float, str]:
    """Return seconds per step, and a digest of all masters, moments and losses."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (plan.semantics.batch_size, plan.semantics.seq_len), generator=generator)
    machine = TorchMachine(plan, lambda step: Batch(tokens, tokens), lambda step: AdamW(1e-3, 0.9, 0.95, 1e-8, 0.1))
    machine.initialise(7)
    start_s = time.perf_counter()
    with Execution(plan, machine, n_steps) as steps:
        results = [step.result for step in steps]
    step_s = (time.perf_counter() - start_s) / n_steps
    digest = hashlib.sha256(json.dumps([(result.loss, result.grad_norm) for result in results if result is not None]).encode())
    for block in range(len(plan.workload.blocks)):
        for p in machine.host.owned[block]:
            state = machine.host.param_state(p)
            for tensor in (state.master.values(), *state.moments):
                digest.update(tensor.contiguous().numpy().tobytes())
    return step_s, digest.hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="*", default=list(range(len(CELLS))), help="Which of the cells, counted from 0.")
    parser.add_argument("--micro-batches", type=int, default=4096, help="Micro-batches of the measured step; 0: skip it.")
    options = parser.parse_args(arguments)
    print("| model | machine | step | micro-batches | group | ops a step | ops in the plan | plan, s (CPU s) | peak, MB |", end="")
    print(" check, s (CPU s) | peak, MB | predicted step | gap |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for n in options.cells:
            print(row(*CELLS[n], Path(folder)), flush=True)
    if options.micro_batches:
        torch.set_num_threads(1)
        plan = tiny(options.micro_batches)
        print("\n| performed | ops in the plan | ops a step | check, s | a step, s | state after two steps |")
        print("|---|---:|---:|---:|---:|---|")
        for name, one in (("as it stands", plan), ("written out", unrolled(plan))):
            start_s = time.perf_counter()
            check(one)
            check_s = time.perf_counter() - start_s
            step_s, digest = performed(one, 2)
            print(f"| {name} | {len(one.ops):,} | {one.n_performed:,} | {check_s:.2f} | {step_s:.1f} | `{digest}` |", flush=True)


if __name__ == "__main__":
    main()
