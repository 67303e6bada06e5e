"""Measured ratios of a run: recovered from its timeline, and used by plans with bounds and checks."""

import json
from dataclasses import replace

import pytest

import penstock
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.check.claim import name_conflicts
from penstock.planner.predict.cost import costs, region_of
from penstock.planner.predict.measured import LEAST_SAMPLES, op_ratios
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.planner.predict.simulate import simulate
from penstock.run_files import MEASURED_FILE, read_measured, write_measured
from penstock.runtime.errors import CheckpointError, PlanError, ProfileError
from penstock.runtime.plan import Kind, PlanFile
from penstock.runtime.plan.timeline import Timeline

SPEEDS = dict.fromkeys((Group.MATMUL, Group.ATTENTION, Group.DEVICE_MEMORY), 0.8)  # the profile has 1
SPEEDS |= dict.fromkeys((Group.UPLOAD, Group.DOWNLOAD, Group.DUPLEX), 0.6) | {Group.OPTIMIZER: 1.5}
OPTIONS = {"seq_len": 2048, "batch_size": 16, "micro_batch": 8, "loss_tile_tokens": 4096}
PROFILE = read_profile("rtx4090-server")
TRUE = faster(PROFILE, SPEEDS)


def performed(plan, profile, n_steps=LEAST_SAMPLES) -> tuple[float, Timeline]:
    """Return the step of a plan on a machine, and the timeline of some steady steps."""
    prediction = simulate(plan, costs(plan, profile), region_of(profile))
    last = max(span.step for span in prediction.timeline.spans)
    steady = [span for span in prediction.timeline.spans if span.step == last]
    return prediction.step_s, Timeline(tuple(replace(span, step=n) for n in range(n_steps) for span in steady))


@pytest.fixture(scope="module")
def former():
    return penstock.plan("qwen2.5-7b", PROFILE, **OPTIONS)


@pytest.fixture(scope="module")
def run(former, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_measured(folder, former.plan, performed(former.plan, TRUE)[1])
    return folder


def test_ratios_are_the_factors_by_which_a_profile_is_wrong(former, run):
    ratios = {(Kind(entry.kind), entry.block): entry for entry in read_measured(run).ratios}
    assert {ratios[kind, 1].n_samples > 0 for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.LOAD, Kind.UPDATE)} == {True}
    for kind, expected in ((Kind.BACKWARD, 1 / 0.8), (Kind.FORWARD, 1 / 0.8), (Kind.LOAD, 1 / 0.6), (Kind.NORM, 1.0)):
        assert ratios[kind, 1].ratio == pytest.approx(expected, rel=0.02), kind
    assert 1 / 1.5 < ratios[Kind.UPDATE, 1].ratio < 0.85, "a faster update shares memory with copies"
    assert ratios[Kind.SPECULATE, 1].n_samples == 0, "this plan has none"
    assert ratios[Kind.SPECULATE, 1].ratio == pytest.approx(ratios[Kind.UPDATE, 1].ratio, rel=0.02)
    with_ratios = read_measured(run).scaled(PROFILE, former.plan.model, former.plan.semantics, run)
    assert performed(former.plan, with_ratios)[0] == pytest.approx(performed(former.plan, TRUE)[0], rel=0.005)


def test_ratios_of_a_plan_with_ratios_refer_to_its_bare_profile(former, run):
    profile = read_measured(run).scaled(PROFILE, former.plan.model, former.plan.semantics, run)
    again = op_ratios(replace(former.plan, profile=profile.to_json()), performed(former.plan, TRUE)[1])
    for first, second in zip(read_measured(run).ratios, again, strict=True):
        assert second.ratio == pytest.approx(first.ratio, rel=0.02), first


def test_few_samples_and_waits_for_ranks_give_no_ratio(former):
    few = performed(former.plan, TRUE, LEAST_SAMPLES - 1)[1]
    kinds = {entry.kind for entry in op_ratios(former.plan, few) if entry.block == 0 and entry.n_samples}
    assert Kind.UPDATE not in kinds, "one a step"
    assert Kind.FORWARD in kinds
    shared = penstock.plan("qwen2.5-7b", "8xh100", **OPTIONS | {"micro_batch": 1}, gpus=8, policy="megatrain").plan
    timeline = performed(shared, Profile.from_json(shared.profile))[1]
    waiting = [i for i, op in enumerate(shared.ops) if op.kind in (Kind.GATHER, Kind.EXCHANGE, Kind.CLIP)]
    spans = [replace(span, end_s=span.end_s + 1.0) if span.op in waiting else span for span in timeline.spans]
    assert {Kind(entry.kind) for entry in op_ratios(shared, Timeline(tuple(spans)))} & {
        Kind.GATHER,
        Kind.EXCHANGE,
        Kind.CLIP,
    } == set()


def test_a_plan_with_the_ratios_of_a_run_is_faster_there_says_so_and_is_checked(former, run):
    planned = penstock.plan("qwen2.5-7b", PROFILE, **OPTIONS, measured=run)
    (before_s, _), (after_s, _) = performed(former.plan, TRUE), performed(planned.plan, TRUE)
    least_s = penstock.plan("qwen2.5-7b", TRUE, **OPTIONS).step_s
    assert after_s == pytest.approx(planned.step_s, rel=0.02)
    assert before_s - after_s > 0.9 * (before_s - least_s) > 0.05 * before_s, "recovered time"
    assert "measured on" in str(planned)
    assert "search and all" in penstock.check(planned, search=True)
    assert ["ratios of a run" in note for note in name_conflicts(planned.plan)] == [True]
    file = json.loads(str(planned.plan))
    file["profile"]["op_ratios"] = [entry | {"ratio": 1.01 * entry["ratio"]} for entry in file["profile"]["op_ratios"]]
    with pytest.raises(PlanError, match="claim: "):
        penstock.check(PlanFile(type(planned.plan).parse(json.dumps(file)), planned.file.claim))


def test_ratios_of_another_run_or_a_damaged_file_are_refused_in_one_line(former, run, tmp_path):
    def planned(model="qwen2.5-7b", machine=PROFILE, **options):
        return penstock.plan(model, machine, **{**OPTIONS, "policy": "megatrain", "measured": run, **options})

    assert planned(seq_len=1024).plan.profile["op_ratios"]
    for error, words, options in (
        (PlanError, "another model", {"model": "llama-3.1-8b"}),
        (PlanError, "another optimizer", {"optimizer": "lion"}),
        (PlanError, "another profile", {"machine": TRUE}),
        (CheckpointError, "no such file", {"measured": tmp_path}),
    ):
        with pytest.raises(error, match=words):
            planned(**options)
    good = json.loads((run / MEASURED_FILE).read_text())
    entry = good["ratios"][0]
    for words, fields in (
        ("ratios.0.ratio", {"ratios": [entry | {"ratio": 1e9}]}),
        ("n_steps", {"n_steps": 0}),
        ("extra", {"extra": 1}),
    ):
        (tmp_path / MEASURED_FILE).write_text(json.dumps(good | fields))
        with pytest.raises(CheckpointError, match=words):
            planned(measured=tmp_path)
    for words, entries in (("no kind of op", [entry | {"kind": "nap"}]), ("two ratios", [entry, entry])):
        (tmp_path / MEASURED_FILE).write_text(json.dumps(good | {"ratios": entries}))
        with pytest.raises(ProfileError, match=words):
            planned(measured=tmp_path)
