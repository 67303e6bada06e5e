"""Tables on standard output: with lines around them on a terminal, elsewhere with tabs."""

import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

SHORT_CELL = 16  # characters of a cell that is not broken into lines


def _parts(text: str) -> list[str]:
    """The parts of a cell that stay on one line: a short cell whole, a sentence by words."""
    return [text] if len(text) <= SHORT_CELL else text.split()


def show_table(titles: Sequence[str], rows: Sequence[Sequence[str]], matter: Sequence[str] = ()) -> None:
    """Print a table without cutting a cell: a narrow terminal breaks sentences between words, and leaves out the columns that come
    last in `matter`, with a note."""
    if not sys.stdout.isatty():
        for row in (titles, *rows):
            click.echo("\t".join(row))
        return
    console, kept = Console(), set[int]()
    columns = [[title, *(row[i] for row in rows)] for i, title in enumerate(titles)]
    least = [max(len(part) for text in (*column[0].split(), *column[1:]) for part in _parts(text)) for column in columns]
    for i in [titles.index(title) for title in matter if title in titles] or range(len(titles)):
        if not kept or sum(least[j] + 3 for j in {*kept, i}) < console.width:
            kept.add(i)
    wide = [i for i in kept if max(map(len, columns[i])) > least[i]]
    spare = (console.width - 1 - sum(least[i] + 3 for i in kept)) // max(1, len(wide))
    table = Table()
    for i in sorted(kept):
        table.add_column(titles[i], width=max(least[i], min(max(map(len, columns[i])), least[i] + spare)))
    for row in rows:
        table.add_row(*(row[i] for i in sorted(kept)))
    console.print(table)
    if left := [title for i, title in enumerate(titles) if i not in kept]:
        click.echo(f"Left out at this width: {', '.join(left)}; a wider terminal, a pipe or --json has all.")
