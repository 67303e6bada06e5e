"""Temporary signal handlers."""

import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any], *numbers: signal.Signals, once: bool = False) -> Iterator[None]:
    """Call `handler` for these signals, except ignored ones (`nohup`). `once`: the first signal restores the old handlers."""
    previous = {number: old for number in numbers if (old := signal.getsignal(number)) not in (None, signal.SIG_IGN)}

    def put_back() -> None:
        for number, old in previous.items():
            signal.signal(number, old)

    def handle(number: int, frame: FrameType | None) -> None:
        if once:
            put_back()
        if number == signal.SIGHUP:  # writes to the closed terminal fail, and the shell sends a second SIGHUP
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            for descriptor in (1, 2):
                if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        handler(number, frame)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        put_back()
