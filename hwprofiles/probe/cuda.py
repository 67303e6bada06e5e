"""How does torch perform what a probe asks of a GPU?

Three streams, one for each lane, events that block instead of polling, host memory that is pinned where it lies and in its exact
size. Everything that torch raises becomes a DeviceError of one line.
"""

import contextlib
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hwprofiles.quantity import Dtype
from hwprofiles.schema import AttentionKernel, Direction
from runtime.errors import ProfileError
from runtime.machines.streams import CudaEvents
from runtime.units import MiB

from .device import Buffer, DeviceError, DeviceFacts, DeviceOutOfMemory, Event, Issue, Load, Memory, PciLink, Place, Stream
from .instruments import on_cores
from .pci import pci_folder, pci_link
from .works import Work, attention, norm, pointwise, products, slab

DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
COPIES_AHEAD = 2  # in a stream's queue while copies run without end
MOST_PLACES = 64  # that copies step through
COPY_STRIDE_BYTES = 4096
LONGEST_MESSAGE = 160
WORKING_BYTES = 512 * MiB  # of sets of operands used in turn: above any device's cache, of which the largest has 256 MiB
# Left to itself torch takes cuDNN's attention where it thinks it faster, and a run takes the one that it is told to.
BACKENDS: dict[AttentionKernel, list[SDPBackend]] = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A buffer: flat bytes, on the device or the host."""

    bytes: torch.Tensor

    @property
    def n_bytes(self) -> int:
        return self.bytes.numel()


@contextmanager
def translated() -> Iterator[None]:
    """What torch raises, as a DeviceError whose message is one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory(_first_line(error)) from None
    except (RuntimeError, AssertionError) as error:
        text = _first_line(error)
        no_memory = "out of memory" in text.lower() or "ALLOC_FAILED" in text
        raise (DeviceOutOfMemory if no_memory else DeviceError)(text) from None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    plain = "".join(c if c.isprintable() else " " for c in (text[0] if text else type(error).__name__))
    return plain[:LONGEST_MESSAGE]


class CudaDevice:
    """One CUDA device of this process. Performs `device.Device`."""

    def __init__(self, index: int = 0) -> None:
        """DeviceError where torch cannot use it."""
        self._device = torch.device("cuda", index)
        self._events = CudaEvents()
        self._has_cudnn: dict[Dtype, bool] = {}
        with translated():
            self._streams = {stream: torch.cuda.Stream(self._device) for stream in Stream}

    def facts(self) -> DeviceFacts:
        with translated():
            properties = torch.cuda.get_device_properties(self._device)
        runtime = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}"
        return DeviceFacts(
            name=properties.name,
            driver=f"driver {_driver_version()}, {runtime}, torch {torch.__version__}",
            capability=(properties.major, properties.minor),
        )

    def pci_link(self) -> PciLink | None:
        folder = self._pci_folder()
        return pci_link(folder) if folder else None

    def _pci_folder(self) -> Path | None:
        with translated():
            properties = torch.cuda.get_device_properties(self._device)
        address = [
            getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
        ]  # newer than our oldest torch
        domain, bus, device = address
        return None if domain is None or bus is None or device is None else pci_folder(int(domain), int(bus), int(device))

    def memory(self) -> Memory:
        with translated():
            free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
            unused_bytes = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return Memory(free_bytes + unused_bytes, total_bytes)

    def load(self) -> Load:
        try:
            clock_mhz, draw = torch.cuda.clock_rate(self._device), torch.cuda.power_draw(self._device)
        except Exception:  # the vendor's library is not there or may not be asked, each in an error of its own
            return Load(None, None)
        return Load(clock_mhz * 1e6 or None, draw / (1 if torch.version.hip else 1000) or None)  # W on AMD, mW elsewhere

    def release(self) -> None:
        with translated():
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    @contextmanager
    def allocate(self, place: Place, n_bytes: int, cores: Sequence[int] | None = None) -> Iterator[Buffer]:
        with translated(), torch.cuda.stream(self._streams[Stream.COMPUTE]):
            if place == "device":
                memory = torch.zeros(n_bytes, dtype=torch.uint8, device=self._device)
            else:
                memory = slab(n_bytes) if cores is None else on_cores(cores, 1, lambda: slab(n_bytes))
            torch.cuda.synchronize(self._device)
        pinned = place == "pinned" and self._pin(memory)
        try:
            yield _Tensor(memory)
        finally:
            with contextlib.suppress(DeviceError), translated():  # a device that is gone has no copies left
                torch.cuda.synchronize(self._device)
                if pinned:
                    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def _pin(self, memory: torch.Tensor) -> bool:
        """Lock the pages where they lie: torch's own allocator would round the size up to a power of two."""
        with translated():
            code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
            if code != 0 or not memory.is_pinned():
                raise DeviceError(
                    f"{memory.numel()} bytes of host memory cannot be pinned (CUDA error {code}); allow more locked memory"
                )
        return True

    def reserve(self, n_bytes: int) -> None:
        with translated():
            memory = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
            del memory
            torch.cuda.empty_cache()

    def copies(self, direction: Direction, to: Buffer, source: Buffer, n_bytes: int) -> Issue:
        assert isinstance(to, _Tensor)
        assert isinstance(source, _Tensor)
        room = min(to.n_bytes, source.n_bytes) - n_bytes
        n_places = min(MOST_PLACES, room // max(n_bytes, COPY_STRIDE_BYTES) + 1)
        at = [room // max(n_places - 1, 1) // COPY_STRIDE_BYTES * COPY_STRIDE_BYTES * i for i in range(n_places)]
        # Cut once: cutting costs as much as starting a copy.
        places = cycle([(to.bytes[i : i + n_bytes], source.bytes[i : i + n_bytes]) for i in at])
        stream = self._streams[Stream(direction)]

        def issue(n: int) -> None:
            with translated(), torch.cuda.stream(stream):
                for there, here in islice(places, n):
                    there.copy_(here, non_blocking=True)

        return issue

    @contextmanager
    def copying(self, n_bytes: int) -> Iterator[None]:
        stop = threading.Event()

        def loop(direction: Direction, to: Buffer, source: Buffer) -> None:
            ahead: deque[Event] = deque()
            issue = self.copies(direction, to, source, n_bytes)
            while not stop.is_set():
                issue(1)
                ahead.append(self.record(Stream(direction)))
                if len(ahead) > COPIES_AHEAD:
                    self.wait(ahead.popleft())

        with ExitStack() as stack:
            on_device = [stack.enter_context(self.allocate("device", n_bytes)) for _ in range(2)]
            on_host = [stack.enter_context(self.allocate("pinned", n_bytes)) for _ in range(2)]
            pool = stack.enter_context(ThreadPoolExecutor(2))
            lanes = [pool.submit(loop, "h2d", on_device[0], on_host[0]), pool.submit(loop, "d2h", on_host[1], on_device[1])]
            try:
                yield
            finally:
                stop.set()
            for lane in lanes:
                lane.result()

    def product(self, dtype: Dtype, m: int, k: int, n: int) -> Issue:
        with self._computing():
            work = products(dtype, m, k, n, self._device, WORKING_BYTES)
        return self._issue(work)

    def attention_kernels(self, dtype: Dtype) -> Sequence[AttentionKernel]:
        if dtype not in self._has_cudnn:
            self._has_cudnn[dtype] = self._attends_by_cudnn(dtype)
        return ("flash", "cudnn") if self._has_cudnn[dtype] else ("flash",)

    def _attends_by_cudnn(self, dtype: Dtype) -> bool:
        """Only a call tells: whether it can depends on the device, on the versions of both libraries, and on the shape."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # in which torch says why not
                for issue in self.attention(dtype, 1, 2, 512, 64, "cudnn"):
                    issue(1)
            self.synchronise()
        except DeviceError:
            return False
        return True

    def attention(
        self, dtype: Dtype, n_sequences: int, n_heads: int, seq_len: int, head_dim: int, kernel: AttentionKernel
    ) -> tuple[Issue, Issue]:
        by_kernel = partial(sdpa_kernel, BACKENDS[kernel])
        with self._computing(), by_kernel():
            forward, backward = attention(dtype, n_sequences, n_heads, seq_len, head_dim, self._device)
        return self._issue(forward, by_kernel), self._issue(backward)  # a backward is by the kernel of its forward

    def norm(self, n_tokens: int, width: int) -> tuple[Issue, Issue]:
        with self._computing():
            forward, backward = norm(n_tokens, width, self._device, WORKING_BYTES)
        return self._issue(forward), self._issue(backward)

    def eager(self, n_tokens: int, width: int, inner: int) -> tuple[Issue, int, int]:
        with self._computing():
            work, n_bytes, n_calls = pointwise(n_tokens, width, inner, WORKING_BYTES, self._device)
        return self._issue(work), n_bytes, n_calls

    def pointwise(self, n_bytes: int) -> Issue:
        with self._computing():
            n_elements = max(1, n_bytes // (3 * torch.bfloat16.itemsize))  # two are read, one is written
            x, y, out = (torch.randn(n_elements, dtype=torch.bfloat16, device=self._device) for _ in range(3))
        return self._issue(lambda: torch.add(x, y, out=out))

    def smallest(self) -> Issue:
        with self._computing():
            x = torch.ones(1, device=self._device)
        return self._issue(lambda: x.add_(1.0))

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with translated(), torch.cuda.stream(self._streams[Stream.COMPUTE]), torch.no_grad():
            yield

    def _issue(self, work: Work, settled: Callable[[], AbstractContextManager[object]] = nullcontext) -> Issue:
        def issue(n: int) -> None:
            with self._computing(), settled():
                for _ in range(n):
                    work()

        return issue

    def record(self, stream: Stream) -> Event:
        with translated():
            event = self._events.timer()
            self._events.record(event, self._streams[stream])
        return event

    def order(self, stream: Stream, event: Event) -> None:
        with translated():
            self._events.order(self._streams[stream], event)

    def wait(self, event: Event) -> None:
        with translated():
            self._events.wait(event)

    def elapsed_s(self, first: Event, last: Event) -> float:
        with translated():
            return self._events.elapsed_s(first, last)

    def synchronise(self) -> None:
        with translated():
            torch.cuda.synchronize(self._device)


def _driver_version() -> str:
    for path in DRIVER_FILES:
        with contextlib.suppress(OSError):
            return path.read_text().strip()
    return "unknown"


def open_cuda(index: int) -> CudaDevice:
    """That device. ProfileError where there is none such, or torch cannot use it."""
    if not torch.cuda.is_available():
        raise ProfileError("no CUDA device is visible to torch; use --device cpu, or a shipped profile with --machine")
    n_devices = torch.cuda.device_count()
    if index >= n_devices:
        raise ProfileError(f"there is no CUDA device {index}; torch sees {n_devices}, counted from 0")
    try:
        return CudaDevice(index)
    except DeviceError as error:
        raise ProfileError(f"CUDA device {index} cannot be used: {error}; see that it works, or use --device cpu") from None
