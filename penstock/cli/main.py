"""The `penstock` command. Subcommands are imported when called, so that help is instant and planning imports no torch."""

import gc
import importlib
import logging
import tomllib
import warnings
from importlib import resources

import click

from penstock.caches import cache_layer_traces
from penstock.version import version_in_words

from .user_errors import OneLineErrors

COMMANDS = ("plan", "check", "run", "data", "probe", "forward", "chat", "merge", "fits", "compare", "machines", "report")
MODULES = {"check": "report", "chat": "forward"} | dict.fromkeys(("fits", "compare", "machines"), "fits_compare")  # if not the name
PLANNING = frozenset({"plan", "check", "compare", "machines", "report"})  # short commands without tensors


class Penstock(OneLineErrors, click.Group):
    """Group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name in PLANNING:
            gc.disable()  # it takes a tenth of a plan's time, and finds nothing
        command: click.Command = getattr(importlib.import_module(f"penstock.cli.{MODULES.get(cmd_name, cmd_name)}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tables = tomllib.loads(resources.files("penstock").joinpath("cli/options.toml").read_text("utf-8"))
        with formatter.section("Commands"):
            formatter.write_dl([(name, tables[name]["summary"]) for name in COMMANDS])


@click.group(cls=Penstock, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version_in_words(), message="%(version)s", help="Show the version.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train language models far larger than GPU memory on one GPU, and know beforehand how fast.

    Start with:  penstock plan qwen2.5-7b --machine rtx4090-server -o plan.json
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    else:
        cache_layer_traces()


def main() -> None:
    warnings.formatwarning = _as_note
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # imported by PEFT, if installed; it warns about its kernels
    cli()


def _as_note(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Format warnings of Penstock (RuntimeWarning) as one line, others with their place in the code."""
    return f"note: {message}\n" if category is RuntimeWarning else f"{filename}:{lineno}: {category.__name__}: {message}\n"
