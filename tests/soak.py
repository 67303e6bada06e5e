"""The two lanes: which cases `make test` takes, and which it leaves to `make soak`.

A test says by a mark what the fast lane leaves out; what it promises is held there too, by fewer or smaller cases:

    soak                  the whole test
    soak_cases("a", "b")  the cases of these ids
    drawn                 of a property's examples, the fast lane draws one in SHARE, the long lane all
    fast("some")          the fast lane takes the first case, and then one in SHARE
    fast("values")        ... cases in which every value of every parameter occurs
    fast("pairs")         ... cases in which every pair of parameters' values occurs
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

from .tiny import ALIKE

SHARE = 13  # a prime, so that no value of a product of parameters is the one that is always taken
FEWEST = 2


def long_lane(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases that the fast lane leaves to the long one."""
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
    left = [item for item in cases if ids[item] not in named]
    match [mark.args[0] for mark in first.iter_markers("fast")]:
        case ["some"]:
            kept = {*left[::SHARE]}
        case ["values" | "pairs" as how]:
            kept = covering({item: item.callspec.params for item in left}, 2 if how == "pairs" else 1)
        case _:
            return
    yield from (item for item in left if item not in kept)


def share(n_examples: int) -> int:
    """Number of examples that the fast lane draws, given that of all."""
    return min(n_examples, max(n_examples // SHARE, FEWEST))


def covering(cases: Mapping[Any, Mapping[str, object]], strength: int) -> set[Any]:
    """Covering array: cases with every combination of `strength` parameters' values that occurs in any; not many more than needed.

    A parameter that is a tuple counts as its elements, a model type as any that is like it.
    """
    wanted = {name: {*combinations(_values(values), strength)} for name, values in cases.items()}
    missing = set().union(*wanted.values())
    chosen = set()
    while missing:
        best = max(wanted, key=lambda name: len(wanted[name] & missing))  # of several, the first
        chosen.add(best)
        missing -= wanted[best]
    return chosen


def _values(parameters: Mapping[str, object]) -> Iterator[Hashable]:
    for name, value in parameters.items():
        for i, element in enumerate(value if isinstance(value, tuple) else (value,)):
            yield name, i, repr(ALIKE.get(element, element) if isinstance(element, str) else element)
