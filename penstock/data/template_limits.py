"""Limits of chat templates: seconds and bytes of a rendering.

The sandbox of jinja2 restricts what a template reads, not its time and memory. A rendering that takes too long, or during which the
process grows, is interrupted between two bytecodes. Single operations whose result would be enormous are refused before they run.
"""

import ctypes
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread, get_ident
from typing import Any

from transformers.utils import chat_template_utils

MOST = 10**7  # digits of a number, width, characters of a repetition
INTERVAL_S = 0.05
GROWTH = 16  # of the process, by the most bytes of a row: for copies of its text
_PAGE_BYTES = 4096
_WIDTH = re.compile(r"\d{8,}")
_Sandbox: Any = vars(chat_template_utils)["ImmutableSandboxedEnvironment"]
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


class TooLargeError(Exception):
    """The template exceeds a limit."""

    def __str__(self) -> str:
        return "it takes too long, or writes too much; for a template that should, set --max-row-seconds or --max-row-mb"


def _refuse_widths(numbers: Any, format: str = "") -> None:
    if _WIDTH.search(format) or any(isinstance(number, int) and abs(number) > MOST for number in numbers):
        raise TooLargeError


def _filtered(function: Any, format: bool, value: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_widths((*args, *kwargs.values()), str(value) if format else "")
    return function(value, *args, **kwargs)


class LimitedSandbox(_Sandbox):  # type: ignore[misc]
    """The sandbox of chat templates, without operations that have enormous results."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters |= {name: partial(_filtered, self.filters[name], name == "format") for name in ("center", "indent", "format")}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Perform an operation. TooLargeError if its result would be enormous."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _refuse_widths([left.bit_length() * right])
        elif operator == "%" and isinstance(left, str):
            _refuse_widths(right if isinstance(right, tuple) else (right,), left)
        elif operator == "*":
            _refuse_widths(len(a) * b for a, b in ((left, right), (right, left)) if hasattr(a, "__len__") and isinstance(b, int))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function. TooLargeError for a method of strings with an enormous width."""
        if isinstance(text := getattr(function, "__self__", None), str):
            _refuse_widths((*args, *kwargs.values()), text if function.__name__ in ("format", "format_map") else "")
        return super().call(context, function, *args, **kwargs)


vars(chat_template_utils)["ImmutableSandboxedEnvironment"] = LimitedSandbox


class Watch:
    """Raises TooLargeError in the thread whose rendering exceeds a limit."""

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
