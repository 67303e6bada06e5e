"""Which commands are there, and what do they answer?

Nothing heavy is imported before a command needs it: `penstock --help` is instant, and planning never wakes torch.
"""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.errors import DoesNotFitError, PenstockError
from runtime.units import parse_bytes

if TYPE_CHECKING:
    from runtime.plan import Policy, Semantics
    from runtime.timeline import Timeline

MAX_COUNT = 10**9
MAX_PLAN_OPS = 500_000  # a plan file of some fifty megabytes; beyond that a larger micro-batch is meant
BASELINE_NAMES = ("megatrain", "megatrain-plus", "slideformer", "zero3-offload")
# Commands of other rooms: where they live, and what `--help` says of them without waking that room.
ELSEWHERE = {
    "run": ("runtime.cli", "Train with a plan: weights stream in, gradients stream out."),
    "probe": ("hwprofiles.cli", "Measure this machine and write its profile."),
}


class Penstock(click.Group):
    """The group. Commands of other rooms are imported when called; what a user can mend is one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *ELSEWHERE]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ELSEWHERE:
            command: click.Command = getattr(importlib.import_module(ELSEWHERE[cmd_name][0]), cmd_name)
            return command
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, command.get_short_help_str(90)) for name, command in self.commands.items()]
        rows += [(name, text) for name, (_, text) in ELSEWHERE.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and leave with its exit code. A mistake of ours keeps its traceback."""
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except PenstockError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(error.exit_code)
        except click.ClickException as error:
            click.echo("error: " + " ".join(error.format_message().split()), err=True)
            sys.exit(2)
        except click.Abort:
            click.echo("error: interrupted", err=True)
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A size such as 80GB, 1.5TB or 24GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else parse_bytes(value)


class ClipNorm(click.ParamType):  # type: ignore[type-arg]
    """A norm above zero, or `none`."""

    name = "norm|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value == "none" or isinstance(value, float):
            return value  # type: ignore[no-any-return]
        try:
            norm = float(value)
        except ValueError:
            norm = 0.0
        if not 0 < norm < float("inf"):
            self.fail(f"{value!r} is not a norm above zero; write for example 1.0, or none", param, ctx)
        return norm


COUNT = click.IntRange(1, MAX_COUNT)


@click.group(cls=Penstock, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock", prog_name="penstock")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train language models far larger than GPU memory on one GPU, and know beforehand how fast.

    Start with:  penstock plan qwen2.5-7b --machine rtx4090-server -o plan.json
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """The `penstock` command."""
    cli()


@cli.command(short_help="Find the fastest schedule for a model on a machine, and say how fast it is.")
@click.argument("model")
@click.option("--machine", required=True, help="A shipped profile's name, or the file of one (penstock probe -o).")
@click.option("--seq-len", type=COUNT, default=4096, show_default=True, help="Tokens of a sequence.")
@click.option("--batch-size", type=COUNT, help="Sequences of a step.  [default: 16]")
@click.option("--tokens-per-step", type=COUNT, help="Instead of --batch-size: a multiple of --seq-len.")
@click.option("--micro-batch", type=COUNT, help="Sequences computed at a time.  [default: what fits in 60 % of the device]")
@click.option("--host-memory", type=Bytes(), help="Host memory to use, for example 1.5TB.  [default: the profile's]")
@click.option("--device-memory", type=Bytes(), help="Device memory to use, for example 24GB.  [default: the profile's]")
@click.option(
    "--policy",
    default="search",
    show_default=True,
    metavar="search|NAME|FILE",
    help=f"The schedule: the fastest found, that of another system ({', '.join(BASELINE_NAMES)}), or one from a JSON or plan file.",
)
@click.option("--clip-norm", type=ClipNorm(), default=1.0, show_default=True, help="Largest norm of the whole gradient.")
@click.option(
    "--on-nonfinite", type=click.Choice(["stop", "skip"]), default="stop", show_default=True, help="When a gradient is not finite."
)
@click.option(
    "--master",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Precision of the weights that are trained.",
)
@click.option(
    "--compute", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True, help="Precision of the products."
)
@click.option(
    "--gradient-dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True, help="Precision of a gradient."
)
@click.option(
    "--attention", type=click.Choice(["sdpa", "eager"]), help="Attention implementation.  [default: the better one of the model's]"
)
@click.option("--loss-tile-tokens", type=COUNT, default=1024, show_default=True, help="Tokens whose logits exist at a time.")
@click.option("--runnable", is_flag=True, help="Only what `penstock run` performs today.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def plan(
    model: str,
    machine: str,
    seq_len: int,
    batch_size: int | None,
    tokens_per_step: int | None,
    micro_batch: int | None,
    host_memory: int | None,
    device_memory: int | None,
    policy: str,
    clip_norm: float | str,
    on_nonfinite: str,
    master: str,
    compute: str,
    gradient_dtype: str,
    attention: str | None,
    loss_tile_tokens: int,
    runnable: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Find the fastest schedule for MODEL on a machine: step time, memory, and how far from optimal it can be.

    MODEL is a folder or config.json in Hugging Face form, or a shipped name such as qwen2.5-7b or gpt-oss-120b. Exit code 3:
    it does not fit, and the message names the smallest changes that do.
    """
    from hwprofiles.schema import read_profile
    from runtime.plan import PlanFile, Semantics

    from .micro_batch import with_micro_batch
    from .search import search
    from .workload import build_workload, read_model, supported_attention

    # Every policy there is today is performed by `run`, so `runnable` leaves nothing out yet.
    profile = read_profile(machine)
    if host_memory is not None or device_memory is not None:
        profile = profile.with_memory(device_memory, host_memory)
    described = read_model(model)
    semantics = Semantics(
        seq_len=seq_len,
        batch_size=_batch_size(batch_size, tokens_per_step, seq_len),
        micro_batch=micro_batch or 1,
        compute_dtype=compute,  # type: ignore[arg-type]
        gradient_dtype=gradient_dtype,  # type: ignore[arg-type]
        master_dtype=master,  # type: ignore[arg-type]
        clip_norm=None if isinstance(clip_norm, str) else clip_norm,
        on_nonfinite=on_nonfinite,  # type: ignore[arg-type]
        loss_tile_tokens=loss_tile_tokens,
        attention=attention or supported_attention(described)[0],  # type: ignore[arg-type]
    )
    if semantics.batch_size % semantics.micro_batch:
        raise click.UsageError(f"--micro-batch {micro_batch} does not divide the batch of {semantics.batch_size}; choose a divisor")
    if micro_batch is None:
        semantics, workload = with_micro_batch(described, semantics, profile)
    else:
        workload = build_workload(described, semantics)
    n_ops = 5 * semantics.n_micro_batches * len(workload.blocks)
    if n_ops > MAX_PLAN_OPS:
        said = f"a step of {semantics.n_micro_batches} micro-batches makes a plan of up to {n_ops} ops"
        raise click.UsageError(f"{said}; use a larger --micro-batch")
    fixed = _policy(policy, semantics)
    try:
        answer = search(described, workload, semantics, profile, fixed, free_micro_batch=micro_batch is None)
    except DoesNotFitError as error:
        if as_json:
            short = {"device": error.short_device_bytes, "host": error.short_host_bytes}
            click.echo(json.dumps({"fits": False, "short_bytes": short, "smallest_change": error.smallest_change}))
        raise
    if output is not None:
        PlanFile(answer.plan, answer.claim()).write(output)
    if as_json:
        fields = {
            "semantics": asdict(answer.plan.semantics),
            "policy": asdict(answer.plan.policy),
            **answer.claim(),
            "baselines": answer.baselines,
        }
        click.echo(json.dumps(fields))
    else:
        from rich.console import Console

        from .explain import explain

        explain(answer, profile, Console(file=sys.stdout))
    if output is not None:
        click.echo(f"wrote {output}: prove it with `penstock check {output}`, perform it with `penstock run {output}`", err=True)


@cli.command(short_help="Prove that a plan is right, or say what is wrong with it.")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
def check(plan_file: Path) -> None:
    """Prove that a plan is right: no race, no deadlock, every gradient once, within memory. Exit code 1 if it is not."""
    from runtime.errors import PlanError
    from runtime.plan import PlanFile

    from .check import check as prove
    from .check import summary

    file = PlanFile.read(plan_file)
    try:
        prove(file.plan, file.claim)
    except PlanError as error:
        click.echo(f"error: {plan_file}: {error}", err=True)
        sys.exit(1)
    click.echo(f"{plan_file}: {summary(file.plan)}")


@cli.command(short_help="Draw when each op runs, as predicted and as measured.")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.argument("run_dir", required=False, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="FILE.json, for ui.perfetto.dev or chrome://tracing.",
)
def report(plan_file: Path, run_dir: Path | None, output: Path) -> None:
    """Draw when each op of PLAN runs: as predicted and, given the folder of a run, as measured."""
    from hwprofiles.schema import Profile
    from runtime.plan import PlanFile
    from runtime.timeline import chrome_trace

    from .cost import costs, region_of
    from .simulate import simulate

    if output.suffix != ".json":
        raise click.UsageError(f"{output}: only traces are drawn today; write to a name that ends in .json")
    described = PlanFile.read(plan_file).plan
    profile = Profile.from_json(described.profile, str(plan_file))
    tracks = {"predicted": simulate(described, costs(described, profile), region_of(profile)).timeline}
    if run_dir is not None:
        tracks["measured"] = _measured(run_dir / "timeline.json", len(described.ops))
    _write(output, chrome_trace(described, tracks))
    click.echo(f"wrote {output}: open it at https://ui.perfetto.dev or chrome://tracing", err=True)


def _batch_size(batch_size: int | None, tokens_per_step: int | None, seq_len: int) -> int:
    """Sequences of a step, however they were given."""
    if tokens_per_step is None:
        return batch_size or 16
    if batch_size is not None:
        raise click.UsageError("--batch-size and --tokens-per-step say the same; give one of them")
    if tokens_per_step % seq_len:
        near = max(1, round(tokens_per_step / seq_len)) * seq_len
        raise click.UsageError(f"--tokens-per-step {tokens_per_step} is no multiple of --seq-len {seq_len}; {near} is")
    return tokens_per_step // seq_len


def _policy(text: str, semantics: "Semantics") -> "Policy | None":
    """None: search. Else the policy of another system, or the one in a file (a plan's, or a policy's own fields)."""
    from difflib import get_close_matches

    from pydantic import TypeAdapter, ValidationError

    from runtime.plan import Policy

    from .space import baseline

    if text == "search":
        return None
    if text in BASELINE_NAMES:
        return baseline(text, semantics)
    path = Path(text)
    if not path.is_file():
        near = get_close_matches(text, ["search", *BASELINE_NAMES], n=1)
        meant = f"did you mean {near[0]}?" if near else f"write search, {', '.join(BASELINE_NAMES)}, or a file"
        raise click.UsageError(f"--policy: no policy or file {text!r}; {meant}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(fields, dict):
            fields = fields.get("policy", fields)
        return TypeAdapter(Policy).validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        said = f"--policy {path}: {place}: {first['msg'][:160]}"
        raise click.UsageError(f"{said}; known are the fields of `policy` in a plan") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        said = f"--policy {path}: not JSON ({str(error)[:80]})"
        raise click.UsageError(f'{said}; give a plan file, or for example {{"prefetch_depth": 2}}') from None


def _measured(path: Path, n_ops: int) -> "Timeline":
    """The timeline that a run wrote."""
    from pydantic import TypeAdapter, ValidationError

    from runtime.timeline import Timeline

    try:
        timeline = TypeAdapter(Timeline).validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.UsageError(f"{path}: cannot be read ({error.strerror}); give the --out folder of a run") from None
    except (ValidationError, UnicodeDecodeError):
        raise click.UsageError(f"{path}: not the timeline of a run; give the --out folder of a run") from None
    if any(span.op >= n_ops for span in timeline.spans):
        raise click.UsageError(f"{path}: the timeline of another plan; give the plan that the run performed")
    return timeline


def _write(path: Path, text: str) -> None:
    """The whole file or none of it."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise click.UsageError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from None


if __name__ == "__main__":
    main()
