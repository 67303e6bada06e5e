"""Plain language: ceilings of private constructions and of function words as names, for each folder. They may only fall."""

import pytest

from tests.language import Counts, bound_names, by_folder, paragraphs, texts
from tests.tour import ROOT

# Markers in 1,000 words and percent of names that are function words
CEILINGS: dict[str, tuple[float, float]] = {
    "CHANGELOG.md": (1, 0.1),
    "CONTRIBUTING.md": (2, 0.1),
    "README.md": (1, 0.1),
    "benchmarks": (3, 0.1),
    "benchmarks/gpu": (3, 0.1),
    "benchmarks/published": (2, 0.1),
    "demo": (8, 0.1),
    "docs": (2, 0.1),
    "docs/benchmarks": (2, 0.1),
    "examples": (1, 0.1),
    "hwprofiles": (4, 0.2),
    "hwprofiles/probe": (3, 0.1),
    "penstock": (1, 0.1),
    "penstock/arguments": (1, 0.1),
    "penstock/chat": (1, 0.1),
    "penstock/hf": (1, 0.1),
    "penstock/checkpoint": (2, 0.1),
    "penstock/cli": (1, 0.1),
    "penstock/data": (2, 0.1),
    "penstock/model_checks": (1, 0.1),
    "penstock/training": (2, 0.1),
    "penstock/vision": (1, 0.1),
    "planner": (1, 0.1),
    "planner/bounds": (1, 0.1),
    "planner/check": (2, 0.1),
    "planner/lower": (1, 0.1),
    "planner/model": (2, 0.1),
    "planner/predict": (1, 0.1),
    "planner/search": (3, 0.1),
    "planner/show": (2, 0.1),
    "runtime": (2, 0.1),
    "runtime/compute": (1, 0.1),
    "runtime/cuda": (7, 0.1),
    "runtime/host": (4, 0.2),
    "runtime/layers": (1, 0.1),
    "runtime/machines": (2, 0.1),
    "runtime/plan": (2, 0.2),
    "tests": (2, 0.3),
    "tests/house": (1, 0.2),
    "tests/hwprofiles": (2, 0.1),
    "tests/penstock": (7, 0.7),
    "tests/planner": (4, 0.1),
    "tests/published": (4, 0.1),
    "tests/runtime": (4, 0.1),
}


def test_no_folder_is_above_its_ceiling() -> None:
    counts = by_folder(ROOT, ["."])
    assert counts.keys() == CEILINGS.keys()
    assert {
        folder: (round(found.markers_per_1000, 1), round(found.function_word_percent, 1))
        for folder, found in counts.items()
        if found.markers_per_1000 > CEILINGS[folder][0] or found.function_word_percent > CEILINGS[folder][1]
    } == {}


@pytest.mark.parametrize("name", ["of", "_given", "At"])
def test_function_words_are_counted_where_a_name_is_bound(name: str) -> None:
    for code in (f"{name} = 1", f"def {name}(): ...", f"def f({name}): ...", f"class {name}: ...", f"for {name} in []: ..."):
        assert name.strip("_").lower() in list(bound_names(code)), code
    assert name.strip("_").lower() not in list(bound_names(f"print({name})"))


def test_prose_is_docstrings_comments_and_messages() -> None:
    code = '"""Module."""\n# first\n# second\nx = "a message of five words"\ny = "short"\n\ndef f():\n    "Function."\n'
    assert sorted(texts(code)) == ["Function.", "Module.", "a message of five words", "first second"]
    page = "# Title\n\nOne paragraph of prose.\n\n```\ncode is not prose at all\n```\n| a | table | is | none |\n"
    assert list(paragraphs(page)) == ["One paragraph of prose."]
    assert Counts(500, 3, 200, 1).markers_per_1000 == 6
    assert Counts(500, 3, 200, 1).function_word_percent == 0.5
