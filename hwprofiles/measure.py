"""What can the machine at hand do?

Everything is measured on the threads and cores that the runtime uses: compute on its half of the cores, copies and optimizer on
the others, each alone and while the others run. A time is the median of repeats; its spread is robust against single outliers
and is widened by what the other lanes' work does to it.
"""

# T tokens, H width, I width inside the MLP, D width of a head

import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from runtime.cores import split_cores
from runtime.errors import ProfileError
from runtime.memory import DTYPE
from runtime.optimizer import CHUNK_ELEMENTS, AdamW, adamw_, sum_of_squares
from runtime.units import KiB, MiB, show_bytes

from .schema import Dtype, Profile

T = TypeVar("T")
Progress = Callable[[str, float], None]  # what is measured now, and the fraction done

SETTINGS = AdamW(lr=1e-5, weight_decay=0.1)
CLIP_FACTOR = 0.5  # any but 1, which would skip the multiplication
COLD_BYTES = 256 * MiB  # far above a cache: host memory that a copy reads or an optimizer updates is never in one
SLOTS_BYTES = 64 * MiB  # a few device slots, used in turn
LEAST_SPREAD = 0.01
CALM_FRACTION = 0.95  # of a run in which our thread had its core: below it another program cut in
DEVICE_SHARE = 0.25  # of the usable memory, for the arena that stands in for a device
BEYOND_TORCH_BYTES = 300_000_000  # transformers, templates, tokenizer and data in the runtime's process


class Sample(NamedTuple):
    """Seconds, and half the width of what four of five repeats lie in, as a fraction."""

    seconds: float
    spread_fraction: float


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to look. A point is repeated until `point_s` is used up, but for at least and at most so many times."""

    least_repeats: int
    most_repeats: int
    point_s: float
    window_s: float  # length of one look at several threads together; there are `least_repeats` of them
    longest_s: float  # a product that would take longer than this is left out
    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    odd_shapes: tuple[tuple[int, int, int], ...]  # m, k, n
    seq_lens: tuple[int, ...]
    copy_bytes: tuple[int, ...]
    cold_bytes: int


THOROUGH = Effort(
    least_repeats=3,
    most_repeats=9,
    point_s=0.06,
    window_s=0.12,
    longest_s=1.2,
    tokens=(64, 256, 1024, 4096),
    widths=(128, 256, 512, 1024),
    odd_shapes=((1024, 512, 2048), (1024, 2048, 512), (1024, 512, 8192)),
    seq_lens=(128, 256, 512, 1024, 2048),
    copy_bytes=(64 * KiB, 1 * MiB, 8 * MiB, 64 * MiB),
    cold_bytes=COLD_BYTES,
)
QUICK = Effort(
    least_repeats=3,
    most_repeats=5,
    point_s=0.01,
    window_s=0.03,
    longest_s=0.3,
    tokens=(64, 512),
    widths=(128, 512),
    odd_shapes=((512, 128, 2048),),
    seq_lens=(128, 512),
    copy_bytes=(1 * MiB, 16 * MiB),
    cold_bytes=96 * MiB,
)


@dataclass(slots=True)
class Bench:
    """The cores of each lane, the clock, and what is known so far of how lanes disturb each other."""

    effort: Effort
    compute_cores: list[int]
    host_cores: list[int]
    progress: Progress
    clock: Callable[[], float] = time.perf_counter
    queue_clock: Callable[[], float] = field(default_factory=lambda: queued_s)  # runs while this thread wants a core and has none
    measured_s: float = 0.0
    stolen_s: float = 0.0  # of that, in which other programs had our core
    slowdown: dict[str, float] = field(default_factory=dict)  # time with the other lanes busy over time alone, by kind of work

    def repeat(self, work: Callable[[], object]) -> Sample:
        """Median time of the work on this thread, without the runs that other programs cut into if enough others are left.

        If not, all runs count, each without the time for which it was cut. A first run that uses up the time is the result.
        """
        calm_s: list[float] = []
        all_s: list[float] = []
        first_s, _ = self._run(work)  # touches memory and fills caches of the library; counts only if it was long
        if first_s > self.effort.longest_s:
            return Sample(first_s, 0.1)
        began_s = self.clock()
        while len(all_s) < self.effort.most_repeats:
            # Longer where calm runs are still wanted, but not without end: on a busy machine there may be none.
            patience = 1 if len(calm_s) >= self.effort.least_repeats else 4
            if len(all_s) >= self.effort.least_repeats and self.clock() - began_s > patience * self.effort.point_s:
                break
            seconds, stolen_s = self._run(work)
            self.measured_s += seconds
            self.stolen_s += stolen_s
            all_s.append(seconds - stolen_s)
            if stolen_s < (1 - CALM_FRACTION) * seconds:
                calm_s.append(seconds)
        return _sample(calm_s if len(calm_s) >= self.effort.least_repeats else all_s)

    def _run(self, work: Callable[[], object]) -> tuple[float, float]:
        """Seconds on the clock, and for how many of them the thread waited for a core that another program had."""
        start_s, start_queued_s = self.clock(), self.queue_clock()
        work()
        seconds = self.clock() - start_s
        return seconds, min(self.queue_clock() - start_queued_s, 0.9 * seconds)

    def compute(self, work: Callable[[], object]) -> Sample:
        """Time of the work on the gpu lane's thread and cores."""
        return _on(self.compute_cores, len(self.compute_cores), lambda: self.repeat(work))

    def host(self, work: Callable[[], object]) -> Sample:
        """Time of the work on a host lane's thread."""
        return _on(self.host_cores, 1, lambda: self.repeat(work))

    def slow_by(self, kind: str, works: Sequence[Callable[[], object]], busy: Sequence[Callable[[], object]]) -> None:
        """Remember what host lanes that do `busy` cost compute lanes that do `works`: the median of the ratios."""
        ratios = []
        for work in [*works] * self.effort.least_repeats:
            alone = self.compute(work)
            with _repeating(self.host_cores, busy):
                loaded = self.compute(work)
            ratios.append(loaded.seconds / alone.seconds)
        self.slowdown[kind] = max(1.0, statistics.median(ratios))

    def together(self, lanes: Sequence[tuple[Sequence[int], Callable[[], object]]]) -> list[Sample]:
        """Seconds per run of each lane's work while all of them run, each on its cores; without what other programs took."""
        windows = [self._window(lanes) for _ in range(self.effort.least_repeats)]
        return [_sample(seconds) for seconds in zip(*windows, strict=True)]

    def _window(self, lanes: Sequence[tuple[Sequence[int], Callable[[], object]]]) -> list[float]:
        """Seconds per run of each lane's work, in one window of time."""
        start = threading.Barrier(len(lanes), timeout=60)  # a lane that fails must not hold up the others

        def lane(work: Callable[[], object]) -> tuple[float, float, float, int]:
            work()
            start.wait()
            start_s, start_cpu_s, start_queued_s, n = self.clock(), time.thread_time(), self.queue_clock(), 0
            while n == 0 or self.clock() - start_s < self.effort.window_s:
                work()
                n += 1
            return self.clock() - start_s, time.thread_time() - start_cpu_s, self.queue_clock() - start_queued_s, n

        with ThreadPoolExecutor(len(lanes)) as pool:
            futures = [pool.submit(_on, cores, 1, lambda w=work: lane(w)) for cores, work in lanes]
            runs = [future.result() for future in futures]
        result = []
        for (cores, _), (seconds, _, in_queue_s, n) in zip(lanes, runs, strict=True):
            sharing = [run for (other, _), run in zip(lanes, runs, strict=True) if {*other} & {*cores}]
            if len(sharing) <= len(cores):
                result.append((seconds - min(in_queue_s, 0.9 * seconds)) / n)
            else:  # lanes wait for each other too: what all of them together did not have of their cores, others had
                had_fraction = sum(cpu_s for _, cpu_s, _, _ in sharing) / (len(cores) * max(run[0] for run in sharing))
                result.append(seconds * min(1.0, had_fraction) / n)
        return result


def probe_cpu(effort: Effort, progress: Progress, name: str = "this-machine") -> Profile:
    """Measure this machine's CPU as a device and as a host. ProfileError when it is too busy to be measured."""
    cores = sorted(os.sched_getaffinity(0))
    bench = Bench(effort, *split_cores(cores), progress)
    usable_bytes = available_bytes()
    if usable_bytes < 6 * effort.cold_bytes:
        needed = show_bytes(6 * effort.cold_bytes)
        raise ProfileError(f"{show_bytes(usable_bytes)} of memory are free, and the probe needs {needed}; end other programs")
    resident_bytes = _resident_bytes()

    progress("copies", 0.0)
    link, load = _link(bench)
    progress("optimizer", 0.15)
    host, update = _host(bench, load)
    progress("calls and memory traffic", 0.3)
    device = _overheads(bench, [load[0], update])
    progress("matrix products", 0.4)
    device["matmul"] = _matmuls(bench, [load[0], update])
    progress("attention", 0.85)
    device["attention"] = _attentions(bench, [load[0], update])
    progress("done", 1.0)

    cpu = f"{_cpu_name()}, {len(cores)} cores"
    today, torch_version = date.today().isoformat(), f"torch {torch.__version__}, {platform.system()} {platform.release()}"

    def source(kind: str, detail: str) -> dict[str, Any]:
        return {"kind": kind, "detail": detail, "date": today, "device": cpu, "driver": torch_version}

    disturbed = ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in sorted(bench.slowdown.items()))
    n_device = int(usable_bytes * DEVICE_SHARE)
    fields = {
        "format_version": 1,
        "name": name,
        "summary": f"{cpu}, {show_bytes(usable_bytes)} of free memory; core{_listed(bench.compute_cores)} for compute, "
        f"core{_listed(bench.host_cores)} for copies and optimizer",
        "sources": {
            "probe": source(
                "measured",
                f"penstock probe --device cpu: medians of {effort.least_repeats} to {effort.most_repeats} repeats on random data, "
                f"alone, other programs having taken {bench.stolen_s / bench.measured_s:.0%} of the time; "
                f"spread widened by the slowdown while the other lanes work: {disturbed}",
            ),
            "memory": source(
                "measured", "memory available when probed, cut by us into a quarter for the device arena and the rest"
            ),
            "process": source(
                "assumed",
                f"resident memory of this process with torch ({show_bytes(resident_bytes)}, measured) and "
                f"{show_bytes(BEYOND_TORCH_BYTES)} for transformers, templates and data",
            ),
            "nature": source(
                "assumed", "a CPU has no device context, and copies memory with a core: by its nature, nothing to measure"
            ),
        },
        "device": {
            "name": f"{len(bench.compute_cores)} of {cpu}",
            "kind": "cpu",
            "memory_bytes": _quantity(n_device, 0.0, "memory"),
            "context_bytes": _quantity(0, 0.0, "nature"),
            **{key: device[key] for key in ("memory_bytes_per_s", "kernel_overhead_s", "op_overhead_s")},
            "compute_threads": len(bench.compute_cores),
            "matmul": device["matmul"],
            "attention": device["attention"],
        },
        "link": {**link, "host_cores_per_copy": _quantity(1, 0.0, "nature"), "dram_bytes_per_byte": 2.0},
        "host": {
            "memory_bytes": _quantity(usable_bytes - n_device, 0.0, "memory"),
            "runtime_bytes": _quantity(resident_bytes + BEYOND_TORCH_BYTES, 0.3, "process"),
            "n_cores": len(bench.host_cores),
            **host,
        },
        "price": {"usd_per_hour": None, "ram_usd_per_gb": None, "date": None},
    }
    try:
        return Profile.from_json(fields, "probe")
    except ProfileError as error:
        raise ProfileError(f"the measurements contradict each other ({error}); end other programs and probe again") from None


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def probe_cuda() -> Profile:
    """Measure a CUDA device. ProfileError: there is none, or this version cannot yet."""
    if not has_cuda():
        raise ProfileError("no CUDA device is visible to torch; use --device cpu, or a shipped profile with --machine")
    raise ProfileError("probing a CUDA device is not built yet; use --device cpu, or a shipped profile with --machine")


def _link(bench: Bench) -> tuple[dict[str, Any], list[Callable[[], object]]]:
    """Copies over sizes and both ways at once; and one endless copy each way, to load the machine with."""
    host_memory = torch.empty(bench.effort.cold_bytes, dtype=torch.uint8).fill_(1)
    slots = torch.empty(SLOTS_BYTES, dtype=torch.uint8).fill_(2)
    ways = {"h2d": (slots, host_memory), "d2h": (host_memory, slots)}
    link: dict[str, Any] = {}
    for direction, (to, source) in ways.items():
        tiny = bench.host(_walking_copy(to, source, 64, n_copies=64))
        latency_s = tiny.seconds / 64
        points: list[tuple[float, Sample]] = []
        for n_bytes in bench.effort.copy_bytes:
            n_copies = max(1, 4 * MiB // n_bytes)
            work = _walking_copy(to, source, n_bytes, n_copies)
            sample = bench.host(work)
            transfer_s = max(sample.seconds / n_copies - latency_s, sample.seconds / n_copies / 2)
            points.append((n_bytes, Sample(transfer_s, sample.spread_fraction)))
        _raise_times(points)
        curve = [
            {"n_bytes": int(n_bytes), "rate": _quantity(n_bytes / s.seconds, s.spread_fraction, "probe")} for n_bytes, s in points
        ]
        link[direction] = {
            "latency_s": _quantity(latency_s, tiny.spread_fraction, "probe"),
            "bytes_per_s": curve,
            "pageable_bytes_per_s": curve[-1]["rate"],
        }
    piece_bytes = 8 * MiB
    works = [_walking_copy(to, source, piece_bytes) for to, source in ways.values()]
    both = bench.together([(bench.host_cores, work) for work in works])
    link["duplex_bytes_per_s"] = _rate(piece_bytes, both)
    return link, works


def _host(bench: Bench, copies: Sequence[Callable[[], object]]) -> tuple[dict[str, Any], Callable[[], object]]:
    """What host lanes do besides copying; and one optimizer loop, to load the machine with."""
    effort, cores = bench.effort, bench.host_cores
    n_params = effort.cold_bytes // 32
    piece = 16 * CHUNK_ELEMENTS
    updates = [_walking_update(n_params // len(cores), piece) for _ in cores]
    optimizer = []
    for n_threads in sorted({1, len(cores)}):
        lanes = [(cores, update) for update in updates[:n_threads]]
        alone = bench.together(lanes)
        loaded = bench.together([*lanes, (cores, copies[0])])[:n_threads]
        optimizer.append(
            {
                "threads": n_threads,
                "params_per_s": _rate(piece, alone),
                "params_per_s_under_copies": _rate(piece, loaded),
            }
        )
    big_bytes = effort.cold_bytes // 2
    ends = [torch.empty(big_bytes, dtype=torch.uint8).fill_(1).chunk(2) for _ in _all(bench)]
    streams = [_walking_copy(to, source, 8 * MiB) for to, source in ends]
    everyone = bench.together([([core], stream) for core, stream in zip(_all(bench), streams, strict=True)])
    gradients = [torch.randn(n_params // len(cores)).bfloat16() for _ in cores]
    sums = bench.together([(cores, lambda g=g: sum_of_squares(g)) for g in gradients])  # type: ignore[misc]
    fault = bench.host(lambda: torch.empty(big_bytes, dtype=torch.uint8).fill_(1))
    host = {
        "dram_bytes_per_s": _rate(2 * 8 * MiB, everyone),  # each byte is read and written
        "optimizer": optimizer,
        "reduce_bytes_per_s": _rate(gradients[0].nbytes, sums),
        "page_fault_bytes_per_s": _quantity(big_bytes / fault.seconds, fault.spread_fraction, "probe"),
    }
    # What compute does to the optimizer: a stream of products beside it.
    x = torch.randn(512, 512)
    alone = bench.together([(cores, updates[0])])
    beside = bench.together([(cores, updates[0]), (bench.compute_cores, lambda: x @ x)])
    bench.slowdown["optimizer"] = max(1.0, beside[0].seconds / alone[0].seconds)
    for point in optimizer:
        _widen(point["params_per_s"], bench.slowdown["optimizer"])  # type: ignore[arg-type]
    return host, updates[0]


def _overheads(bench: Bench, busy: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """Cost of a library call, of an op's hand-over between two lanes, and the rate of memory-bound kernels."""
    tiny, _, n_calls = _pointwise(1, 32, 64)
    call = bench.compute(tiny)
    call_s = call.seconds / n_calls
    bench.slow_by("calls", [tiny], busy)
    sizes = [_pointwise(tokens, 512, 1536) for tokens in (256, 1024)]
    rates, spreads = [], []
    for work, n_bytes, n_calls in sizes:
        sample = bench.compute(work)
        rates.append(n_bytes / max(sample.seconds - n_calls * call_s, sample.seconds / 4))
        spreads.append(sample.spread_fraction)
    bench.slow_by("memory traffic", [work for work, _, _ in sizes], busy)
    mean = statistics.geometric_mean(rates)
    traffic = _quantity(mean, max(*spreads, max(rates) / mean - 1), "probe")
    handover = _handover(bench)
    return {
        "memory_bytes_per_s": _widen(traffic, bench.slowdown["memory traffic"]),
        "kernel_overhead_s": _widen(_quantity(call_s, call.spread_fraction, "probe"), bench.slowdown["calls"]),
        "op_overhead_s": _quantity(handover.seconds, handover.spread_fraction, "probe"),
    }


def _matmuls(bench: Bench, busy: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """Rates of a product together with the two of its backward, over tokens and widths."""
    effort = bench.effort
    shapes = sorted({*((m, w, w) for m in effort.tokens for w in effort.widths), *effort.odd_shapes})
    grid: dict[str, Any] = {}
    middle = (effort.tokens[-2], effort.widths[-2], effort.widths[-1])
    dtypes: tuple[Dtype, ...] = ("bf16", "fp32")
    for dtype in dtypes:
        bench.slow_by(f"{dtype} products", [_products(dtype, *middle)], busy)
    for i, dtype in enumerate(dtypes):
        times: dict[tuple[int, int, int], Sample] = {}
        best = 0.0
        for j, (m, k, n) in enumerate(shapes):
            bench.progress(f"matrix products in {dtype}", 0.4 + 0.225 * (i + j / len(shapes)))
            n_flop = 3 * 2 * m * k * n
            if times and n_flop / best > effort.longest_s:
                continue
            times[m, k, n] = bench.compute(_products(dtype, m, k, n))
            best = max(best, n_flop / times[m, k, n].seconds)
        _raise_products(times)
        grid[dtype] = [
            {"m": m, "k": k, "n": n, "flop_per_s": _loaded(bench, f"{dtype} products", 6 * m * k * n, sample)}
            for (m, k, n), sample in times.items()
        ]
    return grid


def _attentions(bench: Bench, busy: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """Rates of causal attention as transformers calls it, forward and backward apart, over lengths and head widths."""
    effort = bench.effort
    grid: dict[str, Any] = {}
    n_tokens, n_heads = max(effort.seq_lens), 2
    dtypes: tuple[Dtype, ...] = ("bf16", "fp32")
    for dtype in dtypes:
        kind = f"{dtype} attention"
        bench.slow_by(kind, _attention(dtype, 2, n_heads, effort.seq_lens[-2], 64), busy)
        points = []
        narrower: list[list[float]] = [[0.0] * len(effort.seq_lens)] * 2  # times of the head width before, forward and backward
        for head_dim in (64, 128):
            both: list[list[tuple[float, Sample]]] = [[], []]
            for seq_len in effort.seq_lens:
                works = _attention(dtype, n_tokens // seq_len, n_heads, seq_len, head_dim)
                for times, work in zip(both, works, strict=True):
                    sample = bench.compute(work)
                    times.append((seq_len, Sample(sample.seconds * seq_len / n_tokens, sample.spread_fraction)))
            for times, least_s in zip(both, narrower, strict=True):
                _raise_times(times, least_s)
            narrower = [[sample.seconds for _, sample in times] for times in both]
            for seq_len, (_, forward), (_, backward) in zip(effort.seq_lens, *both, strict=True):
                n_flop = 4 * n_heads * head_dim * (seq_len * (seq_len + 1) // 2)
                points.append(
                    {
                        "seq_len": seq_len,
                        "head_dim": head_dim,
                        "forward_flop_per_s": _loaded(bench, kind, n_flop, forward),
                        "backward_flop_per_s": _loaded(bench, kind, 2.5 * n_flop, backward),
                    }
                )
        grid[dtype] = points
    return grid


def _products(dtype: Dtype, m: int, k: int, n: int) -> Callable[[], object]:
    """A linear layer and its backward: three products of equal work. Data are random: zeros run faster on some machines."""
    x, w, dy = (torch.randn(*shape).to(DTYPE[dtype]) for shape in ((m, k), (n, k), (m, n)))

    def work() -> None:
        F.linear(x, w)
        _ = dy @ w
        _ = dy.t() @ x

    return work


def _attention(dtype: Dtype, n_sequences: int, n_heads: int, seq_len: int, head_dim: int) -> list[Callable[[], object]]:
    """Causal attention's forward and backward; heads lie next to each other in memory, as projections leave them."""
    shape = (n_sequences, seq_len, n_heads, head_dim)
    q, k, v = (torch.randn(shape).to(DTYPE[dtype]).transpose(1, 2).requires_grad_() for _ in range(3))
    do = torch.randn(shape).to(DTYPE[dtype]).transpose(1, 2)

    def forward() -> torch.Tensor:
        with torch.enable_grad():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    return [forward, lambda: torch.autograd.grad(out, (q, k, v), do, retain_graph=True)]


def _pointwise(n_tokens: int, width: int, inner: int) -> tuple[Callable[[], object], int, int]:
    """What a decoder layer does in bf16 besides products, forward and backward; its traffic in bytes and its library calls.

    The backward counts twice the forward, as in the planner's cost model.
    """
    bf16 = torch.bfloat16
    hidden_TH = torch.randn(n_tokens, width).to(bf16).requires_grad_()
    gate_TI, up_TI = (torch.randn(n_tokens, inner).to(bf16).requires_grad_() for _ in range(2))
    weight_H = torch.ones(width, dtype=bf16, requires_grad=True)
    cos_TH, sin_TH = (torch.randn(n_tokens, width).to(bf16) for _ in range(2))
    d_TH, d_TI = (torch.randn(n_tokens, w).to(bf16) for w in (width, inner))

    def work() -> None:
        with torch.enable_grad():
            wide_TH = hidden_TH.float()
            scale_T1 = torch.rsqrt(wide_TH.pow(2).mean(-1, keepdim=True) + 1e-6)
            normed_TH = weight_H * (wide_TH * scale_T1).to(bf16)
            turned_TH = torch.cat((-normed_TH[:, width // 2 :], normed_TH[:, : width // 2]), -1)
            sum_TH = normed_TH * cos_TH + turned_TH * sin_TH + hidden_TH
            act_TI = F.silu(gate_TI) * up_TI
        torch.autograd.grad((sum_TH, act_TI), (hidden_TH, weight_H, gate_TI, up_TI), (d_TH, d_TI))

    item, wide = 2, 4
    norm = (item + wide) + 2 * wide + wide + 2 * wide + (wide + item) + 2 * item
    rotate_and_add = 2 * item + item + 2 * item + 2 * item + 3 * item + 3 * item
    n_bytes = n_tokens * (width * (norm + rotate_and_add) + inner * 5 * item)
    n_calls = 8 + 6 + 2
    return work, 3 * n_bytes, 3 * n_calls


def _walking_copy(to: torch.Tensor, source: torch.Tensor, n_bytes: int, n_copies: int = 1) -> Callable[[], object]:
    """Copies of n_bytes that step through both memories, so that the source is never in a cache."""
    n_bytes = min(n_bytes, to.numel(), source.numel())
    at = [0]
    stride = max(n_bytes, 64 * KiB)

    def work() -> None:
        for _ in range(n_copies):
            i, j = at[0] % (to.numel() - n_bytes + 1), at[0] % (source.numel() - n_bytes + 1)
            i, j = i - i % 64, j - j % 64
            to[i : i + n_bytes].copy_(source[j : j + n_bytes])
            at[0] += stride

    return work


def _walking_update(n_params: int, piece: int) -> Callable[[], object]:
    """The runtime's optimizer on `piece` parameters after another of a state too large for a cache."""
    n_params -= n_params % piece
    assert n_params >= piece
    master, exp_avg = torch.randn(n_params), torch.randn(n_params) * 1e-3
    exp_avg_sq = torch.rand(n_params) * 1e-6
    gradient, weight = torch.randn(n_params).bfloat16(), torch.zeros(n_params, dtype=torch.bfloat16)
    at = [0]

    def work() -> None:
        part = slice(at[0], at[0] + piece)
        adamw_(master[part], exp_avg[part], exp_avg_sq[part], gradient[part], weight[part], CLIP_FACTOR, 10, SETTINGS)
        at[0] = (at[0] + piece) % n_params

    return work


def _handover(bench: Bench, n_rounds: int = 200) -> Sample:
    """From one lane's signal to another's start, as the executor hands over: half of a round trip."""
    turn, conditions = [0], [threading.Condition(), threading.Condition()]

    def player(me: int) -> list[float]:
        seconds = []
        for i in range(n_rounds):
            began_s = bench.clock()
            with conditions[me]:
                conditions[me].wait_for(lambda i=i: turn[0] == 2 * i + me)  # type: ignore[misc]
            turn[0] += 1
            with conditions[1 - me]:
                conditions[1 - me].notify_all()
            seconds.append(bench.clock() - began_s)
        return seconds

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(_on, bench.compute_cores, len(bench.compute_cores), lambda: player(0))
        second = pool.submit(_on, bench.host_cores, 1, lambda: player(1))
        rounds = [*first.result()[1:], *second.result()[1:]]
    sample = _sample(rounds)
    return Sample(sample.seconds / 2, sample.spread_fraction)


def _on(cores: Sequence[int], n_threads: int, work: Callable[[], T]) -> T:
    """Run the work on a fresh thread, bound to the cores, with so many threads inside a kernel."""

    def settled() -> T:
        os.sched_setaffinity(0, cores)  # 0: the calling thread
        torch.set_num_threads(n_threads)
        with torch.no_grad():
            return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(settled).result()


@contextmanager
def _repeating(cores: Sequence[int], works: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Threads on the cores that repeat their work until the context ends."""
    stop = threading.Event()
    started = [threading.Event() for _ in works]

    def loop(work: Callable[[], object], running: threading.Event) -> None:
        try:
            while not stop.is_set():
                work()
                running.set()
        finally:
            running.set()

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(_on, cores, 1, lambda w=w, r=r: loop(w, r)) for w, r in zip(works, started, strict=True)]
        for running in started:
            running.wait()
        try:
            yield
        finally:
            stop.set()
        for future in futures:
            future.result()


def _sample(seconds: Sequence[float]) -> Sample:
    """Median, and 1.9 median absolute deviations: in a normal distribution that holds four of five."""
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(s - middle) for s in seconds)
    return Sample(middle, max(LEAST_SPREAD, 1.9 * deviation / middle))


def _raise_times(points: list[tuple[float, Sample]], least: Sequence[float] | None = None) -> None:
    """Lift a time that is not above the one of less work (the point before, or `least`), and widen its spread by as much.

    Only noise brings such a time about.
    """
    for i, (size, sample) in enumerate(points):
        before_s = max(points[i - 1][1].seconds if i else 0.0, least[i] if least else 0.0)
        points[i] = size, _at_least(sample, before_s)


def _at_least(sample: Sample, before_s: float) -> Sample:
    above_s = 1.001 * before_s
    if sample.seconds > above_s:
        return sample
    return Sample(above_s, sample.spread_fraction + above_s / sample.seconds - 1)


def _raise_products(times: dict[tuple[int, int, int], Sample]) -> None:
    """The same for products, in tokens and in width."""
    done: list[tuple[int, float, float]] = []
    for (m, k, n), sample in sorted(times.items(), key=lambda item: (item[0][0], item[0][1] * item[0][2])):
        width = math.sqrt(k * n)
        below = [s for m0, w0, s in done if m0 <= m and w0 <= width and (m0, w0) != (m, width)]
        times[m, k, n] = sample = _at_least(sample, max(below, default=0.0))
        done.append((m, width, sample.seconds))


def _loaded(bench: Bench, kind: str, n_flop: float, sample: Sample) -> dict[str, Any]:
    return _widen(_quantity(n_flop / sample.seconds, sample.spread_fraction, "probe"), bench.slowdown[kind])


def _rate(per_run: float, lanes: Sequence[Sample]) -> dict[str, Any]:
    """What lanes that run together do per second."""
    return _quantity(sum(per_run / s.seconds for s in lanes), max(s.spread_fraction for s in lanes), "probe")


def _widen(quantity: dict[str, Any], slowdown: float) -> dict[str, Any]:
    """Take what the other lanes' work cost into the spread."""
    quantity["spread_fraction"] = _rounded(max(quantity["spread_fraction"], slowdown - 1))
    return quantity


def _quantity(value: float, spread_fraction: float, source: str) -> dict[str, Any]:
    return {"value": _rounded(value), "spread_fraction": _rounded(min(spread_fraction, 10.0)), "source": source}


def _rounded(value: float) -> float:
    """Six significant digits of a rate or time; sizes in bytes stay whole."""
    return float(value) if isinstance(value, int) else float(f"{value:.6g}")


def queued_s() -> float:
    """Seconds for which this thread wanted a core and had none, since it began; 0 where the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def available_bytes() -> int:
    """Memory that new allocations can have: what the system says is available, or what its control group still allows."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(fields["MemAvailable"].split()[0]) * KiB
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        group = Path("/sys/fs/cgroup")
        try:
            left = int((group / limit).read_text()) - int((group / used).read_text())
        except (OSError, ValueError):  # no such control group, or `max`: no limit
            continue
        free_bytes = min(free_bytes, max(left, 0))
    return free_bytes


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip() or platform.machine()
    return platform.machine()


def _all(bench: Bench) -> list[int]:
    return sorted({*bench.compute_cores, *bench.host_cores})


def _listed(cores: Sequence[int]) -> str:
    return ("s " if len(cores) > 1 else " ") + ", ".join(map(str, cores))
