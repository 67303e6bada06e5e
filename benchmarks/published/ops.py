"""Predictions of published single ops, and their errors.

The op ledger: each measurement in a file is predicted by the planner's cost model from its machine's profile. Rows without a
prediction are kept, with a reason. Ratios are predicted over measured time.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.hwprofiles.schema import Profile, read_profile, shipped_profiles
from penstock.planner.predict.scaled_profile import Group
from penstock.runtime.errors import PenstockError

from .op_costs import predict
from .op_rows import RATE, OpRow, read_ops
from .validate import slower


@dataclass(frozen=True, slots=True)
class Op:
    """A measurement and its prediction, both in the row's unit. `predicted` None: see `why_not`."""

    row: OpRow
    predicted: float | None
    interval_fraction: float | None = None  # P10 to P90: prediction divided and multiplied by 1 + this
    why_not: str | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured time."""
        if self.predicted is None:
            return None
        ratio = self.predicted / self.row.value
        return 1 / ratio if self.row.unit == RATE else ratio

    @property
    def covered(self) -> bool | None:
        """True if the measurement is between P10 and P90."""
        if self.ratio is None or self.interval_fraction is None:
            return None
        return abs(math.log(self.ratio)) <= math.log1p(self.interval_fraction)

    def to_json(self) -> dict[str, Any]:
        row = self.row
        return {
            **{name: getattr(row, name) for name in ("machine", "kind", "kernel", "shape")},
            "measured": row.value,
            "predicted": self.predicted,
            "ratio": self.ratio,
            "unit": row.unit,
            "interval_fraction": self.interval_fraction,
            "share": row.share,
            "trust": row.trust,
            **({"why_not": self.why_not} if self.why_not else {}),
        }


@dataclass(frozen=True, slots=True)
class Errors:
    """Statistics over the ratios of several ops."""

    n: int
    median_ratio: float
    median_error_fraction: float  # of |ratio - 1|
    p90_error_fraction: float
    coverage_fraction: float | None

    @staticmethod
    def from_ops(ops: Iterable[Op]) -> "Errors | None":
        known = [(op.ratio, op.covered) for op in ops if op.ratio is not None]
        if not known:
            return None
        errors = sorted(abs(ratio - 1) for ratio, _ in known)
        held = [covered for _, covered in known if covered is not None]
        return Errors(
            len(known),
            statistics.median(ratio for ratio, _ in known),
            statistics.median(errors),
            errors[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)],
            sum(held) / len(held) if held else None,
        )

    def words(self) -> str:
        held = "" if self.coverage_fraction is None else f", P10 to P90 hold {self.coverage_fraction:.0%}"
        return (
            f"{self.n} ops: median ratio {self.median_ratio:.2f}, median error {self.median_error_fraction:.1%}, "
            f"90th percentile {self.p90_error_fraction:.1%}{held}"
        )


@dataclass(frozen=True, slots=True)
class OpLedger:
    """All measurements of a file, with predictions."""

    ops: tuple[Op, ...]

    def groups(self) -> dict[tuple[str, str, str], list[Op]]:
        """Group ops by machine, kind and kernel. Rows of trust 3 are dropped if the group has others."""
        result: dict[tuple[str, str, str], list[Op]] = {}
        for op in self.ops:
            result.setdefault((op.row.machine, op.row.kind, op.row.kernel), []).append(op)
        return {key: [op for op in ops if op.row.trust < 3] or ops for key, ops in sorted(result.items())}

    def to_json(self) -> dict[str, Any]:
        """Return the output of `python -m benchmarks.validate FILE.csv --json`."""
        groups = []
        for (machine, kind, kernel), ops in self.groups().items():
            errors, n_not = Errors.from_ops(ops), sum(op.predicted is None for op in ops)
            named = {"machine": machine, "kind": kind, "kernel": kernel, "n": 0 if errors is None else errors.n}
            fields = ("median_ratio", "median_error_fraction", "p90_error_fraction", "coverage_fraction")
            groups.append(named | {name: getattr(errors, name, None) for name in fields} | {"n_not_predicted": n_not})
        return {
            "ops": [op.to_json() for op in self.ops],
            "groups": groups,
            "n_not_predicted": sum(op.predicted is None for op in self.ops),
        }

    def table(self) -> str:
        """Format a row per group and a summary for a terminal."""
        lines = [f"{'machine':24} {'kind':24} {'kernel':22} {'n':>4} {'ratio':>6} {'median':>7} {'P90':>7}"]
        for (machine, kind, kernel), ops in self.groups().items():
            errors = Errors.from_ops(ops)
            head = f"{machine:24} {kind:24} {kernel[:22]:22}"
            if errors is None:
                lines.append(f"{head} {len(ops):4} not predicted: {ops[0].why_not}")
            else:
                figures = f"{errors.median_ratio:6.2f} {errors.median_error_fraction:7.1%} {errors.p90_error_fraction:7.1%}"
                lines.append(f"{head} {errors.n:4} {figures}")
        return "\n".join([*lines, "", *self.summary()])

    def summary(self) -> list[str]:
        """Return a line for all rows and one per share, without rows of trust 3. Rows without a prediction are counted."""
        counted = [op for op in self.ops if op.row.trust < 3]
        shares = {"all": counted} | {share: [op for op in counted if op.row.share == share] for share in ("fit", "test")}
        lines = [f"{name}: {errors.words()}" for name, ops in shares.items() if (errors := Errors.from_ops(ops))]
        n_listed, missing = len(self.ops) - len(counted), sum(op.predicted is None for op in counted)
        lines += [f"listed, not counted: {n_listed} rows of trust 3"] if n_listed else []
        return [*lines, *([f"not predicted: {missing} rows"] if missing else [])]


def validate_ops(path: str, profile_of: Callable[[str], Profile] = read_profile) -> OpLedger:
    """Return the op ledger of a CSV. PenstockError describes an invalid file in one line."""
    rows = read_ops(path, frozenset(shipped_profiles()))
    known = cache(profile_of)
    doubts = {name: [slower(known(name), group) for group in Group] for name in {row.machine for row in rows}}
    return OpLedger(tuple(_predicted(row, known(row.machine), doubts[row.machine]) for row in rows))


def _predicted(row: OpRow, profile: Profile, doubts: Sequence[Profile]) -> Op:
    try:
        value = predict(row, profile)
    except PenstockError as error:
        return Op(row, None, None, str(error))
    moves = [math.log(predict(row, machine) / value) for machine in doubts]
    return Op(row, value, math.expm1(math.hypot(*moves)))
