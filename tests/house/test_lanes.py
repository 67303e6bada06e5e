"""Fast and long lanes: selection of cases and examples."""

from itertools import product
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import LANES, draw_a_share
from tests.soak import SHARE, covering, long_lane, share

pytest_plugins = ["pytester"]


def test_marks_say_what_the_fast_lane_leaves_out(pytester: pytest.Pytester) -> None:
    cases = f"@pytest.mark.parametrize('i', range({SHARE + 1}))"
    lines = [
        "import pytest",
        *("@pytest.mark.soak", "def test_z(): ..."),
        *("@pytest.mark.soak_cases('0')", "@pytest.mark.fast('some')", cases, "def test_x(i): ..."),
        *("@pytest.mark.fast('some')", cases, "def test_y(i): ..."),
        "def test_w(): ...",
    ]
    items, _ = pytester.inline_genitems(pytester.makepyfile("\n".join(lines)))
    fast = {item.name for item in {*items} - long_lane(items)}
    assert fast == {"test_w", "test_x[1]", "test_y[0]", f"test_y[{SHARE}]"}


def test_no_file_is_in_the_long_lane_alone(request: pytest.FixtureRequest) -> None:
    lanes = request.config.stash[LANES]
    assert {item.path for item in lanes} == {item.path for item, is_left in lanes.items() if not is_left}


@pytest.mark.parametrize("strength", [1, 2])
def test_chosen_cases_cover_every_value_and_every_pair(strength: int) -> None:
    cases = {f"{a} {b} {c}": {"a": a, "bc": (b, c)} for a, b, c in product(range(6), range(3), range(2)) if (a, c) != (5, 1)}
    chosen = covering(cases, strength)
    for i, j in ((0, 1), (0, 2), (1, 2)) if strength == 2 else ((0, 0), (1, 1), (2, 2)):
        assert {(case.split()[i], case.split()[j]) for case in chosen} == {(case.split()[i], case.split()[j]) for case in cases}
    assert len(chosen) <= (6 if strength == 1 else 20)
    assert chosen == covering(cases, strength)


def test_a_share_is_drawn_and_the_same_settings_otherwise() -> None:
    examples = []

    @settings(max_examples=100, database=None)
    @given(st.integers())
    def draws(n: int) -> None:
        examples.append(n)

    draw_a_share(SimpleNamespace(obj=draws))
    draws()
    assert 2 <= len(examples) <= share(100) == 7
    assert [share(n) for n in (1, 5, 8, 40, 400)] == [1, 2, 2, 3, 30]
