"""Disk cache of layer traces: planning a configuration again needs no torch.

The cache folder is set by the command line. Files are keyed by configuration, request, library versions and a hash of our code.
"""

import hashlib
import json
from collections.abc import Set
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from penstock.runtime.files import read_whole, write_whole

MAX_BYTES = 64 * 2**20
folder: ContextVar[Path | None] = ContextVar("folder", default=None)  # None: no cache
_ROOMS = ("planner/model", "planner/lower", "model_checks", "runtime")  # folders of the package that affect traces
OUTLINES = frozenset({"attention", "outlines"})  # as the files of `planner/outlines`


def read(config: str, request: str, keys: Set[str] = OUTLINES) -> dict[str, Any] | None:
    """Return the cached object for a configuration (JSON) and request, or None if it is absent, damaged or lacks one of `keys`."""
    with suppress(OSError, ValueError, ModuleNotFoundError):
        path = _file(config, request)
        cached = None if path is None else json.loads(read_whole(path, MAX_BYTES))
        if isinstance(cached, dict) and cached.keys() >= keys:
            return cached
    return None


def write(config: str, request: str, value: dict[str, Any]) -> None:
    """Write an object to the cache; do nothing if that is impossible."""
    path = _file(config, request)
    with suppress(OSError):
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(value, separators=(",", ":")))


def _file(config: str, request: str) -> Path | None:
    if (cache_folder := folder.get()) is None:
        return None
    key = json.dumps([config, request, *_versions()])
    return cache_folder / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.json"


@cache
def _versions() -> tuple[str, ...]:
    """Versions of torch and transformers, and a hash of the code that uses them."""
    from importlib.metadata import version  # slow to import, and the command's help needs no version

    root = Path(__file__).parents[2]
    code = [path.read_bytes() for room in _ROOMS for path in sorted((root / room).rglob("*.py"))]
    assert code, root
    return version("torch"), version("transformers"), hashlib.blake2b(b"".join(code), digest_size=16).hexdigest()
