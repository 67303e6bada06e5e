"""Does every promise stay in the fast lane, and does the long lane ask for all of it?"""

import re
from collections.abc import Iterable
from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import COLLECTED, draw_a_share
from tests.soak import DRAWN, PAIRS, SHARE, SOAK, SOME, VALUES, covering, long_lane, share
from tests.tiny import MODEL_TYPES
from tests.tour import ROOT

TESTS = (*DRAWN, *SOME, *PAIRS, *VALUES)


def unknown(entries: Iterable[str], collected: Iterable[str]) -> list[str]:
    """Those that name no case and, with or without parameters, no test, of the files that were collected."""
    files = {case.partition("::")[0] for case in collected}
    known = {*collected} | {case.partition("[")[0] for case in collected}
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


def test_every_test_has_a_case_in_the_fast_lane_or_is_named_in_the_long_ones_list(pytestconfig: pytest.Config) -> None:
    """By itself, not by its cases: who takes the last case of a test from the fast lane says so."""
    collected = pytestconfig.stash[COLLECTED]
    fast = {case.partition("[")[0] for case in collected.keys() - long_lane(collected)}
    assert {case.partition("[")[0] for case in collected} - fast - {*SOAK} == set()


def test_no_file_is_in_the_long_lane_alone(pytestconfig: pytest.Config) -> None:
    collected = pytestconfig.stash[COLLECTED]
    fast = {case.partition("::")[0] for case in collected.keys() - long_lane(collected)}
    assert {case.partition("::")[0] for case in collected} - fast == set()


def test_the_first_case_is_in_the_fast_lane_and_one_in_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.soak.SOME", ("test_a.py::test_x", "test_a.py::test_y"))
    monkeypatch.setattr("tests.soak.SOAK", ("test_a.py::test_x[0]", "test_a.py::test_z"))
    cases = {f"test_a.py::test_{test}[{i}]": {"i": i} for test in "wxyz" for i in range(SHARE + 1)}
    fast = {case[len("test_a.py::test_") :] for case in cases.keys() - long_lane(cases)}
    assert fast == {*(f"w[{i}]" for i in range(SHARE + 1)), "x[1]", "y[0]", f"y[{SHARE}]"}


def test_model_types_that_are_alike_count_as_one() -> None:
    cases = {t: {"case": (t, "sdpa")} for t in ("llama", "qwen2", "gemma2", "mixtral", "qwen3_moe")}
    assert covering(cases, 1) == {"llama", "gemma2", "mixtral"}


def test_every_model_type_is_in_the_fast_lane_of_the_law_of_exactness(pytestconfig: pytest.Config) -> None:
    law = "test_exactness.py::test_streaming_a_model_under_any_policy_is_the_plain_loop_to_the_last_bit"
    collected = pytestconfig.stash[COLLECTED]
    if not any(case.startswith("test_exactness.py") for case in collected):
        pytest.skip("the law was not collected")
    assert {f"{law}[{model_type}]" for model_type in MODEL_TYPES} <= collected.keys() - long_lane(collected)


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
    assert 2 <= len(seen) <= share(100) == 14
    assert [share(n) for n in (1, 5, 8, 40, 400)] == [1, 2, 2, 5, 57]
