"""Are machines ranked as their own plans say, and is nothing priced that has no price?"""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprofiles.schema import Profile, read_profile
from planner.model.kernels import with_kernels
from planner.model.workload import build_workload, read_model
from planner.predict.faster import Group, faster
from planner.search.micro_batch import SIZES, with_micro_batch
from planner.search.remedy import MAX_PLAN_OPS, most_ops
from planner.search.search import search
from planner.show.compare import TITLES, Misfit, Speed, TooLong, compare, smallest_host_bytes
from planner.show.price import hourly
from runtime.errors import PlanError
from runtime.plan import Policy, Semantics, Update

MODEL = read_model("qwen2.5-0.5b")
SEMANTICS = Semantics(seq_len=256, batch_size=2, micro_batch=1)
DEFERRED = Policy(update=Update.DEFERRED)
FREE = 1e9
H200 = read_profile("h200-pcie5")
NAMES = ("gh200", "h200-pcie5", "rtx4090-server")


def named(profile, name, **price):
    """The profile under another name, with these prices changed in its JSON."""
    fields = profile.to_json()
    fields["name"] = name
    fields["price"] |= price
    return Profile.from_json(fields)


def speeds(comparison):
    return {c.machine: c.outcome.tokens_per_s for c in comparison.candidates if isinstance(c.outcome, Speed)}


@pytest.mark.soak
def test_a_machine_is_ranked_by_what_its_own_plan_says():
    names = NAMES[1:]
    found = compare(MODEL, [read_profile(name) for name in names], SEMANTICS)
    for candidate in found.candidates:
        profile = read_profile(candidate.machine)
        semantics, workload = with_micro_batch(MODEL, with_kernels(MODEL, SEMANTICS, profile), profile)
        answer = search(MODEL, workload, semantics, profile, free=SIZES)
        speed = candidate.outcome
        assert isinstance(speed, Speed)
        assert speed.step_s == answer.prediction.step_s
        assert speed.tokens_per_s == 512 / answer.prediction.step_s
        assert speed.micro_batch == semantics.micro_batch
        assert (speed.device_peak_bytes, speed.host_peak_bytes) == (answer.needs.device_peak_bytes, answer.needs.host_peak_bytes)
    assert [c.machine for c in found.candidates] == sorted(names, key=lambda name: -speeds(found)[name])


@pytest.mark.soak
def test_the_order_in_which_machines_are_given_does_not_matter():
    small = H200.with_memory(None, 5 * 10**9)
    profiles = [H200, read_profile("gh200"), named(small, "small")]
    found = [compare(MODEL, given_, SEMANTICS, DEFERRED) for given_ in (profiles, profiles[::-1], profiles[1:] + profiles[:1])]
    assert all(f == found[0] for f in found)
    assert found[0].candidates[-1].machine == "small"


groups = st.sets(st.sampled_from(list(Group)), min_size=1)


@pytest.mark.soak
@given(groups, st.sampled_from([1.0, 1.25, 10.0]), st.sampled_from([Policy(), DEFERRED, Policy(prefetch_depth=3)]))
@settings(deadline=None, max_examples=10)
def test_a_faster_machine_is_never_ranked_below_a_slower_one(more, factor, policy):
    """Where nothing is shared: neither host memory nor the two directions of the link."""
    plain = faster(H200, {Group.DRAM: FREE, Group.DUPLEX: FREE})
    better = named(faster(plain, dict.fromkeys(more, factor)), "better")
    found = compare(MODEL, [named(plain, "plain"), better], SEMANTICS, policy)
    assert speeds(found)["better"] >= speeds(found)["plain"] * (1 - 1e-9)


@pytest.mark.soak
def test_a_machine_twice_as_fast_in_everything_does_twice_the_tokens():
    """Search, contention and all."""
    double = named(faster(H200, {group: 2.0 for group in Group if group is not Group.SUSTAINED}), "double")  # a share of a rate
    found = compare(MODEL, [H200, double], SEMANTICS)
    assert [c.machine for c in found.candidates] == ["double", "h200-pcie5"]
    assert speeds(found)["double"] == pytest.approx(2 * speeds(found)["h200-pcie5"], rel=5e-3)


@pytest.mark.soak
def test_machines_that_it_does_not_fit_come_last_with_the_reason_and_a_change_that_fits():
    near, far = (named(H200.with_memory(None, n * 10**9), name) for n, name in ((8, "near"), (7, "far")))
    slow = named(faster(H200, dict.fromkeys(Group, 1e-3)), "slow")
    found = compare(MODEL, [far, slow, near, H200], SEMANTICS)
    assert [c.machine for c in found.candidates] == ["h200-pcie5", "slow", "near", "far"]
    for candidate in found.candidates[2:]:
        misfit = candidate.outcome
        assert isinstance(misfit, Misfit)
        assert "host memory is " in misfit.reason
        assert "device" not in misfit.reason
        assert misfit.short_host_bytes > 0 == misfit.short_device_bytes
        assert "--host-memory 9GB" in misfit.smallest_change
        assert f"{candidate.machine}: {misfit.reason}; smallest changes that fit: {misfit.smallest_change}" in found.notes()
        assert candidate.usd_per_million_tokens is None
    assert all("does not fit" in row for row in found.rows()[2:])
    enough = named(H200.with_memory(None, 15 * 10**9), "enough")
    assert isinstance(compare(MODEL, [enough], SEMANTICS).candidates[0].outcome, Speed)


@pytest.mark.soak_cases("None-free0", "None-free1")
@pytest.mark.parametrize(("policy", "free"), [(None, SIZES), (None, frozenset()), (DEFERRED, SIZES)])
def test_the_smallest_host_memory_fits_and_a_byte_less_does_not(policy, free):
    """With more than one micro-batch, policies differ in what they need of the host."""

    def on(profile):
        return compare(MODEL, [profile], SEMANTICS, policy, free).candidates[0]

    least = on(H200).smallest_host_bytes
    assert least is not None
    exact, less = on(H200.with_memory(None, least)), on(H200.with_memory(None, least - 1))
    assert isinstance(exact.outcome, Speed)
    assert exact.outcome.host_peak_bytes == least
    assert isinstance(less.outcome, Misfit)
    if policy is not None:  # sizes that are free are chosen without it: another micro-batch then, with which it asks for more
        assert less.outcome.short_host_bytes >= 1
        assert less.smallest_host_bytes >= least
        return
    assert less.outcome.short_host_bytes == 1
    assert less.smallest_host_bytes == least


@pytest.mark.soak
def test_where_the_device_is_too_small_no_host_memory_helps():
    tiny = H200.with_memory(10**9, None)
    workload = build_workload(MODEL, SEMANTICS)
    assert smallest_host_bytes(MODEL, workload, SEMANTICS, tiny) is None
    candidate = compare(MODEL, [tiny], SEMANTICS).candidates[0]
    assert candidate.smallest_host_bytes is None
    assert isinstance(candidate.outcome, Misfit)
    assert candidate.outcome.reason.startswith("device memory is ")


def test_dollars_are_the_rent_of_the_hours_and_a_bought_machine_has_its_memory_in_its_price():
    priced = named(H200, "h200-pcie5", usd={"value": 26280.0, "spread_fraction": 0.0, "source": "rental"}, watts=None)
    candidate = compare(MODEL, [priced], SEMANTICS, DEFERRED).candidates[0]
    assert isinstance(candidate.outcome, Speed)
    million_hours = 1e6 / 3600 / candidate.outcome.tokens_per_s
    assert candidate.usd_per_million_tokens == pytest.approx(3.59 * million_hours)
    # The machine over 26,280 hours, and in it 1500 GB at 30 USD/GB.
    ram = 1500 * 30 / 26280
    assert candidate.bought_usd_per_million_tokens == pytest.approx((1 + ram) * million_hours)
    assert candidate.hourly.ram_fraction == pytest.approx(ram / (1 + ram))
    half = compare(MODEL, [priced.with_memory(None, 750 * 10**9)], SEMANTICS, DEFERRED).candidates[0]
    assert half.hourly.ram_usd == pytest.approx(candidate.hourly.ram_usd / 2)
    assert half.outcome == candidate.outcome
    assert candidate.job(36_000_000).rent_usd == pytest.approx(36 * candidate.usd_per_million_tokens)


def test_prices_change_no_rank_and_the_cheapest_is_named():
    fast = named(faster(H200, dict.fromkeys(Group, 2.0)), "fast")
    costly = named(fast, "fast", usd_per_hour=H200.price.usd_per_hour.model_dump() | {"value": 100.0})
    assert compare(MODEL, [H200, fast], SEMANTICS, DEFERRED).cheapest == "fast"
    found = compare(MODEL, [H200, costly], SEMANTICS, DEFERRED)
    assert found.cheapest == "h200-pcie5"
    assert [c.machine for c in found.candidates] == ["fast", "h200-pcie5"]


@pytest.mark.soak
def test_what_has_no_price_says_so():
    nothing = {"usd_per_hour": None, "ram_usd_per_gb": None, "date": None}
    unpriced, no_ram, no_rent = (
        named(H200, "a", **nothing),
        named(H200, "b", ram_usd_per_gb=None),
        named(H200, "c", usd_per_hour=None),
    )
    found = compare(MODEL, [unpriced, no_ram, no_rent], SEMANTICS, DEFERRED)
    a, b, c = found.candidates  # equally fast, so by name
    assert (a.usd_per_million_tokens, a.hourly.ram_fraction, a.hourly.date) == (None, None, None)
    assert c.usd_per_million_tokens is None
    assert b.usd_per_million_tokens is not None
    assert [row[4:7] for row in found.rows()][::2] == [("no price",) * 3] * 2
    said = list(found.notes())
    assert "a: no price in its profile: rent (--usd-per-hour) and purchase (--usd)" in said
    assert "b: no price in its profile: purchase (--usd)" in said
    assert found.cheapest == "b"
    assert compare(MODEL, [unpriced], SEMANTICS, DEFERRED).cheapest is None


def test_a_price_is_as_old_as_its_oldest_part():
    assert hourly(H200).date == "2026-03-31"  # the rent; the memory is of June
    fields = H200.to_json()
    fields["sources"]["ram_price"]["date"] = "2025-12-31"
    assert hourly(Profile.from_json(fields)).date == "2025-12-31"


def test_a_given_micro_batch_is_kept_and_a_free_one_chosen():
    kept, chosen = (compare(MODEL, [H200], SEMANTICS, DEFERRED, free=free).candidates[0].outcome for free in (frozenset(), SIZES))
    assert isinstance(kept, Speed)
    assert isinstance(chosen, Speed)
    assert (kept.micro_batch, chosen.micro_batch) == (1, 2)


@pytest.mark.soak
def test_tiles_that_were_named_are_those_that_are_planned():
    named = replace(SEMANTICS, loss_tile_tokens=7, mlp_tile_tokens=16)
    tiles = {"loss_tile_tokens", "mlp_tile_tokens"}
    kept, chosen = (compare(MODEL, [H200], named, DEFERRED, free).candidates[0].outcome for free in (SIZES - tiles, SIZES))
    pinned = with_kernels(MODEL, replace(named, micro_batch=2), H200)
    assert isinstance(kept, Speed)
    assert kept.step_s == search(MODEL, build_workload(MODEL, pinned), pinned, H200, DEFERRED).step_s
    assert isinstance(chosen, Speed)
    assert chosen.step_s < kept.step_s, "sixteen tokens at a time are slow"


def test_what_no_plan_can_be_is_an_error_and_no_misfit():
    with pytest.raises(PlanError, match="eager"):
        compare(MODEL, [H200], replace(SEMANTICS, clip_norm=1.0), Policy(update=Update.EAGER))


def test_the_json_is_pure_and_the_rows_stand_under_their_titles():
    small = named(H200.with_memory(None, 9 * 10**9), "small", usd_per_hour=None)
    found = compare(MODEL, [H200, small], SEMANTICS, DEFERRED)
    said = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [m["fits"] for m in said["machines"]] == [True, False]
    assert {"tokens_per_s", "step_s", "usd_per_million_tokens", "smallest_host_bytes"} <= set(said["machines"][0])
    assert {"short_host_bytes", "smallest_change", "price_note"} <= set(said["machines"][1])
    assert said["tokens_per_step"] == 512
    assert all(len(row) == len(TITLES) for row in found.rows())


@pytest.mark.soak
def test_a_plan_too_long_to_write_is_no_misfit_and_no_other_machine_suffers_from_it():
    """The small device computes a sequence at a time: too many micro-batches for any plan. The large one computes several."""
    semantics = replace(SEMANTICS, seq_len=4096, batch_size=2**21)
    small = named(H200.with_memory(4 * 10**9, None), "small")
    found = compare(MODEL, [small, H200], semantics, DEFERRED)
    assert [c.machine for c in found.candidates] == ["h200-pcie5", "small"]
    assert isinstance(found.candidates[0].outcome, Speed)
    long = found.candidates[1].outcome
    assert isinstance(long, TooLong)
    assert long.n_ops > MAX_PLAN_OPS
    assert found.rows()[1][:2] == ("small", "too long")
    assert f"small: {long.reason}; use {long.smallest_change}" in found.notes()
    said = json.loads(json.dumps(found.to_json(), allow_nan=False))["machines"][1]
    assert (said["fits"], said["reason"], said["usd_per_million_tokens"]) == (False, long.reason, None)
    batch = int(long.smallest_change.removeprefix("--batch-size "))
    fewer, workload = with_micro_batch(MODEL, replace(semantics, batch_size=batch), small)
    assert most_ops(workload, fewer, DEFERRED) <= MAX_PLAN_OPS


@pytest.mark.soak
def test_what_binds_a_machine_and_whose_tokens_cost_least_can_be_read():
    fast = named(faster(H200, dict.fromkeys(Group, 2.0)), "fast")
    found = compare(MODEL, [H200, fast], SEMANTICS, DEFERRED)
    for candidate, row in zip(found.candidates, found.rows(), strict=True):
        assert isinstance(candidate.outcome, Speed)
        assert row[TITLES.index("bound by")] == candidate.outcome.binding
    assert (
        next(iter(found.notes()))
        == f"Cheapest to rent: fast, {found.candidates[0].usd_per_million_tokens:.3g} USD per million tokens"
    )
    unpriced = named(H200, "a", usd_per_hour=None, ram_usd_per_gb=None, date=None)
    assert not any("Cheapest" in note for note in compare(MODEL, [unpriced], SEMANTICS, DEFERRED).notes())
    assert next(iter(compare(MODEL, [unpriced, H200], SEMANTICS, DEFERRED).notes())).startswith(
        "Cheapest to rent of those with a price: h200"
    )
