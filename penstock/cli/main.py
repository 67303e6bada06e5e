"""Which commands are there, and what do they answer?

Nothing heavy is imported before a command needs it: `penstock --help` is instant, and planning never wakes torch.
"""

import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from runtime.errors import PenstockError
from runtime.units import on_one_line

from .check import check
from .options import version_in_words
from .plan import plan

# What only `run` and `probe` need.
RUN_EXTRA = ("torch", "transformers", "safetensors", "tokenizers", "datasets", "pyarrow", "yaml")
# Commands of other rooms: where they live, and what `--help` says of them without waking that room.
ELSEWHERE = {
    "run": ("penstock.cli.run", "Train with a plan: weights stream in, gradients stream out."),
    "data": ("penstock.cli.data.data", "Show what would be learned of your data, and count it."),
    "probe": ("penstock.cli.probe", "Measure this machine and write its profile."),
    "merge": ("penstock.cli.model.merge", "Make one model of a model and its adapter."),
    "fits": ("penstock.cli.which.fits", "The largest models that host memory of 32 to 2048 GB can train, and their speed."),
    "compare": ("penstock.cli.which.compare", "Rank machines for a model: speed, fit, and dollars per million tokens."),
    "machines": ("penstock.cli.which.machines", "List the machines that can be planned for, and what is known of them."),
    "report": ("penstock.cli.report", "Draw a plan or a run: a page for any browser, or a trace for Perfetto."),
    "validate": ("penstock.cli.validate", "Predict what was measured, runs or single ops, and say how far off that is."),
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


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    click.echo(version_in_words())
    ctx.exit()


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


cli.add_command(plan)
cli.add_command(check)


def main() -> None:
    """The `penstock` command."""
    cli()


if __name__ == "__main__":
    main()
