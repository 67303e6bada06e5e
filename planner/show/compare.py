"""Which machine should do this work?

Each machine gets its own search, and with it its own micro-batch unless one is given. The price of a machine is that of
renting it, and of the host memory beside it, which single-GPU rentals rarely include at these sizes: bought, and written off
over three years of full use. Both are dated, and what has no price has none here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, assert_never

from hwprofiles.schema import Profile
from planner.model.kernels import with_kernels
from planner.predict.memory import footprint, frame
from planner.predict.resident import advice
from planner.search.micro_batch import SIZES, with_micro_batch
from planner.search.remedy import MAX_PLAN_OPS, too_long
from planner.search.search import search
from planner.search.space import leanest
from runtime.errors import DoesNotFitError
from runtime.plan import Policy, Semantics
from runtime.plan.workload import Model, Workload
from runtime.units import GB, show_bytes, show_seconds

RAM_LIFETIME_HOURS = 3 * 365 * 24  # three years, day and night
TITLES = (
    "machine",
    "tokens/s",
    "step",
    "P10 to P90",
    "USD per M tokens",
    "of it RAM",
    "least host memory",
    "micro-batch",
    "bound by",
)


@dataclass(frozen=True, slots=True)
class Hourly:
    """What an hour of a machine costs, and what is missing to know more. The parts are None where the profile has no price."""

    rent_usd: float | None
    ram_usd: float | None  # of all host memory that the profile has
    date: str | None  # of the older price
    note: str | None

    @property
    def total_usd(self) -> float | None:
        """Rent and memory; None without a rent, for memory alone computes nothing."""
        return None if self.rent_usd is None else self.rent_usd + (self.ram_usd or 0.0)

    @property
    def ram_fraction(self) -> float | None:
        """The share of memory in the total."""
        return None if self.total_usd is None or self.ram_usd is None else self.ram_usd / self.total_usd


@dataclass(frozen=True, slots=True)
class Speed:
    """What the fastest plan found does on a machine that the work fits."""

    step_s: float
    p10_step_s: float
    p90_step_s: float
    tokens_per_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    micro_batch: int
    gap_fraction: float
    binding: str
    resident_step_s: float | None  # with all state on the device; None: it does not fit, or device and host are one memory


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why the work does not fit a machine, and the smallest changes after which it does."""

    short_device_bytes: int
    short_host_bytes: int
    smallest_change: str

    @property
    def reason(self) -> str:
        short = (("device", self.short_device_bytes), ("host", self.short_host_bytes))
        return " and ".join(f"{place} memory is {show_bytes(n_bytes)} short" for place, n_bytes in short if n_bytes)


@dataclass(frozen=True, slots=True)
class TooLong:
    """A step of too many micro-batches for a plan, and the change after which it is not."""

    n_micro_batches: int
    n_ops: int
    smallest_change: str

    @property
    def reason(self) -> str:
        return f"a step of {self.n_micro_batches} micro-batches makes a plan of up to {self.n_ops} ops, more than {MAX_PLAN_OPS}"


Outcome = Speed | Misfit | TooLong


@dataclass(frozen=True, slots=True)
class Candidate:
    """One machine and what became of the work on it."""

    machine: str
    outcome: Outcome
    smallest_host_bytes: int | None  # of all policies that the device has memory for; None: it has for none, or it is `TooLong`
    hourly: Hourly

    @property
    def usd_per_million_tokens(self) -> float | None:
        """None where the work does not fit or the machine has no price."""
        match self.outcome:
            case Speed() as speed:
                total_usd = self.hourly.total_usd
                return None if total_usd is None else total_usd / 3600 / speed.tokens_per_s * 1e6
            case Misfit() | TooLong():
                return None
            case _:
                assert_never(self.outcome)

    def to_json(self) -> dict[str, Any]:
        hourly = self.hourly
        return {
            "machine": self.machine,
            "fits": isinstance(self.outcome, Speed),
            **asdict(self.outcome),
            "reason": None if isinstance(self.outcome, Speed) else self.outcome.reason,
            "smallest_host_bytes": self.smallest_host_bytes,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "usd_per_hour": {"total": hourly.total_usd, "rent": hourly.rent_usd, "ram": hourly.ram_usd},
            "ram_fraction": hourly.ram_fraction,
            "price_date": hourly.date,
            "price_note": hourly.note,
        }

    def row(self) -> tuple[str, ...]:
        """One text per title of `TITLES`."""
        usd, ram, least = self.usd_per_million_tokens, self.hourly.ram_fraction, self.smallest_host_bytes
        host = "-" if least is None else show_bytes(least)
        match self.outcome:
            case Speed() as speed:
                return (
                    self.machine,
                    f"{speed.tokens_per_s:,.0f}",
                    show_seconds(speed.step_s),
                    f"{show_seconds(speed.p10_step_s)} to {show_seconds(speed.p90_step_s)}",
                    "no price" if usd is None else f"{usd:.3g}",
                    "no price" if ram is None else f"{ram:.0%}",
                    host,
                    str(speed.micro_batch),
                    speed.binding,
                )
            case Misfit():
                return self.machine, "does not fit", "-", "-", "-", "-", host, "-", "-"
            case TooLong():
                return self.machine, "too long", "-", "-", "-", "-", host, "-", "-"
            case _:
                assert_never(self.outcome)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Machines for one workload, the fastest first; then those that it does not fit, the nearest first; then too long plans."""

    model: str
    tokens_per_step: int
    candidates: tuple[Candidate, ...]

    @property
    def cheapest(self) -> str | None:
        """The machine whose tokens cost least, of those with a price."""
        priced = [(usd, c.machine) for c in self.candidates if (usd := c.usd_per_million_tokens) is not None]
        return min(priced)[1] if priced else None

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "tokens_per_step": self.tokens_per_step,
            "cheapest": self.cheapest,
            "machines": [c.to_json() for c in self.candidates],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """A row per machine, under `TITLES`."""
        return [c.row() for c in self.candidates]

    def notes(self) -> Iterator[str]:
        """What the rows leave out: whose tokens cost least, why machines do not fit, who should not stream, what has no price, how
        old the prices are."""
        unpriced = any(isinstance(c.outcome, Speed) and c.usd_per_million_tokens is None for c in self.candidates)
        for c in self.candidates:
            if c.machine == self.cheapest:
                among = " of those with a price" if unpriced else ""
                yield f"Cheapest{among}: {c.machine}, {c.usd_per_million_tokens:.3g} USD per million tokens"
        for c in self.candidates:
            match c.outcome:
                case Misfit() as misfit:
                    yield f"{c.machine}: {misfit.reason}; smallest changes that fit: {misfit.smallest_change}"
                case TooLong() as long:
                    yield f"{c.machine}: {long.reason}; use {long.smallest_change}"
                case Speed() as speed:
                    if (advised := advice(speed.resident_step_s, speed.step_s)) is not None:
                        yield f"{c.machine}: {advised}"
                case _:
                    assert_never(c.outcome)
        for c in self.candidates:
            if c.hourly.note is not None:
                yield f"{c.machine}: {c.hourly.note}"
        dates = [c.hourly.date for c in self.candidates if c.hourly.date is not None]
        if dates:
            yield f"Prices as of {min(dates)} or later; host memory is bought and written off over three years of full use."


def compare(
    model: Model, profiles: Sequence[Profile], semantics: Semantics, fixed: Policy | None = None, free: frozenset[str] = SIZES
) -> Comparison:
    """Rank machines for a workload by tokens per second, each with the fastest plan found, or with a `fixed` policy.

    `free`: sizes that each machine chooses for itself, as it does its kernels.
    PlanError for semantics or a policy that no plan can have.
    """
    candidates = [_candidate(model, profile, semantics, fixed, free) for profile in profiles]
    return Comparison(model.name or str(model.path), semantics.tokens_per_step, tuple(sorted(candidates, key=_rank)))


def _rank(candidate: Candidate) -> tuple[Literal[0, 1, 2], float, str]:
    match candidate.outcome:
        case Speed() as speed:
            return 0, -speed.tokens_per_s, candidate.machine
        case Misfit() as misfit:
            return 1, misfit.short_device_bytes + misfit.short_host_bytes, candidate.machine
        case TooLong() as long:
            return 2, long.n_ops, candidate.machine
        case _:
            assert_never(candidate.outcome)


def _candidate(model: Model, profile: Profile, semantics: Semantics, fixed: Policy | None, free: frozenset[str]) -> Candidate:
    semantics, workload = with_micro_batch(model, with_kernels(model, semantics, profile), profile, free)
    outcome = _outcome(model, workload, semantics, profile, fixed, free)
    least = None if isinstance(outcome, TooLong) else smallest_host_bytes(model, workload, semantics, profile, fixed)
    return Candidate(profile.name, outcome, least, hourly(profile))


def _outcome(
    model: Model, workload: Workload, semantics: Semantics, profile: Profile, fixed: Policy | None, free: frozenset[str]
) -> Outcome:
    if n_ops := too_long(workload, semantics, fixed):
        fewer = 1 << (semantics.n_micro_batches - 1).bit_length() - 1  # a power of two has divisors for a larger micro-batch
        while fewer > 1 and too_long(workload, replace(semantics, batch_size=fewer * semantics.micro_batch), fixed):
            fewer //= 2
        change = f"--batch-size {fewer * semantics.micro_batch}" + ("" if "micro_batch" in free else ", or a larger --micro-batch")
        return TooLong(semantics.n_micro_batches, n_ops, change)
    try:
        answer = search(model, workload, semantics, profile, fixed, free)
    except DoesNotFitError as error:
        return Misfit(error.short_device_bytes, error.short_host_bytes, error.smallest_change)
    return Speed(
        step_s=answer.step_s,
        p10_step_s=answer.p10_step_s,
        p90_step_s=answer.p90_step_s,
        tokens_per_s=semantics.tokens_per_step / answer.step_s,
        device_peak_bytes=answer.needs.device_peak_bytes,
        host_peak_bytes=answer.needs.host_peak_bytes,
        micro_batch=semantics.micro_batch,
        gap_fraction=answer.certificate.gap_fraction,
        binding=answer.certificate.binding,
        resident_step_s=None if answer.resident is None else answer.resident.step_s,
    )


def smallest_host_bytes(
    model: Model, workload: Workload, semantics: Semantics, profile: Profile, fixed: Policy | None = None
) -> int | None:
    """The least host memory that a policy needs which the device has memory for; None where it has for none."""
    if fixed is not None:
        found = [footprint(frame(model, workload, semantics, fixed), profile)]
    else:
        found = [needs for _, needs in leanest(model, workload, semantics, profile)]
    return min((needs.host_peak_bytes for needs in found if not needs.short_device_bytes), default=None)


def hourly(profile: Profile) -> Hourly:
    """What an hour of the machine costs, by the prices in its profile."""
    price = profile.price
    quantities = [q for q in (price.usd_per_hour, price.ram_usd_per_gb) if q is not None]
    dates = [day for q in quantities if (day := profile.sources[q.source].date) is not None]
    dates += [price.date] if price.date is not None and quantities else []
    ram_usd = None
    if price.ram_usd_per_gb is not None:
        ram_usd = price.ram_usd_per_gb.value * profile.host.memory_bytes.value / GB / RAM_LIFETIME_HOURS
    note = None
    if price.usd_per_hour is None:
        note = "no price per hour in its profile, so none per token"
    elif ram_usd is None:
        note = "no price of memory in its profile, so the price is the rent alone"
    return Hourly(None if price.usd_per_hour is None else price.usd_per_hour.value, ram_usd, min(dates, default=None), note)
