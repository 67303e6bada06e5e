"""Errors of predicted single ops, by GPU and kind.

    python -m benchmarks.op_ledger > docs/ops.md

The op ledger of `benchmarks/published_ops.csv` as a page: predictions within a tenth, misses with their reasons, unmeasured ops,
and a comparison of laws with grids. Half a minute of one core.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator

from benchmarks.common import without_arguments
from benchmarks.op_fit import N_FOLDS, ROWS, FitResult, fold_of, products
from benchmarks.published.gpus import GPUS
from benchmarks.published.op_rows import OpRow
from benchmarks.published.ops import Errors, Op, OpLedger, validate_ops
from benchmarks.published.validate import quantile
from penstock.hwprofiles.curves import interpolated, rows_of
from penstock.hwprofiles.schema import read_profile, shipped_profiles
from penstock.planner.predict.provenance import standard

HOLDS_FRACTION = 0.1  # a group holds up to this median error
HOPPER_AND_ADA = ("h100-sxm", "8xh100", "h200-pcie5", "gh200", "l40s-server", "rtx4090-server")
NVLINK = ("a100-sxm", "8xh100", "h100-sxm", "h200-pcie5", "b200", "gb200", "gb300")
WHOLE_KINDS = ("layer_forward", "layer_backward", "step_compute", "model_attention_step", "model_rest_step")
# Targets on test rows: median and 90th percentile of errors.
WANTED: dict[str, tuple[Callable[[OpRow], bool], float, float]] = {
    "products": (lambda r: r.kind == "matmul" and r.kernel != "best shape of a search", 0.05, 0.15),
    "attention by cuDNN": (lambda r: r.kind.startswith("attention") and r.kernel.startswith("cudnn"), 0.08, 0.2),
    "attention by flash, Hopper and Ada": (
        lambda r: r.kind.startswith("attention") and r.kernel.startswith("flash") and r.machine in HOPPER_AND_ADA,
        0.08,
        0.2,
    ),
    "fused norms": (lambda r: r.kind.startswith("rms_norm") and r.kernel in ("torch-fused", "torch-compile"), 0.12, 0.3),
    "whole layers and steps": (lambda r: r.kind in WHOLE_KINDS, 0.05, 0.1),
    "collectives over NVLink": (lambda r: r.kind == "collective" and r.machine in NVLINK, 0.05, 0.1),
}
TEST_COVERAGE = (0.75, 0.9)  # target share of test rows within P10 to P90
STREAM = "STREAM on one host of its kind; figures of other hosts of this kind differ by the same factor"
L2 = "8 to 50 MB, mostly cached in the L2, unlike in a step"
COMPILED = "compiled norms differ by width and version, up to three times; one rate is used for all"
ALONE = "two shapes of one module alone; the rate of eager modules is that of whole runs (docs/accuracy.md)"
WHY: dict[tuple[str, str, str], str] = {
    ("h100-sxm", "layer_forward_attention", "transformers eager"): (
        "559 tokens, heads 64 wide, 0.1 ms: rows of so short sequences are few, and this one took twice their time"
    ),
    ("h100-sxm", "layer_forward", "transformers eager"): "this layer's attention, above, and its eager modules, below",
    ("h100-sxm", "layer_forward_pointwise", "transformers eager"): "width 1024: small kernels; the rate is larger models'",
    ("8xrtx4090", "host_dram", "stream triad"): "STREAM counts 24 B an element where 32 move; the profile counts 32",
    **{(machine, "host_dram", "stream triad"): STREAM for machine in ("mi355x", "gh200", "8xh100")},
    ("a100-sxm", "head_forward_backward", "eager"): (
        "three products at the best rate that this GPU ever showed leave 30 B a logit for all passes; the model counts 66, with "
        "the casts to fp32 of transformers, which the published module did not make, we suppose"
    ),
    ("a100-sxm", "rope_backward", "eager"): "counted as twice the forward; alone it took 1.2 times that",
    ("a100-sxm", "rope_forward", "eager"): "a module of 2024, which copied more than the one that the model counts",
    ("h100-sxm", "swiglu_backward", "eager"): ALONE,
    ("h100-sxm", "swiglu_backward", "triton-fused"): "two shapes, slower than their memory traffic: not explained",
    ("h100-sxm", "swiglu_forward", "eager"): ALONE,
    ("h100-sxm", "add_forward", "torch"): L2,
    ("gb300", "rms_norm_backward", "torch-compile"): COMPILED,
    ("gb200", "rms_norm_forward", "torch-compile"): COMPILED,
    ("gb200", "rms_norm_backward", "torch-compile"): COMPILED,
    ("a100-sxm", "rms_norm_backward", "eager"): ALONE,
    ("mi300x", "matmul", "best shape of a search"): "slower than three other sets' rows on this GPU, which the law meets",
    ("b200", "matmul", "best shape of a search"): "the best of hundreds of shapes: faster than products as they come in a layer",
    ("mi300x", "matmul", "hipblaslt (torch)"): "two sets measured the same product 37 % apart; the law is between",
    ("gh200", "copy_h2d", "copy engine"): "one host of its kind: others show 335 to 375 GB/s where this showed 300",
    ("h200-pcie5", "model_attention_step", "fa3"): "published as a share of kernel time; the rest of that step is 9 % off",
    ("rtx4090-server", "mlp_forward", "eager"): "width 2048: its products are faster than the law of wider rows",
}
# Licences of the sets. We use their figures and cite the sources, but no text and no code.
LICENCES = {
    "aiconfigurator": "Apache-2.0",
    "cudnn-frontend": "MIT",
    "vidur": "MIT",
    "liger": "BSD-2-Clause",
    "llmservingsim": "MIT",
    "tracelens": "MIT",
    "hipkittens": "MIT",
    "galvatron": "Apache-2.0",
    "tvm-tl": "Apache-2.0",
    "nvbandwidth_5090": "MIT",
    "penstock": "ours",
}


def page(ledger: OpLedger) -> Iterator[str]:
    counted = [op for op in ledger.ops if op.row.trust < 3]
    test = [op for op in counted if op.row.share == "test"]
    yield "# How far from the truth are the predictions of single ops?"
    yield ""
    yield f"""The op ledger: {len(ledger.ops):,} published measurements of products, attention, norms, other modules, layers, copies
and collectives, each predicted by the cost model that plans are made with. `python -m benchmarks.op_ledger > docs/ops.md` writes
this page; `python -m benchmarks.validate benchmarks/published_ops.csv` prints the same predictions, and those of any
file with such columns. Ratios are predicted over measured time. Runs of whole systems are on [the run ledger's page](accuracy.md).

A hash of machine, kind and shape class assigns a row to the *fit* or the *test*, so that nobody chooses. Profiles may
use rows of the fit ({sum(op.row.share == "fit" for op in counted):,}); the first table is of those of the test
({len(test):,}). Tokens of products, and heads and batch of attention, are not hashed, so that the test has other widths and
lengths. Rows of trust 3, with a partly unknown geometry or GPU, are listed and never counted."""
    yield "\n| rows of the test | n | median error | 90th percentile | wanted | P10 to P90 hold |\n|---|--:|--:|--:|---|--:|"
    for name, (belongs, median, p90) in WANTED.items():
        yield _errors_row(name, [op for op in test if belongs(op.row)], f"{median:.0%} and {p90:.0%}")
    yield _errors_row("all", test, f"hold {TEST_COVERAGE[0]:.0%} to {TEST_COVERAGE[1]:.0%}")
    yield from _groups(ledger)
    yield from _nobody()
    yield from _laws(products())
    yield from _sets(ledger)


def _errors_row(name: str, ops: list[Op], wanted: str) -> str:
    errors = Errors.from_ops(ops)
    assert errors is not None, name
    held = f"{errors.coverage_fraction:.0%}" if errors.coverage_fraction is not None else "-"
    return f"| {name} | {errors.n} | {errors.median_error_fraction:.1%} | {errors.p90_error_fraction:.1%} | {wanted} | {held} |"


def misses(ledger: OpLedger) -> list[tuple[tuple[str, str, str], Errors]]:
    """Return groups with a median error beyond HOLDS_FRACTION, worst first."""
    results = [(key, errors) for key, ops in ledger.groups().items() if (errors := Errors.from_ops(ops)) and not _holds(errors)]
    return sorted(results, key=lambda item: -item[1].median_error_fraction)


def _holds(errors: Errors) -> bool:
    return errors.median_error_fraction <= HOLDS_FRACTION


def _groups(ledger: OpLedger) -> Iterator[str]:
    missed = misses(ledger)
    groups = {key: Errors.from_ops(ops) for key, ops in ledger.groups().items()}
    held = {key: errors for key, errors in groups.items() if errors is not None and _holds(errors)}
    yield f"\n## Errors above {HOLDS_FRACTION:.0%}, with reasons\n"
    yield f"The worst of {len(held) + len(missed)} groups first, by median error over all of a group's rows."
    yield "\n| machine | kind | kernel | n | median ratio | median error | 90th percentile | why |"
    yield "|---|---|---|--:|--:|--:|--:|---|"
    for key, errors in missed:
        yield f"{_group_row(key, errors)} {WHY.get(key, 'not explained')} |"
    yield f"\n## Errors up to {HOLDS_FRACTION:.0%}\n"
    yield "| machine | kind | kernel | n | median ratio | median error | 90th percentile |\n|---|---|---|--:|--:|--:|--:|"
    yield from (_group_row(key, errors) for key, errors in held.items())
    unsaid = Counter((op.row.kernel, op.why_not) for op in ledger.ops if op.why_not)
    if unsaid:
        yield f"\nNot predicted: {'; '.join(f'{n} rows of {kernel}: {why}' for (kernel, why), n in unsaid.items())}."


def _group_row(key: tuple[str, str, str], errors: Errors) -> str:
    figures = f"{errors.median_ratio:.2f} | {errors.median_error_fraction:.1%} | {errors.p90_error_fraction:.1%}"
    return f"| {' | '.join(key)} | {errors.n} | {figures} |"


def _nobody() -> Iterator[str]:
    yield "\n## Unmeasured quantities\n"
    yield "Sources of the device's seconds of a standard step (qwen3-8b, four sequences of 4096 tokens). Listed parts are based on"
    yield "other GPUs' rows, scaled by datasheets, or on assumptions, with wide spreads. `penstock probe` measures them."
    yield "\n| machine | this device | another | assumed | most of all |\n|---|--:|--:|--:|---|"
    for name in shipped_profiles():
        provenance = standard(read_profile(name))
        shares = " | ".join(f"{provenance.fraction(basis):.0%}" for basis in ("this device", "another device", "assumptions"))
        yield f"| {name} | {shares} | {', '.join(f'{part.what} {part.fraction:.1%}' for part in provenance.worst)} |"
    yield "\nUnmeasured on all machines: copies while an optimizer works, AdamW of a CPU by threads, page faults of the host, the"
    yield "driver's context, and hand-overs between lanes; profiles of machines that were probed have them."


def _laws(fits: dict[str, FitResult]) -> Iterator[str]:
    rows = {m: result.rows[m] for m, result in fits.items()}
    law = {m: [abs(math.expm1(error)) for error in result.errors[m]] for m, result in fits.items() if result.errors[m]}
    grid = {m: _grid_errors(list(rows[m])) for m in law}
    better = sum(statistics.median(law[m]) <= statistics.median(grid[m]) for m in law)
    surer = sum(_p90(law[m]) <= _p90(grid[m]) for m in law)
    yield "\n## Comparison of laws with grids for products\n"
    yield f"""Errors of rows left out: each of {N_FOLDS} parts of the widths is predicted from the others, by a law of few
constants (tiles, waves, memory; shapes are an architecture's, rates a GPU's), and by a grid of the same rows, interpolated over
tokens and width as probed profiles are. By the median the law is off by less on {better} of {len(law)} GPUs, by the 90th percentile
on {surer}. So profiles hold laws: they share one form, more work never takes less time, and they can be scaled to a GPU without
rows. A profile that `penstock probe` measured holds its grid."""
    yield "\n| machine | rows | law: median | 90th percentile | grid: median | 90th percentile |\n|---|--:|--:|--:|--:|--:|"
    for m in law:
        yield f"| {m} | {len(rows[m])} | {_figures(law[m])} | {_figures(grid[m])} |"
    yield "\nGPUs without rows have the law of another of their architecture, scaled:"
    yield ""
    yield from (f"- {name}: that of {gpu.like}; {gpu.why}" for name, gpu in GPUS.items() if gpu.like)


def _grid_errors(rows: list[OpRow]) -> list[float]:
    """Return errors of held-out rows, interpolated between the others."""
    errors = []
    for fold in range(N_FOLDS):
        training = [row for row in rows if fold_of(row) != fold]
        grid = rows_of((row.sizes["m"], _width(row), _flop(row) / row.value) for row in training)
        left_out = [row for row in rows if fold_of(row) == fold and grid]
        errors += [abs(_flop(row) / interpolated(grid, row.sizes["m"], _width(row)).value / row.value - 1) for row in left_out]
    return errors


def _width(row: OpRow) -> float:
    return math.sqrt(row.sizes["k"] * row.sizes["n"])


def _flop(row: OpRow) -> float:
    return 2.0 * row.sizes["m"] * row.sizes["k"] * row.sizes["n"]


def _p90(errors: list[float]) -> float:
    return quantile(sorted(errors), 0.9) or 0.0


def _figures(errors: list[float]) -> str:
    return f"{statistics.median(errors):.1%} | {_p90(errors):.1%}"


def _sets(ledger: OpLedger) -> Iterator[str]:
    yield "\n## Sources of the measurements\n"
    yield "Figures and their sources; where a set has no licence of its own, figures alone were taken. `where` names a row's file."
    yield "\n| set | rows | machines | licence |\n|---|--:|---|---|"
    by_set: dict[str, list[Op]] = {}
    for op in ledger.ops:
        by_set.setdefault(op.row.set, []).append(op)
    for name, ops in sorted(by_set.items(), key=lambda item: -len(item[1])):
        machines = ", ".join(sorted({op.row.machine for op in ops}))
        yield f"| {name} | {len(ops)} | {machines} | {LICENCES.get(name, 'figures only')} |"


def main() -> None:
    without_arguments(__doc__)
    print("\n".join(page(validate_ops(str(ROWS)))))


if __name__ == "__main__":
    main()
