"""Output of commands: tables on standard output, and files, refused before any work where they cannot be written."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from runtime.errors import PenstockError
from runtime.files import try_to_write, write_whole

SHORT_CELL = 16  # characters of a cell that is not broken into lines


def _parts(text: str) -> list[str]:
    """The parts of a cell that stay on one line: a short cell whole, a sentence by words."""
    return [text] if len(text) <= SHORT_CELL else text.split()


def show_table(titles: Sequence[str], rows: Sequence[Sequence[str]], matter: Sequence[str] = ()) -> None:
    """Print a table, elsewhere than on a terminal with tabs. No cell is cut: a narrow terminal breaks sentences between words, and
    leaves out the columns that come last in `matter`, with a note."""
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


def check_output(path: Path) -> None:
    """PenstockError now rather than after long work, where `write_output` would raise it."""
    if path.is_dir():
        raise PenstockError(f"{path}: is a folder; give the name of a file in it, with -o")
    with _refused(path):
        try_to_write(path)


def write_output(path: Path, text: str) -> None:
    with _refused(path):
        write_whole(path, text)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PenstockError(f"{path}: cannot be written ({error.strerror}); make room, or choose another place") from None
