"""What would a fault in one of our readers look like?

Each of these is a check that somebody could forget. With it gone, changed files must show it: fuzzing that finds nothing proves
nothing unless it finds these.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import yaml

from penstock import run_config
from penstock.checkpoint import checkpoint, model_files
from planner.model import config
from planner.show import report_html
from runtime.plan import plan

from .fuzz_formats import Format
from .fuzz_judge import FailureError, World


@dataclass(frozen=True)
class Planted:
    """Another function in the place of one of ours, and what files of a format then show."""

    format: str
    where: ModuleType | type
    what: str
    instead: Callable[..., Any]
    says: str  # of the failure, as a regular expression

    @contextmanager
    def put(self) -> Iterator[None]:
        """The fault is there inside, wherever the function was imported by name too."""
        original = getattr(self.where, self.what)
        ours = [m for m in list(sys.modules.values()) if (m.__name__ or "").startswith(("planner.", "runtime."))]
        places: list[ModuleType | type] = [self.where, *(m for m in ours if vars(m).get(self.what) is original)]
        for place in places:
            setattr(place, self.what, self.instead)
        try:
            yield
        finally:
            for place in places:
                setattr(place, self.what, original)


def inputs_until_found(planted: Planted, of: Format, world: World, most: int) -> tuple[int, str] | None:
    """How many changed files it takes, and what is then said; None where so many do not show the fault."""
    rng = Random(0)
    with planted.put():
        for n in range(1, most + 1):
            try:
                of.judge(world, of.mutant(rng), cpu_s=2.0)
            except FailureError as failure:
                if re.search(planted.says, str(failure)):
                    return n, str(failure)
    return None


def _unsafe_yaml(path: Path, text: str) -> Any:
    try:
        return yaml.load(text, Loader=yaml.UnsafeLoader)
    except yaml.YAMLError as error:
        raise run_config.RunConfigError(str(error)) from None


def _every_slot(text: str, most: int) -> list[int]:
    return [int(size) for run in text.split() for n, _, size in [run.partition("x")] for _ in range(int(n))]


PLANTED: dict[str, Planted] = {
    "numbers that are not checked": Planted(
        "config.json", config.Config, "count", lambda self, key, *_: self.values.get(key), "Error"
    ),
    "names that are paths": Planted("safetensors index", model_files, "file_name", lambda index, name: str(name), "outside"),
    "a library's own complaint": Planted(
        "plan (JSON)", plan, "_validated", lambda adapter, text, where: adapter.validate_json(text), "ValidationError"
    ),
    "slots without end": Planted("plan (text)", plan, "_unroll", _every_slot, "memory|no answer"),
    "YAML that makes objects": Planted("run (YAML)", run_config, "_read_yaml", _unsafe_yaml, r"os\.system|Popen"),
    "a file that is taken for JSON": Planted(
        "trainer state", checkpoint, "read_json", lambda path: json.loads(path.read_text()), "Error"
    ),
    "text that is not escaped": Planted("samples.jsonl", report_html, "text", str, "page's program"),
}
