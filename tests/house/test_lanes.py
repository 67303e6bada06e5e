"""Does every promise stay in the fast lane, and does the long lane ask for all of it?"""

import re
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import COLLECTED, draw_a_share
from tests.soak import DRAWN, PAIRS, SOAK, VALUES, covering, share
from tests.tour import ROOT

TESTS = (*DRAWN, *PAIRS, *VALUES)


def unknown(entries: tuple[str, ...], collected: set[str]) -> list[str]:
    """Those that name no case and, with or without parameters, no test, of the files that were collected."""
    files = {case.partition("::")[0] for case in collected}
    known = collected | {case.partition("[")[0] for case in collected}
    return [entry for entry in entries if entry.partition("::")[0] in files and entry not in known]


def test_every_entry_names_a_case(pytestconfig: pytest.Config) -> None:
    """Of the files that are collected; a test that is asked for by its name is collected alone."""
    if any("::" in argument for argument in pytestconfig.args):
        pytest.skip("only some cases were collected")
    assert unknown((*SOAK, *TESTS), pytestconfig.stash[COLLECTED]) == []
    assert len({*SOAK, *TESTS}) == len((*SOAK, *TESTS))
    assert all("[" not in entry for entry in TESTS)


def test_every_entry_names_a_test() -> None:
    """Of every file, collected or not."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    for entry in (*SOAK, *TESTS):
        file, _, test = entry.partition("[")[0].partition("::")
        assert re.search(rf"^def {test}\(", texts[file], re.MULTILINE), entry


def test_an_entry_that_names_nothing_is_found() -> None:
    collected = {"test_a.py::test_x[1]", "test_a.py::test_y"}
    entries = ("test_a.py::test_x", "test_a.py::test_x[1]", "test_a.py::test_x[2]", "test_a.py::test_z", "test_b.py::test_x")
    assert unknown(entries, collected) == ["test_a.py::test_x[2]", "test_a.py::test_z"]


def test_a_case_of_the_long_lane_is_never_the_only_one_of_its_file(pytestconfig: pytest.Config) -> None:
    collected = pytestconfig.stash[COLLECTED]
    alone = {entry.partition("::")[0] for entry in SOAK} - {
        case.partition("::")[0] for case in collected if case not in SOAK and case.partition("[")[0] not in SOAK
    }
    assert alone & {case.partition("::")[0] for case in collected} == set()


@pytest.mark.parametrize("strength", [1, 2])
def test_the_cases_that_are_chosen_have_every_value_and_every_pair_and_few_cases_more(strength: int) -> None:
    cases = {f"{a} {b} {c}": {"a": a, "bc": (b, c)} for a, b, c in product(range(6), range(3), range(2)) if (a, c) != (5, 1)}
    chosen = covering(cases, strength)
    for i, j in ((0, 1), (0, 2), (1, 2)) if strength == 2 else ((0, 0), (1, 1), (2, 2)):
        assert {(case.split()[i], case.split()[j]) for case in chosen} == {(case.split()[i], case.split()[j]) for case in cases}
    assert len(chosen) <= (6 if strength == 1 else 20)
    assert chosen == covering(cases, strength)


def test_a_share_is_drawn_and_the_same_settings_otherwise() -> None:
    seen = []

    @settings(max_examples=100, database=None)
    @given(st.integers())
    def draws(n: int) -> None:
        seen.append(n)

    draw_a_share(SimpleNamespace(obj=draws))
    draws()
    assert 5 <= len(seen) <= share(100) == 25
    assert [share(n) for n in (1, 5, 8, 40, 400)] == [1, 3, 3, 10, 100]
