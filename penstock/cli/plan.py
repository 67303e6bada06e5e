"""`penstock plan`: search for the fastest schedule of a model on a machine, print it as text or JSON, and write its file."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from penstock import api
from penstock.data.images import MOST_PIXELS
from penstock.hwprofiles.instructions import plan_advice
from penstock.hwprofiles.schema import read_profile, shipped_profiles
from penstock.planner.model.config import WEIGHT_PATTERNS, download, hub_name, note_on_weights, shipped_models
from penstock.planner.model.workload import read_model
from penstock.results import Planned
from penstock.run_config import PLAN_FLAGS
from penstock.runtime.errors import DoesNotFitError
from penstock.runtime.plan.workload import ITEM_BYTES, Model
from penstock.runtime.units import in_shell, on_one_line, show_bytes, show_seconds

from .options import (
    AS_JSON,
    BYTES,
    NO_DROPOUT,
    PRICES,
    RATE,
    Command,
    semantics_flags,
    sequences_of_a_step,
    with_batch,
    with_host,
    with_prices,
    with_work,
)
from .outputs import beyond_positions, check_output, note

if TYPE_CHECKING:
    from penstock.planner.model.vision import VisionTower

IMAGE_SIZE = "1024x768"  # without --image-size
BASELINE_NAMES = ("megatrain", "megatrain-plus", "slideformer", "zero3-offload", "llmq")


class _Plan(Command):
    """`plan`, with the names of shipped machines and models at the end of its help."""

    also = PLAN_FLAGS

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in (("Shipped machines", shipped_profiles()), ("Shipped models", shipped_models())):
            with formatter.section(title):
                formatter.write_text(", ".join(names))


@click.command(cls=_Plan)
@click.argument("model")
@click.option("--machine", required=True, help="A shipped machine, named below, or the file of one (penstock probe -o).")
@with_batch
@with_work
@click.option(
    "--host-memory", "host_memory_bytes", type=BYTES, help="Host memory to use, for example 1.5TB.  [default: the profile's]"
)
@click.option(
    "--device-memory", "device_memory_bytes", type=BYTES, help="Device memory to use, for example 24GB.  [default: the profile's]"
)
@with_host
@click.option(
    "--disk-read",
    "disk_read_bytes_per_s",
    type=RATE,
    help="Read rate in bytes per second, for example 7GB, of a disk for frozen layers that do not fit in host memory.  "
    "[default: the profile's]",
)
@click.option(
    "--policy",
    default="search",
    show_default=True,
    metavar="search|NAME|FILE",
    help=f"The schedule: the fastest found; that of another system ({', '.join(BASELINE_NAMES)}) under these semantics; or that "
    "of a plan or JSON file.",
)
@semantics_flags
@click.option(
    "--kernels",
    type=click.Choice(["eager", "fused"]),
    help="Norm, loss, activation and attention kernels: as transformers has them, or fused.  [default: the machine's fastest]",
)
@click.option(
    "--loss",
    metavar="NAME|FILE.py:FUNCTION",
    help="Loss: cross-entropy, label-smoothing:0.1, z-loss:1e-4; for pairs dpo:beta=0.1, ipo, hinge, robust, orpo, simpo; for "
    "single answers kto; for rollouts grpo, dapo, dr-grpo; or a function of your own, which is executed.  "
    "[default: cross-entropy]",
)
@NO_DROPOUT
@click.option("--deterministic", is_flag=True, help="Attention with gradients summed in a fixed order, which is slower.")
@click.option(
    "--clipped-steps",
    "clipped_fraction",
    type=click.FloatRange(0, 1),
    help="Known share of steps with a clipped gradient: blocks may then be updated before the norm is known.",
)
@click.option(
    "--measured",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="The --out folder of a run of this model on this machine: op times are scaled by its measured over predicted times.",
)
@click.option("--images", "n_images", type=click.IntRange(1), help="Number of images of the data, for the pass of a vision tower.")
@click.option("--image-size", metavar="WxH", help="Width and height of an image of --images in pixels.  [default: 1024x768]")
@with_prices
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan here.")
@AS_JSON
@click.option("-v", "--verbose", is_flag=True, help="Print sources of the numbers, time and memory in parts, other systems.")
def plan(
    model: str,
    machine: str,
    seq_len: int,
    batch_size: int | None,
    tokens_per_step: int | None,
    policy: str,
    tokens: int | None,
    output: Path | None,
    as_json: bool,
    verbose: bool,
    n_images: int | None,
    image_size: str | None,
    **options: Any,
) -> None:
    """Find the fastest schedule for MODEL on a machine: step time, memory, and how far from optimal it can be.

    MODEL is a folder or config.json in Hugging Face form, or one of the shipped models named below. Sizes are written as 80GB
    (10^9 bytes), 1.5TB or 24GiB. Exit code 3: it does not fit, and the message names the smallest changes that do.
    """
    from penstock.planner.show.facts import Facts
    from penstock.planner.show.text import print_plan

    if output is not None:
        check_output(output)
    shown = _images_of(model, n_images, image_size, seq_len)
    try:
        planned: Planned = unwrap(api.plan)(  # with the flags of the command in its messages
            model,
            read_profile(machine, note).with_prices(**{name: options.pop(name) for name in PRICES}),
            seq_len=seq_len,
            batch_size=sequences_of_a_step(batch_size, tokens_per_step, seq_len),
            policy=policy,
            **options,
        )
    except DoesNotFitError as error:
        if as_json:
            short = {"device": error.short_device_bytes, "host": error.short_host_bytes}
            click.echo(json.dumps({"fits": False, "short_bytes": short, "smallest_change": error.smallest_change}))
        raise
    if output is not None:
        planned.save(output)
    images = {} if shown is None else shown.fields(planned)
    if as_json:
        click.echo(json.dumps(_fields(planned, tokens) | ({"images": images} if images else {})))
    else:
        facts = Facts(planned.file, "the plan", answer=planned.answer, n_tokens=tokens, today=date.today())
        print_plan(facts, Console(file=sys.stdout), verbose)
        if images:
            click.echo(_images_in_words(images))
    for text in filter(None, _notes(planned)):
        note(text)
    if output is not None:
        written = in_shell(output)
        disk = " --disk FOLDER" if planned.plan.policy.disk_blocks else ""
        run = f"penstock run {written} --data FOLDER{disk}{_run_flags(planned.plan.model)}"
        click.echo(f"wrote {on_one_line(str(output))}; next: penstock check {written}, then {run}", err=True)


def _notes(planned: Planned) -> Iterator[str | None]:
    """Yield notes on the installation, the machine and the model; None for one that does not apply."""
    from penstock.runtime.compiled import IS_COMPILED

    if not IS_COMPILED:
        slower = "a search takes longer, and a run's host updates 10 to 60 times as long as planned"
        yield f"without numba {slower}; install it with: pip install numba"
    yield plan_advice(planned.profile) if planned.plan.semantics.compute_dtype == "bf16" else None
    yield note_on_weights(planned.plan.model, planned.plan.semantics.base)
    yield beyond_positions(planned.plan)


def _run_flags(model: Model) -> str:
    """Return the further flags of `run` for a model folder without weights or tokenizer."""
    if (repository := hub_name(model.name)) is not None and model.path is None:
        return f" --model {repository.partition('/')[2]}{download(model)}"
    folder = Path(model.path) if model.path is not None else None
    has_weights = folder is not None and any(True for pattern in WEIGHT_PATTERNS for _ in folder.glob(pattern))
    has_tokenizer = folder is not None and (folder / "tokenizer.json").is_file()
    return ("" if has_weights else " --from-scratch") + ("" if has_tokenizer else " --tokenizer bytes")


def _fields(planned: Planned, tokens: int | None) -> dict[str, Any]:
    """Return the fields of `--json`; `job` only with `--tokens`."""
    from penstock.planner.predict.provenance import provenance_of
    from penstock.planner.search.remedy import tokens_per_s_in_fp8
    from penstock.planner.show.price import hourly, moved_bytes

    answer, hour, (device, remainder) = planned.answer, hourly(planned.profile), provenance_of(planned.plan, planned.profile)
    rented, bought = hour.per_million(planned.tokens_per_s)
    return {
        "semantics": asdict(planned.plan.semantics.all_ranks) | {"ranks": planned.plan.semantics.ranks},
        "policy": planned.plan.policy.to_json(),
        **answer.claim.to_json(),
        "baselines": answer.all_baselines(),
        "next_best": answer.next_best and {"policy": answer.next_best[0].to_json(), "step_s": answer.next_best[1]},
        "tokens_per_s_in_fp8": tokens_per_s_in_fp8(answer, planned.profile),
        "usd_per_million_tokens": rented,
        "bought_usd_per_million_tokens": bought,
        **hour.job_fields(tokens, planned.tokens_per_s, moved_bytes(planned.plan)),
        "rests_on": {"device": device.to_json(), "others": remainder and remainder.to_json()},
    }


@dataclass(frozen=True, slots=True)
class _Images:
    """Images of --images and --image-size, in pixels, and their vision tower."""

    n: int
    width: int
    height: int
    tower: "VisionTower"

    def fields(self, planned: Planned) -> dict[str, Any]:
        """Return the fields of `images` in `--json`."""
        from penstock.planner.predict.cost import CostModel
        from penstock.planner.predict.forward_pass import tower_s

        tower, dtype = self.tower, planned.plan.semantics.compute_dtype
        n_bytes = tower.file_bytes(self.n, ITEM_BYTES[dtype], not planned.plan.semantics.train.projector)
        return {
            **{"n": self.n, "width": self.width, "height": self.height, "tokens_each": tower.n_tokens, "flop_each": tower.flop},
            **{"tower_s": self.n * tower_s(tower, dtype, CostModel(planned.profile)), "file_bytes": n_bytes},
            "weights_bytes": tower.n_params * ITEM_BYTES[dtype],
        }


def _images_of(model: str, n_images: int | None, image_size: str | None, seq_len: int) -> _Images | None:
    """Return the images of --images, or None without. UsageError for a wrong size, or an image that fills a sequence."""
    from penstock.planner.model.vision import processor_limits, vision_tower

    if n_images is None:
        if image_size is not None:
            raise click.UsageError("--image-size does nothing without --images; add it, or leave out --image-size")
        return None
    image_size = image_size or IMAGE_SIZE
    edges = image_size.lower().split("x")
    if len(edges) != 2 or not all(edge.isdecimal() and 0 < int(edge) < 2**16 for edge in edges):
        raise click.UsageError(f"--image-size {image_size[:40]}: no width and height; write it as 1024x768")
    width, height = map(int, edges)
    if width * height > MOST_PIXELS:
        raise click.UsageError(f"--image-size {image_size}: above {MOST_PIXELS:,} pixels, which no run reads; give a smaller one")
    tower = vision_tower(read_model(model).config, width, height, processor_limits(Path(model)))
    if tower.n_tokens >= seq_len:
        problem = f"--image-size {image_size}: {tower.n_tokens:,} tokens an image, and a sequence holds {seq_len:,}"
        raise click.UsageError(f"{problem}; give smaller images, or a longer --seq-len")
    return _Images(n_images, width, height, tower)


def _images_in_words(images: Mapping[str, Any]) -> str:
    n, size, n_tokens = images["n"], f"{images['width']} x {images['height']}", images["tokens_each"]
    tower = f"the tower's pass {show_seconds(images['tower_s'])} without decoding, {show_bytes(images['weights_bytes'])} of weights"
    return f"images    {n:,} of {size}: {n_tokens:,} tokens each; {tower}; features {show_bytes(images['file_bytes'])} on disk"
