"""Text report of `penstock plan`."""

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from .facts import Facts
from .report_lines import Line, Table, answer, asked, basis, gains, lanes, memory, parts, policy, schedules, verdict

PIPE_COLUMNS = 120
OTHERS = """Schedules of other systems under the same semantics and costs; the systems themselves differ in more.
Resident: all state on the device, no copies, and AdamW in one pass there, with this micro-batch or a part of it."""


def print_plan(facts: Facts, console: Console, verbose: bool = False) -> None:
    """Print the answer in a dozen lines; with `verbose`, the full report with provenance and tables."""
    made = Group(*_report(facts)) if verbose else _grid([*answer(facts)])
    if console.is_terminal:
        console.print(made)
        return
    console.width = PIPE_COLUMNS
    with console.capture() as captured:
        console.print(made)
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")  # no colours or padding in pipes


def _report(facts: Facts) -> Iterator[RenderableType]:
    for lines in (verdict(facts), [*asked(facts), *policy(facts)], basis(facts)):
        yield _grid([*lines])
        yield Text()
    for table in (lanes(facts), parts(facts), gains(facts), memory(facts), schedules(facts)):
        if table is not None and table.rows:
            yield _table(table)
            yield Text()
    if facts.waterfall is None:
        yield Text(f"Where the seconds go is left out: the plan has {len(facts.plan.ops):,} ops, too many to simulate ten times.")
    if facts.answer is not None:
        yield Text(OTHERS, style="dim")


def _grid(lines: list[Line]) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in lines:
        grid.add_row(name, Text(text))
    return grid


def _table(table: Table) -> RichTable:
    made = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, title in enumerate(table.titles):
        made.add_column(title, justify="right" if i == 1 else "left")
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made
