"""Signal handlers for as long as something is done."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any], *numbers: signal.Signals, once: bool = False) -> Iterator[None]:
    """Handle these signals so, but for those that are ignored (`nohup`). `once`: the first puts the handlers before it back."""
    before = {number: found for number in numbers if (found := signal.getsignal(number)) not in (None, signal.SIG_IGN)}

    def put_back() -> None:
        for number, found in before.items():
            signal.signal(number, found)

    def first(number: int, frame: FrameType | None) -> None:
        put_back()
        handler(number, frame)

    for number in before:
        signal.signal(number, first if once else handler)
    try:
        yield
    finally:
        put_back()


def without_terminal() -> None:
    """Go on after a hangup: without the terminal, to which no write succeeds, and deaf to the second that the shell sends."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
