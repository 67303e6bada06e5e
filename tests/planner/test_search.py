"""Is the plan that the search returns as good as its certificate says?"""

from dataclasses import replace
from itertools import product
from math import inf

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.any_memory import with_any_memory
from hwprofiles.schema import Profile, read_profile
from penstock.cli.main import cli
from planner.bounds.bounds import policy_bound
from planner.bounds.machine import machine_bound
from planner.bounds.work import ops_of, spared_ops
from planner.check.check import check
from planner.check.claim import check_claim
from planner.lower.lower import lower
from planner.model.workload import build_workload, read_model
from planner.predict.cost import CostModel, region_of
from planner.predict.faster import Group, faster
from planner.predict.memory import footprint, frame
from planner.predict.resident import shares_memory
from planner.predict.simulate import simulate
from planner.search.branch import Tree
from planner.search.estimate import Greedy
from planner.search.micro_batch import with_micro_batch
from planner.search.relax import Relaxation
from planner.search.search import search
from planner.search.space import BASELINES, GRADIENT_SLOTS, Family, Way, baseline, families, family_of, leanest, staying, with_ways
from runtime.errors import PlanError
from runtime.plan import Kind, Policy, Semantics, Update
from runtime.plan.legality import can_stay
from runtime.plan.workload import Block, BlockKind, Matmul, Model, Parameter, Saved, Tier
from tests.strategies import with_smaller

ROUNDING = 1 - 1e-9
NOBODY = Model({}, name="nobody")
STAYING = Way(Saved.INPUT), Way(Saved.PRODUCTS), Way(Saved.ALL)
LEAVING = Way(Saved.PRODUCTS, away=True)


def slower(machine, *places, factor=200.0):
    """The machine with some of its rates so low that they bind."""
    fields = read_profile(machine).to_json()
    for place in places:
        here = fields
        for key in place.split("."):
            here = here[key]
        for quantity in [point["rate"] for point in here] if isinstance(here, list) else [here]:
            quantity["value"] /= factor
    return Profile.from_json(fields)


MACHINES = {
    name: with_any_memory(profile, 10**15, 10**16)
    for name, profile in {
        **{name: read_profile(name) for name in ("h200-pcie5", "rtx4090-desktop", "cpu-2core", "gb10")},
        "slow up": slower("h200-pcie5", "link.h2d.bytes_per_s"),
        "slow down": slower("h200-pcie5", "link.d2h.bytes_per_s"),
        "slow both ways": slower("h200-pcie5", "link.h2d.bytes_per_s", "link.d2h.bytes_per_s", "link.duplex_bytes_per_s"),
        "slow memory": slower("h200-pcie5", "host.dram_bytes_per_s"),
        "slow reduction": slower("h200-pcie5", "host.reduce_bytes_per_s"),
    }.items()
}

# Where much is gained if products need not be computed again.
SLOW_TO_COMPUTE = [MACHINES["cpu-2core"], MACHINES["gb10"], faster(MACHINES["h200-pcie5"], {Group.MATMUL: 0.02})]

widths = st.sampled_from([64, 256, 1024, 4096])


@st.composite
def workloads(draw, semantics, most_layers=5, least_layers=1):
    """Blocks of any proportions: narrow and deep, wide and flat, tied or not."""
    tokens, width, vocab = semantics.tokens_per_micro_batch, draw(widths), draw(st.sampled_from([256, 32768]))
    table = Parameter("table", (vocab, width))
    boundary = tokens * width * 2
    layers = []
    for i in range(draw(st.integers(least_layers, most_layers))):
        inner = draw(widths)
        layers.append(
            Block(
                f"layer {i}",
                BlockKind.LAYER,
                (Parameter(f"{i}.in", (inner, width)), Parameter(f"{i}.out", (width, inner))),
                (Matmul(tokens, width, inner), Matmul(tokens, inner, width)),
                pointwise_bytes=boundary * draw(st.integers(1, 20)),
                n_kernels=draw(st.integers(1, 20)),
                boundary_bytes=boundary,
                kept_bytes=boundary * 3,
                transient_bytes=boundary * 6,
                tiers=(
                    Tier(Saved.INPUT, 0, boundary * 6, 1, True, boundary, 1),
                    Tier(
                        Saved.PRODUCTS,
                        boundary * 2,
                        boundary * 6,
                        0,
                        False,
                        boundary,
                        1,
                        n_saved=draw(st.integers(0, 3)),
                        copied_bytes=boundary * draw(st.integers(0, 2)),
                    ),
                ),
            )
        )
    tied = "table" if draw(st.booleans()) else None
    head = Parameter("head", (vocab, width), tied)
    blocks = (
        Block("embedding", BlockKind.EMBEDDING, (table,), pointwise_bytes=boundary, n_kernels=1, boundary_bytes=boundary),
        *layers,
        Block("head", BlockKind.HEAD, (Parameter("norm", (width,)), head), (Matmul(tokens, width, vocab),), n_kernels=5),
    )
    return with_smaller(blocks, semantics)


@st.composite
def semantics(draw):
    micro_batch, n = draw(st.sampled_from([1, 8])), draw(st.integers(1, 4))
    return Semantics(
        seq_len=draw(st.sampled_from([16, 512])),
        batch_size=micro_batch * n - (draw(st.sampled_from([0, 0, 3, 7])) if n > 1 < micro_batch else 0),
        micro_batch=micro_batch,
        compute_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        gradient_dtype=draw(st.sampled_from(["bf16", "fp32"])),
        clip_norm=draw(st.sampled_from([None, 1.0])),
    )


@st.composite
def cases(draw):
    """Semantics, a workload for them, a legal policy, a machine."""
    s = draw(semantics())
    workload = draw(workloads(s))
    group = draw(st.integers(1, s.n_micro_batches))
    updates = [u for u in Update if u is not Update.EAGER or s.clip_norm is None]
    stride = draw(st.sampled_from([1, 1, draw(st.integers(1, workload.n_layers))]))
    family = Family(draw(st.sampled_from(updates)), group, group, stride)
    policy = draw(members(family, s, workload))
    return s, workload, policy, MACHINES[draw(st.sampled_from(sorted(MACHINES)))]


@st.composite
def members(draw, family, s, workload):
    """Any policy of a family: buffers, and block by block what is saved, resident, spilled, speculated on."""
    n_slots, n_layers = draw(st.integers(1, 3)), workload.n_layers
    saving = [
        draw(st.sampled_from([*STAYING, LEAVING])) if family.boundary_stride == 1 else Way(Saved.INPUT) for _ in range(n_layers)
    ]
    kept = tuple(b for b, way in enumerate(saving, 1) if way.saved is Saved.ALL)
    one_group = family.accumulation_group == s.n_micro_batches

    def some(blocks):
        return tuple(b for b in blocks if draw(st.booleans()))

    spilled = some(b for b in range(n_layers) if b + 1 not in kept) if family.boundary_stride == 1 and draw(st.booleans()) else ()
    policy = Policy(
        prefetch_depth=draw(st.integers(1, 5)),
        gradient_slots=n_slots,
        accumulation_group=family.accumulation_group,
        update=family.update,
        resident_blocks=some(range(n_layers + 2)) if draw(st.booleans()) else (),
        spill_blocks=spilled,
        boundary_stride=family.boundary_stride,
        speculate_blocks=some(range(n_layers + 2)) if family.update is Update.DEFERRED and draw(st.booleans()) else (),
        square_on_device=one_group and draw(st.booleans()),
    )
    return with_ways(policy, dict(enumerate(saving, 1)))


@pytest.mark.drawn
@given(cases())
@settings(deadline=None)
def test_no_plan_is_faster_than_its_bounds(case):
    """Neither the bound of its policy, nor that of the machine, which holds for every policy."""
    s, workload, policy, profile = case
    cost = CostModel(profile)
    bound = policy_bound(frame(NOBODY, workload, s, policy), cost)
    machine = machine_bound(frame(NOBODY, workload, s, Policy()), cost)
    plan = lower(NOBODY, workload, s, policy, {})
    prediction = simulate(plan, cost.demands(plan), region_of(profile))
    if prediction.periodic:
        assert prediction.step_s >= bound.seconds * ROUNDING, bound
        assert prediction.step_s >= machine.seconds * ROUNDING, machine


@given(cases())
@settings(deadline=None)
def test_bounds_count_no_more_ops_than_the_plan_has(case):
    s, workload, policy, profile = case
    plan = lower(NOBODY, workload, s, policy, {})
    cost = CostModel(profile)
    in_plan: dict[Kind, float] = dict.fromkeys(Kind, 0.0)
    for op, demand in zip(plan.ops, cost.demands(plan), strict=True):
        in_plan[op.kind] += demand.uncontended_s
    setup = frame(NOBODY, workload, s, policy)
    for b in range(len(workload.blocks)):
        for kind, demand, count in ops_of(setup, cost, b):
            in_plan[kind] -= count * demand.uncontended_s
    for kind, demand, count in spared_ops(setup, cost):
        in_plan[kind] += count * demand.uncontended_s
    total = sum(d.uncontended_s for d in cost.demands(plan))
    for kind, left_s in in_plan.items():
        if kind is Kind.LOAD:
            assert left_s >= -1e-9 * total  # turns may spare fewer loads than the bound grants
        else:
            assert left_s == pytest.approx(0, abs=1e-9 * total)


@pytest.mark.drawn
@given(cases(), st.floats(0.3, 1.5), st.sampled_from([None, 0.0, 0.3, 1.0]))
@settings(deadline=None)
def test_no_policy_of_a_family_is_faster_than_its_relaxation(case, tightness, often):
    """Whatever it chooses block by block, on a device on which it just fits or nearly so."""
    s, workload, policy, profile = case
    needed = footprint(frame(NOBODY, workload, s, policy), profile)
    profile = profile.with_memory(int(needed.device_peak_bytes * max(1.0, tightness)), needed.host_peak_bytes)
    cost = CostModel(profile)
    family = family_of(policy, s)
    relaxation = Relaxation(NOBODY, workload, s, cost, often if often is not None or not policy.speculate_blocks else 0.5)
    often = relaxation.clipped_fraction or 0.0
    plan = lower(NOBODY, workload, s, policy, {})
    predictions = [
        simulate(plan, CostModel(profile, clipped=clipped).demands(plan), region_of(profile)) for clipped in (False, True)
    ]
    if all(p.periodic for p in predictions):
        step_s = (1 - often) * predictions[0].step_s + often * predictions[1].step_s
        for buffers in ((None, None), (policy.prefetch_depth, policy.gradient_slots)):
            relaxed = relaxation.solve(family, *buffers)
            assert relaxed is not None, "the policy fits"
            assert step_s >= relaxed.bound_s * ROUNDING, buffers


@pytest.mark.drawn
@given(semantics(), st.data())
@settings(deadline=None, max_examples=8)
def test_the_search_finds_what_brute_force_finds(s, data):
    """Within one per cent."""
    workload = data.draw(workloads(s, most_layers=2))
    profile = MACHINES[data.draw(st.sampled_from(sorted(MACHINES)))]
    s = replace(s, batch_size=s.micro_batch * min(2, s.n_micro_batches))
    hold_against_brute_force(workload, s, profile, every_policy(s, workload, profile, STAYING))


@pytest.mark.soak
@given(semantics(), st.data())
@settings(deadline=None, max_examples=3)
def test_the_search_finds_what_brute_force_finds_where_what_is_saved_has_to_leave(s, data):
    """The device has room for what every layer sends away, and for little more: so tight, it is within three per cent."""
    s = replace(s, seq_len=512, micro_batch=8, batch_size=16, clip_norm=1.0)
    drawn = data.draw(workloads(s, most_layers=2, least_layers=2))  # of one, gradient slots are as large as all that is saved
    workload = replace(drawn, blocks=tuple(replace(block, kept_bytes=8 * block.kept_bytes) for block in drawn.blocks))
    lean = Family(Update.DEFERRED, 2, 2, 1).policy(s)
    leaving = with_ways(lean, dict.fromkeys(range(1, workload.n_layers + 1), LEAVING))
    profile = data.draw(st.sampled_from(SLOW_TO_COMPUTE))
    needed = footprint(frame(NOBODY, workload, s, leaving), profile)
    profile = profile.with_memory(int(needed.device_peak_bytes * data.draw(st.sampled_from([1.0, 1.02, 1.2]))), None)
    policies = every_policy(s, workload, profile, (*STAYING, LEAVING))
    fitting = (policy for policy in policies if footprint(frame(NOBODY, workload, s, policy), profile).fits)
    hold_against_brute_force(workload, s, profile, fitting, within=1.03)


def hold_against_brute_force(workload, s, profile, policies, within=1.01):
    """Brute force leaves out policies whose own bound is above the best found."""
    answer = search(NOBODY, workload, s, profile)
    cost, region, shortest_s = CostModel(profile), region_of(profile), float("inf")
    bounds_s = {policy: policy_bound(frame(NOBODY, workload, s, policy), cost).seconds for policy in policies}
    for policy in sorted(bounds_s, key=lambda policy: bounds_s[policy]):
        if bounds_s[policy] < shortest_s:
            plan = lower(NOBODY, workload, s, policy, {})
            shortest_s = min(shortest_s, simulate(plan, cost.demands(plan), region, 24).step_s)
    assert answer.prediction.step_s <= shortest_s * within
    assert answer.certificate.policy_bound_s <= shortest_s * (1 + 1e-9)


def every_policy(s, workload, profile, ways_of_layers):
    """The whole space of a model so small that it can be listed, but for what memory that is not short makes pointless."""
    layers = range(1, workload.n_layers + 1)
    for family, depth, n_slots in product(families(s, workload), (1, 2, 3, 4), (1, 2, 3)):
        one_group = family.accumulation_group == s.n_micro_batches
        lean = replace(family.policy(s), prefetch_depth=depth, gradient_slots=n_slots)
        on_device = {()}
        if one_group and family.update is Update.DEFERRED and not shares_memory(profile):
            may_stay = tuple(can_stay(workload, s))
            on_device |= {may_stay, tuple(b for b in may_stay if b in layers), may_stay[:1]}
        ways = product(ways_of_layers if family.boundary_stride == 1 else [Way(Saved.INPUT)], repeat=len(layers))
        for saving, resident in product(ways, (False, True)):
            policy = with_ways(lean, dict(enumerate(saving, start=1)))
            policy = replace(policy, resident_blocks=tuple(layers) if resident else ())
            yield from (staying(policy, blocks) for blocks in on_device if not (resident and blocks))


def test_the_machine_bound_names_what_is_slow():
    s = Semantics(512, 2, 1)
    model = read_model("qwen2.5-0.5b")
    plan = frame(model, build_workload(model, s), s, Policy())
    slow = {name: profile.with_memory(10**9, 10**16) for name, profile in MACHINES.items() if "slow" in name}  # for little state
    named = {name: machine_bound(plan, CostModel(profile)).binding for name, profile in slow.items()}
    assert named == {
        "slow up": "link to the device",
        "slow down": "link to the host",
        "slow both ways": "link in both directions",
        "slow memory": "host DRAM",
        "slow reduction": "host cores",
    }


def test_where_layers_can_save_nothing_that_leaves_no_greedy_plan_is_made_as_if_they_did():
    """Groups of other sizes are tried for what leaves alone: a group fills the link while another computes."""
    model, profile = read_model("qwen2.5-0.5b"), read_profile("rtx4090-server").with_memory(10**10, None)
    s = Semantics(4096, 16, 1)
    whole = build_workload(model, s)
    poor = replace(whole, blocks=tuple(replace(block, tiers=()) for block in whole.blocks))
    groups = {poor: {1, 16}, whole: {1, 8, 16}}
    for workload, expected in groups.items():
        assert {policy.accumulation_group for policy in Greedy(model, workload, s, profile).policies()} == expected


@pytest.mark.soak
def test_the_answer_is_never_worse_than_a_static_candidate():
    for name, clip in (("h200-pcie5", 1.0), ("rtx4090-server", None), ("gh200", 1.0)):
        model, profile = read_model("qwen2.5-7b"), read_profile(name)
        s, workload = with_micro_batch(model, Semantics(1024, 8, 1, clip_norm=clip), profile)
        answer = search(model, workload, s, profile)
        assert set(answer.baselines) == set(BASELINES)
        for said in answer.baselines.values():
            assert answer.prediction.step_s <= said.get("step_s", float("inf"))


@pytest.mark.soak_cases("qwen2.5-7b-gh200-4096-16")
@pytest.mark.parametrize(
    ("name", "machine", "seq_len", "batch_size"), [("qwen2.5-0.5b", "rtx4090-server", 512, 4), ("qwen2.5-7b", "gh200", 4096, 16)]
)
def test_the_answer_passes_the_checker_with_its_claim_and_is_the_same_twice(name, machine, seq_len, batch_size):
    model, profile = read_model(name), read_profile(machine)
    s, workload = with_micro_batch(model, Semantics(seq_len, batch_size, 1), profile)
    first, second = (search(model, workload, s, profile) for _ in range(2))
    check(first.plan)
    assert check_claim(first.plan, first.claim) == []
    assert (first.plan, first.claim) == (second.plan, second.claim)
    assert first.p10_step_s <= first.prediction.step_s <= first.p90_step_s
    c = first.certificate
    assert c.machine_bound_s <= c.policy_bound_s <= first.prediction.step_s
    assert c.gap_fraction == pytest.approx(first.prediction.step_s / c.policy_bound_s - 1)


@pytest.mark.fast("some")
@pytest.mark.parametrize("opens", [False, True])
def test_a_search_that_may_simulate_nothing_answers_with_the_best_baseline_and_a_true_gap(monkeypatch, opens):
    """What was not simulated keeps its bound, opened or not: the lowest of all, here solved anew."""
    if opens:
        monkeypatch.setattr(Tree, "_suggested", lambda *_: iter(()))
    else:
        monkeypatch.setattr("planner.search.branch.MAX_SEARCHED_OPS", 0)
        monkeypatch.setattr("planner.search.branch.MOST_RELAXED", 0)
    for name in ("_scout", "_climb", "_prefetch_less"):
        monkeypatch.setattr(Tree, name, lambda self: None)
    monkeypatch.setattr(Greedy, "policies", lambda self: [])
    model, profile = read_model("qwen2.5-7b"), read_profile("rtx4090-server")
    s = Semantics(2048, 8, 4)
    workload = build_workload(model, s)
    answer = search(model, workload, s, profile)
    baselines_s = [said["step_s"] for said in answer.baselines.values() if "step_s" in said]
    assert answer.step_s == min(baselines_s)
    assert answer.certificate.n_simulated == len(baselines_s)

    relaxation = Relaxation(model, workload, s, CostModel(profile), None)
    below_s = {f: relaxed.bound_s for f in families(s, workload) if (relaxed := relaxation.solve(f)) is not None}
    lowest_s = min(below_s.values())
    if opens:  # into sizes of groups, and into numbers of slots
        lowest_s = inf
        for family, family_s in below_s.items():
            for size, n_slots in product(family.groups, GRADIENT_SLOTS):
                relaxed = relaxation.solve(replace(family, accumulation_group=size, largest_group=size), None, n_slots)
                lowest_s = min(lowest_s, max(family_s, relaxed.bound_s) if relaxed else inf)
    assert answer.certificate.policy_bound_s == max(machine_bound(answer.plan, CostModel(profile)).seconds, lowest_s)
    assert answer.certificate.gap_fraction == pytest.approx(answer.step_s / answer.certificate.policy_bound_s - 1)
    assert answer.certificate.gap_fraction > 0.05, "this machine gains from what no baseline does"


@pytest.mark.soak
def test_a_policy_whose_plan_is_too_long_keeps_its_bound(monkeypatch):
    """Whatever is too long to be simulated, no policy of the space is below what the certificate says."""
    model, profile = read_model("qwen2.5-0.5b"), read_profile("rtx4090-desktop")
    s = Semantics(512, 8, 1)
    workload = build_workload(model, s)
    whole = search(model, workload, s, profile)
    monkeypatch.setattr("planner.search.branch.LONGEST_SEARCHED_OPS", 5 * len(workload.blocks))
    found = search(model, workload, s, profile)
    best_s = min(whole.step_s, found.step_s)
    assert found.certificate.policy_bound_s <= best_s * (1 + 1e-9)
    assert found.certificate.n_simulated < whole.certificate.n_simulated
    assert found.plan.policy.accumulation_group == 1


@pytest.mark.soak
def test_where_only_long_plans_fit_one_is_found_or_refused_in_one_line(monkeypatch):
    """Host memory for the gradients of one group, which no smaller ones add up in fp32."""
    model, machine = read_model("qwen2.5-0.5b"), read_profile("rtx4090-desktop")
    s = Semantics(512, 8, 1)
    workload = build_workload(model, s)
    one_group = Policy(accumulation_group=8, spill_blocks=tuple(range(24)))
    needs = footprint(frame(model, workload, s, one_group), machine)
    profile = machine.with_memory(None, needs.host_peak_bytes + 10**7)
    monkeypatch.setattr("planner.search.branch.LONGEST_SEARCHED_OPS", 5 * len(workload.blocks))
    found = search(model, workload, s, profile)
    assert found.plan.policy.accumulation_group > 1
    monkeypatch.setattr("planner.search.remedy.MAX_PLAN_OPS", 5 * len(workload.blocks))
    with pytest.raises(PlanError, match="use a larger --micro-batch"):
        search(model, workload, s, profile)


@pytest.mark.soak
def test_a_fixed_policy_is_the_answer():
    model, profile = read_model("qwen2.5-7b"), read_profile("gh200")
    s, workload = with_micro_batch(model, Semantics(4096, 16, 1), profile)
    for name in BASELINES:
        answer = search(model, workload, s, profile, baseline(name, s, workload))
        assert answer.plan.policy == baseline(name, s, workload)
        assert answer.certificate.n_families == 0
        assert answer.prediction.step_s == answer.baselines[name]["step_s"]


def test_eager_updates_are_tried_only_where_they_are_legal():
    model, profile = read_model("qwen2.5-0.5b"), read_profile("gh200")
    for clip, nonfinite, legal in ((1.0, "stop", False), (None, "skip", False), (None, "stop", True)):
        s = Semantics(512, 2, 1, clip_norm=clip, on_nonfinite=nonfinite)
        workload = build_workload(model, s)
        space = [plan.policy for plan, _ in leanest(model, workload, s, profile)]
        assert (Update.EAGER in {p.update for p in space}) == legal
        assert (baseline("slideformer", s, workload).update is Update.EAGER) == legal
        assert len(set(space)) == len(space)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("model", "machine", "device", "host", "batch"),
    [
        ("gpt-oss-120b", "h200-pcie5", None, int(1.5e12), 16),
        ("qwen2.5-72b", "rtx4090-server", None, None, 8),
        ("qwen2.5-7b", "rtx4090-server", 3 * 10**9, None, 8),
    ],
)
def test_every_change_that_is_named_makes_it_fit(model, machine, device, host, batch):
    """The changes are options of `plan`: give them, and ask again."""
    options = ["plan", model, "--machine", machine, "--seq-len", "1024", "--batch-size", str(batch), "--json"]
    options += ["--device-memory", str(device)] if device else []
    options += ["--host-memory", str(host)] if host else []
    before = CliRunner().invoke(cli, options)
    assert before.exit_code == 3, before.output
    changes = before.stderr.split("smallest changes that fit: ")[1].strip().split(", or ")
    assert changes
    for change in changes:
        after = CliRunner().invoke(cli, [*options, *change.split()])
        assert after.exit_code == 0, (change, after.stderr)
