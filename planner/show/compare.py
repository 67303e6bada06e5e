"""Which machine should do this work?

Each machine gets its own search, and with it its own micro-batch unless one is given. Renting and buying are two prices
(`price.py`), and what has no price has none here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, assert_never

from hwprofiles.quantity import BASES
from hwprofiles.schema import Profile
from planner.model.kernels import with_kernels
from planner.predict.memory import footprint, frame
from planner.predict.resident import advice
from planner.predict.rests_on import rests_on
from planner.search.micro_batch import SIZES, with_micro_batch
from planner.search.remedy import MAX_PLAN_OPS, too_long
from planner.search.search import search
from planner.search.space import leanest
from runtime.errors import DoesNotFitError
from runtime.plan import Policy, Semantics
from runtime.plan.workload import Model, Workload
from runtime.units import show_bytes, show_seconds

from .price import USD_PER_KWH, Hourly, Job, hourly, job, show_days

TITLES = (
    "machine",
    "tokens/s",
    "step",
    "P10 to P90",
    "rented: USD per M tokens",
    "bought: USD per M tokens",
    "of it RAM",
    "least host memory",
    "micro-batch",
    "bound by",
    "measured on it",
)
JOB_TITLES = ("time", "rented: USD", "bought: USD")  # of a job
# Which titles stay on a narrow terminal, the first longest.
MATTER = ("machine", "tokens/s", "time", "rented: USD", "bought: USD", "rented: USD per M tokens", "least host memory",
          "bought: USD per M tokens", "bound by", "measured on it", "step", "P10 to P90", "micro-batch", "of it RAM")  # fmt: skip


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
    rests_on: dict[str, Any]  # of the device's seconds, as `RestsOn` says it


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
        """Rented; None where the work does not fit or the machine has no rent."""
        return self.per_million()[0]

    @property
    def bought_usd_per_million_tokens(self) -> float | None:
        """Bought, with power; None where the work does not fit or the machine has no purchase price."""
        return self.per_million()[1]

    def per_million(self) -> tuple[float | None, float | None]:
        """USD of a million tokens, rented and bought."""
        return self.hourly.per_million(self.outcome.tokens_per_s) if isinstance(self.outcome, Speed) else (None, None)

    def job(self, n_tokens: int) -> Job | None:
        """What so many tokens take and cost; None where the work does not fit."""
        return job(n_tokens, self.outcome.tokens_per_s, self.hourly) if isinstance(self.outcome, Speed) else None

    def to_json(self) -> dict[str, Any]:
        hourly = self.hourly
        hour = {"total": hourly.rent_usd, "rent": hourly.rent_usd, "ram": hourly.ram_usd}
        return {
            "machine": self.machine,
            "fits": isinstance(self.outcome, Speed),
            **asdict(self.outcome),
            "reason": None if isinstance(self.outcome, Speed) else self.outcome.reason,
            "smallest_host_bytes": self.smallest_host_bytes,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "bought_usd_per_million_tokens": self.bought_usd_per_million_tokens,
            "usd_per_hour": hour | {"bought": hourly.bought_usd, "machine": hourly.machine_usd, "power": hourly.power_usd},
            "ram_fraction": hourly.ram_fraction,
            "price_date": hourly.date,
            "price_note": hourly.note,
        }

    def row(self, n_tokens: int | None = None) -> tuple[str, ...]:
        """One text per title of `TITLES`, and of `JOB_TITLES` where a job is asked about."""
        ram, least = self.hourly.ram_fraction, self.smallest_host_bytes
        host = "-" if least is None else show_bytes(least)
        match self.outcome:
            case Speed() as speed:
                row = (
                    self.machine,
                    f"{speed.tokens_per_s:,.0f}",
                    show_seconds(speed.step_s),
                    f"{show_seconds(speed.p10_step_s)} to {show_seconds(speed.p90_step_s)}",
                    *("no price" if usd is None else f"{usd:.3g}" for usd in self.per_million()),
                    "no price" if ram is None else f"{ram:.0%}",
                    host,
                    str(speed.micro_batch),
                    speed.binding,
                    f"{speed.rests_on[BASES[0]]:.0%}",
                )
            case Misfit():
                row = (self.machine, "does not fit", "-", "-", "-", "-", "-", host, "-", "-", "-")
            case TooLong():
                row = (self.machine, "too long", "-", "-", "-", "-", "-", host, "-", "-", "-")
            case _:
                assert_never(self.outcome)
        if n_tokens is None:
            return row
        of = self.job(n_tokens)
        if of is None:
            return *row, "-", "-", "-"
        return *row, show_days(of.seconds), *("no price" if usd is None else f"{usd:,.2f}" for usd in (of.rent_usd, of.bought_usd))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Machines for one workload, the fastest first; then those that it does not fit, the nearest first; then too long plans."""

    model: str
    tokens_per_step: int
    candidates: tuple[Candidate, ...]

    @property
    def cheapest(self) -> str | None:
        """The machine whose tokens cost least to who rents it, of those with a rent."""
        return _least((c.usd_per_million_tokens, c.machine) for c in self.candidates)

    @property
    def cheapest_bought(self) -> str | None:
        """To who buys it, of those with a purchase price."""
        return _least((c.bought_usd_per_million_tokens, c.machine) for c in self.candidates)

    def to_json(self, n_tokens: int | None = None) -> dict[str, Any]:
        """All of it; with the job of so many tokens, where that is asked about."""
        jobs = [None if n_tokens is None else c.job(n_tokens) for c in self.candidates]
        return {
            "model": self.model,
            "tokens_per_step": self.tokens_per_step,
            "cheapest": self.cheapest,
            "cheapest_bought": self.cheapest_bought,
            "machines": [
                c.to_json() | ({} if of is None else {"job": asdict(of)}) for c, of in zip(self.candidates, jobs, strict=True)
            ],
        }

    def rows(self, n_tokens: int | None = None) -> list[tuple[str, ...]]:
        """A row per machine, under `TITLES`, and `JOB_TITLES` where a job is asked about."""
        return [c.row(n_tokens) for c in self.candidates]

    def notes(self) -> Iterator[str]:
        """What the rows leave out: whose tokens cost least, why machines do not fit, who should not stream, what has no price, how
        old the prices are."""
        for bought, how, name in ((False, "to rent", self.cheapest), (True, "to buy", self.cheapest_bought)):
            usd = {c.machine: c.per_million()[bought] for c in self.candidates if isinstance(c.outcome, Speed)}
            if name is not None:
                among = " of those with a price" if None in usd.values() else ""
                yield f"Cheapest {how}{among}: {name}, {usd[name]:.3g} USD per million tokens"
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
        yield "Measured on it: of the device's seconds, those that rest on measurements of this very device; `plan` says more"
        for c in self.candidates:
            if c.hourly.note is not None:
                yield f"{c.machine}: {c.hourly.note}"
        dates = [c.hourly.date for c in self.candidates if c.hourly.date is not None]
        if dates:
            yield (
                f"Prices as of {min(dates)} or later. Rented: the price of an hour, with the host memory in it. Bought: "
                f"machine and host memory over three years of full use, and power ({USD_PER_KWH} USD per kWh unless given)."
            )


def compare(
    model: Model, profiles: Sequence[Profile], semantics: Semantics, fixed: Policy | None = None, free: frozenset[str] = SIZES
) -> Comparison:
    """Rank machines for a workload by tokens per second, each with the fastest plan found, or with a `fixed` policy.

    `free`: sizes that each machine chooses for itself, as it does its kernels.
    PlanError for semantics or a policy that no plan can have.
    """
    return ranked(model, semantics, [candidate(model, profile, semantics, fixed, free) for profile in profiles])


def ranked(model: Model, semantics: Semantics, candidates: Sequence[Candidate]) -> Comparison:
    """Machines in their order."""
    return Comparison(model.name or str(model.path), semantics.tokens_per_step, tuple(sorted(candidates, key=_rank)))


def _least(priced: Iterable[tuple[float | None, str]]) -> str | None:
    return min(((usd, name) for usd, name in priced if usd is not None), default=(0.0, None))[1]


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


def candidate(
    model: Model, profile: Profile, semantics: Semantics, fixed: Policy | None = None, free: frozenset[str] = SIZES
) -> Candidate:
    """What becomes of the work on one machine."""
    semantics, workload = with_micro_batch(model, with_kernels(model, semantics, profile), profile, free)
    outcome = _outcome(model, workload, semantics, profile, fixed, free)
    least = None if isinstance(outcome, TooLong) else smallest_host_bytes(model, workload, semantics, profile, fixed)
    of_host = None if least is None else least * (semantics.ranks // profile.n_hosts)
    return Candidate(profile.name, outcome, of_host, hourly(profile))


def _outcome(
    model: Model, workload: Workload, semantics: Semantics, profile: Profile, fixed: Policy | None, free: frozenset[str]
) -> Outcome:
    if n_ops := too_long(workload, semantics, fixed):
        fewer = 1 << (semantics.n_micro_batches - 1).bit_length() - 1  # a power of two has divisors for a larger micro-batch
        while fewer > 1 and too_long(workload, replace(semantics, batch_size=fewer * semantics.micro_batch, sum_groups=1), fixed):
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
        host_peak_bytes=answer.needs.host_peak_bytes * (semantics.ranks // profile.n_hosts),
        micro_batch=semantics.micro_batch,
        gap_fraction=answer.certificate.gap_fraction,
        binding=answer.certificate.binding,
        resident_step_s=None if answer.resident is None else answer.resident.step_s,
        rests_on=rests_on(answer.plan, profile)[0].to_json(),
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
