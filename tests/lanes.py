"""Parametrizations with few cases in the fast lane; the others carry the mark `slow`. Numbers of Hypothesis examples."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

Case = type(pytest.param())
EVERY_13TH = range(0, 10_000, 13)
N_THOROUGH = 100  # properties state their number of examples of these; the profile `thorough` makes half


def mostly_slow(names: Any, values: Iterable[Any], fast: Collection[int] = EVERY_13TH, **options: Any) -> pytest.MarkDecorator:
    """Return `pytest.mark.parametrize` with the mark `slow` on all cases except those at the positions in `fast`."""
    is_single = isinstance(names, str) and "," not in names
    cases = [value if isinstance(value, Case) else pytest.param(*([value] if is_single else value)) for value in values]
    slow = [pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow]) for case in cases]
    assert any(i in fast for i in range(len(cases))), "the fast lane runs a case of every test"
    return pytest.mark.parametrize(names, [cases[i] if i in fast else slow[i] for i in range(len(cases))], **options)


def diagonal(*axes: tuple[str, Iterable[Any]], **options: Any) -> pytest.MarkDecorator:
    """Return `pytest.mark.parametrize` over a product. The fast cases have every value of every axis at least once.

    An axis is a name and its values, or comma-separated names and tuples of values.
    """
    values = [[value if "," in name else (value,) for value in axis] for name, axis in axes]
    n_fast = max(map(len, values))
    chosen = {tuple(i % len(axis) for axis in values) for i in range(n_fast)}
    positions = [*product(*(range(len(axis)) for axis in values))]
    fast = [i for i, position in enumerate(positions) if position in chosen]
    return mostly_slow(",".join(name for name, _ in axes), [sum(case, ()) for case in product(*values)], fast, **options)


def examples(n: int) -> int:
    """Return the share of `n` that the Hypothesis profile makes, at least 2."""
    return min(n, max(2, n * settings().max_examples // N_THOROUGH))
