"""Which question does each file of the house answer?

`python -m tests.tour` writes the answer to docs/tour.md; a test holds the page against the files.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tour.md"
ROOMS = ("penstock", "planner", "hwprofiles", "runtime", "demo", "tests")
# In the order of reading: first what a plan is, then who makes it and who performs it, what both rest on, and the shell last.
READING = (
    *("runtime/plan", "planner/model", "planner/lower", "planner/predict", "planner/bounds", "planner/search", "planner/check"),
    *(
        "planner/show",
        "planner",
        "runtime",
        "runtime/compute",
        "runtime/layers",
        "runtime/host",
        "runtime/machines",
    ),
    *("penstock/data/files", "penstock/data", "penstock/training", "penstock/checkpoint", "hwprofiles", "hwprofiles/probe"),
    *("penstock", "penstock/cli", "penstock/cli/data", "penstock/cli/model", "penstock/cli/which"),
    *("demo", "tests", "tests/planner", "tests/runtime", "tests/hwprofiles", "tests/penstock", "tests/penstock/data"),
    *("tests/penstock/checkpoint", "tests/penstock/training", "tests/published", "tests/house"),
)
_ROOM_QUESTIONS = {"tests": "What do we promise?", "demo": "What does it look like?"}  # folders that are no package
_FIRST_READING = ("runtime/plan/plan.py", "planner/predict/simulate.py", "runtime/executor.py")


@cache
def question(path: Path) -> str:
    """The first line of a file's docstring; empty where there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def sources() -> list[Path]:
    """Every Python file of the house, room by room, in a fixed order."""
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if "out" not in path.parts]


def tour() -> str:
    """The page: every room with its question in the order of reading, every file with its own."""
    first = ", ".join(_link(name) for name in _FIRST_READING)
    lines = [
        "# A tour of the house",
        "",
        "Every file answers one question and asks it first. This page is made of those questions by `make tour`.",
        "",
        f"First reading: the [README](../README.md), then {first}, then their tests.",
    ]
    for room in READING:
        package = ROOT / room / "__init__.py"
        files = [path for path in sources() if path.parent == ROOT / room and path != package]
        lines += ["", f"## {room}: {question(package) if package.exists() else _ROOM_QUESTIONS[room]}", ""]
        lines += [f"- {_link(path.relative_to(ROOT).as_posix())} {question(path)}" for path in files]
    return "\n".join(lines) + "\n"


def _link(name: str) -> str:
    return f"[{name}](../{name})"


if __name__ == "__main__":
    PAGE.write_text(tour(), encoding="utf-8")
