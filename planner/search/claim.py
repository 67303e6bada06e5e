"""The claim of a plan file: its prediction and its certificate, as a search writes them and as a file is read."""

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

SAME_FRACTION = 1e-9  # two times that differ by less are one: sums of floats
MAX_NAME = 80  # characters, of what binds and of the code that claimed it
CUT = "memory_cut"  # among what was free: how the one memory of a machine is cut

ROOT = Path(__file__).parents[2]
# The sources that a claim rests on: of the planner, what profiles mean, what a plan asks for, and how ops share a machine.
SOURCES = (
    *(f"planner/{room}/*.py" for room in ("model", "lower", "predict", "bounds", "search")),
    *(f"hwprofiles/{name}.py" for name in ("schema", "curves")),
    *(f"runtime/plan/{name}.py" for name in ("plan", "ops", "policy", "workload", "region", "footprint", "timeline")),
)
N_DIGITS = 16

Time = Annotated[float, Field(gt=0, lt=1e15)]
Busy = Annotated[float, Field(ge=0, lt=1e15)]
Rate = Annotated[float, Field(gt=0, lt=1e30)]
Gap = Annotated[float, Field(ge=-SAME_FRACTION, lt=1e15)]  # a step at its bound may miss it by rounding
Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


@cache
def arithmetic() -> str:
    """A fingerprint of the code that computed a claim: sources, Python, and the libraries that solve integer programs. Two versions
    of the planner may differ in a cost or a bound, and both be honest: what another version finds otherwise is no lie."""
    sha256 = hashlib.sha256(repr((sys.version_info[:2], *map(metadata.version, ("numpy", "scipy")))).encode())
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        sha256.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + path.read_bytes())
    return sha256.hexdigest()[:N_DIGITS]


@dataclass(frozen=True, slots=True)
class Predicted:
    """The prediction of a step: the mean over steps that are clipped and steps that are not, and its interval."""

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
    """How far from optimal the plan can be: no policy of the space is below one bound, with any of the sizes that were looked at;
    no schedule with this micro-batch is below the other."""

    policy_bound_s: Time
    machine_bound_s: Time
    gap_fraction: Gap
    binding: Name
    n_families: Natural  # that the bound covers; 0: it is that of the one policy asked for
    n_simulated: Count
    # With what the claim can be made again, which older files do not say: the share of steps that are clipped (None: unknown), the
    # draws of the interval, and the code that did the arithmetic.
    clipped_fraction: Fraction | None = None
    n_draws: Count | None = None
    seed: Natural | None = None
    arithmetic: Name | None = None
    free: tuple[Name, ...] | None = None  # sizes that were chosen, not given: the bound is of all that might have been
    n_sizes: Count | None = None  # of these: pairs of a micro-batch and tiles
    size_bound_s: Time | None = None  # below which no policy is with the sizes chosen
    __pydantic_config__ = FILE


@dataclass(frozen=True, slots=True)
class Claim:
    """What a plan file says of its plan."""

    prediction: Predicted
    certificate: Certificate
    __pydantic_config__ = FILE

    @property
    def by_this_code(self) -> bool:
        """Whether it was worked out by the code at hand."""
        return self.certificate.arithmetic == arithmetic()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_CLAIM = TypeAdapter(Claim)


def claimed(fields: dict[str, Any] | None, where: str) -> Claim:
    """The claim in a plan file; PlanError names the first field that is missing, unknown or no number of its kind."""
    if fields is None:
        said = "`claim` is null: it promises nothing that could be held to"
        raise PlanError(f"{where}: {said}; make one with `penstock plan MODEL --policy FILE`, of this plan's policy")
    try:
        return _CLAIM.validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = on_one_line(".".join(map(str, ("claim", *first["loc"]))), 120)
        raise PlanError(f"{where}: {place}: {first['msg'][:160]}; make the plan again with `penstock plan`") from None
