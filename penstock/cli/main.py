"""The `penstock` command. Subcommands are imported when called, so that help is instant and planning imports no torch."""

import gc
import importlib
import logging
import warnings

import click

from penstock.caches import cache_layer_traces
from penstock.version import version_in_words

from .user_errors import OneLineErrors

# Command: its module, and its line in `penstock --help`.
COMMANDS = {
    "plan": ("penstock.cli.plan", "Find the fastest schedule for a model on a machine, and its speed."),
    "check": ("penstock.cli.report", "Prove that a plan is right and that its claim is true, or name the error."),
    "run": ("penstock.cli.run", "Train with a plan: weights stream in, gradients stream out."),
    "data": ("penstock.cli.data", "Show which tokens of your data are learned, and count them."),
    "probe": ("penstock.cli.probe", "Measure this machine and write its profile."),
    "forward": ("penstock.cli.forward", "Write the log-probabilities that a model gives to data: a reference, or a teacher's."),
    "chat": ("penstock.cli.forward", "Talk to a model or checkpoint, to try the result of a run."),
    "merge": ("penstock.cli.merge", "Merge a LoRA adapter into its base model."),
    "fits": ("penstock.cli.fits_compare", "List the largest models that host memory of 32 to 2048 GB can train, and their speed."),
    "compare": ("penstock.cli.fits_compare", "Rank machines for a model: speed, fit, and dollars per million tokens."),
    "machines": ("penstock.cli.fits_compare", "List the machines that can be planned for, and the source of their numbers."),
    "report": ("penstock.cli.report", "Draw a plan or a run: a page for any browser, or a trace for Perfetto."),
}
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
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


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
    is_note = issubclass(category, RuntimeWarning)
    return f"note: {message}\n" if is_note else f"{filename}:{lineno}: {category.__name__}: {message}\n"
