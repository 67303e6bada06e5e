"""The page docs/tour.md: one line for each folder, in the words of its package.

`python -m tests.tour` writes it; a test holds it against the folders.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tour.md"
ROOMS = ("penstock", "planner", "hwprofiles", "runtime", "demo", "tests")
# In the order of reading: what a plan is, who makes it, who performs it, what both rest on, and the shell.
READING = (
    *("runtime/plan", "planner/model", "planner/lower", "planner/predict", "planner/bounds", "planner/search", "planner/check"),
    *("planner/show", "hwprofiles", "hwprofiles/probe", "runtime", "runtime/machines", "runtime/compute", "runtime/layers"),
    *("runtime/host", "penstock", "penstock/data", "penstock/training", "penstock/checkpoint"),
    *("penstock/cli", "penstock/cli/data", "penstock/cli/model", "penstock/cli/which"),
)
_HEAD = """# A tour

```
config.json ──┐                         ┌── simulate ──► predicted timeline ──┐
              ├──► search ──► plan ─────┤                                     ├── the same type: compare
profile.json ─┘      ▲          └ check └── execute  ──► measured timeline  ──┘
                     └ bounds
```

Read first: [the ops](../runtime/plan/ops.py), [the compiler](../planner/lower/passes.py) that makes them, their two interpreters,
[the simulator](../planner/predict/simulate.py) and [the executor](../runtime/executor.py); then their tests. Then folder by folder:
"""


@cache
def first_line(path: Path) -> str:
    """Of a file's docstring; empty where there is none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def sources() -> list[Path]:
    """Every Python file of the house, room by room, in a fixed order."""
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if "out" not in path.parts]


def tour() -> str:
    """The page."""
    lines = [f"- [{room}](../{room}) {first_line(ROOT / room / '__init__.py')}" for room in READING]
    return f"{_HEAD}\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(tour(), encoding="utf-8")
