"""Output of commands: tables on standard output, and files. An unwritable path is rejected before any work."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.runtime.errors import PenstockError
from penstock.runtime.files import try_to_write, write_whole
from penstock.runtime.plan import Plan
from penstock.runtime.plan.workload import text_of
from penstock.runtime.units import in_shell, on_one_line, show_bytes
from penstock.version import version_in_words

PAGES = (".html", ".htm")
MOST_WIDTH = 10_000  # characters of a table
SHORT_CELL = 16  # characters of a cell that is never wrapped


def show_table(titles: Sequence[str], entries: Iterable[Sequence[str]]) -> None:
    """Print a table on a terminal; elsewhere print rows with tabs, each as soon as it is available.

    Names are never cut: sentences are wrapped between words. If the terminal is too narrow for that, print a line per cell.
    """
    if not sys.stdout.isatty():
        for row in chain([titles], entries):
            click.echo("\t".join(row))
        return
    console, table, rows = Console(), Table(), list(entries)
    for title, *cells in zip(titles, *rows, strict=True):
        is_sentence = any(" " in cell and len(cell) > SHORT_CELL for cell in cells)
        table.add_column(title.replace(" ", "\n"), no_wrap=not is_sentence)
    for row in rows:
        table.add_row(*map(Text, row))  # without markup, because a file name may look like it
    if console.measure(table, options=console.options.update(max_width=MOST_WIDTH)).minimum <= console.width:
        console.print(table)
        return
    for row in rows:
        click.echo("\n".join(f"{title}: {cell}" for title, cell in zip(titles, row, strict=True)) + "\n")


# JSON string, or an object or list without nested ones
_FLAT = re.compile(r'"(?:\\.|[^"\\])*"|[\[{](?:"(?:\\.|[^"\\])*"|[^\[\]{}"])*[\]}]')


def json_text(fields: dict[str, Any]) -> str:
    """Return JSON with an indent of 1, and with short flat objects on one line."""

    def shorter(flat: re.Match[str]) -> str:
        return one_line if len(one_line := json.dumps(json.loads(flat[0]))) < 100 else flat[0]

    return _FLAT.sub(shorter, json.dumps(fields, indent=1)) + "\n"


def note(text: str) -> None:
    """Print a note on stderr, on one line."""
    click.echo(f"note: {on_one_line(text)}", err=True)


def check_output(path: Path) -> None:
    """Raise the PenstockError of `write_output` before long work instead of after it."""
    if path.is_dir():
        raise PenstockError(f"{path}: is a folder; give the name of a file in it")
    with _refused(path):
        try_to_write(path)


def beyond_positions(plan: Plan) -> str | None:
    """Return a note if sequences are longer than the model's position limit, else None."""
    limit, n = text_of(plan.model.config).get("max_position_embeddings"), plan.semantics.seq_len
    if not isinstance(limit, int) or n <= limit:
        return None
    excess = f"sequences of {n:,} tokens exceed the model's {limit:,} positions (max_position_embeddings)"
    return f"{excess}; plan with a shorter --seq-len, unless it is to learn longer ones"


def check_page(ctx: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Return the file of an option for a page, if it can be written."""
    if path is not None:
        if path.suffix.lower() not in PAGES:
            raise click.UsageError(f"{path}: write the page to a name that ends in .html")
        check_output(path)
    return path


def write_output(path: Path, text: str) -> None:
    with _refused(path):
        write_whole(path, text)


def created(command: str = "") -> str:
    """Return date, version and command (by default the words of this process) for the last line of a page."""
    command = command or " ".join(map(in_shell, ["penstock", *sys.argv[1:]]))
    return f"{date.today().isoformat()}, {version_in_words()}: {command}"


def write_drawing(path: Path, text: str, where: str = "in a browser") -> None:
    """Write a file, and print where to open it."""
    write_output(path, text)
    n_bytes = show_bytes(len(text.encode("utf-8", "backslashreplace")))
    click.echo(f"wrote {on_one_line(str(path))} ({n_bytes}); open it {where}", err=True)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PenstockError(f"{path}: cannot be written ({error.strerror}); make room, or choose another place") from None
