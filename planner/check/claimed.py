"""What does a plan file claim of its plan?

The fields that `penstock plan` writes beside a plan, each a number of its kind, and what follows from these numbers alone. Whether
they are true is for `recount.py` to say.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from runtime.errors import PlanError
from runtime.plan import Lane, Semantics
from runtime.plan.setup import lanes_of
from runtime.plan.workload import FILE, Count, Natural
from runtime.units import on_one_line

from .shape import AGAIN

SAME_FRACTION = 1e-9  # two times that differ by less are one: sums of floats
MAX_NAME = 80  # characters, of what binds and of the code that claimed it

Time = Annotated[float, Field(gt=0, lt=1e15)]
Busy = Annotated[float, Field(ge=0, lt=1e15)]
Rate = Annotated[float, Field(gt=0, lt=1e30)]
Gap = Annotated[float, Field(ge=-SAME_FRACTION, lt=1e15)]  # a step at its bound may miss it by rounding
Fraction = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a step is to take."""

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
class Certified:
    """How far from the best the plan can be, and with what that can be worked out again: older files do not say it all."""

    policy_bound_s: Time
    machine_bound_s: Time
    gap_fraction: Gap
    binding: Name
    n_families: Natural
    n_simulated: Count
    clipped_fraction: Fraction | None = None
    n_draws: Count | None = None
    seed: Natural | None = None
    arithmetic: Name | None = None
    __pydantic_config__ = FILE


@dataclass(frozen=True, slots=True)
class Claimed:
    """A claim whose every field is there and of its kind."""

    prediction: Predicted
    certificate: Certified
    __pydantic_config__ = FILE


_CLAIM = TypeAdapter(Claimed)


def claimed(fields: dict[str, Any] | None, where: str) -> Claimed:
    """The claim in a plan file; PlanError names the first field that is missing, unknown or no number of its kind."""
    if fields is None:
        said = "`claim` is null: it promises nothing that could be held to"
        raise PlanError(f"{where}: {said}; make one with `penstock plan MODEL --policy FILE`, of this plan's policy")
    try:
        return _CLAIM.validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = on_one_line(".".join(map(str, ("claim", *first["loc"]))), 120)
        raise PlanError(f"{where}: {place}: {first['msg'][:160]}; {AGAIN}") from None


def as_json(claim: Claimed) -> dict[str, Any]:
    """The claim as a file has it; what an older file leaves out is null."""
    fields: dict[str, Any] = _CLAIM.dump_python(claim, mode="json")
    return fields


def refuse_contradictions(claim: Claimed, semantics: Semantics) -> None:
    """PlanError where a claim cannot be true whatever the plan, because its own numbers do not go together."""
    for fault in _contradictions(claim, semantics):
        raise PlanError(f"claim: {fault}; {AGAIN}")


def _contradictions(claim: Claimed, semantics: Semantics) -> Iterator[str]:
    said, proof = claim.prediction, claim.certificate
    if not _ascend(said.p10_step_s, said.step_s, said.p90_step_s):
        yield f"p10_step_s {said.p10_step_s}, step_s {said.step_s} and p90_step_s {said.p90_step_s} do not ascend"
    if not _ascend(proof.machine_bound_s, proof.policy_bound_s, said.step_s):
        bounds = f"machine_bound_s {proof.machine_bound_s}, policy_bound_s {proof.policy_bound_s} and step_s {said.step_s}"
        yield f"{bounds} do not ascend"
    if not same(1 + proof.gap_fraction, said.step_s / proof.policy_bound_s):
        yield f"gap_fraction is {proof.gap_fraction}, but step_s is {said.step_s / proof.policy_bound_s} times policy_bound_s"
    if not same(said.tokens_per_s, semantics.tokens_per_step / said.step_s):
        yield f"tokens_per_s is {said.tokens_per_s}, but a step of step_s has {semantics.tokens_per_step / said.step_s}"
    if set(said.busy_s) != set(lanes_of(semantics)):
        yield f"busy_s names {', '.join(sorted(said.busy_s)) or 'no lane'}, not {', '.join(sorted(lanes_of(semantics)))}"


def _ascend(*times_s: float) -> bool:
    return all(a <= b or same(a, b) for a, b in pairwise(times_s))


def same(a: float, b: float) -> bool:
    """Whether two numbers are one but for rounding."""
    return abs(a - b) <= SAME_FRACTION * max(abs(a), abs(b))
