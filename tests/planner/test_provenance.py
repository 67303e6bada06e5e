"""Provenance of a prediction, compared with explicit sums over ops."""

import pytest

from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.provenance import provenance_of
from penstock.planner.predict.scaled_profile import with_quantities
from penstock.runtime.plan import Lane, Policy, Semantics


def only(profile, place):
    """Return the profile with all quantities "measured", except those below `place`, which are "assumed"."""
    is_odd = lambda path, quantity: quantity.model_copy(update={"source": "odd"} if path.startswith(place) else {})  # noqa: E731
    fields = with_quantities(profile, is_odd).to_json()
    for source in fields["sources"].values():
        source |= {"kind": "measured", "device": profile.device.name, "scaled": False}
    fields["sources"]["odd"] = {"kind": "assumed", "detail": "odd", "date": None, "device": None, "driver": None}
    return Profile.from_json(fields)


def test_a_share_is_the_seconds_of_its_ops():
    """If only matrix product rates are assumed, the assumed fraction is their share of device time."""
    profile = read_profile("cpu-2core")  # measured points only: no product is limited by memory
    model, semantics = read_model("qwen2.5-0.5b"), Semantics(1024, 4, 2)
    plan = lower(model, build_workload(model, semantics), semantics, Policy(), profile.to_json())
    cost = CostModel(profile)

    def device_s(model):
        ops = ((i, op) for i, op in enumerate(plan.ops) if op.lane is Lane.GPU)
        return sum(plan.often(i) * model.demand(plan, op).uncontended_s for i, op in ops)

    fast = profile.to_json()
    for point in fast["device"]["matmul"]["bf16"]:
        point["flop_per_s"]["value"] *= 1e6
    without_s = device_s(CostModel(Profile.from_json(fast)))
    by_hand = 1 - without_s / device_s(cost)
    device, _ = provenance_of(plan, only(profile, "device.matmul"))
    assert device.fraction("assumptions") == pytest.approx(by_hand, abs=0.001)
    assert 0.2 < device.fraction("assumptions") < 0.95
    assert device.worst[0].what == "matrix products"
