"""Prices of a machine per hour and per job, to rent and to buy.

Rent includes the host memory. A purchase consists of machine and host memory, depreciated over three years of full use, and
electric power. The two are alternatives and never added up. Prices are dated; missing prices are None.
"""

from dataclasses import asdict, dataclass
from typing import Any

from penstock.hwprofiles.schema import Profile
from penstock.runtime.units import GB, show_duration

LIFETIME_HOURS = 3 * 365 * 24  # three years
USD_PER_KWH = 0.15  # default
HOUR_S = 3600
JOB_TITLES = ("time", "rented", "bought")


@dataclass(frozen=True, slots=True)
class Job:
    """Time and price of training on a number of tokens."""

    n_tokens: int
    seconds: float
    rent_usd: float | None
    bought_usd: float | None


@dataclass(frozen=True, slots=True)
class Hourly:
    """Price of a machine per hour. Parts without a price in the profile are None."""

    rent_usd: float | None
    machine_usd: float | None  # depreciation; without host memory if `ram_usd` is set
    ram_usd: float | None  # depreciation of all host memory
    power_usd: float | None
    date: str | None  # of the oldest price
    note: str | None  # names missing prices

    @property
    def bought_usd(self) -> float | None:
        """Sum for a purchased machine; None without a price of the machine itself."""
        return None if self.machine_usd is None else self.machine_usd + (self.ram_usd or 0.0) + (self.power_usd or 0.0)

    @property
    def ram_fraction(self) -> float | None:
        """Share of host memory in the purchase."""
        return None if self.bought_usd is None or self.ram_usd is None else self.ram_usd / self.bought_usd

    def job(self, n_tokens: int, tokens_per_s: float) -> Job:
        seconds = n_tokens / tokens_per_s
        rent_usd, bought_usd = (None if usd is None else usd * seconds / HOUR_S for usd in (self.rent_usd, self.bought_usd))
        return Job(n_tokens, seconds, rent_usd, bought_usd)

    def per_million(self, tokens_per_s: float) -> tuple[float | None, float | None]:
        """USD per million tokens: rented, and bought."""
        job = self.job(1_000_000, tokens_per_s)
        return job.rent_usd, job.bought_usd

    def job_fields(self, n_tokens: int | None, tokens_per_s: float | None) -> dict[str, Any]:
        """JSON field with the job; empty if no job is given, or the model does not fit."""
        return {} if n_tokens is None or tokens_per_s is None else {"job": asdict(self.job(n_tokens, tokens_per_s))}

    def job_cells(self, n_tokens: int | None, tokens_per_s: float | None) -> tuple[str, ...]:
        """Cells for `JOB_TITLES`; empty if no job is given."""
        if n_tokens is None or tokens_per_s is None:
            return () if n_tokens is None else ("-",) * len(JOB_TITLES)
        job = self.job(n_tokens, tokens_per_s)
        return show_duration(job.seconds), show_usd(job.rent_usd), show_usd(job.bought_usd)


def hourly(profile: Profile) -> Hourly:
    price = profile.price
    priced = [q for q in (price.usd_per_hour, price.usd, price.ram_usd_per_gb) if q is not None]
    dates = [day for q in priced if (day := profile.sources[q.source].date) is not None]
    dates += [price.date] if price.date is not None and priced else []
    machine_usd = ram_usd = power_usd = None
    if price.usd is not None:
        machine_usd = price.usd.value / LIFETIME_HOURS
        is_whole = profile.sources[price.usd.source].kind == "user"  # a price set by the user includes memory
        if price.ram_usd_per_gb is not None and not is_whole:
            ram_usd = price.ram_usd_per_gb.value * profile.host.memory_bytes.value / GB / LIFETIME_HOURS
    if price.watts is not None:
        power_usd = price.watts.value / 1000 * (USD_PER_KWH if price.usd_per_kwh is None else price.usd_per_kwh.value)
    missing = [name for name, q in (("rent (--usd-per-hour)", price.usd_per_hour), ("purchase (--usd)", price.usd)) if q is None]
    note = f"no price in its profile: {' and '.join(missing)}" if missing else None
    rent_usd = None if price.usd_per_hour is None else price.usd_per_hour.value
    return Hourly(rent_usd, machine_usd, ram_usd, power_usd, min(dates, default=None), note)


def prices_in_words(hour: Hourly, tokens_per_s: float) -> list[str]:
    """Format prices: `rented: 0.40 USD per million tokens, at 2.69 USD an hour`, and the same for a purchase."""
    rent_usd, bought_usd = hour.per_million(tokens_per_s)
    words = []
    if rent_usd is not None:
        words.append(f"rented: {show_usd(rent_usd)} per million tokens, at {show_usd(hour.rent_usd)} an hour")
    if bought_usd is not None:
        ram = "" if hour.ram_fraction is None else f", {hour.ram_fraction:.0%} of it host memory"
        power = "with power" if hour.power_usd is not None else "without power (draw unknown)"
        words.append(f"bought: {show_usd(bought_usd)} per million tokens, over three years {power}{ram}")
    return words


def job_in_words(job: Job) -> str:
    """Format a job: `2 d 5 h, 143 USD rented, 80.1 USD bought`."""
    prices = [f"{show_usd(usd)} {how}" for usd, how in ((job.rent_usd, "rented"), (job.bought_usd, "bought")) if usd is not None]
    return ", ".join([show_duration(job.seconds), *prices])


def show_usd(usd: float | None) -> str:
    """Format a price: `0.401 USD`, `1,240 USD`, or `no price`."""
    return "no price" if usd is None else f"{usd:,.0f} USD" if usd >= 100 else f"{usd:.3g} USD"
