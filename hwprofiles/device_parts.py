"""Profile of one of n devices: the device, its link, and 1/n of its host."""

from penstock.runtime.errors import ProfileError

from .schema import Profile

BYTES_PER_GBIT = 1e9 / 8
NETWORK_LATENCY_S = 2e-5  # assumed for --network-gbit, which states a rate only


def part_of(profile: Profile, n: int, n_hosts: int = 1, gbit_per_s: float | None = None) -> Profile:
    """Return the profile of one of n devices per host, on `n_hosts` hosts with a network of `gbit_per_s` per host."""
    if min(n, n_hosts) < 1:
        raise ProfileError(f"--gpus {n} and --hosts {n_hosts}: give at least 1 of each")
    if gbit_per_s is not None and n_hosts == 1:
        raise ProfileError("--network-gbit is a rate between hosts, but there is one host; give their number with --hosts")
    return shared_by(on_network(profile, gbit_per_s), n, n_hosts)


def shared_by(profile: Profile, n: int, n_hosts: int = 1) -> Profile:
    """Return the profile of one of n devices per host: cores, memory and rates of the host are divided by n. Prices become totals:
    a shipped price is per device and is multiplied, a price by the user is the total already."""
    has = None if profile.peers is None else profile.peers.n_devices
    if has is not None and n > has:
        raise ProfileError(f"{profile.name}: has {has} devices, not {n}; choose --gpus {has} or fewer")
    if n_hosts > 1 and profile.network is None:
        raise ProfileError(f"{profile.name}: has no network; give the rate of each host with --network-gbit")
    if n * n_hosts == 1 and profile.n_hosts == 1:
        return profile
    fields = profile.to_json()
    host, price = fields["host"], fields["price"]
    host["n_cores"] = max(1, host["n_cores"] // n)
    for key in {"memory_bytes", "dram_bytes_per_s", "reduce_bytes_per_s", "page_fault_bytes_per_s", "most_bytes"} & host.keys():
        host[key]["value"] /= n
    for key in ("usd_per_hour", "usd", "watts", "ram_usd_per_gb"):
        quantity = price.get(key)
        if quantity and (key == "ram_usd_per_gb" or profile.sources[quantity["source"]].kind != "user"):  # memory: per part
            quantity |= {end: quantity[end] * n * n_hosts for end in ("value", "low", "high") if end in quantity}
    if profile.network is not None:
        fields["network"]["n_hosts"] = n_hosts
    return Profile.from_json(fields | {"name": name_of_shared(profile.name, n, n_hosts)}, profile.name)


def name_of_shared(name: str, n: int, n_hosts: int) -> str:
    """Return the name with the number of GPUs and hosts, for example `h100-sxm, 8 GPUs on each of 2 hosts`."""
    hosts = f" on each of {n_hosts} hosts" if n_hosts > 1 else ""
    return f"{name}, {n} GPU{'' if n == 1 else 's'}{hosts}" if n * n_hosts > 1 else name


def on_network(profile: Profile, gbit_per_s: float | None) -> Profile:
    """Return the profile with a network of `gbit_per_s` per host; None: unchanged."""
    if gbit_per_s is None:
        return profile
    rate = {"value": gbit_per_s * BYTES_PER_GBIT, "spread_fraction": 0.0, "source": "user_network"}
    latency = {"value": NETWORK_LATENCY_S, "spread_fraction": 0.5, "source": "network_latency"}
    undated = {"date": None, "device": None, "driver": None}
    fields = profile.to_json()
    fields["network"] = {"bytes_per_s": rate, "latency_s": latency}
    fields["sources"]["user_network"] = {"kind": "user", "detail": f"{gbit_per_s:g} Gbit/s as given by the user", **undated}
    fields["sources"]["network_latency"] = {"kind": "assumed", "detail": "from one host to the next", **undated}
    return Profile.from_json(fields, profile.name)
