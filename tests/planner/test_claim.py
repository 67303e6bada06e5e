"""Claims of plans: honest claims hold, changed claims are rejected, claims of another version are reported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock.planner.check.claim import check_claim, check_origin, check_search, name_conflicts
from penstock.planner.search.claim import claimed
from penstock.runtime.errors import PlanError
from penstock.runtime.plan import Plan, PlanFile
from tests.lanes import mostly_slow
from tests.running import penstock as invoke
from tests.running import succeeded

OPTIONS = {"machine": "rtx4090-desktop", "seq_len": 512, "batch_size": 4}
WAYS = {
    "searched": {},
    "a baseline": {"policy": "slideformer"},
    "clipped steps": {"clipped_steps": 0.3},
    "fp32 without clipping": {"compute": "fp32", "gradient_dtype": "fp32", "clip_norm": None},
}


def planned(path: Path, **options: object) -> PlanFile:
    flags = {f"--{name.replace('_', '-')}": "none" if value is None else str(value) for name, value in options.items()}
    succeeded(invoke("plan", "qwen2.5-0.5b", *(word for flag in flags.items() for word in flag), "-o", path))
    return PlanFile.read(path)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> PlanFile:
    return planned(tmp_path_factory.mktemp("plan") / "plan.json", **OPTIONS)


@mostly_slow("way", WAYS)
def test_an_honest_claim_holds_search_and_all(way: str, honest: PlanFile, tmp_path: Path) -> None:
    file = planned(tmp_path / "plan.json", **(OPTIONS | WAYS[way])) if WAYS[way] else honest
    claim = claimed(file.claim, "plan.json")
    assert check_origin(file.plan, claim) == check_claim(file.plan, claim) == check_search(file.plan, claim) == []
    assert list(name_conflicts(file.plan)) == []
    assert "claim recomputed" in penstock.check(file)
    p, c = claim.prediction, claim.certificate
    assert p.p10_step_s <= p.step_s <= p.p90_step_s
    assert c.machine_bound_s <= c.policy_bound_s <= p.step_s
    assert c.gap_fraction == pytest.approx(p.step_s / c.policy_bound_s - 1)


def changed(claim: dict, place: str, factor: float) -> dict:
    part, name = place.split(".")
    return claim | {part: claim[part] | {name: claim[part][name] * factor}}


def test_a_changed_number_is_refused_by_its_place(honest: PlanFile) -> None:
    claim = nearly = honest.claim
    for place in ("prediction.step_s", "prediction.p90_step_s", "certificate.machine_bound_s", "certificate.gap_fraction"):
        claim = changed(honest.claim, place, 1 + 1e-6)
        with pytest.raises(PlanError, match=place):
            check_claim(honest.plan, claimed(claim, "plan.json"))
        nearly = changed(nearly, place, 1 + 1e-12)
    check_claim(honest.plan, claimed(nearly, "plan.json"))  # floating-point sums
    foreign = claim | {"certificate": claim["certificate"] | {"arithmetic": "0" * 16}}
    assert "the claim is from another version" in check_claim(honest.plan, claimed(foreign, "plan.json"))[0]


def test_a_bound_on_all_policies_is_refused_by_a_search(honest: PlanFile) -> None:
    claim = changed(honest.claim, "certificate.policy_bound_s", 1.001)
    with pytest.raises(PlanError, match=r"policy_bound_s|gap_fraction"):
        check_search(honest.plan, claimed(claim, "plan.json"))


def test_a_slower_policy_claimed_to_be_the_best_is_refused(honest: PlanFile, tmp_path: Path) -> None:
    slower = planned(tmp_path / "slower.json", **(OPTIONS | {"policy": "zero3-offload"}))
    proof = slower.claim["certificate"] | {"n_families": honest.claim["certificate"]["n_families"]}
    with pytest.raises(PlanError):
        check_search(slower.plan, claimed(slower.claim | {"certificate": proof}, "plan.json"))


def tampered(plan: Plan) -> dict[str, Plan]:
    first, layer, *layers_after, head = plan.workload.blocks
    frozen, *weights = layer.parameters

    def with_blocks(layer=layer, head=head):
        return replace(plan, workload=replace(plan.workload, blocks=(first, layer, *layers_after, head)))

    arenas = (replace(plan.arenas[0], slot_bytes=(*plan.arenas[0].slot_bytes, 256)), *plan.arenas[1:])
    return {
        "what a layer keeps": with_blocks(replace(layer, kept_bytes=layer.kept_bytes - 256)),
        "what a layer computes": with_blocks(replace(layer, n_kernels=layer.n_kernels - 1)),
        "what is trained": with_blocks(replace(layer, parameters=(replace(frozen, frozen=True), *weights))),
        "a weight twice": with_blocks(replace(layer, parameters=(frozen, frozen, *weights[1:]))),
        "what is tied": with_blocks(head=replace(head, parameters=tuple(replace(p, tied_to=None) for p in head.parameters))),
        "an arena": replace(plan, arenas=arenas),
        "the model": replace(plan, model=replace(plan.model, config=plan.model.config | {"num_hidden_layers": 1})),
    }


def test_blocks_and_arenas_are_those_of_model_and_policy(honest: PlanFile) -> None:
    claim = claimed(honest.claim, "plan.json")
    older = replace(claim, certificate=replace(claim.certificate, arithmetic="another"))
    for change, plan in tampered(honest.plan).items():
        with pytest.raises(PlanError):
            check_origin(plan, claim)
        if change == "what a layer computes":  # counts may differ between versions
            assert check_origin(plan, older)
        else:
            with pytest.raises(PlanError):
                check_origin(plan, older)


def test_a_claim_that_is_none_is_refused_by_its_field(honest: PlanFile) -> None:
    for claim, message in (
        (None, "`claim` is null"),
        ({}, "claim.prediction"),
        (honest.claim | {"more": 1}, "claim.more"),
        (changed(honest.claim, "prediction.step_s", -1), "claim.prediction.step_s"),
    ):
        with pytest.raises(PlanError, match=message):
            claimed(claim, "plan.json")


def test_a_shipped_name_that_means_something_else_is_told(honest: PlanFile) -> None:
    profile = json.loads(json.dumps(honest.plan.profile))
    profile["host"]["dram_bytes_per_s"]["value"] *= 2
    model = replace(honest.plan.model, config=honest.plan.model.config | {"rope_theta": 1})
    (machine,) = name_conflicts(replace(honest.plan, profile=profile))
    assert "dram_bytes_per_s" in machine
    assert [message for message in name_conflicts(replace(honest.plan, model=model)) if "qwen2.5-0.5b" in message]
