"""Ranking of machines for one workload, with a separate search and micro-batch for each."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import chain
from typing import Any

from penstock.hwprofiles.quantity import BASES
from penstock.hwprofiles.schema import Profile
from penstock.planner.model.kernels import with_kernels
from penstock.planner.predict.provenance import provenance_of
from penstock.planner.search.claim import Certificate, Predicted
from penstock.planner.search.evaluation import without_collection
from penstock.planner.search.micro_batch import SIZES, sizes_of
from penstock.planner.search.remedy import Request, TooLongError
from penstock.planner.search.search import search_machine
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.workload import Model
from penstock.runtime.units import show_bytes, show_seconds

from .price import AROUND, USD_PER_KWH, Ends, Hourly, hourly, in_range, moved_bytes
from .report_lines import resident_hint


@dataclass(frozen=True, slots=True)
class Speed:
    """The fastest plan found for a machine."""

    predicted: Predicted  # host memory: sum over all ranks of a host
    proof: Certificate
    micro_batch: int
    resident_step_s: float | None  # with all state on the device; None if it does not fit, or if both share one memory
    rests_on: dict[str, Any]  # shares of the device's seconds, from `Provenance`
    moved_bytes: int  # of weights and the last checkpoint

    def to_json(self) -> dict[str, Any]:
        predicted = {name: value for name, value in asdict(self.predicted).items() if name not in ("model_flop_per_s", "busy_s")}
        proven = {"gap_fraction": self.proof.gap_fraction, "binding": self.proof.binding}
        extra = {"resident_step_s": self.resident_step_s, "rests_on": self.rests_on}
        return {**predicted, "micro_batch": self.micro_batch, **proven, **extra}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Reason for a missing plan, and the smallest change that makes one possible."""

    status: str
    reason: str
    smallest_change: str
    fields: dict[str, int]  # JSON fields: missing bytes, or the number of ops

    @property
    def in_words(self) -> str:
        return f"{self.reason}; smallest changes that allow a plan: {self.smallest_change}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine, its hourly price, and its speed or the reason for a missing plan."""

    machine: str
    hourly: Hourly
    speed: Speed | None
    refusal: Refusal | None
    smallest_host_bytes: int | None = None  # minimum over policies that fit the device; None if none does, or if plans are too long

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.speed is None else self.speed.predicted.tokens_per_s

    def per_million(self) -> tuple[float | None, float | None]:
        """USD per million tokens, rented and bought; None without a plan or a price."""
        return (None, None) if self.tokens_per_s is None else self.hourly.per_million(self.tokens_per_s)

    def per_million_range(self, bought: bool) -> Ends | None:
        """Lowest and highest USD per million tokens; None without a plan or a price."""
        return None if self.tokens_per_s is None else self.hourly.million_ranges(self.tokens_per_s)[bought]

    @property
    def moved_bytes(self) -> int:
        return 0 if self.speed is None else self.speed.moved_bytes

    def rank(self) -> tuple[bool, bool, float, str]:
        """Sort key: by speed, then machines that do not fit by missing bytes, then those without FP8 or with too long plans."""
        missing = {} if self.refusal is None else self.refusal.fields
        is_other = self.refusal is not None and "short_host_bytes" not in missing
        return self.speed is None, is_other, sum(missing.values()) - (self.tokens_per_s or 0.0), self.machine

    def to_json(self, n_tokens: int | None = None) -> dict[str, Any]:
        """Convert to JSON fields, with the job of `--tokens` if given and possible."""
        hour, (rented, bought), refusal = self.hourly, self.per_million(), self.refusal
        return {
            "machine": self.machine,
            "fits": self.speed is not None,
            **({} if self.speed is None else self.speed.to_json()),
            **({} if refusal is None else {**refusal.fields, "smallest_change": refusal.smallest_change}),
            "reason": refusal and refusal.reason,
            "smallest_host_bytes": self.smallest_host_bytes,
            "usd_per_million_tokens": rented,
            "bought_usd_per_million_tokens": bought,
            "usd_per_million_tokens_range": self.per_million_range(False),
            "bought_usd_per_million_tokens_range": self.per_million_range(True),
            "usd_per_hour": {"total": hour.rent_usd, "rent": hour.rent_usd, "ram": hour.ram_usd}
            | {"bought": hour.bought_usd, "machine": hour.machine_usd, "power": hour.power_usd},
            "ram_fraction": hour.ram_fraction,
            "price_date": hour.date,
            "price_note": hour.note,
        } | hour.job_fields(n_tokens, self.tokens_per_s, self.moved_bytes)

    def row(self, n_tokens: int | None = None) -> tuple[str, ...]:
        """Cells for the titles in `COLUMNS` and, if a job is given, in `JOB_TITLES`."""
        cells = {title: "-" if self.speed is None else text(self, self.speed) for title, text in COLUMNS.items()}
        cells |= {"machine": self.machine} | ({} if self.refusal is None else {"tokens/s": self.refusal.status})
        if self.smallest_host_bytes is not None:
            cells["least host memory"] = show_bytes(self.smallest_host_bytes)
        return *cells.values(), *self.hourly.job_cells(n_tokens, self.tokens_per_s, self.moved_bytes)


def _usd(usd: float | None, form: str = ".3g") -> str:
    return "no price" if usd is None else format(usd, form)


COLUMNS: dict[str, Callable[[Candidate, Speed], str]] = {
    "machine": lambda c, speed: c.machine,
    "tokens/s": lambda c, speed: f"{speed.predicted.tokens_per_s:,.0f}",
    "step": lambda c, speed: show_seconds(speed.predicted.step_s),
    "P10 to P90": lambda c, speed: " to ".join(map(show_seconds, (speed.predicted.p10_step_s, speed.predicted.p90_step_s))),
    "rented: USD per M tokens": lambda c, speed: _usd(c.per_million()[0]),
    "bought: USD per M tokens": lambda c, speed: _usd(c.per_million()[1]),
    "RAM share": lambda c, speed: _usd(c.hourly.ram_fraction, ".0%"),
    "least host memory": lambda c, speed: "-",
    "micro-batch": lambda c, speed: str(speed.micro_batch),
    "bound by": lambda c, speed: speed.proof.binding,
    "measured on it": lambda c, speed: f"{speed.rests_on[BASES[0]]:.0%}",
}


def cheapest(candidates: Iterable[Candidate], bought: bool) -> tuple[float, str] | None:
    """Lowest price per million tokens, to rent or to buy, and its machine; None if no machine has a price."""
    return min(((usd, c.machine) for c in candidates if (usd := c.per_million()[bought]) is not None), default=None)


def tied(candidates: Sequence[Candidate], bought: bool) -> list[Candidate]:
    """The cheapest machine, and all with a lowest price up to its highest one, in order of price."""
    priced = [(usd, c.machine, c) for c in candidates if (usd := c.per_million()[bought]) is not None]
    ordered = [(c, c.per_million_range(bought) or (usd, usd)) for usd, _, c in sorted(priced, key=lambda entry: entry[:2])]
    return [c for c, ends in ordered if ends[0] <= ordered[0][1][1]]


def _cheapest_in_words(candidates: Sequence[Candidate], bought: bool) -> str:
    """`rtx4090-server, 0.154 USD per million tokens (0.154 to 0.272)`, or a tie of several machines."""
    prices = [(c, c.per_million()[bought], in_range(c.per_million_range(bought))) for c in tied(candidates, bought)]
    if len(prices) == 1:
        (c, usd, ends), *_ = prices
        return f"{c.machine}, {usd:.3g} USD per million tokens{ends}"
    machines = "; ".join(f"{c.machine} {usd:.3g}{ends}" for c, usd, ends in prices)
    return f"a tie, as the ranges of prices overlap: {machines} USD per million tokens"


def notes(candidates: Sequence[Candidate], today: date | None = None, n_tokens: int | None = None) -> Iterator[str]:
    """Yield notes: cheapest machines, reasons for missing plans, resident training that is faster, missing prices and dates."""
    for bought, how in ((False, "to rent"), (True, "to buy")):
        if cheapest(candidates, bought) is not None:
            are_all_priced = all(c.speed is None or c.per_million()[bought] is not None for c in candidates)
            suffix = "" if are_all_priced else " of those with a price"
            yield f"Cheapest {how}{suffix}: {_cheapest_in_words(candidates, bought)}"
    for c in candidates:
        if c.refusal is not None:
            yield f"{c.machine}: {c.refusal.in_words}"
        elif c.speed is not None and (advised := resident_hint(c.speed.resident_step_s, c.speed.predicted.step_s)) is not None:
            yield f"{c.machine}: {advised}"
    yield "Measured on it: the share of the device's seconds from measurements of this device (details: `penstock plan -v`)"
    yield from (f"{c.machine}: {c.hourly.note}" for c in candidates if c.hourly.note is not None)
    if dates := [c.hourly.date for c in candidates if c.hourly.date is not None]:
        yield (
            f"Prices as of {min(dates)} or later. Rented: the hourly price, including host memory. Bought: "
            f"machine and host memory over three years of full use, and power ({USD_PER_KWH} USD per kWh unless given)."
        )
    yield from (f"{c.machine}: {old}" for c in candidates if (old := c.hourly.old(today)) is not None)
    if n_tokens is not None:
        yield f"Time and price of the job include {AROUND}"


@without_collection()
def candidate(
    model: Model, profile: Profile, semantics: Semantics, fixed: Policy | None = None, free: frozenset[str] = SIZES
) -> Candidate:
    """Search a machine, or evaluate a `fixed` policy. `free`: sizes to choose per machine; kernels are always chosen per machine.
    PlanError for illegal semantics or policy."""
    gc.collect()  # the search of the machine before has reference cycles
    hour, n_here = hourly(profile), semantics.ranks // profile.n_hosts
    if semantics.products == "fp8" and not profile.has_fp8:
        reason = f"the profile of {profile.device.name} has no FP8 products"
        instead = f"leave out --compute fp8{', and use --base int8' * (semantics.base == 'fp8-rows')}"
        return Candidate(profile.name, hour, None, Refusal("no FP8", reason, instead, {}))
    semantics = with_kernels(model, semantics, profile)
    sizes = sizes_of(model, semantics, profile, free)
    every = chain.from_iterable(Request(model, size, profile, fixed, free).needs() for size, _ in sizes)
    least_bytes = min((n_here * needs.host_peak_bytes for needs in every if not needs.short_device_bytes), default=None)
    try:
        answer, profile = search_machine(model, semantics, profile, fixed, free)
    except TooLongError as error:
        counts = {"n_micro_batches": error.n_micro_batches, "n_ops": error.n_ops}
        return Candidate(profile.name, hour, None, Refusal("too long", error.reason, error.change, counts))
    except DoesNotFitError as error:
        short = {"device": error.short_device_bytes, "host": error.short_host_bytes}
        reason = " and ".join(f"{place} memory is {show_bytes(n_bytes)} short" for place, n_bytes in short.items() if n_bytes)
        fields = {f"short_{place}_bytes": n_bytes for place, n_bytes in short.items()}
        return Candidate(profile.name, hour, None, Refusal("does not fit", reason, error.smallest_change, fields), least_bytes)
    predicted, resident = answer.claim.prediction, answer.resident
    predicted = replace(predicted, host_peak_bytes=predicted.host_peak_bytes * n_here)
    provenance, resident_s = provenance_of(answer.plan, profile)[0].to_json(), None if resident is None else resident.step_s
    speed = Speed(
        predicted, answer.certificate, answer.plan.semantics.micro_batch, resident_s, provenance, moved_bytes(answer.plan)
    )
    return Candidate(profile.name, hour, speed, None, least_bytes)
