"""Prices of a machine per hour and per job, to rent and to buy.

Rent includes the host memory. A purchase consists of machine and host memory, depreciated over three years of full use, and
electric power. The two are alternatives and never added up. Prices are dated and have ranges; missing prices are None. The price of
a job includes the hours of set-up, download of the weights and last checkpoint (earlier ones are written during training).
"""

import datetime
from dataclasses import asdict, dataclass
from typing import Any

from penstock.hwprofiles.schema import Profile
from penstock.runtime.plan import Setup
from penstock.runtime.units import GB, MB, show_bytes, show_duration

LIFETIME_HOURS = 3 * 365 * 24  # three years
USD_PER_KWH = 0.15  # default
HOUR_S = 3600
JOB_TITLES = ("time", "rented", "bought")
OLD = datetime.timedelta(days=183)  # six months
SETUP_S, MOVED_BYTES_PER_S = 1800, 200 * MB  # assumed: start and installation; download of weights and copy of the last checkpoint
DOWNLOADED_BYTES = 2  # per parameter: published weights are in bf16
AROUND = f"{show_duration(SETUP_S)} of set-up, download and last checkpoint at {show_bytes(MOVED_BYTES_PER_S)}/s (assumed)"
Ends = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Job:
    """Time of training on a number of tokens, time around it, and the price of both."""

    n_tokens: int
    seconds: float
    rent_usd: float | None
    bought_usd: float | None
    around_s: float  # set-up, download and last checkpoint


@dataclass(frozen=True, slots=True)
class Hourly:
    """Price of a machine per hour. Parts without a price in the profile are None."""

    rent_usd: float | None
    machine_usd: float | None  # depreciation; without host memory if `ram_usd` is set
    ram_usd: float | None  # depreciation of all host memory
    power_usd: float | None
    date: str | None  # oldest price that is not the user's
    note: str | None  # names missing prices
    rent_range: Ends | None = None
    bought_range: Ends | None = None
    dates: tuple[tuple[str, str], ...] = ()  # ("rent", "2026-03-31"): of prices that are not the user's

    @property
    def bought_usd(self) -> float | None:
        """Sum for a purchased machine; None without a price of the machine itself."""
        return None if self.machine_usd is None else self.machine_usd + (self.ram_usd or 0.0) + (self.power_usd or 0.0)

    @property
    def ram_fraction(self) -> float | None:
        """Share of host memory in the purchase."""
        return None if self.bought_usd is None or self.ram_usd is None else self.ram_usd / self.bought_usd

    def job(self, n_tokens: int, tokens_per_s: float, moved_bytes: int) -> Job:
        seconds, around_s = n_tokens / tokens_per_s, SETUP_S + moved_bytes / MOVED_BYTES_PER_S
        hours = (seconds + around_s) / HOUR_S
        rent_usd, bought_usd = (None if usd is None else usd * hours for usd in (self.rent_usd, self.bought_usd))
        return Job(n_tokens, seconds, rent_usd, bought_usd, around_s)

    def per_million(self, tokens_per_s: float) -> tuple[float | None, float | None]:
        """USD per million tokens: rented, and bought."""
        rented, bought = (None if usd is None else _per_million(usd, tokens_per_s) for usd in (self.rent_usd, self.bought_usd))
        return rented, bought

    def million_ranges(self, tokens_per_s: float) -> tuple[Ends | None, Ends | None]:
        """Lowest and highest USD per million tokens: rented, and bought."""
        both = self.rent_range, self.bought_range
        rented, bought = (ends and (_per_million(ends[0], tokens_per_s), _per_million(ends[1], tokens_per_s)) for ends in both)
        return rented, bought

    def old(self, today: datetime.date | None) -> str | None:
        """Name prices older than six months; None if all are newer, or without `today`."""
        ages = [f"{name} of {day}" for name, day in self.dates if today and today - datetime.date.fromisoformat(day) > OLD]
        return f"more than six months old: {', '.join(ages)}" if ages else None

    def job_fields(self, n_tokens: int | None, tokens_per_s: float | None, moved_bytes: int) -> dict[str, Any]:
        """JSON field with the job; empty if no job is given, or the model does not fit."""
        return {} if n_tokens is None or tokens_per_s is None else {"job": asdict(self.job(n_tokens, tokens_per_s, moved_bytes))}

    def job_cells(self, n_tokens: int | None, tokens_per_s: float | None, moved_bytes: int) -> tuple[str, ...]:
        """Cells for `JOB_TITLES`; empty if no job is given."""
        if n_tokens is None or tokens_per_s is None:
            return () if n_tokens is None else ("-",) * len(JOB_TITLES)
        job = self.job(n_tokens, tokens_per_s, moved_bytes)
        return show_duration(job.seconds + job.around_s), show_usd(job.rent_usd), show_usd(job.bought_usd)


def _per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    return usd_per_hour * 1e6 / tokens_per_s / HOUR_S


def moved_bytes(plan: Setup) -> int:
    """Bytes of the weights to download and of the last checkpoint."""
    return DOWNLOADED_BYTES * plan.workload.n_params + plan.checkpoint_bytes()


def hourly(profile: Profile) -> Hourly:
    price = profile.price
    machine_usd = ram_usd = power_usd = None
    bought_range: Ends | None = None
    if price.usd is not None:
        machine_usd = price.usd.value / LIFETIME_HOURS
        low, high = (usd / LIFETIME_HOURS for usd in price.usd.ends)
        is_whole = profile.sources[price.usd.source].kind == "user"  # a price set by the user includes memory
        if price.ram_usd_per_gb is not None and not is_whole:
            per_usd = profile.host.memory_bytes.value / GB / LIFETIME_HOURS
            ram_usd = price.ram_usd_per_gb.value * per_usd
            low, high = (a + b * per_usd for a, b in zip((low, high), price.ram_usd_per_gb.ends, strict=True))
        bought_range = low, high
    if price.watts is not None:
        power_usd = price.watts.value / 1000 * (USD_PER_KWH if price.usd_per_kwh is None else price.usd_per_kwh.value)
        bought_range = bought_range and (bought_range[0] + power_usd, bought_range[1] + power_usd)
    missing = [name for name, q in (("rent (--usd-per-hour)", price.usd_per_hour), ("purchase (--usd)", price.usd)) if q is None]
    note = f"no price in its profile: {' and '.join(missing)}" if missing else None
    rent_usd = None if price.usd_per_hour is None else price.usd_per_hour.value
    kinds = {"rent": price.usd_per_hour, "purchase": price.usd, "memory": price.ram_usd_per_gb if ram_usd is not None else None}
    shipped = {name: profile.sources[q.source] for name, q in kinds.items() if q is not None}
    dated = tuple(
        (name, day) for name, source in shipped.items() if source.kind != "user" and (day := source.date or price.date) is not None
    )
    rent_range = None if price.usd_per_hour is None else price.usd_per_hour.ends
    oldest = min((day for _, day in dated), default=None)
    return Hourly(rent_usd, machine_usd, ram_usd, power_usd, oldest, note, rent_range, bought_range, dated)


def prices_in_words(hour: Hourly, tokens_per_s: float, today: datetime.date | None = None) -> list[str]:
    """Format prices: `rented: 0.40 USD per million tokens, at 2.69 USD an hour (1.99 to 5)`, likewise a purchase, and old dates."""
    (rent_usd, bought_usd), (_, bought_range) = hour.per_million(tokens_per_s), hour.million_ranges(tokens_per_s)
    words = []
    if rent_usd is not None:
        hourly_usd = f"{show_usd(hour.rent_usd)} an hour{in_range(hour.rent_range)}"
        words.append(f"rented: {show_usd(rent_usd)} per million tokens, at {hourly_usd}")
    if bought_usd is not None:
        ram = "" if hour.ram_fraction is None else f", {hour.ram_fraction:.0%} of it host memory"
        power = "with power" if hour.power_usd is not None else "without power (draw unknown)"
        words.append(f"bought: {show_usd(bought_usd)} per million tokens{in_range(bought_range)}, over three years {power}{ram}")
    return [*words, *filter(None, [hour.old(today)])] if words else []


def in_range(ends: Ends | None) -> str:
    """Format a range: ` (1.99 to 5)`; empty for a single figure."""
    return "" if ends is None or ends[0] == ends[1] else f" ({ends[0]:.3g} to {ends[1]:.3g})"


def job_in_words(job: Job) -> str:
    """Format a job: `2 d 5 h, 143 USD rented, 80.1 USD bought`, and the part of the time that is not training."""
    prices = [f"{show_usd(usd)} {how}" for usd, how in ((job.rent_usd, "rented"), (job.bought_usd, "bought")) if usd is not None]
    total = ", ".join([show_duration(job.seconds + job.around_s), *prices])
    around = f"{show_duration(SETUP_S)} set-up, {show_duration(job.around_s - SETUP_S)} download and checkpoint"
    return f"{total}, with {around} ({show_bytes(MOVED_BYTES_PER_S)}/s)"


def show_usd(usd: float | None) -> str:
    """Format a price: `0.401 USD`, `1,240 USD`, or `no price`."""
    return "no price" if usd is None else f"{usd:,.0f} USD" if usd >= 100 else f"{usd:.3g} USD"
