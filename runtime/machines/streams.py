"""Streams and events of a CUDA device. Tests replace them by streams with the same methods that are late on purpose."""

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
from penstock.runtime.plan.policy import AttentionKernel


class CudaStreams:
    """Streams of one CUDA device. All methods but `finish` are asynchronous."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        torch.cuda.init()  # creates the generator that is seeded later
        self.name: str | None = torch.cuda.get_device_name(self.device)  # product name

    @staticmethod
    def event(is_timed: bool = False) -> Event:
        """Event to order streams or to wait for; a timed one records its time."""
        return torch.cuda.Event(enable_timing=is_timed, blocking=True)  # else a waiting thread polls, on the optimizer's core

    def stream(self) -> Stream:
        """Create a stream; once per machine, because torch keeps a memory pool per stream."""
        return torch.cuda.Stream(self.device)

    @contextmanager
    def current(self, stream: Stream) -> Iterator[None]:
        """Issue the calling thread's work to the stream, with backward passes, which autograd would run on other threads."""
        with torch.cuda.device(self.device), torch.cuda.stream(stream), set_multithreading_enabled(False):
            yield

    def issue(self, stream: Stream, name: str, work: Callable[[], None]) -> None:
        """Issue `work` to the stream, which must be the calling thread's current one."""
        torch.cuda.nvtx.range_push(name)
        try:
            work()
        finally:
            torch.cuda.nvtx.range_pop()

    def finish(self, stream: Stream) -> None:
        """Wait for all work issued to the stream; raise its error."""
        try:
            stream.synchronize()
        except RuntimeError as error:
            line = str(error).partition("\n")[0]
            raise RuntimeError(f"{line} (a device reports errors late: an earlier op may be at fault)") from error

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to pinned memory, for asynchronous copies; torch keeps it until they end."""
        return tensor.pin_memory()

    def lock(self, arenas: Arenas, shared: Sequence[torch.Tensor] = ()) -> None:
        """Pin the host's arenas during their lifetime, and `shared`, for asynchronous copies."""
        slabs = arenas.host_slabs() | {f"of another rank, {i}": slab for i, slab in enumerate(shared)}
        on_device = partial(torch.cuda.device, self.device)  # by default a new thread uses device 0
        locked = register_for_dma(slabs, n_threads=len(os.sched_getaffinity(0)), settled=on_device)
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
        raise PlanError(f"the CUDA device cannot be used ({line[:160]}); check it, or use --device cpu") from None


def give_back_cached() -> None:
    """Return cached memory of freed tensors to the device."""
    torch.cuda.empty_cache()


def use_attention(kernel: AttentionKernel) -> None:
    """Select the fused attention kernel of this process. Calls that it does not support (masks) use the memory-efficient one, and
    packed documents FlashAttention, because cuDNN compiles and caches a plan for each length."""
    torch.backends.cuda.enable_cudnn_sdp(kernel == "cudnn")
    torch.backends.cuda.enable_flash_sdp(kernel != "cudnn")


def use_same_kernels() -> None:
    """Select deterministic kernels, so that results of a stream are bitwise identical with any concurrent work. Some are slower,
    above all the backward pass of attention. cuBLAS needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before its first
    use."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing reads it: slots are written before they are read
