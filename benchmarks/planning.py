"""Time and memory of planning and checking, by layers and by micro-batches.

    python -m benchmarks.planning layers > docs/benchmarks/planning_DATE.md      # four minutes
    python -m benchmarks.planning steps > docs/benchmarks/long-steps_DATE.md     # a quarter of an hour

`layers`: `penstock plan` of qwen2.5-72b with more or fewer layers, 65,536 tokens a step, and one simulation of 80 layers. `steps`:
`penstock plan` and `penstock check` of steps of one to four million tokens, and one step of a tiny model in thousands of
micro-batches, planned, checked and trained on this CPU, folded and unrolled. Every command is a fresh process, start-up included.
"""

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.common import took
from penstock.hwprofiles.schema import read_profile
from penstock.planner.check.check import check
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.simulate import simulate
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

MODEL, MACHINE = "qwen2.5-72b", "h200-pcie5"
LAYERS = (20, 40, 80, 120, 160)
POLICIES = ("search", "megatrain", "slideformer")
N_RUNS, N_SIMULATIONS = 3, 9
MILLION = 2**20  # tokens
ENOUGH = ("--host-memory", "1.5TB")  # 512 GB are too few for several groups: the host accumulates gradients in fp32
STEPS: tuple[tuple[str, str, int, int | None, tuple[str, ...]], ...] = (  # model, machine, million tokens, micro-batch, more
    *(("qwen2.5-32b", "rtx4090-server", n, b, ENOUGH) for n in (1, 2, 4) for b in (1, 2)),
    ("qwen2.5-72b", "rtx4090-server", 1, 1, ENOUGH),
    ("qwen2.5-32b", "h100-sxm", 4, None, ()),
    ("qwen2.5-7b", "rtx4090-desktop", 4, 1, ("--host-memory", "140GB")),
)


def layers(folder: Path) -> Iterator[str]:
    """Yield medians of planning by layers and policy, and of simulations."""
    config = read_model(MODEL).config
    yield "| layers | policy | seconds | seconds per layer | peak MB |\n|---:|---|---:|---:|---:|"
    for n in LAYERS:
        path = folder / f"{n}.json"
        path.write_text(json.dumps(config | {"num_hidden_layers": n, "layer_types": None}))
        for policy in POLICIES:
            sizes = ("--machine", MACHINE, "--host-memory", "4TB", "--tokens-per-step", 65536)
            runs = [took("plan", path, *sizes, "--policy", policy, "--json") for _ in range(N_RUNS)]
            seconds, peak_bytes = (statistics.median(getattr(run, name) for run in runs) for name in ("wall_s", "peak_bytes"))
            yield f"| {n} | {policy} | {seconds:.2f} | {seconds / n:.3f} | {peak_bytes / MB:.0f} |"
    yield f"\nOne simulation of a step of 80 layers and 8 micro-batches, median of {N_SIMULATIONS} (spread: slowest / fastest):\n"
    yield "| group | ops | ms | spread |\n|---:|---:|---:|---:|"
    profile, semantics, model = read_profile(MACHINE), Semantics(4096, 8, 1), read_model(MODEL)
    workload, region = build_workload(model, semantics), region_of(profile)
    for group in (8, 1):
        deferred = Policy(prefetch_depth=2, gradient_slots=2, accumulation_group=group, update=Update.DEFERRED)
        plan = lower(model, workload, semantics, deferred, profile.to_json())
        demands = CostModel(profile).demands(plan)
        times_s = [seconds_of(lambda plan=plan, demands=demands: simulate(plan, demands, region)) for _ in range(N_SIMULATIONS)]
        yield f"| {group} | {len(plan.ops)} | {statistics.median(times_s) * 1e3:.0f} | {max(times_s) / min(times_s):.2f} |"


def seconds_of(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def long_step(model: str, machine: str, millions: int, micro_batch: int | None, flags: tuple[str, ...], folder: Path) -> str:
    path = folder / "plan.json"
    sizes = ("--tokens-per-step", millions * MILLION, *(() if micro_batch is None else ("--micro-batch", micro_batch)))
    planned = took("plan", model, "--machine", machine, *sizes, *flags, "-o", path)
    name = f"| {model} | {machine}{' ' + ' '.join(flags) if flags else ''} | {millions} M "
    if not planned.output or planned.output.startswith("error"):
        return f"{name}| {planned.output.strip()} |"
    checked, file = took("check", path), PlanFile.read(path)
    plan, semantics, claim = file.plan, file.plan.semantics, file.claim or {}
    step_s, gap = claim["prediction"]["step_s"], claim["certificate"]["gap_fraction"]
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
    for p in machine.host.all_owned():
        state = machine.host.param_state(p)
        for tensor in (state.master.values(), *state.moments):
            digest.update(tensor.contiguous().numpy().tobytes())
    return step_s, digest.hexdigest()[:16]


def steps(folder: Path, numbers: list[int], n_micro_batches: int) -> Iterator[str]:
    """Yield rows of long steps, and of a tiny model's step, folded and unrolled."""
    yield (
        "| model | machine | step | micro-batches | group | ops a step | ops in the plan | plan, s (CPU s) | peak, MB | "
        f"check, s (CPU s) | peak, MB | predicted step | gap |\n|---|---|---:{'|---:' * 10}|"
    )
    yield from (long_step(*STEPS[n], folder) for n in numbers)
    if n_micro_batches:
        torch.set_num_threads(1)
        plan = tiny(n_micro_batches)
        yield "\n| performed | ops in the plan | ops a step | check, s | a step, s | state after two steps |"
        yield "|---|---:|---:|---:|---:|---|"
        for name, form in (("folded", plan), ("unrolled", unrolled(plan))):
            check_s = seconds_of(lambda form=form: check(form))
            step_s, digest = performed(form, 2)
            yield f"| {name} | {len(form.ops):,} | {form.n_performed:,} | {check_s:.2f} | {step_s:.1f} | `{digest}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layers", "steps"))
    parser.add_argument("--cells", type=int, nargs="*", default=list(range(len(STEPS))), help="numbers of long steps, from 0")
    parser.add_argument("--micro-batches", type=int, default=4096, help="number in the tiny model's step; 0: skip it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        for line in layers(path) if options.what == "layers" else steps(path, options.cells, options.micro_batches):
            print(line, flush=True)


if __name__ == "__main__":
    main()
