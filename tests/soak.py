"""Selection of test cases for the fast lane (`make test`) and the long lane (`make soak`).

Marks of a test select the cases that the fast lane omits; fewer or smaller cases of the same property remain in it:

    soak                  the long lane runs the whole test
    soak_cases("a", "b")  the long lane runs the cases of these ids
    drawn                 the fast lane samples 1 / SHARE of a property's examples, the long lane all
    fast("some")          the fast lane runs every SHARE-th case, starting with the first
    fast("values")        ... a set of cases that covers every value of every parameter
    fast("pairs")         ... a set of cases that covers every pair of parameters' values
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

from .tiny import SAME_PATHS

SHARE = 13  # prime, so that a stride through a product of parameters visits all values
FEWEST = 2


def long_lane(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that only the long lane runs."""
    of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {item for cases in of_test.values() for item in _left_out(cases)}


def _left_out(cases: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    first = cases[0]
    if first.get_closest_marker("soak"):
        yield from cases
        return
    named = {case for mark in first.iter_markers("soak_cases") for case in mark.args}
    ids = {item: item.nodeid.partition("[")[2].removesuffix("]") for item in cases}
    unknown = named - {*ids.values()}
    assert not unknown or len(cases) < len(named), f"{first.nodeid}: no case {', '.join(map(str, unknown))}"
    yield from (item for item in cases if ids[item] in named)
    unnamed = [item for item in cases if ids[item] not in named]
    match [mark.args[0] for mark in first.iter_markers("fast")]:
        case ["some"]:
            fast = {*unnamed[::SHARE]}
        case ["values" | "pairs" as how]:
            fast = covering({item: item.callspec.params for item in unnamed}, 2 if how == "pairs" else 1)
        case _:
            return
    yield from (item for item in unnamed if item not in fast)


def share(n_examples: int) -> int:
    """Return the number of examples in the fast lane."""
    return min(n_examples, max(n_examples // SHARE, FEWEST))


def covering(cases: Mapping[Any, Mapping[str, object]], strength: int) -> set[Any]:
    """Return a covering array, by a greedy algorithm: cases that together have every combination of `strength` parameters' values.

    A tuple counts as its elements, and a model type as the type in ALIKE.
    """
    wanted = {name: {*combinations(_values(values), strength)} for name, values in cases.items()}
    missing = set().union(*wanted.values())
    chosen = set()
    while missing:
        best = max(wanted, key=lambda name: len(wanted[name] & missing))  # ties: the first
        chosen.add(best)
        missing -= wanted[best]
    return chosen


def _values(parameters: Mapping[str, object]) -> Iterator[Hashable]:
    for name, value in parameters.items():
        for i, element in enumerate(value if isinstance(value, tuple) else (value,)):
            yield name, i, repr(SAME_PATHS.get(element, element) if isinstance(element, str) else element)
