"""Limits of chat templates: seconds and bytes of a rendering.

The sandbox of jinja2 restricts the access of a template, not its time and memory. A rendering that takes too long, or makes the
process grow, is interrupted between two bytecodes. Single operations with enormous results are refused before they run.
"""

import ctypes
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread, get_ident
from typing import Any

from transformers.utils import chat_template_utils

from penstock.runtime.errors import PenstockError

LIMIT = 10**7  # digits of a number, width, characters of a repetition
INTERVAL_S = 0.05
GROWTH = 16  # of the process, by the most bytes of a row: for copies of its text
_PAGE_BYTES = 4096
_WIDTH = re.compile(r"\d{8,}")
_Sandbox: Any = vars(chat_template_utils)["ImmutableSandboxedEnvironment"]
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


class TooLargeError(PenstockError):
    """A template exceeds a limit. Reading ends, because other rows would exceed it, too."""

    def __init__(self, where: str = "") -> None:
        problem = "the chat template takes too long, or writes too much; allow more with --max-row-seconds or --max-row-mb"
        super().__init__(f"{where}: {problem}")


def _refuse_widths(numbers: Iterable[Any], format: str = "") -> None:
    if _WIDTH.search(format) or any(isinstance(number, int) and abs(number) > LIMIT for number in numbers):
        raise TooLargeError


def _filtered(function: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_widths((*args, *kwargs.values()))
    return function(value, *args, **kwargs)


class LimitedSandbox(_Sandbox):  # type: ignore[misc]
    """The sandbox of chat templates, without operations that have enormous results."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters |= {name: partial(_filtered, self.filters[name]) for name in ("center", "indent")}

    def call_binop(self, context: Any, operator: str, first: Any, second: Any) -> Any:
        """Perform an operation. TooLargeError if its result would be enormous."""
        if operator == "**" and isinstance(first, int) and isinstance(second, int):
            _refuse_widths([first.bit_length() * second])
        elif operator == "%" and isinstance(first, str):
            _refuse_widths(second if isinstance(second, tuple) and "*" in first else (), first)
        elif operator == "*":
            _refuse_widths(
                len(a) * b
                for a, b in ((first, second), (second, first))
                if isinstance(a, str | list | tuple) and isinstance(b, int)
            )
        return super().call_binop(context, operator, first, second)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function. TooLargeError for a method of strings with an enormous width."""
        if isinstance(getattr(function, "__self__", None), str):
            _refuse_widths((*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """Return the sandboxed `format` of a string. TooLargeError for an enormous width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _refuse_widths((), value.__self__)
        return wrapped


vars(chat_template_utils)["ImmutableSandboxedEnvironment"] = LimitedSandbox


class Watch:
    """Raises TooLargeError in a thread that renders beyond a limit."""

    def __init__(self, most_s: float, most_bytes: int) -> None:
        self.most_s, self.most_bytes, self._lock = most_s, most_bytes, Lock()
        self._thread, self._until_s, self._n_bytes = 0, 0.0, 0

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Watch the renderings in the context, from a thread."""
        over = Event()
        thread = Thread(target=self._look, args=(over,), daemon=True, name="limits of chat templates")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """Limit the time and memory of the context."""
        with self._lock:
            self._thread, self._until_s, self._n_bytes = get_ident(), time.monotonic() + self.most_s, 0
        try:
            yield
        finally:
            with self._lock:
                _set_exception(ctypes.c_ulong(self._thread), None)  # none arrives later
                self._thread = 0

    def _look(self, over: Event) -> None:
        while not over.wait(INTERVAL_S):
            n_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
            with self._lock:
                self._n_bytes = self._n_bytes or n_bytes
                is_over = time.monotonic() > self._until_s or n_bytes - self._n_bytes > GROWTH * self.most_bytes
                if self._thread and is_over:
                    _set_exception(ctypes.c_ulong(self._thread), ctypes.py_object(TooLargeError))
