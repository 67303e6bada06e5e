"""Published runs on several GPUs against predictions.

A section of docs/accuracy.md: runs of sharding systems (`benchmarks/sharded.py`), single layers, another system next to our plan.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

from pydantic import TypeAdapter

import penstock
from benchmarks.published.system_costs import Software, SystemCosts
from benchmarks.sharded import Sharded, Shown, predict
from penstock.hwprofiles.components import Collective
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.scaled_profile import Group, faster, sped_up, with_quantities
from penstock.planner.search.result import forward_flop
from penstock.results import Planned
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan import Semantics
from penstock.runtime.units import GB, GiB

FILE = Path(__file__).parent / "published_several.json"
# An A800 is an A100 with NVLink at 400 instead of 600 GB/s (datasheet). It is assumed to reach the same share as the 900 GB/s of
# `8xh100`, with the same latency of collectives. Its host is assumed to be that of `a100-sxm`.
A800_RATES = {f"peers.collectives.{name}.bytes_per_s" for name in get_args(Collective)}
A800, A800_LIKE, A800_NVLINK_LIKE, A800_LINK_FRACTION = "8xa800", "a100-sxm", "8xh100", 400 / 900
FP16_SUMS_FACTOR = 330 / 165  # of products on a GeForce card, by its datasheet
GEFORCE, TFLOP = "8xrtx4090", 10**12
SLOWEST, FASTEST, N_HALVINGS = 1e-2, 10.0, 16  # bisection for a rate of exchange: factors of the profile's rate
NOTES = {
    "8xrtx4090-fsdp-offload-qwen3-1.7b": "two errors nearly cancel: products in fp16 are faster than we say, exchange is slower",
    "8xrtx4090-fsdp-offload-qwen3-32b": "not published which memory was exhausted, and when; we suppose, during model creation",
    "8xrtx4090-fsdp-qwen3-32b": "no command is published; batch and length are those of the run with offload",
    "8xa800-fsdp-llama-3.1-8b": "its products would have to be faster than single ones on an A100 were ever measured to be",
    "8xa800-fsdp-qwen3-32b": "it filled the device, so we suppose that the allocator freed and reallocated",
}


@dataclass(frozen=True, slots=True)
class PublishedSharded:
    """A run of a sharding system. `tokens_per_s` None: out of memory."""

    id: str
    system: str
    machine: str
    model: str
    gpus: int
    batch: int
    micro_batch: int
    seq: int
    tokens_per_s: float | None
    source: str

    @property
    def run(self) -> Sharded:
        return Sharded(self.system, self.machine, self.model, self.gpus, self.batch, self.micro_batch, self.seq)


@dataclass(frozen=True, slots=True)
class PublishedLayer:
    """One layer timed alone: forward, and backward without its forward."""

    machine: str
    model: str
    batch: int
    seq: int
    forward_ms: float
    backward_ms: float
    source: str


@dataclass(frozen=True, slots=True)
class PublishedPipeline:
    """RoundPipe with updates delayed by one step, and with synchronous updates."""

    machine: str
    model: str
    gpus: int
    batch: int
    seq: int
    tokens_per_s: float
    synchronous_tokens_per_s: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Published:
    """Contents of the file."""

    about: str
    batches: str
    excluded: list[str]
    sharded: list[PublishedSharded]
    layers: list[PublishedLayer]
    pipelines: list[PublishedPipeline]


def read_published(path: Path = FILE) -> Published:
    return TypeAdapter(Published).validate_json(path.read_bytes(), strict=True)


@cache
def machine_of(name: str) -> Profile:
    """Return a shipped profile, or the A800 composed of two."""
    if name != A800:
        return read_profile(name)
    device, links = read_profile(A800_LIKE), read_profile(A800_NVLINK_LIKE)
    assert links.peers is not None
    combined = device.model_copy(update={"name": name, "peers": links.peers, "sources": {**links.sources, **device.sources}})
    return with_quantities(combined, lambda place, q: sped_up(place, q, A800_LINK_FRACTION) if place in A800_RATES else q)


def exchange_bytes_per_s(machine: Profile) -> float:
    """Return the rate at which a device's weights reach another, with many in flight."""
    assert machine.peers is not None
    return machine.peers.collectives["all_gather"].bytes_per_s.value


def explaining_bytes_per_s(published: PublishedSharded, products: float = 1.0) -> float | None:
    """Return the exchange rate through the host that explains the measured step, or None if none does.

    `products`: speed-up of matrix products over the profile.
    """
    machine = machine_of(published.machine)
    if published.tokens_per_s is None or machine.peers is None or not machine.peers.through_host:
        return None
    measured_s = published.run.tokens_per_step / published.tokens_per_s

    def step_s(factor: float) -> float:
        return predict(published.run, faster(machine, {Group.PEERS: factor, Group.MATMUL: products})).step_s

    if not step_s(FASTEST) < measured_s < step_s(SLOWEST):
        return None
    low, high = SLOWEST, FASTEST
    for _ in range(N_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if step_s(middle) > measured_s else (low, middle)
    return exchange_bytes_per_s(machine) * high


def section(published: Published) -> Iterator[str]:
    """Yield the lines of the page; some five minutes of planning."""
    explained = explained_rates(published)
    yield "## Several GPUs"
    yield ""
    yield _HEAD
    yield from sharded_rows(published, explained)
    yield ""
    yield from _reading(published, explained)
    yield from layer_rows(published)
    yield ""
    yield from _compared(published)
    yield ""
    yield _NOT_MODELLED


_HEAD = """Published runs on eight GPUs in one host, with scripts for batch and length: by the authors of RoundPipe, of
their system and of others. Sources are listed with each run in `benchmarks/published_several.json`. Each GPU has an eighth of the
host; the GeForce cards have the exchange rate of single collectives on another host of such cards, not the rate that explains
these runs. The machines are `8xrtx4090`, and for the A800 `a100-sxm`, its host too, with 400/900 of the NVLink of
`8xh100`. All of it was fp16 with sums in fp16, which tensor cores of GeForce cards do
at twice the rate (datasheet: 330 and 165 TFLOP/s; an A800 gains nothing). No shipped profile has that rate: Penstock computes in
bf16, which has no such sums.

`fsdp` is PyTorch's first FullyShardedDataParallel, `-offload` with its state in host memory; `zero3-offload` is ZeRO-Infinity
without disks. Assumptions about them: `benchmarks/sharded.py`. `exchange`: the rate that would explain the step, all else as
predicted.
"""

_NOT_MODELLED = """Not modelled: loss scaling and the casts of autocast, Python's time to issue a step, an allocator that
frees and reallocates, the two sockets of a host. Adam's traffic is counted from PyTorch's passes, not timed. FSDP2 with offload,
which allocates gradients anew, was not published with enough to predict it; nor were SlideDP, and SuperOffload on several GPUs.
"""


def explained_rates(published: Published, products: float = 1.0) -> dict[str, float]:
    """Return by run the explaining exchange rate, if it exists."""
    rates = {run.id: explaining_bytes_per_s(run, products) for run in published.sharded}
    return {name: rate for name, rate in rates.items() if rate is not None}


def sharded_rows(published: Published, explained: Mapping[str, float]) -> Iterator[str]:
    """Yield a row per run of a sharding system."""
    yield "| run | sequences, at a time | tokens/s predicted | measured | step | exchange | device memory predicted | |"
    yield "|---|---|---:|---:|---:|---:|---:|---|"
    for row in published.sharded:
        machine = machine_of(row.machine)
        shown, has_bytes = predict(row.run, machine), machine.device.memory_bytes.value
        fits, ran = shown.device_peak_bytes <= has_bytes, row.tokens_per_s is not None
        notes = [] if fits == ran else ["missed: we say that it fits" if fits else "missed: we say that it does not fit"]
        cells = [
            row.id,
            f"{row.batch} x {row.seq:,}, {row.micro_batch}",
            f"{row.run.tokens_per_step / shown.step_s:,.0f}" if ran else "-",
            "out of memory" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            "-" if row.tokens_per_s is None else f"{_error_fraction(row, shown):+.0%}",
            f"{explained[row.id] / GB:.1f} GB/s" if row.id in explained else "-",
            f"{shown.device_peak_bytes / GiB:.1f} of {has_bytes / GiB:.1f} GiB",
            "; ".join([*notes, *([NOTES[row.id]] if row.id in NOTES else [])]),
        ]
        yield f"| {' | '.join(cells)} |"


def _error_fraction(row: PublishedSharded, shown: Shown) -> float:
    """Return predicted over measured step time, minus 1."""
    assert row.tokens_per_s is not None
    return shown.step_s * row.tokens_per_s / row.run.tokens_per_step - 1


def _reading(published: Published, explained: Mapping[str, float]) -> Iterator[str]:
    """Yield the discussion of the rows."""
    ran = [row for row in published.sharded if row.tokens_per_s is not None]
    errors = {row: _error_fraction(row, predict(row.run, machine_of(row.machine))) for row in ran}
    by_host, by_nvlink = ([e for row, e in errors.items() if (row.machine == A800) is is_a800] for is_a800 in (False, True))
    spread, has_bytes_per_s = _rates(explained), exchange_bytes_per_s(machine_of(GEFORCE))
    quick = _rates(explained_rates(published, FP16_SUMS_FACTOR))
    why = (
        f"The profile has {has_bytes_per_s / GB:.0f}, of collectives on another such host: hosts differ from 1 to 23 (docs/ops.md)."
    )
    yield f"""Errors of the step: {_span(by_host)}, on the RTX 4090; {_span(by_nvlink)}, on the A800.

Of {len(by_host)} steps on the RTX 4090 {sum(e < 0 for e in by_host)} took longer than predicted. One cause would explain them
for every system and placement of state: an exchange through the host at {spread}
({quick}, if products were twice as fast). {why}
`fsdp` with the 8B is the clearest case: its host only forwards the exchange. The rate is far below that of a link, so ranks of
Penstock use no library there: each device copies to host memory, and reads the parts of other devices from it. On the A800
the exchange runs over NVLink, which does not bind.

The same source timed single layers on one RTX 4090. They show the value of sums in fp16: some exceed the
165 TFLOP/s that are the limit in bf16.
"""


def _rates(explained: Mapping[str, float]) -> str:
    rates = sorted(rate / GB for rate in explained.values())
    return f"{rates[0]:.1f} to {rates[-1]:.1f} GB/s, {statistics.median(rates):.1f} in the median"


def _span(errors: list[float]) -> str:
    return f"{min(errors):+.0%} to {max(errors):+.0%}, {statistics.median(map(abs, errors)):.0%} in the median"


def layer_rows(published: Published) -> Iterator[str]:
    """Yield a row per layer."""
    yield "| a layer of | sequences | forward predicted | measured | error | TFLOP/s | backward predicted | measured | error |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in published.layers:
        semantics = Semantics(row.seq, row.batch, row.batch)
        workload = build_workload(read_model(row.model), semantics)
        c, layer = SystemCosts(machine_of(row.machine), Software(), workload, semantics), workload.blocks[1]
        reached = forward_flop(layer) / row.forward_ms * 1e3 / TFLOP
        forward = _milliseconds(c.forward(layer).uncontended_s, row.forward_ms)
        backward = _milliseconds(c.backward(layer).uncontended_s, row.backward_ms)
        yield f"| {row.model} | {row.batch} x {row.seq:,} | {forward} | {reached:.0f} | {backward} |"


def _milliseconds(predicted_s: float, measured_ms: float) -> str:
    return f"{predicted_s * 1e3:.1f} ms | {measured_ms:.1f} ms | {predicted_s * 1e3 / measured_ms - 1:+.0%}"


def _compared(published: Published) -> Iterator[str]:
    """Yield another system's runs next to our plans of the same steps."""
    yield """RoundPipe next to our plan for the same step and machine. The plan does not predict RoundPipe, which moves activations
from GPU to GPU and uploads fp16 weights, each to one GPU at a time. It updates one step late by default, or synchronously
(`waiting`). Plans have the kernels that `plan` chooses, and one sum group per GPU. `resident`: all state on the devices,
sharded, with a plan's kernels and micro-batch (`planner/predict/resident.py`). It only recomputes for lack of memory, unlike
the `fsdp` above, which had plain modules and recomputed all.

| machine | model | sequences | GPUs | RoundPipe | waiting | planned | gap | binding | resident |
|---|---|---:|---:|---:|---:|---:|---:|---|---:|"""
    ratios: dict[str, list[float]] = {}
    for row in published.pipelines:
        plan = _planned(row, machine_of(row.machine) if row.machine == A800 else read_profile(row.machine))
        yield pipeline_row(row, plan)
        if plan is not None and row.synchronous_tokens_per_s is not None:
            ratios.setdefault(row.machine, []).append(plan.tokens_per_s / row.synchronous_tokens_per_s)
    text = " and ".join(f"{min(values):.2f} to {max(values):.2f} times on `{name}`" for name, values in ratios.items())
    yield ""
    yield f"The plan reaches {text} the speed of RoundPipe when waiting. On the RTX"
    yield "4090 its products are the faster ones; on the A800 they are not, and ours is a prediction without a run."


def _planned(row: PublishedPipeline, machine: Profile) -> Planned | None:
    """Return our plan of the step, or None if it does not fit."""
    try:
        return penstock.plan(row.model, machine, seq_len=row.seq, batch_size=row.batch, sum_groups=row.gpus, gpus=row.gpus)
    except DoesNotFitError:
        return None


def published_cells(row: PublishedPipeline) -> str:
    """Format the start of a row, which does not depend on a plan."""
    waiting = "" if row.synchronous_tokens_per_s is None else f"{row.synchronous_tokens_per_s:,.0f}"
    return f"| {row.machine} | {row.model} | {row.batch} x {row.seq:,} | {row.gpus} | {row.tokens_per_s:,.0f} | {waiting} |"


def pipeline_row(row: PublishedPipeline, planned: Planned | None) -> str:
    """Format a run and our plan."""
    if planned is None:
        return f"{published_cells(row)} does not fit | | | |"
    held = planned.answer.resident
    resident_s = None if held is None else held.step_s
    resident = "does not fit" if resident_s is None else f"{planned.tokens_per_s * planned.step_s / resident_s:,.0f}"
    proof = planned.certificate
    cells = [f"{planned.tokens_per_s:,.0f}", f"{proof.gap_fraction:.1%}", str(proof.binding), resident]
    return f"{published_cells(row)} {' | '.join(cells)} |"
