"""Does what a plan file says follow from its model, its policy and its profile?

The checker (`check.py`) proves a plan right as it stands, and shares no code with the planner. Here the planner is asked again: the
blocks that the model and the semantics make, the arenas that the policy needs, and all that the claim says of time and memory,
worked out from the plan's own ops on the plan's own profile. What another version of the planner works out otherwise is told, not
refused. Only the search takes long: a bound on all policies can be held to what follows from it, or be found again.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from hwprofiles.schema import Profile, read_profile, shipped_profiles
from hwprofiles.several import BYTES_PER_GBIT, name_of_shared, on_network, shared_by
from planner.bounds.bounds import policy_bound
from planner.lower.arenas import arenas_of
from planner.model.config import shipped_model, shipped_models
from planner.model.workload import build_workload
from planner.predict.arithmetic import arithmetic
from planner.search.branch import Trial
from planner.search.search import Answer, answer_of, search
from planner.search.space import families
from runtime.errors import PenstockError, PlanError
from runtime.plan import Arena, Plan
from runtime.units import on_one_line, show_seconds

from .claimed import Claimed, as_json, refuse_contradictions, same
from .shape import AGAIN

# What of a block says how long it takes, and nothing of what it is or needs: another version may count it otherwise.
_OF_TIME = frozenset(
    {
        "matmuls",
        "n_matmuls",
        "pointwise_bytes",
        "fused_bytes",
        "norm_bytes",
        "n_kv_heads",
        "n_kernels",
        "tile_sum_bytes",
        "copied_bytes",
    }
)
MOST_SHOWN = 60  # characters of a value


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not what it should be."""

    place: str
    said: object
    found: object

    def __str__(self) -> str:
        return f"{self.place} is {_shown(self.said)}, not {_shown(self.found)}"


def check_origin(plan: Plan, by_this_code: bool) -> list[str]:
    """PlanError where blocks or arenas are not those of the plan's model, semantics and policy, or hosts share the ranks unequally;
    else what was not held to.

    `by_this_code`: the code that made the plan is this one, so that even what only costs rest on must be as it is counted here.
    """
    left, n_hosts = [], _profile_of(plan).n_hosts
    if plan.semantics.ranks % n_hosts:
        raise PlanError(f"profile: {n_hosts} hosts cannot have equally many of {plan.semantics.ranks} ranks; {AGAIN}")
    for found in _differences("workload", plan.workload, _workload_of(plan)):
        if by_this_code or not _OF_TIME & {*found.place.split(".")}:
            raise PlanError(f"{found} as the model and the semantics have it; {AGAIN}")
        left.append(f"{found} as this version counts it")
    wanted = tuple(arenas_of(plan))
    for found in _differences("arenas", _by_name(plan.arenas), _by_name(wanted)):
        raise PlanError(f"{found} as the policy needs it; {AGAIN}")
    return left[:1]


def is_by_this_code(claim: Claimed | None) -> bool:
    """Whether a claim was worked out by the code at hand. A plan without a claim has no other code to appeal to."""
    return claim is None or claim.certificate.arithmetic == arithmetic()


def check_claim(plan: Plan, claim: Claimed) -> list[str]:
    """PlanError with the first thing in the claim that does not follow from the plan; else what was not held to, and why.

    Everything but the search: of a bound on all policies only that it lies between the machine's and the step.
    """
    refuse_contradictions(claim, plan.semantics)
    return _held(claim, _answer(plan, claim), lambda place: place != "certificate.n_simulated")


def check_search(plan: Plan, claim: Claimed) -> list[str]:
    """The same, and that searching again, as it was searched, finds this plan, and for all others the bound that is claimed."""
    refuse_contradictions(claim, plan.semantics)
    proof, of_search = claim.certificate, {"certificate.n_simulated", "certificate.policy_bound_s"}
    fixed = None if proof.n_families else plan.policy  # whose bound is its own, and depends on its ops
    try:
        found = search(plan.model, plan.workload, plan.semantics, _profile_of(plan), fixed, clipped_fraction=proof.clipped_fraction)
    except PenstockError as error:
        raise PlanError(f"claim: searching again fails: {on_one_line(str(error), 200)}; {AGAIN}") from None
    if found.plan == plan:
        return _held(claim, found)
    left = check_claim(plan, claim)
    if found.plan.policy != plan.policy:
        other = f"claim: searching again finds another policy, of {show_seconds(found.step_s)} a step"
        return left + _refused_or_left(claim, other)
    return left + _held(claim, found, lambda place: fixed is None and place in of_search)


def strangers(plan: Plan) -> Iterator[str]:
    """Where a model or a machine bears the name of one that comes with Penstock, and is not that."""
    if plan.model.name in shipped_models():
        shipped = shipped_model(plan.model.name).config
        for found in _differences("model.config", {key: plan.model.config.get(key) for key in shipped}, shipped):
            yield f"the model is called {plan.model.name} as a shipped one is, but {found}"
            break
    profile, ranks = _profile_of(plan), plan.semantics.ranks
    n_hosts = profile.n_hosts if ranks % profile.n_hosts == 0 else 1
    here = ranks // n_hosts
    of = profile.name.removesuffix(name_of_shared("", here, n_hosts))
    if of in shipped_profiles():
        wanted = shared_by(_as_given(profile, read_profile(of), here), here, n_hosts)
        for found in _differences("profile", profile.to_json(), wanted.to_json()):
            yield f"the machine is called {profile.name} as a shipped one is, but {found}"
            break


def _answer(plan: Plan, claim: Claimed) -> Answer:
    """What the planner says of this very plan, if its bound on other policies is true."""
    proof = claim.certificate
    trial = Trial(plan.model, plan.workload, plan.semantics, _profile_of(plan), proof.clipped_fraction)
    trial.adopt(plan)
    if proof.n_families:
        n_families = len(families(plan.semantics, plan.workload))
        return answer_of(trial, plan.policy, proof.policy_bound_s, n_families, {})
    return answer_of(trial, plan.policy, policy_bound(plan, trial.cost).seconds, 0, {})


def _held(claim: Claimed, answer: Answer, concerns: Callable[[str], bool] = lambda place: True) -> list[str]:
    """PlanError at the first difference of a claim from the answer; of another version's claim that difference is told."""
    for found in _differences("", as_json(claim), answer.claim()):
        unsaid = found.said is None and not is_by_this_code(claim)  # an older file does not know the field
        if concerns(found.place) and found.place != "certificate.arithmetic" and not unsaid:
            return _refused_or_left(claim, f"claim: {found} as the plan on its profile has it")
    return []


def _refused_or_left(claim: Claimed, what: str) -> list[str]:
    if is_by_this_code(claim):
        raise PlanError(f"{what}; {AGAIN}")
    return [f"{what}, but it was claimed by another version"]


def _workload_of(plan: Plan) -> Any:
    try:
        return build_workload(plan.model, plan.semantics)
    except PenstockError as error:
        raise PlanError(f"model: {error}") from None


def _profile_of(plan: Plan) -> Profile:
    return Profile.from_json(plan.profile, "profile")


def _as_given(profile: Profile, shipped: Profile, here: int) -> Profile:
    """A shipped machine with what a user gave: memory of a device, and of the host, of which each of so many ranks has a part;
    and a network."""
    sizes = [
        int(has.value * times) if has.source.startswith("user_") else None
        for has, times in ((profile.device.memory_bytes, 1), (profile.host.memory_bytes, here))
    ]
    network = profile.network
    is_given = network is not None and network.bytes_per_s.source.startswith("user_")
    gbit = network.bytes_per_s.value / BYTES_PER_GBIT if network is not None and is_given else None
    return on_network(shipped.with_memory(*sizes), gbit)


def _by_name(arenas: Sequence[Arena]) -> dict[str, Arena]:
    return {a.name: a for a in arenas}


def _differences(place: str, said: object, found: object) -> Iterator[Difference]:
    """Where two trees of values differ, first to last; numbers are compared but for rounding."""
    if said is found or (type(said) is type(found) and said == found):
        return
    match said, found:
        case (Mapping(), Mapping()):
            for key in {**found, **said}:
                yield from _differences(_at(place, key), said.get(key), found.get(key))
        case (tuple() | list(), tuple() | list()) if len(said) == len(found):
            for i, pair in enumerate(zip(said, found, strict=True)):
                yield from _differences(_at(place, i), *pair)
        case _ if is_dataclass(said) and type(said) is type(found):
            for field in fields(said):
                yield from _differences(_at(place, field.name), getattr(said, field.name), getattr(found, field.name))
        case (float() | int(), float() | int()) if float in (type(said), type(found)) and same(said, found):
            return
        case _:
            yield Difference(place, said, found)


def _at(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)


def _shown(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, (tuple, list)) and len(str(value)) > MOST_SHOWN:
        return f"{len(value)} values"
    return on_one_line(json.dumps(value, default=str), MOST_SHOWN)
