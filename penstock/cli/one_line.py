"""How does a command end: with its exit code, and one line where something is wrong that a user can mend?"""

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

# What only `run` and `probe` need.
RUN_EXTRA = ("torch", "transformers", "safetensors", "tokenizers", "datasets", "pyarrow", "yaml")


class OneLine(click.Command):
    """A command of which a user's mistake ends in one line and an exit code."""

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
