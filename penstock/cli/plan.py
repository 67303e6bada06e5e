"""How does a user ask for a plan?"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.errors import DoesNotFitError
from runtime.units import on_one_line

from .options import (
    COUNT,
    Bytes,
    ClipNorm,
    Command,
    refuse_endless,
    refuse_larger,
    sequences_of_a_step,
    with_gpus,
    with_prices,
    with_training,
)

if TYPE_CHECKING:
    from hwprofiles.schema import Profile
    from planner.search.search import Answer
    from runtime.plan import Kernel, Policy, Semantics
    from runtime.plan.workload import Model, Workload

MAX_POLICY_FILE_BYTES = 512 * 2**20  # a plan file is one too
BASELINE_NAMES = ("megatrain", "megatrain-plus", "slideformer", "zero3-offload")


class _Plan(Command):
    """`plan --help` ends with the names that can be given. Only folders are listed; no room wakes."""

    def also(self) -> Mapping[str, str]:
        return {
            **dict.fromkeys(("max_seq_length", "max_seq_len", "max_length", "cutoff_len", "sequence_len"), "--seq-len"),
            **dict.fromkeys(("global_batch_size", "train_batch_size"), "--batch-size"),
            **dict.fromkeys(("max_grad_norm", "gradient_clipping"), "--clip-norm"),
            "micro_batch_size": "--micro-batch",
        }

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, package, folder in (("Shipped machines", "hwprofiles", "profiles"), ("Shipped models", "planner", "models")):
            names = sorted(file.name for file in (resources.files(package) / folder).iterdir())
            with formatter.section(title):
                formatter.write_text(", ".join(name.removesuffix(".json") for name in names if name.endswith(".json")))


@click.command(cls=_Plan, short_help="Find the fastest schedule for a model on a machine, and its speed.")
@click.argument("model")
@click.option("--machine", required=True, help="A shipped machine, named below, or the file of one (penstock probe -o).")
@click.option("--seq-len", type=COUNT, default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--batch-size", type=COUNT, help="Sequences of a step.  [default: 16]")
@click.option("--tokens-per-step", type=COUNT, help="Instead of --batch-size: a multiple of --seq-len.")
@click.option("--micro-batch", type=COUNT, help="Sequences computed at a time; the last may be fewer.  [default: the fastest]")
@click.option("--host-memory", type=Bytes(), help="Host memory to use, for example 1.5TB.  [default: the profile's]")
@click.option("--device-memory", type=Bytes(), help="Device memory to use, for example 24GB.  [default: the profile's]")
@click.option(
    "--policy",
    default="search",
    show_default=True,
    metavar="search|NAME|FILE",
    help=f"The schedule: the fastest found; that of another system ({', '.join(BASELINE_NAMES)}) under these semantics; or that "
    "of a plan or JSON file.",
)
@with_training
@click.option("--clip-norm", type=ClipNorm(), default=1.0, show_default=True, help="Largest norm of the whole gradient.")
@click.option(
    "--on-nonfinite", type=click.Choice(["stop", "skip"]), default="stop", show_default=True, help="When a gradient is not finite."
)
@click.option(
    "--master",
    "master_dtype",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Precision of the weights that are trained.",
)
@click.option(
    "--compute",
    "compute_dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="bf16",
    show_default=True,
    help="Precision of the products.",
)
@click.option(
    "--gradient-dtype", type=click.Choice(["bf16", "fp32"]), help="Precision of a gradient.  [default: bf16; of adapters fp32]"
)
@click.option(
    "--attention", type=click.Choice(["sdpa", "eager"]), help="Attention implementation.  [default: the better one of the model's]"
)
@click.option(
    "--kernels",
    type=click.Choice(["eager", "fused"]),
    help="Norms, loss, activation and attention as transformers spells them out, or fused.  [default: the machine's fastest]",
)
@click.option("--deterministic", is_flag=True, help="Attention whose gradients are added in a fixed order, at its price.")
@click.option(
    "--loss-tile-tokens",
    type=COUNT,
    help="Tokens whose logits exist at a time.  [default: 4096 with fused kernels, else 1024, or what fits]",
)
@click.option("--mlp-tile-tokens", type=COUNT, help="Tokens that go through an MLP at a time.  [default: all, or what fits]")
@click.option(
    "--sum-groups",
    type=COUNT,
    help="Parts of a step whose gradients are summed apart, and then as a tree: an order that up to as many GPUs keep.  "
    "[default: 1; of several GPUs 8, or as many as divide the batch]",
)
@with_gpus
@click.option("--runnable", is_flag=True, expose_value=False, hidden=True)  # of scripts from when not every plan could be run
@click.option(
    "--clipped-steps",
    type=click.FloatRange(0, 1),
    help="Share of steps whose gradient is clipped, if known: then blocks may be updated before the norm is.",
)
@with_prices
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def plan(
    model: str,
    machine: str,
    seq_len: int,
    batch_size: int | None,
    tokens_per_step: int | None,
    host_memory: int | None,
    device_memory: int | None,
    policy: str,
    clip_norm: float | str,
    kernels: "Kernel | None",
    deterministic: bool,
    clipped_steps: float | None,
    gpus: int,
    hosts: int,
    network_gbit: float | None,
    tokens: int | None,
    usd_per_hour: float | None,
    usd: float | None,
    usd_per_kwh: float | None,
    output: Path | None,
    as_json: bool,
    **semantics: Any,
) -> None:
    """Find the fastest schedule for MODEL on a machine: step time, memory, and how far from optimal it can be.

    MODEL is a folder or config.json in Hugging Face form, or one of the shipped models named below. Sizes are written as 80GB
    (10^9 bytes), 1.5TB or 24GiB. Exit code 3: it does not fit, and the message names the smallest changes that do.
    """
    from rich.console import Console

    from hwprofiles.schema import read_profile
    from hwprofiles.several import part_of
    from penstock.api import answer_of
    from planner.model.config import unread_weights
    from planner.model.workload import read_model
    from planner.show.facts import facts
    from planner.show.text import print_report
    from runtime.plan import PlanFile

    refuse_endless(machine)
    profile = read_profile(machine)
    if host_memory is not None or device_memory is not None:
        profile = profile.with_memory(device_memory, host_memory)
    profile = profile.with_prices(usd_per_hour=usd_per_hour, usd=usd, usd_per_kwh=usd_per_kwh)
    profile = part_of(profile, gpus, hosts, network_gbit)
    described = read_model(model)
    given: dict[str, Any] = {
        "seq_len": seq_len,
        "batch_size": sequences_of_a_step(batch_size, tokens_per_step, seq_len),
        "clip_norm": None if isinstance(clip_norm, str) else clip_norm,
    }
    given |= semantics  # whose options are named as its fields
    refuse_larger(given["micro_batch"] or 1, given["batch_size"])
    if output is not None:
        PlanFile.refuse_unwritable(output)
    try:
        answer = answer_of(described, profile, given, kernels, deterministic, partial(_policy, policy), clipped_steps, gpus * hosts)
    except DoesNotFitError as error:
        if as_json:
            short = {"device": error.short_device_bytes, "host": error.short_host_bytes}
            click.echo(json.dumps({"fits": False, "short_bytes": short, "smallest_change": error.smallest_change}))
        raise
    file = PlanFile(answer.plan, answer.claim())
    if output is not None:
        file.write(output)
    if as_json:
        click.echo(json.dumps(_fields(answer, profile, tokens)))
    else:
        print_report(facts(file, "the plan", answer=answer, n_tokens=tokens), Console(file=sys.stdout))
    if (unread := unread_weights(described, answer.plan.semantics.base)) is not None:
        click.echo(f"note: {on_one_line(unread)}", err=True)
    if output is not None:
        written = on_one_line(str(output))
        run = f"penstock run {written} --data FOLDER{_needed(described)}"
        click.echo(f"wrote {written}; next: penstock check {written}, then {run}", err=True)


def _needed(model: "Model") -> str:
    """What else `run` must be told about a model whose folder lacks weights or a tokenizer."""
    from planner.model.config import WEIGHT_PATTERNS, download, hub_name

    if (there := hub_name(model.name)) is not None and model.path is None:
        return f" --model {there.partition('/')[2]}{download(model)}"
    folder = Path(model.path) if model.path is not None else None
    has_weights = folder is not None and any(True for pattern in WEIGHT_PATTERNS for _ in folder.glob(pattern))
    has_tokenizer = folder is not None and (folder / "tokenizer.json").is_file()
    return ("" if has_weights else " --from-scratch") + ("" if has_tokenizer else " --tokenizer bytes")


def _fields(answer: "Answer", profile: "Profile", tokens: int | None) -> dict[str, Any]:
    """What `--json` prints of an answer; `job` only where it was asked for."""
    from planner.predict.rests_on import rests_on
    from planner.show.price import hourly, job

    fields = {
        "semantics": asdict(answer.plan.semantics.whole) | {"ranks": answer.plan.semantics.ranks},
        "policy": answer.plan.policy.to_json(),
        **answer.claim(),
        "baselines": answer.all_baselines(),
        "next_best": answer.next_best and {"policy": answer.next_best[0].to_json(), "step_s": answer.next_best[1]},
    }
    tokens_per_s, hour = answer.plan.semantics.tokens_per_step / answer.step_s, hourly(profile)
    rented, bought = hour.per_million(tokens_per_s)
    fields |= {"usd_per_million_tokens": rented, "bought_usd_per_million_tokens": bought}
    if tokens is not None:
        fields["job"] = asdict(job(tokens, tokens_per_s, hour))
    device, others = rests_on(answer.plan, profile)
    fields["rests_on"] = {"device": device.to_json(), "others": others and others.to_json()}
    return fields


def _policy(text: str, semantics: "Semantics", workload: "Workload") -> "Policy | None":
    """None: search. Else the policy of another system, or the one in a file (a plan's, or a policy's own fields)."""
    from difflib import get_close_matches

    from pydantic import TypeAdapter, ValidationError

    from planner.search.space import baseline
    from runtime.files import read_whole
    from runtime.plan import Policy

    if text == "search":
        return None
    if text in BASELINE_NAMES:
        return baseline(text, semantics, workload)
    path = Path(text)
    if not os.path.isfile(path):  # a name too long for a file is no file
        near = get_close_matches(text, ["search", *BASELINE_NAMES], n=1)
        meant = f"did you mean {near[0]}?" if near else f"write search, {', '.join(BASELINE_NAMES)}, or a file"
        raise click.UsageError(f"--policy: no policy or file {text!r}; {meant}")
    try:
        fields = json.loads(read_whole(path, MAX_POLICY_FILE_BYTES).decode("utf-8"))
        if isinstance(fields, dict):
            fields = fields.get("policy", fields)
        return TypeAdapter(Policy).validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors()[0]
        place = on_one_line(".".join(map(str, first["loc"])), 120) or "the file"
        problem = f"--policy {path}: {place}: {first['msg'].removeprefix('Value error, ')[:160]}"
        raise click.UsageError(f"{problem}; known are the fields of `policy` in a plan") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        problem = f"--policy {path}: not JSON ({str(error)[:80]})"
        raise click.UsageError(f'{problem}; give a plan file, or for example {{"prefetch_depth": 2}}') from None
