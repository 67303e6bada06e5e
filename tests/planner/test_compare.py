"""Machine comparison: ranks by the plan of each machine, equal prices in all reports."""

from dataclasses import replace
from datetime import date

import pytest

from penstock.hwprofiles.device_parts import part_of
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.model.workload import read_model
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.planner.search.micro_batch import SIZES
from penstock.planner.show.compare import Candidate, candidate, cheapest, notes, tied
from penstock.planner.show.fits import Fit
from penstock.planner.show.price import hourly, prices_in_words
from penstock.planner.show.report_lines import ALONE, exchange_in_words
from penstock.runtime.errors import ProfileError
from penstock.runtime.plan import Policy, Semantics, Update
from penstock.runtime.units import show_bytes, show_duration
from tests.lanes import mostly_slow

MODEL = read_model("qwen2.5-0.5b")
SEMANTICS = Semantics(seq_len=256, batch_size=2, micro_batch=1)
DEFERRED = Policy(update=Update.DEFERRED)
H200 = read_profile("h200-pcie5")


def named(profile, name, **price):
    """Return the profile with another name and changed price fields."""
    fields = profile.to_json() | {"name": name}
    fields["price"] |= price
    return Profile.from_json(fields)


def compared(*profiles, fixed=DEFERRED):
    return sorted((candidate(MODEL, profile, SEMANTICS, fixed, SIZES) for profile in profiles), key=Candidate.rank)


def alone(profile, **options):
    return compared(profile, **options)[0]


def test_ranks_do_not_depend_on_the_order_of_the_question():
    small = named(H200.with_memory(None, 5 * 10**9), "small")
    fast = named(faster(H200, {group: 2.0 for group in Group if group is not Group.SUSTAINED}), "fast")  # itself a fraction
    rankings = [compared(*profiles) for profiles in ((H200, fast, small), (small, H200, fast))]
    assert rankings[0] == rankings[1]
    assert [entry.machine for entry in rankings[0]] == ["fast", "h200-pcie5", "small"]
    assert rankings[0][0].speed.predicted.tokens_per_s == pytest.approx(2 * rankings[0][1].speed.predicted.tokens_per_s, rel=5e-3)


@mostly_slow("policy", [None, DEFERRED], fast=(1,))
def test_the_smallest_host_memory_fits_and_a_byte_less_does_not(policy):
    least = alone(H200, fixed=policy).smallest_host_bytes
    exact, short = (alone(H200.with_memory(None, least - n), fixed=policy) for n in (0, 1))
    assert exact.speed.predicted.host_peak_bytes == least
    assert short.speed is None
    assert short.refusal.fields["short_host_bytes"] >= 1
    assert short.smallest_host_bytes >= least


@pytest.mark.parametrize("n_gpus", [1, 8])
def test_a_shortage_has_one_figure(n_gpus):
    """The memory of the host plus its shortage is the least host memory, also if ranks share it."""
    semantics, machine = replace(SEMANTICS, batch_size=8, sum_groups=8).shared_by(n_gpus), read_profile("8xh100")
    entry = candidate(MODEL, part_of(machine.with_memory(None, 4 * 10**9), n_gpus, 1, None), semantics, None, SIZES)
    short_bytes = entry.refusal.fields["short_host_bytes"]
    assert short_bytes + 4 * 10**9 == entry.smallest_host_bytes
    assert f"host memory is {show_bytes(short_bytes)} short" in entry.refusal.reason


def test_prices_are_the_same_wherever_they_are_shown():
    """Rent by the hour; purchase over 26,280 hours with 1500 GB of memory at 30 USD/GB. Prices do not affect ranks."""
    priced = named(H200, "h200-pcie5", usd={"value": 26280.0, "spread_fraction": 0.0, "source": "rental"}, watts=None)
    h200 = alone(priced)
    million_hours, ram = 1e6 / 3600 / h200.speed.predicted.tokens_per_s, 1500 * 30 / 26280
    assert h200.per_million() == pytest.approx((3.59 * million_hours, (1 + ram) * million_hours))
    assert h200.hourly.ram_fraction == pytest.approx(ram / (1 + ram))
    job, moved_bytes = h200.to_json(36_000_000)["job"], h200.moved_bytes
    assert moved_bytes == (2 + 2 + 12) * 494_032_768, "published weights; weights, masters and moments"
    assert job["around_s"] == 30 * 60 + moved_bytes / 200e6
    assert job["rent_usd"] == pytest.approx(36 * h200.per_million()[0] + 3.59 * job["around_s"] / 3600)
    fit = Fit("h200", "h200-pcie5", 1, "qwen", hourly(priced), False, "adamw", "m", 1, h200.tokens_per_s, moved_bytes)
    fields = hourly(priced).job_fields(36_000_000, h200.speed.predicted.tokens_per_s, moved_bytes)
    assert fit.to_json(36_000_000)["job"] == h200.to_json(36_000_000)["job"] == fields["job"]
    text = " ".join(prices_in_words(hourly(priced), h200.speed.predicted.tokens_per_s))
    assert all(f"{usd:.3g} USD per million tokens" in text for usd in h200.per_million())
    costly = named(faster(H200, dict.fromkeys(Group, 2.0)), "fast", usd_per_hour=priced.price.usd.model_dump() | {"value": 100.0})
    ranking = compared(priced, costly)
    assert ranking[0].machine == "fast"
    assert cheapest(ranking, bought=False) == (h200.per_million()[0], "h200-pcie5")
    low, high = h200.per_million_range(bought=False)
    assert (low, high) == pytest.approx((2.5 * million_hours, 7 * million_hours))
    usd = f"{h200.per_million()[0]:.3g} USD per million tokens ({low:.3g} to {high:.3g})"
    assert next(notes(ranking)) == f"Cheapest to rent: h200-pcie5, {usd}"


def rented_at(name: str, value: float, low: float, high: float) -> Profile:
    return named(H200, name, usd_per_hour={"value": value, "low": low, "high": high, "spread_fraction": 0.4, "source": "rental"})


def test_a_winner_that_depends_on_the_low_end_of_a_range_is_a_tie():
    """A machine ties if its lowest price is not above the highest one of the cheapest."""
    ranking = compared(rented_at("a", 1.0, 1.0, 2.0), rented_at("b", 1.9, 1.9, 3.0), rented_at("c", 2.1, 2.1, 3.0))
    assert [entry.machine for entry in tied(ranking, bought=False)] == ["a", "b"]
    assert next(notes(ranking)).startswith("Cheapest to rent: a tie, as the ranges of prices overlap: a ")
    assert tied(ranking, bought=True) == []
    for low, words in ((2.0, "usd_per_hour: 1 is not between low and high, 2 and 3"), (-1.0, "usd_per_hour.low: ")):
        with pytest.raises(ProfileError, match=words):
            rented_at("wrong", 1.0, low, 3.0)


@pytest.mark.parametrize(("day", "is_old"), [(date(2026, 9, 29), False), (date(2026, 10, 1), True)])
def test_a_price_older_than_six_months_says_so(day, is_old):
    ranking, old = compared(H200), "more than six months old: rent of 2026-03-31"
    assert (f"h200-pcie5: {old}" in notes(ranking, day)) == is_old
    assert (old in prices_in_words(hourly(H200), 100.0, day)) == is_old
    assert old not in prices_in_words(hourly(H200.with_prices(usd_per_hour=3.0)), 100.0, day), "an offer of the user has no age"
    assert not any("six months" in note for note in notes(ranking)), "without a date of today nothing is old"


def test_prices_have_a_date_only_if_the_profile_has_a_price():
    """A price of memory alone buys nothing; a price of the user has no date."""
    bare = named(H200, "bare", usd_per_hour=None, usd=None)
    assert bare.price.ram_usd_per_gb is not None
    for profile, day in ((H200, "2026-03-31"), (bare, None), (bare.with_prices(usd_per_hour=3.0), None)):
        assert hourly(profile).date == day
        assert any(note.startswith(f"Prices as of {day}") for note in notes(compared(profile))) == (day is not None)


def test_eight_gpus_of_a_profile_of_one_name_the_machine_of_eight():
    one, eight = read_profile("h100-sxm"), read_profile("8xh100")
    assert "profile is of one GPU: 8 are assumed to share its host" in exchange_in_words(one, 8)
    assert exchange_in_words(one, 8).endswith("; 8xh100 is a machine of 8")
    assert exchange_in_words(read_profile("rtx4090-desktop"), 2).endswith(f"{ALONE}; 2xrtx4090 is a machine of 2")
    assert (exchange_in_words(one, 1), exchange_in_words(eight, 8)) == (None, None)


def test_a_duration_below_a_second_is_not_zero():
    assert [show_duration(s) for s in (0, 0.0224, 0.9, 45, 720)] == ["0 s", "22.4 ms", "900 ms", "45 s", "12 min"]
