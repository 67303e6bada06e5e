"""Signal handlers for as long as something is done."""

import signal
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
