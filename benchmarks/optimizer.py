"""Bandwidth of the host's AdamW against memcpy.

`python -m benchmarks.optimizer` prints a page of Markdown: nanoseconds per parameter of AdamW on split, bf16 and fp32 masters
with one worker and more, beside a copy that moves as many bytes with as many threads, measured in turns; the bytes per parameter
counted from the loops; and what the processor's own counters say, where they can be had.
"""

import argparse
import ctypes
import os
import platform
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from runtime.host.chunks import UPDATE_ELEMENTS, Scratch
from runtime.host.norms import squares_tasks
from runtime.host.optimizer import Master, ParamState, Step, SummedGradient
from runtime.host.slabs import host_slab, settle_allocator, touch
from runtime.host.workers import Workers
from runtime.plan.optimizer import AdamW

N_PARAMS = 48 * 2**20
N_ROUNDS = 9
FACTOR = 0.5  # any but one, which would skip a multiplication
SETTINGS = AdamW(lr=1e-5, weight_decay=0.1)
MOVED_BYTES = {"split": 26, "bf16": 22, "fp32": 28}  # per parameter; tests/runtime/test_optimizer_memory.py counts them
BYTES_PER_LINE = 64
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_LAST_LEVEL_MISSES = ((0, 3), (3, 2 | 0 << 8 | 1 << 16))  # (type, config): cache misses; last level, read, miss


@dataclass(frozen=True, slots=True)
class Case:
    """A parameter in one of the store's forms, and what there is to do with it."""

    name: str
    n_bytes: int  # moved by one run
    run: Callable[[Workers[Scratch]], object]


def flat(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory as the arenas have it."""
    slab = host_slab(n * dtype.itemsize)
    touch([slab], 1)
    return slab.view(dtype)


def update_case(kind: str, n: int) -> Case:
    """One AdamW step on a parameter of n elements."""
    exp_avg, exp_avg_sq = flat(n, torch.float32), flat(n, torch.float32)
    half, gradient = flat(n, torch.bfloat16), flat(n, torch.float32 if kind == "fp32" else torch.bfloat16)
    for tensor in (half, gradient):
        tensor.normal_()
    exp_avg_sq.uniform_(1e-8, 1e-6)
    match kind:
        case "split":
            master = Master(half, flat(n, torch.int16))
        case "fp32":
            master = Master(flat(n, torch.float32).copy_(half))
        case _:
            master = Master(half)
    to, summed = ParamState(master, (exp_avg, exp_avg_sq)), SummedGradient((gradient,), gradient.dtype)
    tasks = Step(to, summed, FACTOR, 10, SETTINGS).tasks()
    return Case(kind, MOVED_BYTES[kind] * n, lambda workers: workers.run(tasks))


def norm_case(n: int) -> Case:
    gradient = flat(n, torch.bfloat16).normal_()
    tasks = squares_tasks(SummedGradient((gradient,), torch.bfloat16))
    return Case("norm", gradient.nbytes, lambda workers: workers.run(tasks))


def copy_case(n_bytes: int) -> Case:
    """A copy that reads and writes `n_bytes` in sum, shared by the workers in equal parts."""
    to, source = flat(n_bytes // 2, torch.uint8), flat(n_bytes // 2, torch.uint8)

    def run(workers: Workers[Scratch]) -> None:
        part = -(-to.numel() // workers.n_threads)
        pairs = list(zip(to.split(part), source.split(part), strict=True))
        workers.run([lambda _, a=a, b=b: a.copy_(b) for a, b in pairs])  # type: ignore[misc]

    return Case("copy", n_bytes, run)


# -- counters -------------------------------------------------------------------------------------------------------


@contextmanager
def misses_counted() -> Iterator[Callable[[], int] | None]:
    """A counter of the last cache's misses by this thread and those that it starts; None where the system has none to give."""
    for kind, config in _LAST_LEVEL_MISSES:
        # struct perf_event_attr: type, size, config, .., flags (inherit, exclude_kernel, exclude_hv), ..
        attributes = struct.pack("IIQQQQQ", kind, 64, config, 0, 0, 0, 1 << 1 | 1 << 5 | 1 << 6).ljust(64, b"\0")
        number = _PERF_EVENT_OPEN.get(platform.machine())
        found = ctypes.CDLL(None, use_errno=True).syscall(number, attributes, 0, -1, -1, 0) if number is not None else -1
        if found >= 0:
            try:
                yield lambda found=found: struct.unpack("Q", os.read(found, 8))[0]  # type: ignore[misc]
            finally:
                os.close(found)
            return
    yield None


def misses_of(case: Case, n_threads: int) -> int | None:
    """Of one run, after one that warms up."""
    with misses_counted() as read:
        workers = Workers(n_threads, Scratch)
        with workers.helped(settled):
            case.run(workers)
            before = read() if read is not None else 0
            case.run(workers)
        return read() - before if read is not None else None  # a helper's count is added when it ends


@contextmanager
def settled() -> Iterator[None]:
    """As a machine settles its lanes: one thread inside a kernel, no autograd."""
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


# -- the page -------------------------------------------------------------------------------------------------------


def in_turns(cases: list[Case], n_threads: int, n_rounds: int) -> dict[str, list[float]]:
    """Seconds of every run; one of each case after another, round by round."""
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    workers = Workers(n_threads, Scratch)
    with settled(), workers.helped(settled):
        for number in range(n_rounds + 1):
            for case in cases:
                start_s = time.perf_counter()
                case.run(workers)
                if number:  # the first round warms up
                    times[case.name].append(time.perf_counter() - start_s)
    return times


def rows(n_params: int, n_rounds: int, n_threads: int) -> Iterator[str]:
    copy = copy_case(26 * n_params)
    for kind in (*MOVED_BYTES, "norm"):
        case = norm_case(n_params) if kind == "norm" else update_case(kind, n_params)
        times = in_turns([case, copy], n_threads, n_rounds)
        ordered, mine_s = sorted(times[case.name]), median(times[case.name])
        copy_s = median(times["copy"]) * case.n_bytes / copy.n_bytes
        ratio = median(a / b for a, b in zip(times[case.name], times["copy"], strict=True)) * copy.n_bytes / case.n_bytes
        missed = misses_of(case, n_threads)
        counted = "none to be had" if not missed else f"{missed * BYTES_PER_LINE / n_params:.1f}"
        spread = f"{ordered[0] / n_params * 1e9:.2f} to {ordered[-1] / n_params * 1e9:.2f}"
        yield (
            f"| {kind} | {n_threads} | {case.n_bytes / n_params:.0f} | {mine_s / n_params * 1e9:.2f} | {spread} "
            f"| {copy_s / n_params * 1e9:.2f} | {ratio:.2f} | {case.n_bytes / mine_s / 1e9:.1f} | {counted} |"
        )


def processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=N_PARAMS, help="parameters of a case")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    asked = parser.parse_args()
    settle_allocator()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    print(f"Commit {commit}; {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}.")
    gradients = f"gradients fp32 beside an fp32 master and else bf16, {asked.rounds} rounds in turns"
    print(f"{asked.params / 1e6:.1f} M parameters, chunks of {UPDATE_ELEMENTS}, {gradients}.\n")
    print("| what | workers | B | ns | least to most | copy, ns | ratio | GB/s | B of cache misses |")
    print("|---|---:|---:|---:|---|---:|---:|---:|---|", flush=True)
    for n_threads in asked.workers:
        for row in rows(asked.params, asked.rounds, n_threads):
            print(row, flush=True)


if __name__ == "__main__":
    main()
