"""Profile of a machine with other host cores, link or host memory bandwidth, as a rented part of a server has.

A rented share of the cores has its share of memory bandwidth and of the optimizer's rate. Two virtual machines with 16 cores were
measured. `h100-16core` and `h200-16core` have 0.27 and 0.22 of the cores of `h100-sxm` and `h200-pcie5`, 0.28 and 0.23 of the
memory bandwidth, 0.35 and 0.18 of their optimizer's rate, and 0.077 and 0.044 of their rate of norms and sums, nearly the squares.
"""

from typing import Any

from penstock.runtime.errors import ProfileError
from penstock.runtime.units import GB, MB, TB, show_rate

from .curves import along
from .schema import Profile

# Least and largest; bytes per second: from a quarter of PCIe Gen3 x1 to twice NVLink-C2C
RANGES = {"--host-cores": (2, 1024), "--link": (100 * MB, TB), "--host-bandwidth": (GB, 10 * TB)}
DERIVED_SPREAD = 0.3  # least spread of rates that are derived for a share of the host
FEW_CORES = 8  # up to this many cores one drives the device, beyond it two


def rented(
    profile: Profile,
    host_cores: int | None = None,
    link_bytes_per_s: float | None = None,
    host_bandwidth_bytes_per_s: float | None = None,
) -> Profile:
    """Return the profile with these cores and rates of its whole host; None: unchanged. Raise ProfileError if one is not sensible.

    `host_cores`: all cores; one or two of them drive the device. `link_bytes_per_s`: each direction, for large copies.
    """
    values = zip(RANGES, (host_cores, link_bytes_per_s, host_bandwidth_bytes_per_s), strict=True)
    if not (stated := {flag: value for flag, value in values if value is not None}):
        return profile
    if profile.device.kind == "cpu":
        raise ProfileError(f"{profile.name}: {min(stated)} is for the host of a GPU; measure a CPU with `penstock probe`")
    shown = {flag: f"{n:g}" if flag == "--host-cores" else show_rate(n, "B") for flag, n in stated.items()}
    for flag, value in stated.items():
        if not RANGES[flag][0] <= value <= RANGES[flag][1]:
            limits = " and ".join(f"{n:g}" if flag == "--host-cores" else show_rate(n, "B") for n in RANGES[flag])
            raise ProfileError(f"{flag} {shown[flag]}: is not between {limits}; give the whole host's (--link: one GPU's)")
    fields, words = profile.to_json(), ", ".join(f"{flag} {value}" for flag, value in shown.items())
    derived = f"scaled to {words} from {profile.host.n_cores} cores and rates of {profile.name}, as of two probed virtual machines"
    for key, kind, detail in (("user_host", "user", f"{words} as given by the user"), ("user_share", "assumed", derived)):
        fields["sources"][key] = {"kind": kind, "detail": detail, "date": None, "device": None, "driver": None}
    if link_bytes_per_s is not None:
        _set_link(fields["link"], profile, link_bytes_per_s)
    if host_cores is not None or host_bandwidth_bytes_per_s is not None:
        _set_host(fields["host"], profile, host_cores, host_bandwidth_bytes_per_s)
    return Profile.from_json(fields, profile.name)


def _set_link(link: dict[str, Any], profile: Profile, bytes_per_s: float) -> None:
    """Scale each direction to this rate, and both together by the ratio of their sums. Latencies stay."""
    curves = {"h2d": profile.link.h2d, "d2h": profile.link.d2h}
    best = {name: max(point.rate.value for point in curve.bytes_per_s) for name, curve in curves.items()}
    for name, best_bytes_per_s in best.items():
        curve, ratio = link[name], bytes_per_s / best_bytes_per_s
        for point in curve["bytes_per_s"]:
            _set(point["rate"], point["rate"]["value"] * ratio, "user_host")
        _set(curve["pageable_bytes_per_s"], curve["pageable_bytes_per_s"]["value"] * min(1.0, ratio))
        for key in {"duplex_bytes_per_s", "under_optimizer_bytes_per_s"} & curve.keys():
            _set(curve[key], curve[key]["value"] * ratio)
    _set(link["duplex_bytes_per_s"], link["duplex_bytes_per_s"]["value"] * 2 * bytes_per_s / sum(best.values()))


def _set_host(host: dict[str, Any], profile: Profile, n_cores: int | None, bytes_per_s: float | None) -> None:
    """Set cores and memory bandwidth. The optimizer runs on a `part` of the memory system with threads in proportion."""
    server, dram = profile.host, host["dram_bytes_per_s"]
    n = server.n_cores if n_cores is None else n_cores - (1 if n_cores <= FEW_CORES else 2)
    share = min(1.0, n / server.n_cores)
    part = share if bytes_per_s is None else bytes_per_s / dram["value"]
    host["n_cores"] = n
    if bytes_per_s is not None:
        _set(dram, bytes_per_s, "user_host")
    elif part < 1.0:
        _set(dram, dram["value"] * part)
    if (share, part) == (1.0, 1.0):
        return
    _set(host["reduce_bytes_per_s"], host["reduce_bytes_per_s"]["value"] * share * part)
    template, host["optimizer"] = host["optimizer"][-1], []
    for threads in sorted({2**i for i in range(n.bit_length())} | {n}):
        point: dict[str, Any] = {"threads": threads}
        for key in sorted(template.keys() - {"threads"}):
            rates = [(float(p.threads), rate.value) for p in server.optimizer if (rate := getattr(p, key)) is not None]
            point[key] = dict(template[key])
            _set(point[key], part * along(rates, threads / part) * min(1.0, threads / part / rates[0][0]))
        host["optimizer"].append(point)


def _set(quantity: dict[str, Any], value: float, source: str = "user_share") -> None:
    """Set a value that the user gave (`user_host`), exactly, or a derived one."""
    spread = 0.0 if source == "user_host" else max(quantity["spread_fraction"], DERIVED_SPREAD)
    quantity |= {"value": value, "spread_fraction": spread, "source": source}
