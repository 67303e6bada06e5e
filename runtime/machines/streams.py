"""Streams of a CUDA device, which do what is issued to them in order and later, and events, which mark a place in a stream.

Tests give lanes streams and events of their own, with the same methods, which are late on purpose.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.grad_mode import set_multithreading_enabled
from torch.cuda import Event, Stream

from penstock.runtime.errors import PlanError
from penstock.runtime.host.memory import Arenas
from penstock.runtime.host.slabs import register_for_dma, unregister


class CudaStreams:
    """One CUDA device's streams. All but `finish` return at once."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        torch.cuda.init()  # else there is no generator to be seeded
        self.name: str | None = torch.cuda.get_device_name(self.device)  # as the device's maker calls it

    @staticmethod
    def event(is_timed: bool = False) -> Event:
        """To order streams and to be waited for; a timed one also knows when it was reached."""
        return torch.cuda.Event(enable_timing=is_timed, blocking=True)  # else a waiting thread polls, on the optimizer's core

    def stream(self) -> Stream:
        """Made once, with the machine: a pool of memory stays with each."""
        return torch.cuda.Stream(self.device)

    @contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        """The calling thread's work goes to the stream; its backward passes too, which autograd would do on threads of its own."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream), set_multithreading_enabled(False):
            yield

    def issue(self, stream: Stream, name: str, work: Callable[[], None]) -> None:
        """Have `work` done in the stream after all that was issued to it before. Called on a thread whose stream it is."""
        torch.cuda.nvtx.range_push(name)
        try:
            work()
        finally:
            torch.cuda.nvtx.range_pop()

    def finish(self, stream: Stream) -> None:
        """Return once all that was issued to the stream is done; raise what went wrong there."""
        try:
            stream.synchronize()
        except RuntimeError as error:
            line = str(error).partition("\n")[0]
            raise RuntimeError(f"{line} (a device reports late: an op that was issued earlier may be at fault)") from error

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory that streams can copy from while the host goes on; torch keeps it until they have."""
        return tensor.pin_memory()

    def lock(self, arenas: Arenas, others: Sequence[torch.Tensor] = ()) -> None:
        """Let streams copy from and to the host's arenas, as long as they exist, and from `others`, while the host goes on."""
        slabs = arenas.host_slabs() | {f"of another rank, {i}": slab for i, slab in enumerate(others)}
        here = partial(torch.cuda.device, self.device)  # a thread's first call would else be of the first device
        locked = register_for_dma(slabs, n_threads=len(os.sched_getaffinity(0)), settled=here)
        weakref.finalize(arenas, unregister, locked)
        odd = [name for name, slab in arenas.host_slabs().items() if slab.numel() and not slab.is_pinned()]
        assert not odd, f"copies from pageable memory would block the host, and race: {odd}"

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)


def has_cuda() -> bool:
    return torch.cuda.is_available()


def free_cuda_bytes(index: int = 0) -> int:
    try:
        return torch.cuda.mem_get_info(index)[0]
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        raise PlanError(f"the CUDA device cannot be used ({line[:160]}); see that it works, or use --device cpu") from None


def use_same_kernels() -> None:
    """Products of fp32 numbers are fp32 ones, and no kernel adds in the order in which its threads come. Then what a stream
    computes is the same, to the last bit, whatever runs beside it. Some kernels are slower for it, attention's backward above all.
    cuBLAS wants CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before it is first used."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it: slots are written before they are read
