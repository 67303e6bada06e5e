"""`penstock probe`: measure this machine and write its profile."""

import re
import sys
from inspect import unwrap
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from penstock.hwprofiles.instructions import plan_advice
from penstock.hwprofiles.op_laws import ProductLaw
from penstock.hwprofiles.probe.cliffs import without_cliffs
from penstock.hwprofiles.quantity import Share
from penstock.hwprofiles.schema import Profile
from penstock.runtime.units import in_shell, show_bytes, show_rate, show_seconds

from .options import BYTES, PATH
from .outputs import check_output, json_text, write_output
from .progress import Preparing


@click.command("probe")
@click.option(
    "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Device to measure. [auto: cuda, if available]"
)
@click.option("--quick", is_flag=True, help="Fewer points and repeats: about 20 seconds, or a minute for a GPU.")
@click.option("--gpu", type=click.IntRange(min=0), default=0, show_default=True, help="Which CUDA device.")
@click.option(
    "--host-memory",
    type=BYTES,
    help="Host memory for a run, for example 118GB: for a virtual machine with memory that grows when it is used. "
    "[default: the system's available memory]",
)
@click.option(
    "--disk", type=PATH, metavar="FOLDER", help="Also measure the disk of this folder: frozen weights may be read from it."
)
@click.option("-o", "output", type=click.Path(path_type=Path), help="Write the profile here. [default: standard output]")
def probe(device: str, quick: bool, gpu: int, host_memory: int | None, disk: Path | None, output: Path | None) -> None:
    """Measure this machine: about 90 seconds, or four minutes for a GPU, which runs each product until its clock is steady.

    Measures matrix products, attention, copies, host memory and the optimizer, each alone and while the others run. Close
    other programs first. `penstock plan --machine FILE` reads the profile.
    """
    from penstock.api import probe as measured

    if output is not None:
        check_output(output)
    console = Console(stderr=True)
    with Preparing(every_stage=True) as show:
        name = output.stem if output else "this-machine"
        profile = unwrap(measured)(
            device, quick, gpu=gpu, name=name, disk=disk, report=lambda stage, share: show(f"measuring {stage}: {share:.0%}")
        )
    profile = profile.with_memory(None, host_memory)
    console.print(headline(profile))
    for line in remarks(profile):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if output is None:
        sys.stdout.write(json_text(profile.to_json()))
    else:
        write_output(output, json_text(profile.to_json()))
        following = f"plan for it with: penstock plan MODEL --machine {in_shell(output)}"
        console.print(f"wrote {output}; {following}", soft_wrap=True, highlight=False)


def headline(profile: Profile) -> Table:
    """Return a table of the quantities by name; for a curve of points, the highest value."""
    table = Table("what", Column("value", justify="right"), Column("spread", justify="right"), title=profile.summary)
    best = dict[str, Share]()
    for place, measurement in profile.quantities():
        name = re.sub(r"\.\d+(?=\.)", "", place)
        best[name] = max(measurement, best.get(name, measurement), key=lambda quantity: quantity.value)
    for name, quantity in best.items():
        table.add_row(name, _shown(name, quantity.value), f"{quantity.spread_fraction:.0%}")
    return table


def _shown(name: str, value: float) -> str:
    """Format a number with the unit in its name."""
    if rate := re.search(r"(bytes|flop|params)_per_s", name):
        return show_rate(value, {"bytes": "B", "flop": "FLOP", "params": "param"}[rate[1]])
    if name.endswith("_bytes"):
        return show_bytes(value)
    return show_seconds(value) if name.endswith("_s") else f"{value:.3g}"


def remarks(profile: Profile) -> list[str]:
    """Return lines on the sources of the numbers, on the details of measurements, and on every cliff."""
    counts = ", ".join(f"{n} {kind}" for kind, n in profile.count_sources().items() if n)
    details = [without_cliffs(source.detail) for source in profile.sources.values() if source.kind == "measured"]
    warnings = [f"cliff: {line}" for _, lines in details for line in lines]
    if (advice := plan_advice(profile)) is not None:
        warnings.append(advice)
    points = profile.device.matmul["bf16"]
    if profile.device.kind == "cuda" and not isinstance(points, ProductLaw) and points[0].clock_hz is None:
        warnings.append("no clock and no power with rates: for torch to read them, `pip install nvidia-ml-py` and probe again")
    return [f"numbers: {counts}", *(detail for detail, _ in details), *warnings]
