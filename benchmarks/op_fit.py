"""Fit of the profiles' cost laws to published measurements of single ops.

Laws (`hwprofiles/op_laws.py`) are fitted to the `fit` rows of `benchmarks/published_ops.csv`, per architecture: curve shapes belong
to an architecture, rates to a GPU. Least squares over logarithms with a robust loss and a prior on each constant.
`benchmarks/op_profiles.py` converts the results to profiles.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from scipy.optimize import least_squares

from benchmarks.published.gpus import GPUS
from benchmarks.published.op_costs import block_of
from benchmarks.published.op_rows import OpRow, read_ops
from penstock.hwprofiles.components import BACKWARD_ATTENTION, Collective
from penstock.hwprofiles.op_laws import CollectiveLaw, PassLaw, ProductLaw
from penstock.hwprofiles.quantity import Quantity
from penstock.hwprofiles.schema import read_profile, shipped_profiles

ROWS = Path(__file__).with_name("published_ops.csv")
TOLERANCE = 0.04  # trusted difference of logarithms of a row; the loss flattens beyond
N_FOLDS = 4  # of shape classes, for cross-validation
COVERED = 0.8  # share of errors within a spread
LEAST_SPREAD = 0.02
FEW, FEW_SPREAD = 8, 0.12  # least number of held-out errors to use alone; least spread with fewer
BF16 = 2
SEARCHED = "best shape of a search"  # of hundreds: not typical products

Values = Mapping[str, float]
Groups = Mapping[str, Sequence[OpRow]]  # machine -> rows
Fit = Callable[[Groups], dict[str, dict[str, float]]]
Seconds = Callable[[str, Values, OpRow], float]  # (machine, constants, row) -> seconds by a law


# ---- fitting


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant to fit: prior, and standard deviation of its logarithm."""

    name: str
    prior: float
    deviation: float
    least: float = 0.0
    upper: float = math.inf


def fitted(
    groups: Groups, per_machine: Callable[[str], Sequence[Constant]], shared: Sequence[Constant], seconds: Seconds
) -> dict[str, dict[str, float]]:
    """Return constants by machine, both per-machine and shared ones."""
    names = [(machine, c) for machine in groups for c in per_machine(machine)] + [("", c) for c in shared]

    def values(steps: Sequence[float]) -> dict[str, dict[str, float]]:
        result: dict[str, dict[str, float]] = {machine: {} for machine in ("", *groups)}
        for (machine, c), step in zip(names, steps, strict=True):
            result[machine][c.name] = min(c.upper, max(c.least, c.prior * math.exp(step)))
        return {machine: result[""] | result[machine] for machine in groups}

    @lru_cache(maxsize=2 * len(groups))  # a step in one machine's constant leaves the errors of others cached
    def errors(machine: str, v: tuple[tuple[str, float], ...]) -> list[float]:
        return [error / TOLERANCE for error in errors_of(machine, dict(v), groups[machine], seconds)]

    def residuals(steps: Sequence[float]) -> list[float]:
        constants = values(steps)
        off = [error for machine in groups for error in errors(machine, (*constants[machine].items(),))]
        return [*off, *(step / c.deviation for (_, c), step in zip(names, steps, strict=True))]

    solved = least_squares(residuals, [0.0] * len(names), loss="soft_l1", diff_step=1e-3, max_nfev=200)
    return values([float(x) for x in solved.x])


def errors_of(machine: str, v: Values, rows: Iterable[OpRow], seconds: Seconds) -> list[float]:
    """Return logarithms of predicted over measured time."""
    return [math.log(seconds(machine, v, row) / row.value) for row in rows]


@dataclass(frozen=True, slots=True)
class FitResult:
    """Constants of a law by machine, and cross-validation errors: predictions without a row's shape class."""

    values: dict[str, dict[str, float]]
    rows: Groups
    errors: dict[str, list[float]]

    @staticmethod
    def validated(groups: Groups, fit: Fit, seconds: Seconds) -> "FitResult":
        errors: dict[str, list[float]] = {machine: [] for machine in groups}
        for fold in range(N_FOLDS):
            training = {m: [row for row in rows if fold_of(row) != fold] for m, rows in groups.items()}
            result = fit({m: rows for m, rows in training.items() if rows})
            for machine in result:
                left_out = [row for row in groups[machine] if fold_of(row) == fold]
                errors[machine] += errors_of(machine, result[machine], left_out, seconds)
        return FitResult(fit(groups), groups, errors)

    def spread(self, machine: str) -> float:
        """Return the spread of a machine's rates; with few rows, of all machines in the fit."""
        rows, errors = self.rows[machine], self.errors[machine]
        if len(errors) >= FEW:
            return spread_of(errors, rows)
        pooled = [error for group in self.errors.values() for error in group]
        return max(spread_of(pooled, rows), 0.0 if len(pooled) >= FEW else FEW_SPREAD)

    def words(self, machine: str, subject: str) -> str:
        """Describe the fit: its rows, held-out error, and a digest of the rows."""
        rows, errors = self.rows[machine], [abs(math.expm1(error)) for error in self.errors[machine]]
        off = f", off by {statistics.median(errors):.1%} in the median where left out" if len(errors) >= N_FOLDS else ""
        return f"{subject} fitted to {counted_sets(rows)}{off} (docs/ops.md; rows {digest_of(rows)})"


def fold_of(row: OpRow) -> int:
    return int.from_bytes(hashlib.sha256(f"fold {row.shape_class}".encode()).digest(), "big") % N_FOLDS


def spread_of(errors: Sequence[float], rows: Sequence[OpRow]) -> float:
    """Return the bound on 80 % of the errors, and at least half of the median difference between software versions."""
    versions = [math.log(row.high / row.low) / 2 for row in rows if row.low and row.high and row.high > row.low]
    ordered = sorted(map(abs, errors))
    within = ordered[math.ceil(COVERED * len(ordered)) - 1] if ordered else 0.0
    return max(LEAST_SPREAD, math.expm1(max(within, statistics.median(versions) if versions else 0.0)))


@cache
def rows_to_fit() -> tuple[OpRow, ...]:
    """Return rows to fit: trusted ones, without best-of-search results."""
    rows = read_ops(str(ROWS), frozenset(shipped_profiles()))
    return tuple(row for row in rows if row.share == "fit" and row.trust < 3 and row.kernel != SEARCHED)


def rows_of(kind: str, kernels: Collection[str] | None = None) -> dict[str, list[OpRow]]:
    """Return rows of a kind, and of these kernels, by machine."""
    groups: dict[str, list[OpRow]] = {}
    for row in rows_to_fit():
        if row.kind == kind and (kernels is None or row.kernel in kernels):
            groups.setdefault(row.machine, []).append(row)
    return groups


def counted_sets(rows: Iterable[OpRow]) -> str:
    """Return for example `48 rows of aiconfigurator, 28 of llmservingsim`."""
    names = [row.set for row in rows]
    counts = [f"{names.count(name)} {'row' if names.count(name) == 1 else 'rows'} of {name}" for name in sorted(set(names))]
    return ", ".join(counts)


def digest_of(rows: Iterable[OpRow]) -> str:
    """Return a digest of rows, stored in the source of a profile."""
    text = "\n".join(sorted(f"{r.machine} {r.kind} {r.kernel} {r.shape} {r.set} {r.value!r}" for r in rows))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def by_architecture(groups: Groups) -> Iterator[Groups]:
    """Yield the GPUs with rows, grouped by architecture."""
    for architecture in dict.fromkeys(gpu.architecture for gpu in GPUS.values()):
        if group := {m: rows for m, rows in groups.items() if m in GPUS and GPUS[m].architecture == architecture}:
            yield group


def _rate(value: float) -> Quantity:
    return Quantity.model_construct(value=value, spread_fraction=0.0, source="")


@cache
def memory_of(machine: str) -> float:
    """Return a device's memory bandwidth from its profile, in bytes per second."""
    return read_profile(machine).device.memory_bytes_per_s.value


# ---- products

PRODUCT = ("short_k", "reload", "rounding", "split_s", "memory_fraction", "overlap", "heat")


def product_law(machine: str, v: Values) -> ProductLaw:
    names = {name: v[name] for name in PRODUCT}
    n = GPUS[machine].n_processors
    return ProductLaw.model_construct(flop_per_s=_rate(v["flop_per_s"]), n_processors=n, m=(1, 2), width=(1, 2), **names)


def product_s(machine: str, v: Values, row: OpRow) -> float:
    d = row.sizes
    law_s = product_law(machine, v).seconds(d["m"], d["k"], d["n"], BF16, memory_of(machine))
    return law_s + v["kernel_overhead_s"]


def fit_products(groups: Groups) -> dict[str, dict[str, float]]:
    def per_machine(machine: str) -> list[Constant]:
        best = max(2 * r.sizes["m"] * r.sizes["k"] * r.sizes["n"] / r.value for r in groups[machine])
        rate = Constant("flop_per_s", 1.2 * best, 1.0)
        return [rate, Constant("heat", 0.005, 1.0, upper=0.2), Constant("kernel_overhead_s", 2e-6, 0.7)]

    shared = [
        Constant("short_k", 100.0, 1.0), Constant("reload", 0.3, 1.0), Constant("rounding", 0.67, 1.0, upper=1.0),
        Constant("split_s", 1e-6, 1.5), Constant("overlap", 4.0, 1.0, 1.0, 100.0), Constant("memory_fraction", 0.95, 0.3),
    ]  # fmt: skip
    return fitted(groups, per_machine, shared, product_s)


@cache
def products() -> dict[str, FitResult]:
    """Fit products per architecture. Return the fit of each GPU."""
    fits = [(group, FitResult.validated(group, fit_products, product_s)) for group in by_architecture(rows_of("matmul"))]
    return {m: result for group, result in fits for m in group}


def overhead_of(machine: str) -> float:
    """Return the launch time of a kernel in seconds."""
    measured = machine if machine in products() else GPUS[machine].like or machine
    return products()[measured].values[measured]["kernel_overhead_s"]


def large_rate(machine: str) -> float:
    """Return FLOP/s of the 8192-cubed product, for comparisons of GPUs."""
    if (rate := GPUS[machine].flop_per_s) is not None:
        return rate
    law = product_law(machine, products()[machine].values[machine])
    return 2 * 8192**3 / law.seconds(8192, 8192, 8192, BF16, memory_of(machine))


def scaled_spread(architecture: str) -> float:
    """Return the error of another GPU's law, scaled to the rate of large products, over all pairs of measured GPUs of the
    architecture, or of any architecture for a single GPU."""
    pairs = [(a, b) for a in products() for b in products() if a != b and GPUS[a].architecture == GPUS[b].architecture]
    errors: list[float] = []
    for measured, source in [pair for pair in pairs if GPUS[pair[0]].architecture == architecture] or pairs:
        v = products()[source].values[source]
        scaled = v | {"flop_per_s": v["flop_per_s"] * large_rate(measured) / large_rate(source)}
        errors += errors_of(measured, scaled, products()[measured].rows[measured], product_s)
    return spread_of(errors, [])


# ---- attention

ONE_CODE = ("flash",)  # kernels with the same code on all architectures
PASS = ("short_tokens", "unmasked", "narrow", "grouped", "paged_passes")


def pass_law(v: Values) -> PassLaw:
    return PassLaw.model_construct(flop_per_s=_rate(v["flop_per_s"]), **{name: v[name] for name in PASS})


def flop_of(row: OpRow) -> float:
    """Return FLOP of an attention call: the causal half if masked; 2.5 times the forward for a backward."""
    d = row.sizes
    n_pairs = d["seq"] * (d["seq"] + 1) / 2 if d.get("causal", 1) else d["seq"] ** 2
    return 4 * d["batch"] * d["heads"] * d["head_dim"] * n_pairs * (BACKWARD_ATTENTION if row.kind == "attention_backward" else 1.0)


def attention_s(machine: str, v: Values, row: OpRow) -> float:
    d = row.sizes
    rate = pass_law(v).rate(d["seq"], d["head_dim"], d["kv_heads"] < d["heads"], bool(d.get("causal", 1)))
    if row.kernel.endswith("-deterministic") and row.kind == "attention_backward":
        rate *= v["deterministic_fraction"]
    kv_bytes = 2 * d["batch"] * d["kv_heads"] * d["head_dim"] * d["seq"] * BF16
    cached_s = v["paged_passes"] * kv_bytes / memory_of(machine) if row.is_paged else 0.0
    return flop_of(row) / rate + cached_s + overhead_of(machine)


def fit_attention(groups: Groups) -> dict[str, dict[str, float]]:
    def per_machine(machine: str) -> list[Constant]:
        return [Constant("flop_per_s", 1.15 * max(flop_of(row) / row.value for row in groups[machine]), 0.5)]

    shared = [
        Constant("short_tokens", 350.0, 0.5), Constant("unmasked", 0.3, 0.5, upper=1.0), Constant("narrow", 0.85, 0.2),
        Constant("grouped", 1.0, 0.05), Constant("deterministic_fraction", 0.8, 0.5, upper=1.0), Constant("paged_passes", 1.8, 0.3),
    ]  # fmt: skip
    return fitted(groups, per_machine, shared, attention_s)


def attention(kernel: str, way: str) -> dict[str, FitResult]:
    """Fit a kernel per architecture, or jointly if all run the same code. Return the fit of each GPU. `way`: forward or
    backward."""
    groups = rows_of(f"attention_{way}", (kernel, f"{kernel}-deterministic"))
    partitions = [groups] if kernel in ONE_CODE else by_architecture(groups)
    return {m: result for group in partitions for result in [FitResult.validated(group, fit_attention, attention_s)] for m in group}


# ---- norms, eager modules, memory

PIECES = ("rms_norm", "rope", "swiglu")  # of a layer, with one rate for their eager modules
LARGE_BYTES = 150e6  # larger than any cache


def moved_bytes(row: OpRow) -> float:
    """Return the bytes that the cost model counts for a piece of a layer. Backward: twice the forward."""
    return block_of(row).pointwise_bytes * (2.0 if row.kind.endswith("_backward") else 1.0)


def pointwise_s(machine: str, v: Values, row: OpRow) -> float:
    """`share`: of memory bandwidth; `factor`: deviation of one GPU."""
    n_kernels = block_of(row).n_kernels * (2 if row.kind.endswith("_backward") else 1)
    return moved_bytes(row) / (v["share"] * v["factor"] * memory_of(machine)) + n_kernels * overhead_of(machine)


def fit_pointwise(groups: Groups) -> dict[str, dict[str, float]]:
    return fitted(groups, lambda machine: [Constant("factor", 1.0, 0.2)], [Constant("share", 0.7, 1.0)], pointwise_s)


def norms(kernel: str, way: str) -> FitResult:
    """Fit the rates of RMS norms in one kernel."""
    return FitResult.validated(rows_of(f"rms_norm_{way}", (kernel,)), fit_pointwise, pointwise_s)


def bytes_per_s(result: FitResult, machine: str) -> float:
    v = result.values[machine]
    return v["share"] * v["factor"] * memory_of(machine)


def eager_rates() -> dict[str, tuple[float, list[OpRow]]]:
    """Return by GPU the mean rate of eager modules over pieces of a layer and directions, and the rows."""
    results: dict[str, tuple[float, list[OpRow]]] = {}
    for machine in GPUS:
        kinds = (rows_of(f"{piece}_{way}", ("eager",)).get(machine) for piece in PIECES for way in ("forward", "backward"))
        known = [rows for rows in kinds if rows]
        rates = [bytes_per_s(FitResult(fit_pointwise({machine: rows}), {}, {}), machine) for rows in known]
        if rates:
            results[machine] = statistics.geometric_mean(rates), [row for rows in known for row in rows]
    return results


def memory_rates() -> dict[str, tuple[float, list[OpRow]]]:
    """Return by GPU the median memory bandwidth of device copies and pure copy kernels beyond cache size, and the rows."""
    results = {}
    for machine in GPUS:
        moved = [(row.value, row) for row in rows_of("device_copy").get(machine, [])]
        for kind, kernel in (("swiglu_forward", "triton-fused"), ("add_forward", "torch")):
            rows = rows_of(kind, (kernel,)).get(machine, [])
            moved += [(moved_bytes(row) / row.value, row) for row in rows if moved_bytes(row) >= LARGE_BYTES]
        if moved:
            results[machine] = statistics.median(rate for rate, _ in moved), [row for _, row in moved]
    return results


# ---- collectives

JOINED = {  # interconnect -> machines
    "NVLink 3": ("a100-sxm",), "NVLink 4": ("8xh100", "h200-pcie5"), "NVLink 5": ("b200", "gb200", "gb300"),
    "PCIe of L40S": ("l40s-server",), "PCIe of RTX PRO 6000": ("rtxpro6000-workstation",),
}  # fmt: skip
EQUAL_COST: dict[str, tuple[Collective, ...]] = {
    "ring": ("all_gather", "reduce_scatter"), "all_reduce": ("all_reduce",), "alltoall": ("alltoall",),
}  # fmt: skip
COLLECTIVE = ("growth", "fill_s", "fill_bytes", "fill_growth", "crowding", "here")


def collective_s(machine: str, v: Values, row: OpRow) -> float:
    names = {name: v[name] for name in COLLECTIVE}
    law = CollectiveLaw.model_construct(latency_s=_rate(v["latency_s"]), bytes_per_s=_rate(v["bytes_per_s"]), **names)
    n = row.sizes["gpus"]
    return law.latency_of(n) + law.moving_s(n, row.sizes["bytes"])


def fit_collectives(groups: Groups) -> dict[str, dict[str, float]]:
    def per_machine(machine: str) -> list[Constant]:
        large = [row for row in groups[machine] if row.sizes["bytes"] >= 2**26] or groups[machine]
        return [Constant("bytes_per_s", max(row.sizes["bytes"] / row.value for row in large), 1.0)]

    crowded = bool({*groups} & {*JOINED["PCIe of L40S"], *JOINED["PCIe of RTX PRO 6000"]})
    shared = [
        Constant("latency_s", 1e-5, 0.5), Constant("growth", 0.05, 1.0), Constant("fill_s", 1.5e-5, 1.0),
        Constant("fill_bytes", 8 * 2**20, 0.7), Constant("fill_growth", 1.0, 0.5), Constant("here", 0.4, 1.5),
        Constant("crowding", 0.3 if crowded else 1e-4, 1.0),
    ]  # fmt: skip
    return fitted(groups, per_machine, shared, collective_s)


def collectives() -> dict[str, dict[str, FitResult]]:
    """Fit collectives. Return fits by interconnect, and by groups of collectives with equal cost."""
    results: dict[str, dict[str, FitResult]] = {}
    for joined, machines in JOINED.items():
        for name, kinds in EQUAL_COST.items():
            rows = rows_of("collective", [f"nccl-{kind}" for kind in kinds])
            group = {m: rows[m] for m in machines if m in rows}
            results.setdefault(joined, {})[name] = FitResult.validated(group, fit_collectives, collective_s)
    return results
