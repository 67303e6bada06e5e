"""Fake of torch.cuda that performs work on the CPU at once, and records calls."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PAGE_BYTES = resource.getpagesize()


class Driver:
    """Register slabs up to a sum of sizes. Lock whole pages, each once."""

    def __init__(self, limit: int = 2**40) -> None:
        self.limit, self.most_slabs = limit, 0
        self.registered: dict[int, int] = {}  # bytes by address

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802 its name
        first, last = address // PAGE_BYTES, (address + n_bytes - 1) // PAGE_BYTES
        for start, n in list(self.registered.items()):  # several threads register
            if first <= (start + n - 1) // PAGE_BYTES and start // PAGE_BYTES <= last:
                return 712  # cudaErrorHostMemoryAlreadyRegistered
        if sum(self.registered.values()) + n_bytes > self.limit:
            return 2
        self.registered[address] = n_bytes
        self.most_slabs = max(self.most_slabs, len(self.registered))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


class FakeCuda(Driver):
    """Replace streams, events, ranges and the driver of torch.cuda; `calls`: more of its functions by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **calls: Any) -> None:
        super().__init__()
        self.ranges, self.current, self.flags, self.waits, self.timed = ([] for _ in range(5))  # type: ignore[var-annotated]
        calls |= {"Stream": self.stream, "Event": self.event, "cudart": lambda: self}
        for name, value in (calls | dict.fromkeys(("device", "stream"), self.enter)).items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", self.ranges.append)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: self.ranges.append("end"))
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in self.registered)

    @contextmanager
    def enter(self, thing: object) -> Iterator[None]:
        self.current.append(thing)
        try:
            yield
        finally:
            self.current.remove(thing)

    def stream(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(wait_event=self.waits.append, synchronize=lambda: None)

    def event(self, enable_timing: bool = False, blocking: bool = False) -> SimpleNamespace:
        self.flags.append((enable_timing, blocking))
        event = SimpleNamespace(synchronize=lambda: None)

        def record(stream: object) -> None:
            event.stream, event.recorded_s = stream, time.perf_counter()

        def elapsed_ms(last: SimpleNamespace) -> float:
            self.timed.append((event.stream, last.stream))
            return (last.recorded_s - event.recorded_s) * 1e3

        event.record, event.elapsed_time = record, elapsed_ms
        return event
