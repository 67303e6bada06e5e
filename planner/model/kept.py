"""Cache of models' outlines on disk: a configuration that is planned again needs no torch.

A file for each configuration, what was asked of it, and the versions of all that answered, in a folder that the shell names.
"""

import hashlib
import json
from collections.abc import Set
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock.runtime.files import read_whole, write_whole

MAX_BYTES = 64 * 2**20
folder: ContextVar[Path | None] = ContextVar("folder", default=None)  # None: nothing is kept
_ROOMS = ("planner/model", "planner/lower", "training", "runtime")  # of the package
OUTLINES = frozenset({"attention", "outlines"})  # as the files of `planner/outlines`


def read(config: str, asked: str, keys: Set[str] = OUTLINES) -> dict[str, Any] | None:
    """What was kept for a configuration (JSON), an object with these keys. None where nothing was, or it is damaged."""
    with suppress(OSError, ValueError, PackageNotFoundError):
        path = _file(config, asked)
        found = None if path is None else json.loads(read_whole(path, MAX_BYTES))
        if isinstance(found, dict) and found.keys() >= keys:
            return found
    return None


def write(config: str, asked: str, found: dict[str, Any]) -> None:
    """Keep it, where that can be."""
    path = _file(config, asked)
    with suppress(OSError):
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(found, separators=(",", ":")))


def _file(config: str, asked: str) -> Path | None:
    if (own := folder.get()) is None:
        return None
    of = json.dumps([config, asked, *_versions()])
    return own / f"{hashlib.blake2b(of.encode(), digest_size=16).hexdigest()}.json"


@cache
def _versions() -> tuple[str, ...]:
    """Of torch and transformers, and the code that asks them, as a number."""
    root = Path(__file__).parents[2]
    code = [path.read_bytes() for room in _ROOMS for path in sorted((root / room).rglob("*.py"))]
    assert code, root
    return version("torch"), version("transformers"), hashlib.blake2b(b"".join(code), digest_size=16).hexdigest()
