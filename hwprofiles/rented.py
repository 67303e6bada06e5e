"""Profile of a machine with other host cores, link or host memory bandwidth, as a rented part of a server has.

A rented share of the cores has its share of memory bandwidth and of the optimizer's rate. Two virtual machines with 16 cores were
measured. `h100-16core` and `h200-16core` have 0.27 and 0.22 of the cores of `h100-sxm` and `h200-pcie5`, 0.28 and 0.23 of the
memory bandwidth, 0.35 and 0.18 of their optimizer's rate, and 0.077 and 0.044 of their rate of norms and sums, nearly the squares.
"""

from typing import Any

from penstock.runtime.errors import ProfileError
from penstock.runtime.units import GB, MB, TB, show_bytes, show_rate

from .curves import along
from .schema import Profile

CORES = (2, 1024)
LINK = (100 * MB, TB)  # bytes per second: a quarter of PCIe Gen3 x1; twice NVLink-C2C
BANDWIDTH = (GB, 10 * TB)
DERIVED_SPREAD = 0.3  # least spread of rates that are derived for a share of the host
FEW_CORES = 8  # up to this many cores one drives the device, beyond it two


def rented(
    profile: Profile,
    host_cores: int | None = None,
    link_bytes_per_s: float | None = None,
    host_bandwidth_bytes_per_s: float | None = None,
    author: str = "the user",
) -> Profile:
    """Return the profile with these cores and rates of its whole host; None: unchanged. Raise ProfileError if one is not sensible.

    `host_cores`: all cores; one or two of them drive the device. `link_bytes_per_s`: each direction, for large copies.
    """
    stated = {"--host-cores": host_cores, "--link": link_bytes_per_s, "--host-bandwidth": host_bandwidth_bytes_per_s}
    if not (stated := {flag: value for flag, value in stated.items() if value is not None}):
        return profile
    if profile.device.kind == "cpu":
        raise ProfileError(
            f"{profile.name}: {min(stated)} is for the host of a GPU, not for a CPU; measure it with `penstock probe`"
        )
    for flag, (least, largest) in (("--host-cores", CORES), ("--link", LINK), ("--host-bandwidth", BANDWIDTH)):
        if not least <= (value := stated.get(flag, least)) <= largest:
            shown = [f"{n:g}" if flag == "--host-cores" else show_rate(n, "B") for n in (value, least, largest)]
            raise ProfileError(f"{flag} {shown[0]}: is not between {shown[1]} and {shown[2]}; give the value of the whole host")
    fields = profile.to_json()
    if link_bytes_per_s is not None:
        _set_link(fields, profile, link_bytes_per_s, author)
    if host_cores is not None or host_bandwidth_bytes_per_s is not None:
        _set_host(fields, profile, host_cores, host_bandwidth_bytes_per_s, author)
    return Profile.from_json(fields, profile.name)


def _source(kind: str, detail: str) -> dict[str, Any]:
    return {"kind": kind, "detail": detail, "date": None, "device": None, "driver": None}


def _set_link(fields: dict[str, Any], profile: Profile, bytes_per_s: float, author: str) -> None:
    """Scale each direction to this rate, and both together by the ratio of their sums. Latencies stay."""
    fields["sources"]["user_link"] = _source("user", f"a link of {show_bytes(bytes_per_s)}/s per direction as given by {author}")
    fields["sources"]["user_link_load"] = _source("assumed", "rates under load, scaled by the rate of the link that was given")
    link, curves = fields["link"], {"h2d": profile.link.h2d, "d2h": profile.link.d2h}
    best = {name: max(point.rate.value for point in curve.bytes_per_s) for name, curve in curves.items()}
    for name, had in best.items():
        curve, ratio = link[name], bytes_per_s / had
        for point in curve["bytes_per_s"]:
            _scale(point["rate"], ratio, "user_link", 0.0)
        _scale(curve["pageable_bytes_per_s"], min(1.0, ratio), "user_link_load")
        for key in {"duplex_bytes_per_s", "under_optimizer_bytes_per_s"} & curve.keys():
            _scale(curve[key], ratio, "user_link_load")
    _scale(link["duplex_bytes_per_s"], 2 * bytes_per_s / sum(best.values()), "user_link_load")


def _set_host(fields: dict[str, Any], profile: Profile, n_cores: int | None, bytes_per_s: float | None, author: str) -> None:
    """Set cores and memory bandwidth. The optimizer runs on a `part` of the memory system with threads in proportion."""
    host, had = fields["host"], profile.host
    n = had.n_cores if n_cores is None else n_cores - (1 if n_cores <= FEW_CORES else 2)
    share = min(1.0, n / had.n_cores)
    part = share if bytes_per_s is None else bytes_per_s / had.dram_bytes_per_s.value
    stated = [] if n_cores is None else [f"{n_cores} host cores, {n} of them for copies and optimizer"]
    stated += [] if bytes_per_s is None else [f"host memory at {show_bytes(bytes_per_s)}/s"]
    had_words = f"{profile.name} has {had.n_cores} and {show_bytes(had.dram_bytes_per_s.value)}/s"
    words = f"{' and '.join(stated)} as given by {author}; {had_words}"
    host["n_cores"] = n
    if bytes_per_s is not None:
        fields["sources"]["user_host_bandwidth"] = _source("user", words)
        _scale(host["dram_bytes_per_s"], part, "user_host_bandwidth", 0.0)
    if (share, part) == (1.0, 1.0):
        return
    fields["sources"]["user_host"] = _source("assumed", f"{words}; a share of its rates, as of two probed virtual machines")
    if bytes_per_s is None:
        _scale(host["dram_bytes_per_s"], part, "user_host")
    _scale(host["reduce_bytes_per_s"], share * part, "user_host")
    template = host["optimizer"][-1]
    host["optimizer"] = []
    for threads in sorted({2**i for i in range(n.bit_length())} | {n}):
        point: dict[str, Any] = {"threads": threads}
        for key in sorted(template.keys() - {"threads"}):
            rates = [(float(p.threads), rate.value) for p in had.optimizer if (rate := getattr(p, key)) is not None]
            wide = threads / part
            value = part * along(rates, wide) * min(1.0, wide / rates[0][0])
            point[key] = dict(template[key]) | {"value": value}
            _scale(point[key], 1.0, "user_host")
        host["optimizer"].append(point)


def _scale(quantity: dict[str, Any], ratio: float, source: str, spread: float | None = None) -> None:
    spread = max(quantity["spread_fraction"], DERIVED_SPREAD) if spread is None else spread
    quantity |= {"value": quantity["value"] * ratio, "spread_fraction": spread, "source": source}
