"""Profiles rebuilt from the fitted laws.

    python -m benchmarks.op_profiles            # print the laws of products
    python -m benchmarks.op_profiles --write    # all laws, into hwprofiles/profiles; then: python benchmarks/ledger.py RUNS --write

Each shipped GPU profile gets the laws of `benchmarks/op_fit.py`: from its rows, or from the nearest GPU of its architecture, scaled
to a rate from datasheets or single measurements. Each source names its data and device. Half a minute of one core.
"""

import argparse
import json
import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.op_fit import (
    COLLECTIVE,
    EQUAL_COST,
    JOINED,
    PASS,
    PRODUCT,
    FitResult,
    attention,
    bytes_per_s,
    collectives,
    counted_sets,
    digest_of,
    eager_rates,
    large_rate,
    memory_rates,
    norms,
    products,
    scaled_spread,
)
from benchmarks.published.gpus import GPUS
from benchmarks.published.op_rows import OpRow
from benchmarks.run_fit import STAGES
from penstock.cli.outputs import json_text
from penstock.hwprofiles.quantity import SourceKind
from penstock.hwprofiles.schema import FOLDER, Profile, read_profile

SAME_GPU = {
    "h100-sxm": ("8xh100",), "h200-pcie5": ("8xh200",), "b200": ("8xb200",), "rtx3090-desktop": ("2xrtx3090",),
    "rtx4090-server": ("8xrtx4090", "2xrtx4090", "rtx4090-desktop", "rtx4090-threadripper"),
}  # fmt: skip
AS_JOINED = {"h100-sxm": "NVLink 4", "8xh200": "NVLink 4", "8xb200": "NVLink 5", "a100-40gb": "NVLink 3"}  # without own rows
MEMORY_LIKE = {"rtx5090-desktop": "rtx5090-server", "rtx5090-threadripper": "rtx5090-server"}
KERNELS = ("flash", "cudnn", "fa3", "aiter")
ONLY_MEASURED = ("fa3", "aiter")  # kernels that plans never choose: only for GPUs with rows
# Substitutes for architectures without published torch attention in both directions
STANDING = {"Blackwell GeForce": "Ada", "Blackwell": "Hopper", "Ampere": "Hopper", "CDNA": "Hopper"}
ATTENTION_SPREAD, NORM_SPREAD, EAGER_SPREAD, MEMORY_SPREAD = 0.25, 0.4, 0.25, 0.05  # of values from other GPUs
OVERHEAD_SPREAD, ORDER_SPREAD = 0.5, 0.1
EAGER_SHARE = 0.65  # of memory bandwidth: between 0.58 (single modules on A100 and H100) and 0.7 to 0.76 (runs)
WIDEST = 3.0  # of exchanges through a host: the spread between hosts of one card

# Rate of products in a step relative to a burst, by architecture; runs give it for some GPUs (`benchmarks/run_fit.py`).
AS_HOPPER = "as on Hopper, whose clocks fall under load, too; nobody published a step of this architecture"
AS_ISOLATED = "whole MLPs run at the rate of isolated products (Liger-Kernel's benchmarks)"
SUSTAINED: dict[str, tuple[float, float, SourceKind, str | None, str]] = {
    "Ampere": (1.0, 0.04, "published", "a100-sxm", AS_ISOLATED),
    "Ada": (1.0, 0.04, "published", "rtx4090-server", AS_ISOLATED),
    "Hopper": (0.96, 0.04, "fitted", "h100-sxm", "power under load, as runs say of H100 and GH200 (docs/accuracy.md)"),
    "Blackwell": (0.96, 0.06, "assumed", None, AS_HOPPER),
    "Blackwell GeForce": (0.96, 0.06, "assumed", None, AS_HOPPER),
    "CDNA": (1.0, 0.06, "assumed", None, "not told apart from the rate of its products, which runs give"),
}
BY_RUNS = {(c.owner, c.key) for stage in STAGES.values() for c in stage.constants}

Fields = dict[str, Any]


@cache
def device_of(machine: str) -> str:
    return read_profile(machine).device.name


def source(kind: SourceKind, detail: str, machine: str | None = None, scaled: bool = False) -> Fields:
    """Return the fields of a source. `machine`: the measured device."""
    device = None if machine is None else device_of(machine)
    fields: Fields = {"kind": kind, "detail": detail, "date": None, "device": device, "driver": None}
    return fields | ({"scaled": True} if scaled else {})


def quantity(value: float, spread_fraction: float, key: str) -> Fields:
    return {"value": rounded(value), "spread_fraction": float(f"{spread_fraction:.2g}"), "source": key}


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def nearest(gpu: str, measured: Collection[str], kernel: str) -> str | None:
    """Return the GPU with the law to use: itself, its `like`, or the one of its architecture with the nearest products. For torch's
    attention, which every GPU has, another architecture is accepted."""
    if gpu in measured or (like := GPUS[gpu].like) in measured:
        return gpu if gpu in measured else like
    candidates = [m for m in measured if GPUS[m].architecture == GPUS[gpu].architecture]
    if not candidates and kernel == "flash":
        candidates = [m for m in measured if GPUS[m].architecture == STANDING.get(GPUS[gpu].architecture)]
    return min(candidates, key=lambda m: abs(math.log(large_rate(m) / large_rate(gpu))), default=None)


@dataclass(slots=True)
class Writing:
    """Fields of a profile under construction. `gpu`: the machine with the rows of its device."""

    machine: str
    gpu: str
    fields: Fields

    @property
    def device(self) -> Fields:
        return self.fields["device"]  # type: ignore[no-any-return]

    def put(self, key: str, fields: Fields) -> str:
        """Store a source and return its key."""
        self.fields["sources"][key] = fields
        return key

    def memory(self, rates: Mapping[str, tuple[float, list[OpRow]]]) -> None:
        gpu = MEMORY_LIKE.get(self.gpu, self.gpu)
        if gpu in rates:
            rate, rows = rates[gpu]
            detail = f"copies on the device and kernels that only move: {counted_sets(rows)} (docs/ops.md; rows {digest_of(rows)})"
            self.device["memory_bytes_per_s"] = quantity(rate, MEMORY_SPREAD, self.put("ops_memory", source("fitted", detail, gpu)))

    def products(self) -> None:
        gpu = GPUS[self.gpu]
        base = gpu.like or self.gpu
        result, v = products()[base], products()[base].values[base]
        factor = large_rate(self.gpu) / large_rate(base)
        if gpu.like is None:
            fields, spread = source("fitted", result.words(base, "a law of bf16 products"), base), result.spread(base)
        else:
            detail = (
                f"the law of bf16 products of {base}, with this device's multiprocessors and memory, scaled to "
                f"{large_rate(self.gpu) / 1e12:.4g} TFLOP/s at 8192 cubed ({gpu.why}); nobody published other sizes"
            )
            fields = source("fitted", detail, base, scaled=True)
            spread = math.hypot(scaled_spread(gpu.architecture), gpu.spread_fraction)
        key = self.put("ops_products", fields)
        sizes = [row.sizes for row in result.rows[base]]
        widths = [round(math.sqrt(d["k"] * d["n"])) for d in sizes]
        self.device["matmul"]["bf16"] = {
            "flop_per_s": quantity(v["flop_per_s"] * factor, spread, key),
            "n_processors": gpu.n_processors,
            **{name: rounded(v[name]) for name in PRODUCT},
            "m": [min(d["m"] for d in sizes), max(d["m"] for d in sizes)],
            "width": [min(widths), max(widths)],
        }
        self.device["kernel_overhead_s"] = quantity(v["kernel_overhead_s"], OVERHEAD_SPREAD, key)

    def attention(self, kernel: str, results: Mapping[str, Mapping[str, FitResult]]) -> None:
        """Add the law of a kernel in both directions, unless it was not measured on this architecture."""
        ats = {way: nearest(self.gpu, fits, kernel) for way, fits in results.items()}
        if None in ats.values() or (kernel in ONLY_MEASURED and self.gpu not in results["forward"]):
            return
        law: Fields = {}
        lengths: list[int] = []
        for way, gpu in ats.items():
            assert gpu is not None
            fit, v, factor = results[way][gpu], results[way][gpu].values[gpu], 1.0
            lengths += [row.sizes["seq"] for row in fit.rows[gpu]]
            if gpu == self.gpu:
                origin = source("fitted", fit.words(gpu, f"a law of {kernel} attention, {way},"), gpu)
            else:
                # Scale a backward like its forward, if that was measured
                by_forward = way == "backward" and ats["forward"] == self.gpu and gpu in results["forward"]
                factor = large_rate(self.gpu) / large_rate(gpu)
                if by_forward:
                    factor = law["forward"]["flop_per_s"]["value"] / results["forward"][gpu].values[gpu]["flop_per_s"]
                as_what = "its forward" if by_forward else "large products"
                text = f"the law of {kernel} attention of {gpu}, {way}, times {factor:.3g}, as {as_what}; nobody published its own"
                origin = source("fitted", text, gpu, scaled=True)
            key = self.put(f"ops_{kernel}_{way}", origin)
            spread = fit.spread(gpu) if gpu == self.gpu else ATTENTION_SPREAD
            law[way] = {
                "flop_per_s": quantity(v["flop_per_s"] * factor, spread, key),
                **{name: rounded(v[name]) for name in PASS if name != "paged_passes" or any(row.is_paged for row in fit.rows[gpu])},
            }
            if way == "backward" and any("deterministic" in row.kernel for rows in fit.rows.values() for row in rows):
                law["deterministic_fraction"] = quantity(v["deterministic_fraction"], ORDER_SPREAD, key)
        law["seq_len"] = [min(lengths), max(lengths)]
        self.device["attention"].setdefault(kernel, {})["bf16"] = law

    def norms(self, results: Mapping[str, Mapping[str, FitResult]]) -> None:
        """Add rates of norms by kernel. For torch's fused norm, the median of other GPUs is a fallback."""
        self.device["norms"] = {}
        for kernel, by_way in results.items():
            rates: Fields = {}
            for way, result in by_way.items():
                key = f"ops_norm_{way}"
                if self.gpu in result.values:
                    self.put(key, source("fitted", result.words(self.gpu, f"a rate of RMS norms in one kernel, {way},"), self.gpu))
                    rates[f"{way}_bytes_per_s"] = quantity(bytes_per_s(result, self.gpu), result.spread(self.gpu), key)
                elif kernel == "torch-fused":
                    share = statistics.median(v["share"] * v["factor"] for v in result.values.values())
                    names = ", ".join(result.values)
                    self.put(
                        key, source("fitted", f"{share:.2f} of the rate of memory, the median of {names}; nobody published its own")
                    )
                    rate = share * self.device["memory_bytes_per_s"]["value"]
                    rates[f"{way}_bytes_per_s"] = quantity(rate, NORM_SPREAD, key)
            if rates:
                self.device["norms"][kernel] = rates

    def eager(self, rates: Mapping[str, tuple[float, list[OpRow]]]) -> None:
        if self.gpu in rates:
            rate, rows = rates[self.gpu]
            kinds = ", ".join(sorted({row.kind for row in rows}))
            detail = f"what eager modules reach, the mean over {kinds}: {counted_sets(rows)} (docs/ops.md; rows {digest_of(rows)})"
            fields = source("fitted", detail, self.gpu)
        else:
            rate = EAGER_SHARE * self.device["memory_bytes_per_s"]["value"]
            fields = source(
                "fitted", f"{EAGER_SHARE} of the rate of memory: single modules of A100 and H100 reach 0.58, runs 0.7 to 0.76"
            )
        self.device["eager_bytes_per_s"] = quantity(rate, EAGER_SPREAD, self.put("ops_eager", fields))

    def sustained(self) -> None:
        value, spread, kind, base, detail = SUSTAINED[GPUS[self.gpu].architecture]
        key = self.put("under_load", source(kind, detail, base, scaled=base is not None and base != self.gpu))
        self.device["sustained_fraction"] = quantity(value, spread, key)

    def collectives(self, joined: str, results: Mapping[str, FitResult]) -> None:
        laws: Fields = {}
        for name, result in results.items():
            machine = next((m for m in (self.machine, self.gpu) if m in result.values), next(iter(result.values)))
            key, v = (
                self.put(f"ops_{name}", source("fitted", result.words(machine, f"a law of NCCL's {name} over {joined}"), machine)),
                result.values[machine],
            )
            spread = result.spread(machine)
            by_host = joined.startswith("PCIe")
            law = {name: quantity(v[name], WIDEST if by_host else spread, key) for name in ("latency_s", "bytes_per_s")}
            laws |= dict.fromkeys(EQUAL_COST[name], law | {name: rounded(v[name]) for name in COLLECTIVE})
        waiting = self.put(
            "meeting", source("assumed", "ranks that come to an op wait for the last of them; nobody measured how long")
        )
        peers = self.fields.get("peers") or {"latency_s": quantity(3e-5, 0.5, waiting)}
        self.fields["peers"] = peers | {"collectives": laws} | ({"through_host": True} if joined.startswith("PCIe") else {})


def profiles() -> Iterator[tuple[str, Fields]]:
    """Yield every GPU profile with its laws."""
    ways = ("forward", "backward")
    of_attention = {kernel: {way: attention(kernel, way) for way in ways} for kernel in KERNELS}
    of_norms = {kernel: {way: norms(kernel, way) for way in ways} for kernel in ("torch-fused", "torch-compile")}
    eager, memory, joining = eager_rates(), memory_rates(), collectives()
    joined = {machine: name for name, machines in JOINED.items() for machine in machines} | AS_JOINED
    for gpu in GPUS:
        for machine in (gpu, *SAME_GPU.get(gpu, ())):
            writing = Writing(machine, gpu, json.loads((FOLDER / f"{machine}.json").read_text()))
            writing.memory(memory)
            writing.products()
            for kernel, results in of_attention.items():
                writing.attention(kernel, results)
            writing.norms(of_norms)
            if (gpu, "eager") not in BY_RUNS:
                writing.eager(eager)
            if (gpu, "sustained") not in BY_RUNS:
                writing.sustained()
            if machine in joined:
                writing.collectives(joined[machine], joining[joined[machine]])
            yield machine, without_unused(writing.fields)


def without_unused(fields: Fields) -> Fields:
    """Drop sources that no quantity names."""
    used = {quantity.source for _, quantity in Profile.from_json(fields).quantities()}
    return fields | {"sources": {key: entry for key, entry in fields["sources"].items() if key in used}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="Put the laws into the shipped profiles.")
    arguments = parser.parse_args()
    for machine, fields in list(profiles()):
        if arguments.write:
            (FOLDER / f"{machine}.json").write_text(json_text(Profile.from_json(fields, machine).to_json()), encoding="utf-8")
        law, kernels = fields["device"]["matmul"]["bf16"], ", ".join(fields["device"]["attention"])
        print(f"{machine:24} products {law['flop_per_s']['value']:.4g} FLOP/s, attention {kernels}")


if __name__ == "__main__":
    main()
