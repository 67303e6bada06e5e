"""Whether the claim of a plan file follows from the plan's own ops on its own profile.

The checker (`check.py`) proves a plan right as it stands, without the planner. Here the planner is asked again: blocks
are built from the model, arenas from the policy, the step is simulated and bounded, and what is claimed is compared. What another
version of the planner works out otherwise is told, not refused. A search takes as long as `plan` did, and is done where it is asked
for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf, isclose
from typing import Any

from penstock.hwprofiles.device_parts import name_of_shared, shared_by
from penstock.hwprofiles.schema import Profile, read_profile, shipped_profiles
from penstock.planner.bounds.bounds import policy_bound
from penstock.planner.lower.arenas import arenas_of
from penstock.planner.model.config import shipped_model, shipped_models
from penstock.planner.model.workload import build_workload
from penstock.planner.search.answer import Answer, Bounds, answer_of
from penstock.planner.search.claim import SAME_FRACTION, Claim
from penstock.planner.search.micro_batch import sizes_of
from penstock.planner.search.search import search
from penstock.planner.search.space import families
from penstock.planner.search.trial import Trial
from penstock.runtime.errors import PenstockError, PlanError
from penstock.runtime.plan import Plan
from penstock.runtime.units import on_one_line

from .shape import AGAIN

# Fields of a block that say how long it takes, and nothing of what it is or needs: another version may count them otherwise.
_OF_TIME: dict[str, Any] = {"matmuls": (), "attention": None, "tiers": ()} | dict.fromkeys(
    ("pointwise_bytes", "fused_bytes", "norm_bytes", "n_kernels", "tile_sum_bytes"), 0
)


def check_origin(plan: Plan, claim: Claim | None = None) -> list[str]:
    """PlanError where blocks or arenas are not those of the plan's model, semantics and policy, or hosts share the ranks unequally;
    else what was not held to: with a claim of other code, what only costs rest on."""
    n_hosts = _profile_of(plan).n_hosts
    if plan.semantics.ranks % n_hosts:
        raise PlanError(f"profile: {n_hosts} hosts cannot have equally many of {plan.semantics.ranks} ranks; {AGAIN}")
    try:
        built = build_workload(plan.model, plan.semantics)
    except PenstockError as error:
        raise PlanError(f"model: {error}") from None
    is_other, is_by_this = plan.workload != built, claim is None or claim.by_this_code
    sizes, of_built = ([replace(block, **_OF_TIME) for block in (*of.blocks, *of.smaller)] for of in (plan.workload, built))
    if is_other and (is_by_this or sizes != of_built):
        raise PlanError(f"workload: its blocks are not those of the model and the semantics; {AGAIN}")
    if sorted(plan.arenas, key=lambda arena: arena.name) != sorted(arenas_of(plan), key=lambda arena: arena.name):
        raise PlanError(f"arenas: they are not those of the policy; {AGAIN}")
    return ["what blocks take, which another version counted"] if is_other else []


def check_claim(plan: Plan, claim: Claim) -> list[str]:
    """PlanError where a claim does not follow from the plan; else what was not held to, and why. Everything but the search: a bound
    on all policies is taken as it is claimed."""
    proof = claim.certificate
    trial = Trial(plan.model, plan.workload, plan.semantics, _profile_of(plan), proof.clipped_fraction)
    trial.adopt(plan)
    proven = Bounds(policy_bound(plan, trial.cost).seconds, inf, 0, proof.free or (), proof.n_sizes or 1)
    if proof.n_families:
        n_families, size_s = len(families(plan.semantics, plan.workload)), proof.size_bound_s or proof.policy_bound_s
        proven = replace(proven, size_s=size_s, others_s=proof.policy_bound_s, n_families=n_families)
    return _held(claim, answer_of(trial, plan, proven, {}), "n_simulated")


def check_search(plan: Plan, claim: Claim) -> list[str]:
    """The same; and searching again, as it was searched, finds this plan, and for all others the bound that is claimed."""
    proof = claim.certificate
    fixed = None if proof.n_families else plan.policy  # whose bound is its own, and depends on its ops
    try:
        profile, sizes, free = _profile_of(plan), [(plan.semantics, plan.workload)], frozenset(proof.free or ())
        if (proof.n_sizes or 1) > 1:
            sizes = [*sizes_of(plan.model, plan.semantics, profile, free)]
        found = search(plan.model, sizes, profile, fixed, free, proof.clipped_fraction)
    except PenstockError as error:
        raise PlanError(f"claim: searching again fails: {on_one_line(str(error), 200)}; {AGAIN}") from None
    left = [] if found.plan == plan else check_claim(plan, claim)
    if found.plan.policy == plan.policy or claim.by_this_code:
        return left + _held(claim, found)
    return [*left, "the search, which finds another plan in this version"]


def _held(claim: Claim, answer: Answer, *unheld: str) -> list[str]:
    """PlanError at a difference of a claim from the answer; of another version's claim that difference is told."""
    said, found = claim.to_json(), answer.claim.to_json()
    for part, name in [(part, name) for part, fields in found.items() for name in fields if name not in ("arithmetic", *unheld)]:
        old, new = said[part][name], found[part][name]
        if _same(old, new) or (old is None and not claim.by_this_code):  # an older file does not know the field
            continue
        what = f"claim: {part}.{name} is {old}, not {new} as the plan on its profile has it"
        if claim.by_this_code:
            raise PlanError(f"{on_one_line(what, 300)}; {AGAIN}")
        return [f"{what}, but it was claimed by another version"]
    return []


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one, but for rounding of numbers."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    are_numbers = isinstance(a, float | int) and isinstance(b, float | int)
    return isclose(a, b, rel_tol=SAME_FRACTION) if are_numbers else bool(a == b)


def strangers(plan: Plan) -> Iterator[str]:
    """Where a model or a machine bears the name of one that comes with Penstock, and is not that."""
    if plan.model.name in shipped_models():
        shipped = shipped_model(plan.model.name).config
        if {key: plan.model.config.get(key) for key in shipped} != shipped:
            yield f"the model is called {plan.model.name} as a shipped one is, but its configuration is another"
    profile = _profile_of(plan)
    here = plan.semantics.ranks // profile.n_hosts
    of = profile.name.removesuffix(name_of_shared("", here, profile.n_hosts))
    if of in shipped_profiles():
        shipped = dict(shared_by(read_profile(of), here).quantities())
        for place, quantity in profile.quantities():  # but for what users may give, and what is of all hosts
            is_given = quantity.source.startswith("user_") or place.startswith(("network.", "price."))
            if not is_given and quantity != shipped.get(place):
                yield f"the machine is called {profile.name} as a shipped one is, but {place} is another"
                break


def _profile_of(plan: Plan) -> Profile:
    return Profile.from_json(plan.profile, "profile")
