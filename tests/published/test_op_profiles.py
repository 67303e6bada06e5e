"""Shipped profiles against published measurements of ops: training rows and test rows."""

import json
import math
import re

import pytest

from benchmarks.op_fit import rows_to_fit
from benchmarks.op_profiles import FOLDER, profiles
from benchmarks.published.ops import validate_ops
from penstock.hwprofiles.schema import Profile
from tests.tour import ROOT

CHANCE = 0.01  # significance level: probability that correct spreads cover so few rows
COVERED = 0.8


def test_no_law_is_fitted_to_rows_of_the_test_or_distrusted_rows():
    assert len(rows_to_fit()) > 900
    assert {row.share for row in rows_to_fit()} == {"fit"}
    assert all(row.trust < 3 for row in rows_to_fit())


def test_no_spread_is_tighter_than_the_rows_of_the_test_show():
    """By machine, kind and kernel. Counts shapes instead of rows, because errors of rows of one shape are correlated."""
    groups = {}
    for op in validate_ops(str(ROOT / "benchmarks" / "published_ops.csv")).ops:
        if op.row.share == "test" and op.row.trust < 3 and op.covered is not None:
            shapes = groups.setdefault((op.row.machine, op.row.kind, op.row.kernel), {})
            shapes.setdefault(op.row.shape_class, []).append(op.covered)
    held = {key: [sum(covered) >= len(covered) / 2 for covered in shapes.values()] for key, shapes in groups.items()}
    assert len(held) > 60
    tight = {key: (sum(shapes), len(shapes)) for key, shapes in held.items() if chance_of(sum(shapes), len(shapes)) < CHANCE}
    assert tight == {}
    every = [shape for shapes in held.values() for shape in shapes]
    assert chance_of(sum(every), len(every)) > CHANCE


def chance_of(n_held, n):
    """Return the probability that at most `n_held` of n shapes are covered if spreads cover with probability COVERED."""
    return sum(math.comb(n, i) * COVERED**i * (1 - COVERED) ** (n - i) for i in range(n_held + 1))


@pytest.mark.slow
def test_shipped_profiles_are_what_the_fit_gives_today():
    """Fit all laws again. Values fitted to runs are tested with the ledger of runs. A source contains a digest of its rows."""
    n_named = 0
    for machine, fields in profiles():
        shipped, fitted = json.loads((FOLDER / f"{machine}.json").read_text()), Profile.from_json(fields).to_json()
        for part in ("device", "peers"):
            assert_close(fitted.get(part), shipped.get(part), f"{machine}.{part}")
        digests = [re.findall(r"rows ([0-9a-f]{12})", json.dumps(one["sources"], sort_keys=True)) for one in (fitted, shipped)]
        assert digests[0] == digests[1], machine
        n_named += len(digests[1])
    assert n_named > 50


def assert_close(value, shipped, place):
    if isinstance(shipped, dict) and str(shipped.get("source")).startswith("fitted_"):
        return
    if isinstance(shipped, dict):
        assert isinstance(value, dict), place
        assert set(value) == set(shipped), place
        for key in shipped:
            assert_close(value[key], shipped[key], f"{place}.{key}")
    elif isinstance(shipped, float) and isinstance(value, float):
        assert value == pytest.approx(shipped, rel=0.03), place
    else:
        assert value == shipped or isinstance(shipped, list), place
