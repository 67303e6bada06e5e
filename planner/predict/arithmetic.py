"""A fingerprint of the code that computed a plan's claim.

Two versions of the planner may differ in a cost or a bound, and both be honest: what another version finds otherwise is no lie.
"""

import hashlib
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The sources that a claim rests on: of the planner, what profiles mean, what a plan asks for, and how ops share a machine.
SOURCES = (
    *(f"planner/{room}/*.py" for room in ("model", "lower", "predict", "bounds", "search")),
    *(f"hwprofiles/{name}.py" for name in ("schema", "curves")),
    *(f"runtime/plan/{name}.py" for name in ("plan", "ops", "policy", "workload", "region", "footprint", "timeline")),
)
N_DIGITS = 16


@cache
def arithmetic() -> str:
    """The fingerprint of the sources, of Python and of the libraries that solve the search's integer programs."""
    sha256 = hashlib.sha256(repr((sys.version_info[:2], *map(metadata.version, ("numpy", "scipy")))).encode())
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        sha256.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes())
    return sha256.hexdigest()[:N_DIGITS]
