"""Which commands are there, and what do they answer?

Nothing heavy is imported before a command needs it: `penstock --help` is instant, and planning never wakes torch.
"""

import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from runtime.errors import DoesNotFitError, PenstockError
from runtime.units import on_one_line, parse_bytes

if TYPE_CHECKING:
    from runtime.plan import Policy, Semantics
    from runtime.timeline import Timeline

MAX_COUNT = 10**9
RUN_EXTRA = ("torch", "transformers", "safetensors", "tokenizers", "numpy")  # what only `run` and `probe` need
MAX_POLICY_FILE_BYTES = 512 * 2**20  # a plan file is one too
MAX_TIMELINE_FILE_BYTES = 2**30
BASELINE_NAMES = ("megatrain", "megatrain-plus", "slideformer", "zero3-offload")
# Commands of other rooms: where they live, and what `--help` says of them without waking that room.
ELSEWHERE = {
    "run": ("runtime.cli", "Train with a plan: weights stream in, gradients stream out."),
    "probe": ("hwprofiles.cli", "Measure this machine and write its profile."),
    "compare": ("planner.cli_compare", "Rank machines for a model: speed, fit, and dollars per million tokens."),
    "validate": ("planner.cli_validate", "Predict published runs and say how far off the predictions are."),
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
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # names that are no UTF-8, and terminals that know only ASCII
        try:
            with _signals_end_the_command():
                code = super().main(*args, **extra)
                sys.stdout.flush()
        except PenstockError as error:
            _fail(str(error), error.exit_code)
        except click.ClickException as error:
            _fail(" ".join(error.format_message().split()), 2)
        except ModuleNotFoundError as error:
            if error.name not in RUN_EXTRA:
                raise
            _fail(f"this needs {error.name}, which the base install leaves out; install it: pip install '.[run]'", 2)
        except BrokenPipeError:
            _leave_stdout()
            sys.exit(1)  # who reads has seen enough, as `penstock plan ... | head` has
        except OSError as error:
            _leave_stdout()
            where = error.filename if isinstance(error.filename, str) else "the output"
            _fail(f"{where}: cannot be read or written ({error.strerror}); make room, or choose another place", 2)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except _Terminated:
            _fail("terminated", 128 + signal.SIGTERM)
        except KeyboardInterrupt:
            _fail("interrupted", 128 + signal.SIGINT)


class _Terminated(BaseException):
    """Somebody asked the process to end: what is half-written is taken back on the way out."""


@contextmanager
def _signals_end_the_command() -> Iterator[None]:
    """SIGTERM unwinds the stack as SIGINT does; otherwise it would leave half a checkpoint behind."""

    def end(*_: object) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave_stdout() -> None:
    """What could not be written is dropped; Python would try once more on leaving, and complain."""
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, exit_code: int) -> NoReturn:
    """One line, whatever a file or a file's name put into the message."""
    click.echo(f"error: {on_one_line(message)}", err=True)
    sys.exit(exit_code)


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


class Count(click.IntRange):
    """A whole number above zero. `--help` leaves out the upper end, which nobody means."""

    def _describe_range(self) -> str:
        return "1 or more"


COUNT = Count(1, MAX_COUNT)


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    try:
        click.echo(f"penstock {metadata.version('penstock')}")
    except metadata.PackageNotFoundError:
        click.echo("penstock, version unknown: run from its source folder without `pip install .`")
    ctx.exit()


class _Plan(click.Command):
    """`plan --help` ends with the names that can be given. Only folders are listed; no room wakes."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, package, folder in (("Shipped machines", "hwprofiles", "profiles"), ("Shipped models", "planner", "models")):
            names = sorted(file.name for file in (resources.files(package) / folder).iterdir())
            with formatter.section(title):
                formatter.write_text(", ".join(name.removesuffix(".json") for name in names if name.endswith(".json")))


@click.group(cls=Penstock, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version and leave."
)
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


@cli.command(cls=_Plan, short_help="Find the fastest schedule for a model on a machine, and its speed.")
@click.argument("model")
@click.option("--machine", required=True, help="A shipped machine, named below, or the file of one (penstock probe -o).")
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
    help=f"The schedule: the fastest found; that of another system ({', '.join(BASELINE_NAMES)}) under these semantics; or that "
    "of a plan or JSON file.",
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
@click.option("--runnable", is_flag=True, help="Only policies that `penstock run` performs; today it performs all of them.")
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

    MODEL is a folder or config.json in Hugging Face form, or one of the shipped models named below. Sizes are written as 80GB
    (10^9 bytes), 1.5TB or 24GiB. Exit code 3: it does not fit, and the message names the smallest changes that do.
    """
    from hwprofiles.schema import read_profile
    from runtime.plan import PlanFile, Semantics

    from .micro_batch import with_micro_batch
    from .remedy import MAX_PLAN_OPS, most_ops
    from .search import search
    from .workload import build_workload, read_model, supported_attention

    # Every policy there is today is performed by `run`, so `runnable` leaves nothing out yet.
    refuse_endless(machine)
    profile = read_profile(machine)
    if host_memory is not None or device_memory is not None:
        profile = profile.with_memory(device_memory, host_memory)
    described = read_model(model)
    semantics = Semantics(
        seq_len=seq_len,
        batch_size=sequences_of_a_step(batch_size, tokens_per_step, seq_len),
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
    n_ops = most_ops(workload, semantics)
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
        name = on_one_line(str(output))
        click.echo(f"wrote {name}; next: penstock check {name}, then penstock run {name} --data FOLDER", err=True)


@cli.command(short_help="Prove that a plan is right, or say what is wrong with it.")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
def check(plan_file: Path) -> None:
    """Prove that PLAN is right: no race, no deadlock, every gradient once, within the memory of its machine.

    Exit code 0 and one line if it is; 1 and what is wrong if it is not; 2 if the file is no plan.
    """
    from runtime.errors import PlanError
    from runtime.plan import PlanFile

    from .check import check as prove
    from .check import summary

    file = PlanFile.read(plan_file)
    try:
        prove(file.plan, file.claim)
    except PlanError as error:
        _fail(f"{plan_file}: {error}", 1)
    click.echo(f"{on_one_line(str(plan_file))}: {summary(file.plan)}")


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
    click.echo(f"wrote {on_one_line(str(output))}; open it at https://ui.perfetto.dev or chrome://tracing", err=True)


def refuse_endless(machine: str) -> None:
    """A profile is a file: reading a pipe or a device might never end."""
    if os.path.exists(machine) and not os.path.isfile(machine):
        raise click.UsageError(
            f"--machine {machine}: a folder, pipe or device; give a shipped name or a file of `penstock probe -o`"
        )


def sequences_of_a_step(batch_size: int | None, tokens_per_step: int | None, seq_len: int) -> int:
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

    from runtime.files import read_whole
    from runtime.plan import Policy

    from .space import baseline

    if text == "search":
        return None
    if text in BASELINE_NAMES:
        return baseline(text, semantics)
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
        place = ".".join(map(str, first["loc"])) or "the file"
        said = f"--policy {path}: {place}: {first['msg'][:160]}"
        raise click.UsageError(f"{said}; known are the fields of `policy` in a plan") from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        said = f"--policy {path}: not JSON ({str(error)[:80]})"
        raise click.UsageError(f'{said}; give a plan file, or for example {{"prefetch_depth": 2}}') from None


def _measured(path: Path, n_ops: int) -> "Timeline":
    """The timeline that a run wrote."""
    from pydantic import TypeAdapter, ValidationError

    from runtime.files import read_whole
    from runtime.timeline import Timeline

    try:
        timeline = TypeAdapter(Timeline).validate_json(read_whole(path, MAX_TIMELINE_FILE_BYTES))
    except OSError as error:
        raise click.UsageError(f"{path}: cannot be read ({error.strerror}); give the --out folder of a run") from None
    except ValidationError:
        raise click.UsageError(f"{path}: not the timeline of a run; give the --out folder of a run") from None
    if any(span.op >= n_ops for span in timeline.spans):
        raise click.UsageError(f"{path}: the timeline of another plan; give the plan that the run performed")
    return timeline


def _write(path: Path, text: str) -> None:
    """The whole file or none of it."""
    from runtime.files import write_whole

    try:
        write_whole(path, text)
    except OSError as error:
        raise click.UsageError(f"{path}: cannot be written ({error.strerror}); choose another place with -o") from None


if __name__ == "__main__":
    main()
