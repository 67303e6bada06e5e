"""Fit of the profiles' cost laws to published measurements of single ops.

Laws (`hwprofiles/op_laws.py`) are fitted to the rows of `benchmarks/published_ops.csv` that are marked `fit`, those of one
architecture together: shapes of curves are an architecture's, rates a GPU's. Least squares over logarithms with a robust loss,
each constant held by what is believed of it. What `benchmarks/op_profiles.py` makes of them is what profiles hold.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from scipy.optimize import least_squares

from benchmarks.published.op_costs import block_of
from benchmarks.published.op_rows import OpRow, read_ops
from penstock.hwprofiles.op_laws import CollectiveLaw, PassLaw, ProductLaw
from penstock.hwprofiles.quantity import Quantity
from penstock.hwprofiles.schema import BACKWARD_ATTENTION, Collective, read_profile, shipped_profiles

ROWS = Path(__file__).with_name("published_ops.csv")
TOLERANCE = 0.04  # a difference of logarithms that a row is trusted to, beyond which the loss grows slowly
N_FOLDS = 4  # of shape classes, each left out once
COVERED = 0.8  # of errors that a spread covers
LEAST_SPREAD = 0.02
FEW, FEW_SPREAD = 8, 0.12  # errors of rows left out, below which others' count too; and the least spread where those are few
BF16 = 2
SEARCHED = "best shape of a search"  # of hundreds: no row of products as they come

Values = Mapping[str, float]
Groups = Mapping[str, Sequence[OpRow]]  # rows by machine
Fit = Callable[[Groups], dict[str, dict[str, float]]]
Seconds = Callable[[str, Values, OpRow], float]  # of a row on a machine, by a law with these constants


@dataclass(frozen=True, slots=True)
class Gpu:
    """What datasheets say of a GPU that a law needs; of one without rows, whose law it has, and the rate that it is scaled to."""

    architecture: str
    n_processors: int
    like: str | None = None  # the measured GPU whose law it has
    flop_per_s: float | None = None  # of the 8192-cubed product in bf16
    spread_fraction: float = 0.0  # of that rate
    why: str = ""


MAMF = "maximum achievable matmul, stas00/ml-engineering"
ON_5090 = "224 TFLOP/s over (16384, 1280) @ (1280, 8192), main-horse.github.io/posts/5090-mm-perf"
GPUS: dict[str, Gpu] = {
    "a100-sxm": Gpu("Ampere", 108),
    "a100-pcie": Gpu("Ampere", 108, "a100-sxm", 242e12, 0.06, f"{MAMF}: 252.9 TFLOP/s against 271.2 of the SXM module"),
    **dict.fromkeys(
        ("rtx3090-desktop", "rtx3090-epyc", "rtx3090-threadripper"),
        Gpu("Ampere", 82, "a100-sxm", 65e12, 0.1, "71 TFLOP/s in bf16 with fp32 sums by datasheet, of which 0.92 is taken"),
    ),
    "rtxa6000-threadripper": Gpu("Ampere", 84, "a100-sxm", 114e12, 0.15, "155 TFLOP/s in bf16 by datasheet, under 300 W"),
    "l40s-server": Gpu("Ada", 142),
    "rtx4090-server": Gpu("Ada", 128),
    "h100-sxm": Gpu("Hopper", 132),
    "h200-pcie5": Gpu("Hopper", 132),
    "gh200": Gpu("Hopper", 132, "h100-sxm", 755e12, 0.06, f"{MAMF}: 828.6 TFLOP/s at 900 W against 794.5 of H100 SXM"),
    "h100-nvl": Gpu("Hopper", 132, "h100-sxm", 585e12, 0.12, "835 TFLOP/s by datasheet, under 400 W"),
    "h100-pcie": Gpu("Hopper", 114, "h100-sxm", 484e12, 0.12, "114 multiprocessors of 132, and 350 W"),
    "b200": Gpu("Blackwell", 148),
    "gb200": Gpu("Blackwell", 152),
    "gb300": Gpu("Blackwell", 152),
    "rtxpro6000-workstation": Gpu("Blackwell GeForce", 188),
    **dict.fromkeys(
        ("rtx5090-desktop", "rtx5090-server", "rtx5090-threadripper"),
        Gpu("Blackwell GeForce", 170, "rtxpro6000-workstation", 224e12, 0.1, ON_5090),
    ),
    "gb10": Gpu("Blackwell GeForce", 48, "rtxpro6000-workstation", 103e12, 0.15, "from runs, docs/accuracy.md"),
    "mi300x": Gpu("CDNA", 304),
    "mi355x": Gpu("CDNA", 256),
}


# ---- fitting


@dataclass(frozen=True, slots=True)
class Constant:
    """Something to fit: where it is believed to be, and how surely, as a standard deviation of its logarithm."""

    name: str
    prior: float
    deviation: float
    least: float = 0.0
    most: float = math.inf


def fitted(
    groups: Groups, own: Callable[[str], Sequence[Constant]], shared: Sequence[Constant], seconds: Seconds
) -> dict[str, dict[str, float]]:
    """Constants by machine: its own, and those that all share."""
    names = [(machine, c) for machine in groups for c in own(machine)] + [("", c) for c in shared]

    def values(steps: Sequence[float]) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {machine: {} for machine in ("", *groups)}
        for (machine, c), step in zip(names, steps, strict=True):
            found[machine][c.name] = min(c.most, max(c.least, c.prior * math.exp(step)))
        return {machine: found[""] | found[machine] for machine in groups}

    @lru_cache(maxsize=2 * len(groups))  # differences by a constant of one machine's own leave the errors of all others
    def errors(machine: str, v: tuple[tuple[str, float], ...]) -> list[float]:
        return [error / TOLERANCE for error in errors_of(machine, dict(v), groups[machine], seconds)]

    def residuals(steps: Sequence[float]) -> list[float]:
        of = values(steps)
        off = [error for machine in groups for error in errors(machine, (*of[machine].items(),))]
        return [*off, *(step / c.deviation for (_, c), step in zip(names, steps, strict=True))]

    solved = least_squares(residuals, [0.0] * len(names), loss="soft_l1", diff_step=1e-3, max_nfev=200)
    return values([float(x) for x in solved.x])


def errors_of(machine: str, v: Values, rows: Iterable[OpRow], seconds: Seconds) -> list[float]:
    """Logarithms of predicted over measured time."""
    return [math.log(seconds(machine, v, row) / row.value) for row in rows]


@dataclass(frozen=True, slots=True)
class Found:
    """Constants of a law by machine, and how far rows are off that were left out: each predicted without its shape class."""

    values: dict[str, dict[str, float]]
    rows: Groups
    errors: dict[str, list[float]]

    @staticmethod
    def of(groups: Groups, fit: Fit, seconds: Seconds) -> "Found":
        errors: dict[str, list[float]] = {machine: [] for machine in groups}
        for fold in range(N_FOLDS):
            kept = {m: [row for row in rows if fold_of(row) != fold] for m, rows in groups.items()}
            found = fit({m: rows for m, rows in kept.items() if rows})
            for machine in found:
                left_out = [row for row in groups[machine] if fold_of(row) == fold]
                errors[machine] += errors_of(machine, found[machine], left_out, seconds)
        return Found(fit(groups), groups, errors)

    def spread(self, machine: str) -> float:
        """Of the rates of a machine; where it has few rows, of those of all that were fitted with it."""
        rows, errors = self.rows[machine], self.errors[machine]
        if len(errors) >= FEW:
            return spread_of(errors, rows)
        pooled = [error for of in self.errors.values() for error in of]
        return max(spread_of(pooled, rows), 0.0 if len(pooled) >= FEW else FEW_SPREAD)

    def words(self, machine: str, what: str) -> str:
        """What was fitted to what, how far off it is, and a mark of the very rows."""
        rows, errors = self.rows[machine], [abs(math.expm1(error)) for error in self.errors[machine]]
        off = f", off by {statistics.median(errors):.1%} in the median where left out" if len(errors) >= N_FOLDS else ""
        return f"{what} fitted to {counted_sets(rows)}{off} (docs/ops.md; rows {digest_of(rows)})"


def fold_of(row: OpRow) -> int:
    return int.from_bytes(hashlib.sha256(f"fold {row.shape_class}".encode()).digest(), "big") % N_FOLDS


def spread_of(errors: Sequence[float], rows: Sequence[OpRow]) -> float:
    """What four of five errors lie within, and no less than half of what versions of software differ by, in the median."""
    versions = [math.log(row.high / row.low) / 2 for row in rows if row.low and row.high and row.high > row.low]
    at = sorted(map(abs, errors))
    within = at[math.ceil(COVERED * len(at)) - 1] if at else 0.0
    return max(LEAST_SPREAD, math.expm1(max(within, statistics.median(versions) if versions else 0.0)))


@cache
def rows_to_fit() -> tuple[OpRow, ...]:
    """The rows that profiles may rest on: trusted ones, and no search's best."""
    rows = read_ops(str(ROWS), frozenset(shipped_profiles()))
    return tuple(row for row in rows if row.share == "fit" and row.trust < 3 and row.kernel != SEARCHED)


def rows_of(kind: str, kernels: Collection[str] | None = None) -> dict[str, list[OpRow]]:
    """By machine, the rows of a kind, and of these kernels if named."""
    found: dict[str, list[OpRow]] = {}
    for row in rows_to_fit():
        if row.kind == kind and (kernels is None or row.kernel in kernels):
            found.setdefault(row.machine, []).append(row)
    return found


def counted_sets(rows: Iterable[OpRow]) -> str:
    """`48 rows of aiconfigurator, 28 of llmservingsim`."""
    names = [row.set for row in rows]
    counts = [f"{names.count(name)} {'row' if names.count(name) == 1 else 'rows'} of {name}" for name in sorted(set(names))]
    return ", ".join(counts)


def digest_of(rows: Iterable[OpRow]) -> str:
    """Tells sets of rows apart: what a profile's source repeats of those that it rests on."""
    text = "\n".join(sorted(f"{r.machine} {r.kind} {r.kernel} {r.shape} {r.set} {r.value!r}" for r in rows))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def by_architecture(groups: Groups) -> Iterator[Groups]:
    """The GPUs with rows, those of an architecture together."""
    for architecture in dict.fromkeys(gpu.architecture for gpu in GPUS.values()):
        if of := {m: rows for m, rows in groups.items() if m in GPUS and GPUS[m].architecture == architecture}:
            yield of


def _rate(value: float) -> Quantity:
    return Quantity.model_construct(value=value, spread_fraction=0.0, source="")


@cache
def memory_of(machine: str) -> float:
    """Bytes a second of a device's memory, as its profile has it."""
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
    def own(machine: str) -> list[Constant]:
        best = max(2 * r.sizes["m"] * r.sizes["k"] * r.sizes["n"] / r.value for r in groups[machine])
        rate = Constant("flop_per_s", 1.2 * best, 1.0)
        return [rate, Constant("heat", 0.005, 1.0, most=0.2), Constant("kernel_overhead_s", 2e-6, 0.7)]

    shared = [
        Constant("short_k", 100.0, 1.0), Constant("reload", 0.3, 1.0), Constant("rounding", 0.67, 1.0, most=1.0),
        Constant("split_s", 1e-6, 1.5), Constant("overlap", 4.0, 1.0, 1.0, 100.0), Constant("memory_fraction", 0.95, 0.3),
    ]  # fmt: skip
    return fitted(groups, own, shared, product_s)


@cache
def products() -> dict[str, Found]:
    """By GPU, what was found together with its architecture."""
    return {m: found for of in by_architecture(rows_of("matmul")) for found in [Found.of(of, fit_products, product_s)] for m in of}


def overhead_of(machine: str) -> float:
    """Seconds that a kernel takes to begin."""
    at = machine if machine in products() else GPUS[machine].like or machine
    return products()[at].values[at]["kernel_overhead_s"]


def large_rate(machine: str) -> float:
    """FLOP/s of the 8192-cubed product, by which GPUs are compared."""
    if (given := GPUS[machine].flop_per_s) is not None:
        return given
    law = product_law(machine, products()[machine].values[machine])
    return 2 * 8192**3 / law.seconds(8192, 8192, 8192, BF16, memory_of(machine))


def scaled_spread(architecture: str) -> float:
    """How far another GPU's law is off once it is scaled to the right rate for large products: over all pairs of measured GPUs of
    the architecture, or of any where it has but one."""
    pairs = [(a, b) for a in products() for b in products() if a != b and GPUS[a].architecture == GPUS[b].architecture]
    errors: list[float] = []
    for measured, other in [pair for pair in pairs if GPUS[pair[0]].architecture == architecture] or pairs:
        v = products()[other].values[other]
        scaled = v | {"flop_per_s": v["flop_per_s"] * large_rate(measured) / large_rate(other)}
        errors += errors_of(measured, scaled, products()[measured].rows[measured], product_s)
    return spread_of(errors, [])


# ---- attention

ONE_CODE = ("flash",)  # kernels that are written once for all architectures
PASS = ("short_tokens", "unmasked", "narrow", "grouped", "paged_passes")


def pass_law(v: Values) -> PassLaw:
    return PassLaw.model_construct(flop_per_s=_rate(v["flop_per_s"]), **{name: v[name] for name in PASS})


def flop_of(row: OpRow) -> float:
    """Of a call of attention, the causal half where it is masked; those of a backward are 2.5 times the forward's."""
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
    def own(machine: str) -> list[Constant]:
        return [Constant("flop_per_s", 1.15 * max(flop_of(row) / row.value for row in groups[machine]), 0.5)]

    shared = [
        Constant("short_tokens", 350.0, 0.5), Constant("unmasked", 0.3, 0.5, most=1.0), Constant("narrow", 0.85, 0.2),
        Constant("grouped", 1.0, 0.05), Constant("deterministic_fraction", 0.8, 0.5, most=1.0), Constant("paged_passes", 1.8, 0.3),
    ]  # fmt: skip
    return fitted(groups, own, shared, attention_s)


def attention(kernel: str, way: str) -> dict[str, Found]:
    """By GPU, what was found of a kernel together with its architecture, or with all that run the same code; `way`: forward or
    backward."""
    groups = rows_of(f"attention_{way}", (kernel, f"{kernel}-deterministic"))
    alike = [groups] if kernel in ONE_CODE else by_architecture(groups)
    return {m: found for of in alike for found in [Found.of(of, fit_attention, attention_s)] for m in of}


# ---- norms, eager modules, memory

PIECES = ("rms_norm", "rope", "swiglu")  # of a layer, whose eager modules have one rate
LARGE_BYTES = 150e6  # that no cache keeps


def moved_bytes(row: OpRow) -> float:
    """What the cost model counts of a piece of a layer, backward twice the forward."""
    return block_of(row).pointwise_bytes * (2.0 if row.kind.endswith("_backward") else 1.0)


def pointwise_s(machine: str, v: Values, row: OpRow) -> float:
    """`share`: of the memory's rate; `factor`: by which one GPU differs from the others."""
    n_kernels = block_of(row).n_kernels * (2 if row.kind.endswith("_backward") else 1)
    return moved_bytes(row) / (v["share"] * v["factor"] * memory_of(machine)) + n_kernels * overhead_of(machine)


def fit_pointwise(groups: Groups) -> dict[str, dict[str, float]]:
    return fitted(groups, lambda machine: [Constant("factor", 1.0, 0.2)], [Constant("share", 0.7, 1.0)], pointwise_s)


def norms(kernel: str, way: str) -> Found:
    """Rates of RMS norms in one kernel."""
    return Found.of(rows_of(f"rms_norm_{way}", (kernel,)), fit_pointwise, pointwise_s)


def bytes_per_s(found: Found, machine: str) -> float:
    v = found.values[machine]
    return v["share"] * v["factor"] * memory_of(machine)


def eager_rates() -> dict[str, tuple[float, list[OpRow]]]:
    """By GPU, the mean over pieces of a layer, each way, of what their eager modules reach; and the rows."""
    found: dict[str, tuple[float, list[OpRow]]] = {}
    for machine in GPUS:
        kinds = (rows_of(f"{piece}_{way}", ("eager",)).get(machine) for piece in PIECES for way in ("forward", "backward"))
        known = [rows for rows in kinds if rows]
        rates = [bytes_per_s(Found(fit_pointwise({machine: rows}), {}, {}), machine) for rows in known]
        if rates:
            found[machine] = statistics.geometric_mean(rates), [row for rows in known for row in rows]
    return found


def memory_rates() -> dict[str, tuple[float, list[OpRow]]]:
    """By GPU, the median over copies on the device, and over kernels that only move, of what no cache keeps; and the rows."""
    found = {}
    for machine in GPUS:
        moved = [(row.value, row) for row in rows_of("device_copy").get(machine, [])]
        for kind, kernel in (("swiglu_forward", "triton-fused"), ("add_forward", "torch")):
            rows = rows_of(kind, (kernel,)).get(machine, [])
            moved += [(moved_bytes(row) / row.value, row) for row in rows if moved_bytes(row) >= LARGE_BYTES]
        if moved:
            found[machine] = statistics.median(rate for rate, _ in moved), [row for _, row in moved]
    return found


# ---- collectives

JOINED = {  # machines whose devices are joined alike
    "NVLink 3": ("a100-sxm",), "NVLink 4": ("8xh100", "h200-pcie5"), "NVLink 5": ("b200", "gb200", "gb300"),
    "PCIe of L40S": ("l40s-server",), "PCIe of RTX PRO 6000": ("rtxpro6000-workstation",),
}  # fmt: skip
ALIKE: dict[str, tuple[Collective, ...]] = {
    "ring": ("all_gather", "reduce_scatter"), "all_reduce": ("all_reduce",), "alltoall": ("alltoall",),
}  # fmt: skip
COLLECTIVE = ("growth", "fill_s", "fill_bytes", "fill_growth", "crowding", "here")


def collective_s(machine: str, v: Values, row: OpRow) -> float:
    names = {name: v[name] for name in COLLECTIVE}
    law = CollectiveLaw.model_construct(latency_s=_rate(v["latency_s"]), bytes_per_s=_rate(v["bytes_per_s"]), **names)
    n = row.sizes["gpus"]
    return law.latency_of(n) + law.moving_s(n, row.sizes["bytes"])


def fit_collectives(groups: Groups) -> dict[str, dict[str, float]]:
    def own(machine: str) -> list[Constant]:
        large = [row for row in groups[machine] if row.sizes["bytes"] >= 2**26] or groups[machine]
        return [Constant("bytes_per_s", max(row.sizes["bytes"] / row.value for row in large), 1.0)]

    crowded = bool({*groups} & {*JOINED["PCIe of L40S"], *JOINED["PCIe of RTX PRO 6000"]})
    shared = [
        Constant("latency_s", 1e-5, 0.5), Constant("growth", 0.05, 1.0), Constant("fill_s", 1.5e-5, 1.0),
        Constant("fill_bytes", 8 * 2**20, 0.7), Constant("fill_growth", 1.0, 0.5), Constant("here", 0.4, 1.5),
        Constant("crowding", 0.3 if crowded else 1e-4, 1.0),
    ]  # fmt: skip
    return fitted(groups, own, shared, collective_s)


def collectives() -> dict[str, dict[str, Found]]:
    """By what joins devices, and by collectives that take alike."""
    found: dict[str, dict[str, Found]] = {}
    for joined, machines in JOINED.items():
        for alike, kinds in ALIKE.items():
            rows = rows_of("collective", [f"nccl-{kind}" for kind in kinds])
            of = {m: rows[m] for m in machines if m in rows}
            found.setdefault(joined, {})[alike] = Found.of(of, fit_collectives, collective_s)
    return found
