"""Text report of `penstock plan`."""

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from . import report_lines as report
from .facts import Facts
from .report_lines import Line, Table

PIPE_COLUMNS = 120
BASELINE_NOTE = """Schedules of other systems under the same semantics and costs; the systems themselves differ in more.
Resident: all state on the device, micro-batches one by one, with this micro-batch or a part of it (several GPUs: an estimate)."""
SPACE_NOTE = """The bound holds for each schedule of this space: micro-batches in order, in equal groups; per layer, saving, offload
or recomputation; per block, where weights, gradient sums, masters and moments live; updates eager, speculative, deferred or
behind a barrier. Not in it: other semantics (precision, FP8 products), parts of a block, unequal groups; on several GPUs, tensor,
pipeline and expert parallelism."""


def print_plan(facts: Facts, console: Console, verbose: bool = False) -> None:
    """Print the answer in a dozen lines; with `verbose`, the full report with provenance and tables."""
    text = Group(*_report(facts)) if verbose else _grid([*report.short_report(facts)])
    if console.is_terminal:
        console.print(text)
        return
    console.width = PIPE_COLUMNS
    with console.capture() as captured:
        console.print(text)
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")  # no colours or padding in pipes


def _report(f: Facts) -> Iterator[RenderableType]:
    for lines in (report.verdict_lines(f), [*report.request_lines(f), *report.policy_lines(f)], report.provenance_lines(f)):
        yield _grid([*lines])
        yield Text()
    tables = (report.lane_table, report.waterfall_table, report.gain_table, report.memory_table, report.baseline_table)
    for table in (build(f) for build in tables):
        if table is not None and table.rows:
            yield _table(table)
            yield Text()
    if f.waterfall is None:
        yield Text(f"The breakdown of the step is left out: the plan has {len(f.plan.ops):,} ops, too many to simulate ten times.")
    if f.answer is not None:
        yield Text(BASELINE_NOTE + ("\n" + SPACE_NOTE if f.answer.certificate.n_families else ""), style="dim")


def _grid(lines: list[Line]) -> RichTable:
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, text in lines:
        grid.add_row(name, Text(text))
    return grid


def _table(table: Table) -> RichTable:
    rich_table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for i, title in enumerate(table.titles):
        rich_table.add_column(title, justify="right" if i == 1 else "left")
    for row in table.rows:
        rich_table.add_row(*map(Text, row))
    return rich_table
