"""Machine comparison: ranks by the plan of each machine, equal prices in all reports."""

import pytest

from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import read_model
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.planner.search.micro_batch import SIZES, sizes_of
from penstock.planner.search.search import search
from penstock.planner.show.compare import Candidate, candidate, cheapest, notes
from penstock.planner.show.fits import Fit
from penstock.planner.show.price import hourly, prices_in_words
from penstock.runtime.plan import Policy, Semantics, Update
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


def compared(*profiles, fixed=DEFERRED, free=SIZES):
    return sorted((candidate(MODEL, profile, SEMANTICS, fixed, free) for profile in profiles), key=Candidate.rank)


def alone(profile, **options):
    return compared(profile, **options)[0]


@pytest.mark.slow
def test_a_machine_is_ranked_by_its_own_plan():
    names = ("h200-pcie5", "rtx4090-server")
    candidates = compared(*map(read_profile, names), fixed=None)
    last, profile = candidates[1], read_profile(candidates[1].machine)
    answer = search(MODEL, sizes_of(MODEL, with_kernels(MODEL, SEMANTICS, profile), profile), profile, free=SIZES)
    assert (last.speed.predicted.step_s, last.speed.predicted.tokens_per_s) == (answer.step_s, 512 / answer.step_s)
    assert (last.speed.micro_batch, last.speed.proof.binding) == (answer.plan.semantics.micro_batch, answer.certificate.binding)
    needs, predicted = answer.needs, last.speed.predicted
    assert (predicted.device_peak_bytes, predicted.host_peak_bytes) == (needs.device_peak_bytes, needs.host_peak_bytes)
    speeds = [c.speed.predicted.tokens_per_s for c in candidates]
    assert speeds == sorted(speeds, reverse=True)


def test_ranks_do_not_depend_on_the_order_of_the_question():
    small = named(H200.with_memory(None, 5 * 10**9), "small")
    fast = named(faster(H200, {group: 2.0 for group in Group if group is not Group.SUSTAINED}), "fast")  # itself a fraction
    rankings = [compared(*profiles) for profiles in ((H200, fast, small), (small, H200, fast))]
    assert rankings[0] == rankings[1]
    assert [entry.machine for entry in rankings[0]] == ["fast", "h200-pcie5", "small"]
    assert rankings[0][0].speed.predicted.tokens_per_s == pytest.approx(2 * rankings[0][1].speed.predicted.tokens_per_s, rel=5e-3)


@mostly_slow(("policy", "free"), [(None, SIZES), (DEFERRED, SIZES)], fast=(1,))
def test_the_smallest_host_memory_fits_and_a_byte_less_does_not(policy, free):
    least = alone(H200, fixed=policy, free=free).smallest_host_bytes
    exact, short = (alone(H200.with_memory(None, least - n), fixed=policy, free=free) for n in (0, 1))
    assert exact.speed.predicted.host_peak_bytes == least
    assert short.speed is None
    assert short.refusal.fields["short_host_bytes"] >= 1
    assert short.smallest_host_bytes >= least


def test_prices_are_the_same_wherever_they_are_shown():
    """Rent by the hour; purchase over 26,280 hours with 1500 GB of memory at 30 USD/GB. Prices do not affect ranks."""
    priced = named(H200, "h200-pcie5", usd={"value": 26280.0, "spread_fraction": 0.0, "source": "rental"}, watts=None)
    h200 = alone(priced)
    million_hours, ram = 1e6 / 3600 / h200.speed.predicted.tokens_per_s, 1500 * 30 / 26280
    assert h200.per_million() == pytest.approx((3.59 * million_hours, (1 + ram) * million_hours))
    assert h200.hourly.ram_fraction == pytest.approx(ram / (1 + ram))
    assert h200.to_json(36_000_000)["job"]["rent_usd"] == pytest.approx(36 * h200.per_million()[0])
    fit = Fit("h200", "h200-pcie5", 1, "qwen", hourly(priced), False, "adamw", "m", 1, h200.speed.predicted.tokens_per_s)
    fields = hourly(priced).job_fields(36_000_000, h200.speed.predicted.tokens_per_s)
    assert fit.to_json(36_000_000)["job"] == h200.to_json(36_000_000)["job"] == fields["job"]
    text = " ".join(prices_in_words(hourly(priced), h200.speed.predicted.tokens_per_s))
    assert all(f"{usd:.3g} USD per million tokens" in text for usd in h200.per_million())
    costly = named(faster(H200, dict.fromkeys(Group, 2.0)), "fast", usd_per_hour=priced.price.usd.model_dump() | {"value": 100.0})
    ranking = compared(priced, costly)
    assert ranking[0].machine == "fast"
    assert cheapest(ranking, bought=False) == (h200.per_million()[0], "h200-pcie5")
    assert next(notes(ranking)) == f"Cheapest to rent: h200-pcie5, {h200.per_million()[0]:.3g} USD per million tokens"
