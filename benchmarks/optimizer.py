"""Bandwidth of the host's optimizers against memcpy, and their times next to AdamW's.

`python -m benchmarks.optimizer` prints a page of Markdown: nanoseconds per parameter of AdamW with split, bf16 and fp32 masters,
and of the low-bit optimizers, with one worker and more. Baselines, all interleaved: a copy of the same bytes with the same threads,
AdamW with split masters, and torch's fused kernel. Also bytes per parameter counted in the loops. `--before REVISION` compares with
a revision instead.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import provenance
from penstock.runtime.host.chunks import UPDATE_ELEMENTS, Scratch
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.host.norms import squares_tasks
from penstock.runtime.host.optimizer import Master, ParamState, Step, SummedGradient
from penstock.runtime.host.rounding import StochasticRounding, group_bytes
from penstock.runtime.host.slabs import host_slab, settle_allocator, touch
from penstock.runtime.host.workers import Workers
from penstock.runtime.plan.optimizer import AdamW, Optimizer

N_PARAMS = 48 * 2**20
N_ROUNDS = 9
FACTOR = 0.5  # not 1, which would skip a multiplication
SETTINGS = AdamW(lr=1e-5, weight_decay=0.1)
# Optimizer, and master: fp32, whole or split; or bf16, rounded to nearest or stochastically
KINDS = {
    "split": (Optimizer.ADAMW, "split"),
    "bf16": (Optimizer.ADAMW, "bf16"),
    "fp32": (Optimizer.ADAMW, "fp32"),
    "moments=bf16": (Optimizer.ADAMW_BF16, "split"),
    "moments=int8": (Optimizer.ADAMW_INT8, "split"),
    "master=bf16": (Optimizer.ADAMW, "stochastic"),
    "moments=bf16,master=bf16": (Optimizer.ADAMW_BF16, "stochastic"),
    "moments=int8,master=bf16": (Optimizer.ADAMW_INT8, "stochastic"),
    "moments=int8,master=split24": (Optimizer.ADAMW_INT8, "split24"),
    "lion": (Optimizer.LION, "split"),
    "lion:moments=bf16": (Optimizer.LION_BF16, "split"),
    "lion:moments=int8": (Optimizer.LION_INT8, "split"),
    "lion:moments=bf16,master=bf16": (Optimizer.LION_BF16, "stochastic"),
    "lion:moments=int8,master=bf16": (Optimizer.LION_INT8, "stochastic"),
    "lion:moments=int8,master=split24": (Optimizer.LION_INT8, "split24"),
}
FUSED_BYTES = 28  # traffic of torch's fused kernel on fp32


@dataclass(frozen=True, slots=True)
class Case:
    """A parameter in one storage layout, and the work on it."""

    name: str
    n_bytes: int  # traffic of one run
    run: Callable[[Workers[Scratch]], object]


def flat(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate memory like the arenas."""
    slab = host_slab(n * dtype.itemsize)
    touch([slab], 1)
    return slab.view(dtype)


def update_case(kind: str, n: int) -> Case:
    """Return one update of a parameter with n elements."""
    optimizer, of_master = KINDS[kind]
    moments = [flat(group_bytes(n) if dtype == "int8" else n, DTYPE[dtype]) for dtype in optimizer.moments.values()]
    half, gradient = flat(n, torch.bfloat16), flat(n, torch.float32 if of_master == "fp32" else torch.bfloat16)
    for tensor in (half, gradient):
        tensor.normal_()
    for moment in moments:
        moment.copy_(torch.empty(len(moment)).uniform_(1e-8, 1e-6)) if moment.dtype is not torch.uint8 else moment.random_(1, 60)
    match of_master:
        case "split" | "split24":
            master = Master(half, flat(n, torch.int16 if of_master == "split" else torch.int8))
        case "fp32":
            master = Master(flat(n, torch.float32).copy_(half))
        case _:
            master = Master(half)
    is_drawn = of_master in ("stochastic", "split24")
    rounding = StochasticRounding((5, 6, 7), is_drawn) if is_drawn or optimizer is not Optimizer.ADAMW else None
    state, summed = ParamState(master, tuple(moments)), SummedGradient((gradient,), gradient.dtype)
    tasks = Step(state, summed, FACTOR, 10, SETTINGS, None, optimizer.rule, rounding).tasks()
    wide = "bf16" if half is master.weight and master.remainder is None else of_master if of_master == "split24" else "fp32"
    n_bytes = optimizer.update_bytes(wide, "fp32" if of_master == "fp32" else "bf16")  # type: ignore[arg-type]
    return Case(kind, round(n_bytes * n), lambda workers: workers.run(tasks))


def fused_case(n: int) -> Case:
    """Return torch's fused AdamW on fp32 master, gradient and moments, in chunks, without splitting, rounding or scaling."""
    tensors = [flat(n, torch.float32).uniform_(1e-8, 1e-6) for _ in range(4)]
    step, adamw = torch.tensor(10.0), SETTINGS
    how = {"lr": adamw.lr, "beta1": adamw.beta1, "beta2": adamw.beta2, "weight_decay": adamw.weight_decay, "eps": adamw.eps}
    how |= {"amsgrad": False, "maximize": False}

    def run(workers: Workers[Scratch]) -> None:
        def task(parts: tuple[torch.Tensor, ...]) -> None:
            master, gradient, exp_avg, exp_avg_sq = parts
            torch._fused_adamw_([master], [gradient], [exp_avg], [exp_avg_sq], [], [step], **how)

        chunks = zip(*(tensor.split(UPDATE_ELEMENTS) for tensor in tensors), strict=True)
        workers.run([lambda _, parts=parts: task(parts) for parts in chunks])  # type: ignore[misc]

    return Case("torch's fused", FUSED_BYTES * n, run)


def norm_case(n: int) -> Case:
    gradient = flat(n, torch.bfloat16).normal_()
    tasks = squares_tasks(SummedGradient((gradient,), torch.bfloat16))
    return Case("norm", gradient.nbytes, lambda workers: workers.run(tasks))


def copy_case(n_bytes: int, n_threads: int) -> Case:
    """Return a copy with `n_bytes` of reads plus writes, split equally among the workers."""
    target, source = flat(n_bytes // 2, torch.uint8), flat(n_bytes // 2, torch.uint8)

    def run(workers: Workers[Scratch]) -> None:
        part = -(-target.numel() // n_threads)
        pairs = list(zip(target.split(part), source.split(part), strict=True))
        workers.run([lambda _, a=a, b=b: a.copy_(b) for a, b in pairs])  # type: ignore[misc]

    return Case("copy", n_bytes, run)


@contextmanager
def settled() -> Iterator[None]:
    """Configure a thread like a machine's lane: one thread per kernel, no autograd."""
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


# -- the page -------------------------------------------------------------------------------------------------------


def in_turns(cases: list[Case], n_threads: int, n_rounds: int) -> dict[str, list[float]]:
    """Return seconds of every run, interleaved by rounds. With one worker, CPU seconds, because others may use the machine."""
    clock = time.thread_time if n_threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    workers = Workers(n_threads, Scratch)
    with settled(), workers.helped(settled):
        for number in range(n_rounds + 1):
            for case in cases:
                start_s = clock()
                case.run(workers)
                if number:  # the first round is warm-up
                    times[case.name].append(clock() - start_s)
    return times


def rows(n_params: int, n_rounds: int, n_threads: int) -> Iterator[str]:
    copy, split, bare = copy_case(26 * n_params, n_threads), update_case("split", n_params), fused_case(n_params)
    for kind in (*KINDS, "norm"):
        case = norm_case(n_params) if kind == "norm" else update_case(kind, n_params)
        case = replace(case, name=f"{kind} ")  # distinct from the baseline of the same kind
        times = in_turns([case, copy, split, bare], n_threads, n_rounds)
        to_split, to_bare = (median(a / b for a, b in zip(times[case.name], times[ref.name], strict=True)) for ref in (split, bare))
        ordered, mine_s = sorted(times[case.name]), median(times[case.name])
        copy_s = median(times["copy"]) * case.n_bytes / copy.n_bytes
        ratio = median(a / b for a, b in zip(times[case.name], times["copy"], strict=True)) * copy.n_bytes / case.n_bytes
        spread = f"{ordered[0] / n_params * 1e9:.2f} to {ordered[-1] / n_params * 1e9:.2f}"
        yield (
            f"| {kind} | {n_threads} | {case.n_bytes / n_params:.0f} | {mine_s / n_params * 1e9:.2f} | {spread} "
            f"| {copy_s / n_params * 1e9:.2f} | {ratio:.2f} | {to_split:.2f} | {to_bare * bare.n_bytes / case.n_bytes:.2f} "
            f"| {case.n_bytes / mine_s / 1e9:.1f} |"
        )


# Cases of another revision, in a separate process: a line of input starts a run, a line of output is its thread time
CHILD = """
import sys, time
from benchmarks import optimizer as of
try:
    from penstock.runtime.host.slabs import settle_allocator
except ImportError:  # a revision before 0.2.0
    from runtime.host.slabs import settle_allocator
settle_allocator()
kind, n = sys.argv[1], int(sys.argv[2])
case, workers = of.norm_case(n) if kind == "norm" else of.update_case(kind, n), of.Workers(1, of.Scratch)
with of.settled(), workers.helped(of.settled):
    for _ in sys.stdin:
        start_s = time.thread_time()
        case.run(workers)
        print(time.thread_time() - start_s, flush=True)
"""


def compared(revision: str, kinds: list[str], n_params: int, n_rounds: int) -> Iterator[str]:
    """Yield a row per kind: a revision and this one, interleaved by rounds, each on one thread of a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive)
        for kind in kinds:
            with ExitStack() as stack:
                command = [sys.executable, "-c", CHILD, kind, str(n_params)]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                children = [
                    stack.enter_context(subprocess.Popen(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, **pipes))
                    for root in (folder, Path(__file__).parents[1])
                ]
                pairs = [[_one_run(child) for child in children] for _ in range(n_rounds + 1)][1:]  # the first round is warm-up
            old, new = ([pair[i] / n_params * 1e9 for pair in pairs] for i in (0, 1))
            ratio = median(a / b for b, a in zip(old, new, strict=True))
            spread = f"{min(new):.2f} to {max(new):.2f}"
            yield f"| {kind} | {median(old):.2f} | {median(new):.2f} | {spread} | {ratio:.2f} |"


def _one_run(child: "subprocess.Popen[str]") -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    print(file=child.stdin, flush=True)
    return float(child.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=N_PARAMS, help="parameters of a case")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS, "norm"], help="of --before")
    parser.add_argument("--before", metavar="REVISION", help="compare with a revision of git, in turns, on one thread")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    settle_allocator()
    print(f"{provenance()}.")
    if options.before is not None:
        print(f"{options.params / 1e6:.1f} M parameters, one thread, {options.rounds} rounds in turns, medians.\n")
        print(f"| kind | {options.before}, ns | now, ns | least to most | ratio |\n|---|---:|---:|---|---:|", flush=True)
        for row in compared(options.before, options.kinds, options.params, options.rounds):
            print(row, flush=True)
        return
    gradients = f"gradients fp32 with an fp32 master, otherwise bf16, {options.rounds} rounds in turns"
    print(f"{options.params / 1e6:.1f} M parameters, chunks of {UPDATE_ELEMENTS}, {gradients}.\n")
    print("| kind | workers | B | ns | least to most | copy, ns | ratio | to split's | a byte, to fused's | GB/s |")
    print("|---|---:|---:|---:|---|---:|---:|---:|---:|---:|", flush=True)
    for n_threads in options.workers:
        for row in rows(options.params, options.rounds, n_threads):
            print(row, flush=True)


if __name__ == "__main__":
    main()
