"""Verification of a plan file's claim with the planner.

The checker (`check.py`) proves a plan correct without the planner. This module runs the planner again: it builds blocks from the
model and arenas from the policy, simulates and bounds the step, and compares the results with the claim. Differences from claims by
another version of the planner are reported, not rejected. A search takes as long as `plan` did and only runs on request.
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
from penstock.planner.search.claim import SAME_FRACTION, Claim
from penstock.planner.search.evaluation import Evaluator
from penstock.planner.search.micro_batch import sizes_of
from penstock.planner.search.policies import families
from penstock.planner.search.result import Bounds, SearchResult, result_of
from penstock.planner.search.search import search
from penstock.runtime.errors import PenstockError, PlanError
from penstock.runtime.plan import Plan
from penstock.runtime.units import on_one_line

from .shape import AGAIN

# Fields of a block that affect its time, but not its identity or memory. Another version may count them differently.
_OF_TIME: dict[str, Any] = {"matmuls": (), "attention": None, "tiers": ()} | dict.fromkeys(
    ("pointwise_bytes", "fused_bytes", "norm_bytes", "n_kernels", "tile_sum_bytes"), 0
)


def check_origin(plan: Plan, claim: Claim | None = None) -> list[str]:
    """Check blocks and arenas against the plan's model, semantics and policy, and ranks against the number of hosts; PlanError if
    they differ, ProfileError for FP8 products without their rate. Return the parts that were not verified: for a claim of other
    code, fields that only affect costs."""
    profile = _profile_of(plan)
    if plan.semantics.products == "fp8":
        _ = profile.fp8_rate_fraction  # raises if the machine has none
    n_hosts = profile.n_hosts
    if plan.semantics.ranks % n_hosts:
        raise PlanError(f"profile: {plan.semantics.ranks} ranks cannot be divided among {n_hosts} hosts; {AGAIN}")
    try:
        built = build_workload(plan.model, plan.semantics)
    except PenstockError as error:
        raise PlanError(f"model: {error}") from None
    is_other, is_by_this = plan.workload != built, claim is None or claim.by_this_code
    sizes, of_built = ([replace(block, **_OF_TIME) for block in (*w.blocks, *w.smaller)] for w in (plan.workload, built))
    if is_other and (is_by_this or sizes != of_built):
        raise PlanError(f"workload: its blocks do not match the model and the semantics; {AGAIN}")
    if sorted(plan.arenas, key=lambda arena: arena.name) != sorted(arenas_of(plan), key=lambda arena: arena.name):
        raise PlanError(f"arenas: they do not match the policy; {AGAIN}")
    return ["the cost fields of blocks, computed by another version"] if is_other else []


def check_claim(plan: Plan, claim: Claim) -> list[str]:
    """Check the prediction and the bounds of a claim; PlanError if they do not follow from the plan. Return the parts that were not
    verified, with the reason. The bound on all policies is taken from the claim, because it needs a search."""
    proof = claim.certificate
    evaluator = Evaluator(plan.model, plan.workload, plan.semantics, _profile_of(plan), proof.clipped_fraction)
    evaluator.adopt(plan)
    proven = Bounds(policy_bound(plan, evaluator.cost).seconds, inf, 0, proof.free, proof.n_sizes)
    if proof.n_families:
        n_families = len(families(plan.semantics, plan.workload))
        proven = replace(proven, size_s=proof.size_bound_s, others_s=proof.policy_bound_s, n_families=n_families)
    return _compare(claim, result_of(evaluator, plan, proven, {}), "n_simulated")


def check_search(plan: Plan, claim: Claim) -> list[str]:
    """Repeat the search with the claim's inputs and compare plan and bounds with the claim; otherwise like `check_claim`."""
    proof = claim.certificate
    fixed = None if proof.n_families else plan.policy  # a fixed policy has its own bound, which depends on its ops
    try:
        profile, sizes, free = _profile_of(plan), [(plan.semantics, plan.workload)], frozenset(proof.free)
        if proof.n_sizes > 1:
            sizes = [*sizes_of(plan.model, plan.semantics, profile, free)]
        result = search(plan.model, sizes, profile, fixed, free, proof.clipped_fraction)
    except PenstockError as error:
        raise PlanError(f"claim: repeating the search fails: {on_one_line(str(error), 200)}; {AGAIN}") from None
    unverified = [] if result.plan == plan else check_claim(plan, claim)
    if result.plan.policy == plan.policy or claim.by_this_code:
        return unverified + _compare(claim, result)
    return [*unverified, "the search: this version finds another plan"]


def _compare(claim: Claim, answer: SearchResult, *skipped: str) -> list[str]:
    """Compare a claim with a new result: PlanError for a claim of this code; a claim of another version returns the difference."""
    claimed, computed = claim.to_json(), answer.claim.to_json()
    names = [(part, name) for part, fields in computed.items() for name in fields if name not in ("arithmetic", *skipped)]
    for part, name in names:
        old, new = claimed[part][name], computed[part][name]
        if _same(old, new):
            continue
        message = f"claim: {part}.{name} is {old}, but the plan on its profile gives {new}"
        if claim.by_this_code:
            raise PlanError(f"{on_one_line(message, 300)}; {AGAIN}")
        return [f"{message}; the claim is from another version"]
    return []


def _same(a: Any, b: Any) -> bool:
    """True if two values are equal up to rounding of numbers."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    are_numbers = isinstance(a, float | int) and isinstance(b, float | int)
    return isclose(a, b, rel_tol=SAME_FRACTION) if are_numbers else bool(a == b)


def name_conflicts(plan: Plan) -> Iterator[str]:
    """Yield a warning if the model or machine has the name of a shipped one and differs from it, or has measured ratios."""
    if plan.model.name in shipped_models():
        shipped = shipped_model(plan.model.name).config
        if {key: plan.model.config.get(key) for key in shipped} != shipped:
            yield f"the model has the name of the shipped {plan.model.name}, but another configuration"
    profile = _profile_of(plan)
    if profile.op_ratios:
        yield f"its op times are scaled by {len(profile.op_ratios)} ratios of a run (plan --measured), which are taken as given"
    ranks_per_host = plan.semantics.ranks // profile.n_hosts
    base_name = profile.name.removesuffix(name_of_shared("", ranks_per_host, profile.n_hosts))
    if base_name in shipped_profiles():
        shipped = dict(shared_by(read_profile(base_name), ranks_per_host).quantities())
        for place, quantity in profile.quantities():  # except values that users may set, and those of all hosts
            is_given = quantity.source.startswith("user_") or place.startswith(("network.", "price."))
            if not is_given and quantity != shipped.get(place):
                yield f"the machine has the name of the shipped {profile.name}, but another {place}"
                break


def _profile_of(plan: Plan) -> Profile:
    return Profile.from_json(plan.profile, "profile")
