"""`penstock probe`: measure this machine and write its profile."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hwprofiles.laws import AttentionLaw, ProductLaw
from hwprofiles.probe.cliffs import without_cliffs
from hwprofiles.quantity import Dtype, Quantity, Share
from hwprofiles.schema import Profile
from runtime.units import show_bytes, show_rate, show_seconds

from .options import BYTES
from .outputs import check_output, write_output
from .progress import Preparing


@click.command("probe")
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    help="What is to compute. [auto: cuda where there is one]",
)
@click.option("--quick", is_flag=True, help="Fewer points and repeats: about 20 seconds, of a GPU a minute.")
@click.option("--gpu", type=click.IntRange(min=0), default=0, show_default=True, help="Which CUDA device.")
@click.option(
    "--host-memory",
    type=BYTES,
    help="Host memory that a run may have, for example 118GB: for a virtual machine whose memory grows as it is used. "
    "[default: what the system says is available]",
)
@click.option("-o", "output", type=click.Path(path_type=Path), help="Write the profile here. [default: standard output]")
def probe(device: str, quick: bool, gpu: int, host_memory: int | None, output: Path | None) -> None:
    """Measure this machine: about 90 seconds; a GPU, each of whose products runs until clocks are steady, some four minutes.

    Measures matrix products, attention, copies, host memory and the optimizer, each alone and while the others run. Close
    other programs first. The profile is what `penstock plan --machine FILE` reads.
    """
    from penstock.api import probe as measured

    if output is not None:
        check_output(output)
    console = Console(stderr=True)
    with Preparing(each=True) as tell:
        name = output.stem if output else "this-machine"
        profile = measured(device, quick, gpu=gpu, name=name, report=lambda what, done: tell(f"measuring {what}: {done:.0%}"))
    profile = profile.with_memory(None, host_memory)
    console.print(headline(profile))
    for line in remarks(profile):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if output is None:
        sys.stdout.write(text_of(profile))
    else:
        write_output(output, text_of(profile))
        console.print(f"wrote {output}; plan for it with: penstock plan MODEL --machine {output}", soft_wrap=True, highlight=False)


def headline(profile: Profile) -> Table:
    """The numbers that matter most, with their spread."""
    device, link, host = profile.device, profile.link, profile.host
    table = Table(title=f"{profile.name}: {profile.summary}", title_justify="left")
    for column, justify in (("what", "left"), ("value", "right"), ("spread", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]

    def row(what: str, q: Quantity | Share, show: Callable[[float], str]) -> None:
        table.add_row(what, show(q.value), f"{q.spread_fraction:.0%}")

    def rate(unit: str) -> Callable[[float], str]:
        return lambda value: show_rate(value, unit)

    dtypes: tuple[Dtype, ...] = ("bf16", "fp32")
    for dtype in dtypes:
        if not isinstance(points := device.matmul[dtype], ProductLaw):
            best = max(points, key=lambda p: p.flop_per_s.value)
            row(f"{dtype} products, best: ({best.m}, {best.k}) @ ({best.k}, {best.n})", best.flop_per_s, rate("FLOP"))
        for kernel, of in device.attention.items():
            rates, by = of.get(dtype, ()), "" if kernel == "flash" else f" by {'cuDNN' if kernel == 'cudnn' else kernel}"
            if rates and not isinstance(rates, AttentionLaw):
                longest = max(rates, key=lambda p: (p.seq_len, p.head_dim))
                for way, found in (("forward", longest.forward_flop_per_s), ("backward", longest.backward_flop_per_s)):
                    row(f"{dtype} attention{by} over {longest.seq_len} tokens, {way}", found, rate("FLOP"))
    for name, norm in device.norms.items():
        row(f"{name} norms, forward", norm.forward_bytes_per_s, rate("B"))
        row(f"{name} norms, backward", norm.backward_bytes_per_s, rate("B"))
    row("memory traffic of other kernels", device.memory_bytes_per_s, rate("B"))
    row("one library call", device.kernel_overhead_s, show_seconds)
    row("hand-over between two lanes", device.op_overhead_s, show_seconds)
    for direction, curve in (("to the device", link.h2d), ("to the host", link.d2h)):
        row(f"copies {direction}, {show_bytes(curve.bytes_per_s[-1].n_bytes)}", curve.bytes_per_s[-1].rate, rate("B"))
        if curve.under_optimizer_bytes_per_s is not None:
            row("  while the optimizer works", curve.under_optimizer_bytes_per_s, rate("B"))
        if curve.duplex_bytes_per_s is not None:
            row("  while the other direction copies", curve.duplex_bytes_per_s, rate("B"))
        if device.kind == "cuda":
            row("  of pageable memory", curve.pageable_bytes_per_s, rate("B"))
    row("copies both ways, sum", link.duplex_bytes_per_s, rate("B"))
    row("host memory traffic, all cores", host.dram_bytes_per_s, rate("B"))
    for point in host.optimizer:
        row(f"optimizer, {point.threads} thread{'s' * (point.threads > 1)}", point.params_per_s, rate("param"))
        row("  while copying", point.params_per_s_under_copies, rate("param"))
    row("gradient norm", host.reduce_bytes_per_s, rate("B"))
    row("first touch of memory", host.page_fault_bytes_per_s, rate("B"))
    row("memory for the device arena" if device.kind == "cpu" else "usable device memory", device.memory_bytes, show_bytes)
    if device.kind == "cuda":
        row("  of which its context takes", device.context_bytes, show_bytes)
    row("memory for the host", host.memory_bytes, show_bytes)
    return table


def remarks(profile: Profile) -> list[str]:
    """How many numbers rest on what, what the lanes do to each other, and every cliff."""
    counts = ", ".join(f"{n} {kind}" for kind, n in profile.count_sources().items() if n)
    details = [without_cliffs(source.detail) for source in profile.sources.values() if source.kind == "measured"]
    found = [f"cliff: {line}" for _, lines in details for line in lines]
    points = profile.device.matmul["bf16"]
    if profile.device.kind == "cuda" and not isinstance(points, ProductLaw) and points[0].clock_hz is None:
        found.append("no clock and no power with rates: for torch to read them, `pip install nvidia-ml-py` and probe again")
    return [f"numbers: {counts}", *(detail for detail, _ in details), *found]


def text_of(profile: Profile) -> str:
    """The profile as JSON that is easy to read: one quantity a line."""
    return _text(profile.to_json(), 0) + "\n"


def _text(value: Any, indent: int) -> str:
    """JSON with an indent of 1, in which an object of plain values takes one line."""
    if not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    one_line = json.dumps(value)
    items = value.values() if isinstance(value, dict) else value
    if len(one_line) < 100 and not any(isinstance(item, dict | list) for item in items):
        return one_line
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_text(item, indent + 1)}" for key, item in value.items()]
    else:
        lines = [inner + _text(item, indent + 1) for item in value]
    first, last = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return first + "\n" + ",\n".join(lines) + "\n" + " " * indent + last
