"""`penstock machines`: the shipped machines, their prices, and the provenance of their speeds."""

import json
from dataclasses import asdict

import click

from penstock.cli.outputs import show_table
from runtime.units import show_bytes

TITLES = ("machine", "what it is", "device memory", "host memory", "rent an hour", "bought", "measured", "on another", "assumed")
MATTER = ("machine", "what it is", "rent an hour", "bought", "measured", "on another", "assumed", "device memory", "host memory")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def machines(as_json: bool) -> None:
    """List the machines that can be planned for by name, what they cost, and what their speed rests on.

    The last columns share out the device's seconds of a standard step (qwen3-8b, 4 x 4096 tokens): measurements of this very
    device, those of another, scaled by datasheets, or assumptions. A machine that is not here is a file: that of the nearest, with
    other numbers, or of `penstock probe -o`.
    """
    from hwprofiles.quantity import BASES
    from hwprofiles.schema import read_profile, shipped_profiles
    from planner.predict.rests_on import standard
    from planner.show.price import hourly

    profiles = [read_profile(name) for name in shipped_profiles()]
    if as_json:
        fields = [
            {"name": p.name, "summary": p.summary, "device": p.device.name, "device_memory_bytes": int(p.device.memory_bytes.value)}
            | {"host_memory_bytes": int(p.host.memory_bytes.value), "most_host_bytes": p.most_host_bytes}
            | {"usd_per_hour": asdict(hourly(p)), "numbers": p.count_sources(), "rests_on": standard(p).to_json()}
            for p in profiles
        ]
        click.echo(json.dumps({"machines": fields}))
        return
    rows = []
    for p in profiles:
        price, basis = p.price, standard(p)
        host = show_bytes(p.host.memory_bytes.value) + ("" if p.most_host_bytes is None else ", soldered")
        rent = "no price" if price.usd_per_hour is None else f"{price.usd_per_hour.value:.2f} USD"
        memory = " and memory" if price.ram_usd_per_gb else ""
        bought = "no price" if price.usd is None else f"{price.usd.value:,.0f} USD{memory}"
        shares = (f"{basis.fraction(of):.0%}" for of in BASES)
        rows.append((p.name, p.summary, show_bytes(p.device.memory_bytes.value), host, rent, bought, *shares))
    show_table(TITLES, rows, MATTER)
