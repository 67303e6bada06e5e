"""Stages that measure host memory, the link, and the optimizer under copies."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from hwprofiles.probe.cpu import CpuDevice
from hwprofiles.probe.device import Ready
from hwprofiles.probe.host_works import updates
from runtime.host.slabs import host_slab, register_for_dma, touch, unregister
from runtime.units import MiB

from .commands import host_bytes
from .facts import meminfo
from .stages import Asked, Note

SLAB_BYTES, TINY_SLAB_BYTES = 8 * 10**9, 32 * MiB
COPY_BYTES = (64 * MiB, 512 * MiB)
COPY_S = 0.5
LARGE_SHARE = 0.55  # of the host's memory, in one piece: as large as the moments of the whole model
PIECE_BYTES = 4 * 10**9  # of it touched at a time
LEAST_FREE_BYTES = 3 * 10**9
GROWS_S = 3.0  # how long memory may take to grow
WORKERS = (8, 14, 15)
UPDATE_S = 1.5


def host(asked: Asked, note: Note) -> None:
    n_bytes = TINY_SLAB_BYTES if asked.tiny else SLAB_BYTES
    cores = sorted(os.sched_getaffinity(0))
    slab, touched_s = _touched(n_bytes, len(cores))
    note("touch", n_bytes=n_bytes, seconds=touched_s, bytes_per_s=n_bytes / touched_s, n_threads=len(cores))
    if asked.device == "cuda":
        began_s = time.perf_counter()
        pieces = register_for_dma({"benchmark": slab})
        seconds = time.perf_counter() - began_s
        note("lock", n_bytes=n_bytes, seconds=seconds, bytes_per_s=n_bytes / seconds)
        try:
            _link(slab, note)
            _optimizer(asked, note, cores, slab)
        finally:
            unregister(pieces)
    else:
        _optimizer(asked, note, cores, None)
    del slab
    _grow(asked, note, len(cores))


def _touched(n_bytes: int, n_threads: int) -> tuple[torch.Tensor, float]:
    slab, began_s = host_slab(n_bytes), time.perf_counter()
    touch([slab], n_threads)
    return slab, time.perf_counter() - began_s


def _link(slab: torch.Tensor, note: Note) -> None:
    for n_bytes in COPY_BYTES:
        up, down = (_copy(slab, n_bytes, is_up) for is_up in (True, False))
        note("copies", n_bytes=n_bytes, h2d_bytes_per_s=_copied([up])[0], d2h_bytes_per_s=_copied([down])[0])
        both = _copied([up, down])
        note("copies both ways", n_bytes=n_bytes, h2d_bytes_per_s=both[0], d2h_bytes_per_s=both[1])


def _copy(slab: torch.Tensor, n_bytes: int, is_up: bool) -> tuple[torch.cuda.Stream, Callable[[], int]]:
    """A stream, and what issues one copy there; the two directions use halves of the slab of their own."""
    stream, there = torch.cuda.Stream(), torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    half = slab[: slab.numel() // 2] if is_up else slab[slab.numel() // 2 :]
    n_places, turn = half.numel() // n_bytes, [0]
    torch.cuda.synchronize()  # what filled `there` was issued elsewhere

    def issue() -> int:
        turn[0] += 1
        here = half[turn[0] % n_places * n_bytes :][:n_bytes]
        with torch.cuda.stream(stream):
            if is_up:
                there.copy_(here, non_blocking=True)
            else:
                here.copy_(there, non_blocking=True)
        return n_bytes

    return stream, issue


def _copied(lanes: Sequence[tuple[torch.cuda.Stream, Callable[[], int]]]) -> list[float]:
    """Bytes per second of each lane while all of them copy."""

    def lane(stream: torch.cuda.Stream, issue: Callable[[], int]) -> float:
        issue()
        stream.synchronize()
        began_s, n_bytes = time.perf_counter(), 0
        while time.perf_counter() - began_s < COPY_S:
            n_bytes += issue() + issue()
            stream.synchronize()
        return n_bytes / (time.perf_counter() - began_s)

    with ThreadPoolExecutor(len(lanes)) as pool:
        return list(pool.map(lambda each: lane(*each), lanes))


def _optimizer(asked: Asked, note: Note, cores: list[int], slab: torch.Tensor | None) -> None:
    """Parameters per second with some counts of workers, alone and beside copies both ways."""
    seconds = 0.1 if asked.tiny else UPDATE_S
    for n_workers in (2,) if asked.tiny else [n for n in WORKERS if n < max(len(cores), min(WORKERS) + 1)]:
        host = CpuDevice(lambda all_cores, n=n_workers: (all_cores, cores[-min(n, len(cores)) :]))  # type: ignore[misc]
        with host.prepared(updates(n_workers, TINY_SLAB_BYTES if asked.tiny else SLAB_BYTES)) as ready:
            alone = _updated(host, ready, seconds)
            beside = None
            if slab is not None:
                with _copying(slab):
                    beside = _updated(host, ready, seconds)
        note("optimizer", n_workers=n_workers, params_per_s=alone, beside_copies_params_per_s=beside)


def _updated(host: CpuDevice, ready: Ready, seconds: float) -> float:
    """Parameters per second, by the wall clock."""
    one = host.run(ready, 1).seconds
    n = max(1, round(seconds / one))
    return n * ready.work.amount / host.run(ready, n).seconds


@contextmanager
def _copying(slab: torch.Tensor) -> Iterator[None]:
    stop = threading.Event()

    def loop(stream: torch.cuda.Stream, issue: Callable[[], int]) -> None:
        while not stop.is_set():
            issue()
            stream.synchronize()

    with ThreadPoolExecutor(2) as pool:
        lanes = [pool.submit(loop, *_copy(slab, COPY_BYTES[0], is_up)) for is_up in (True, False)]
        try:
            yield
        finally:
            stop.set()
        for lane in lanes:
            lane.result()


def _grow(asked: Asked, note: Note, n_threads: int) -> None:
    """One piece as large as the largest arena of the whole model, touched step by step: does memory grow as it is used?"""
    n_bytes = TINY_SLAB_BYTES if asked.tiny else int(LARGE_SHARE * host_bytes(asked))
    piece_bytes = n_bytes // 4 if asked.tiny else PIECE_BYTES
    note("large piece", n_bytes=n_bytes, **meminfo())
    slab = host_slab(n_bytes)
    for at in range(0, n_bytes, piece_bytes):
        until_s = time.monotonic() + GROWS_S
        while meminfo()["available_bytes"] < piece_bytes + LEAST_FREE_BYTES and time.monotonic() < until_s:
            time.sleep(0.1)
        if meminfo()["available_bytes"] < min(piece_bytes, LEAST_FREE_BYTES):
            note("large piece stopped", touched_bytes=at, **meminfo())
            return
        began_s = time.perf_counter()
        touch([slab[at : at + piece_bytes]], n_threads)
        note(
            "large piece touched", touched_bytes=min(at + piece_bytes, n_bytes), seconds=time.perf_counter() - began_s, **meminfo()
        )
