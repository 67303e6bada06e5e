"""Claim of a plan file: prediction and certificate, as written by a search and read from a file."""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Lane
from penstock.runtime.plan.workload import FILE, Count, Natural
from penstock.runtime.units import on_one_line

SAME_FRACTION = 1e-9  # relative tolerance for equal times, because of rounding in sums
MAX_NAME = 80  # characters of the binding resource and of the code fingerprint
CUT = "memory_cut"  # entry of `free` if the split of a machine's single memory is free

ROOT = Path(__file__).parents[2]
# Source files that affect a claim: planner, profiles, plan semantics and contention of ops
SOURCES = (
    *(f"planner/{room}/*.py" for room in ("model", "lower", "predict", "bounds", "search")),
    *(f"hwprofiles/{name}.py" for name in ("schema", "components", "curves")),
    *(f"runtime/plan/{name}.py" for name in ("plan", "ops", "policy", "workload", "footprint", "timeline")),
)
N_DIGITS = 16

Time = Annotated[float, Field(gt=0, lt=1e15)]
Busy = Annotated[float, Field(ge=0, lt=1e15)]
Rate = Annotated[float, Field(gt=0, lt=1e30)]
Gap = Annotated[float, Field(ge=-SAME_FRACTION, lt=1e15)]  # rounding can put a step slightly below its bound
Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


@cache
def arithmetic() -> str:
    """Fingerprint of the code that computes claims: source files, Python, NumPy and scipy. Versions of the planner may differ in
    costs or bounds, so a difference from another version's claim is no error."""
    sha256 = hashlib.sha256(repr((sys.version_info[:2], *map(metadata.version, ("numpy", "scipy")))).encode())
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        sha256.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes())
    return sha256.hexdigest()[:N_DIGITS]


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted step: the mean over clipped and unclipped steps, with its P10-P90 interval."""

    step_s: Time
    p10_step_s: Time
    p90_step_s: Time
    tokens_per_s: Rate
    model_flop_per_s: Rate
    device_peak_bytes: Natural
    host_peak_bytes: Natural
    busy_s: dict[Lane, Busy]
    __pydantic_config__ = FILE


@dataclass(frozen=True, slots=True)
class Certificate:
    """Optimality gap of a plan. `policy_bound_s` is a lower bound for all policies with any of the searched sizes,
    `machine_bound_s` for any schedule with this micro-batch."""

    policy_bound_s: Time
    machine_bound_s: Time
    gap_fraction: Gap
    binding: Name
    n_families: Natural  # covered by the bound; 0: a fixed policy
    n_simulated: Count
    clipped_fraction: Fraction | None  # share of steps; None: unknown
    n_draws: Count  # of the interval
    seed: Natural
    arithmetic: Name  # fingerprint of the code
    free: tuple[Name, ...]  # sizes that the search chose; the bound covers all candidates
    n_sizes: Count  # number of candidates (micro-batch and tiles)
    size_bound_s: Time  # lower bound for policies with the chosen sizes
    __pydantic_config__ = FILE


@dataclass(frozen=True, slots=True)
class Claim:
    """Prediction and certificate of a plan, as stored in its file."""

    prediction: Predicted
    certificate: Certificate
    __pydantic_config__ = FILE

    @property
    def by_this_code(self) -> bool:
        """True if the claim was computed by the current code."""
        return self.certificate.arithmetic == arithmetic()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_CLAIM = TypeAdapter(Claim)


def claimed(fields: dict[str, Any] | None, where: str) -> Claim:
    """Validate the claim of a plan file. PlanError names the first missing, unknown or malformed field."""
    if fields is None:
        message = "`claim` is null, so nothing can be verified"
        raise PlanError(f"{where}: {message}; make one with `penstock plan MODEL --policy FILE`, of this plan's policy")
    try:
        return _CLAIM.validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = on_one_line(".".join(map(str, ("claim", *first["loc"]))), 120)
        raise PlanError(f"{where}: {place}: {first['msg'][:160]}; make the plan again with `penstock plan`") from None
