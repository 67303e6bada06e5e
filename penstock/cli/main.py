"""Which commands are there, and what do they answer?

Nothing heavy is imported before a command needs it: `penstock --help` is instant, and planning never wakes torch.
"""

import importlib
import logging

import click

from penstock.version import version_in_words

from .check import check
from .one_line import OneLine
from .plan import plan

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
}


class Penstock(OneLine, click.Group):
    """The group. Commands of other rooms are imported when called."""

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
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it where it is installed; it warns of other kernels
    cli()


if __name__ == "__main__":
    main()
