"""Exit codes of commands, and one-line messages for mistakes of a user."""

import io
import os
import signal
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import click

from penstock.runtime.errors import PenstockError
from penstock.runtime.units import on_one_line
from penstock.signals import handled

# Modules of the extra `run`, absent from the base install
RUN_EXTRA = ("torch", "transformers", "safetensors", "tokenizers", "datasets", "pyarrow", "yaml")


class OneLineErrors(click.Command):
    """Command that reports a user's mistake in one line and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and exit with its code. An internal error keeps its traceback."""
        extra["standalone_mode"] = False
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # file names that are not UTF-8, and ASCII terminals
        try:
            with handled(_terminate, signal.SIGTERM):
                code = super().main(*args, **extra)
                sys.stdout.flush()
        except PenstockError as error:
            _fail(str(error), error.exit_code, getattr(error, "__notes__", ()))
        except click.ClickException as error:
            _fail(" ".join(error.format_message().split()), 2)
        except ModuleNotFoundError as error:
            if error.name not in RUN_EXTRA:
                raise
            _fail(f"this needs {error.name}, which the base install leaves out; install it: pip install '.[run]'", 2)
        except BrokenPipeError:
            _drop_stdout()
            sys.exit(1)  # the reader closed the pipe, for example `penstock plan ... | head`
        except OSError as error:
            _drop_stdout()
            where = error.filename if isinstance(error.filename, str) else "the output"
            _fail(f"{where}: cannot be read or written ({error.strerror}); make room, or choose another place", 2)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            number = error.args[0] if error.args else signal.SIGINT
            _fail("terminated" if number == signal.SIGTERM else "interrupted", 128 + number)


def _terminate(number: int, frame: object) -> NoReturn:
    """Unwind the stack on SIGTERM, like SIGINT, so that half-written files are removed."""
    raise KeyboardInterrupt(number)


def _drop_stdout() -> None:
    """Discard unwritten output, because Python would retry on exit and print an error."""
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, exit_code: int, notes: Iterable[str] = ()) -> NoReturn:
    """Print the notes and then the message, in one line each even if file names contain line ends, and exit."""
    for line in (*(f"  {on_one_line(note)}" for note in notes), f"error: {on_one_line(message)}"):
        click.echo(line, err=True)
    sys.exit(exit_code)
