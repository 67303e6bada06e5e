"""List of measurements: the benchmark, the concurrent benchmarks, and the profile field of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, get_args

from penstock.hwprofiles.components import AttentionKernel, Direction
from penstock.hwprofiles.quantity import Dtype
from penstock.runtime.units import GB, KiB, MiB, show_bytes

from . import host_kernels
from . import kernels_to_time as kernels
from .device import DeviceOutOfMemory, Facts
from .kernels_to_time import Benchmark

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
HEAD_DIMS = (64, 128)
LARGE_BYTES = 771 * MiB  # traffic of one pointwise kernel on a GPU: far above a cache
CLOCKED = 4096, 3584, 4736  # m, k, n of the product that precedes memory-bound kernels
LOGITS = 4096, 152_064  # tokens and vocabulary of a tile: rows too long for the memory of a multiprocessor
RANK = 16  # of adapters
CLOCKED_FRACTION = 0.9  # maximum share of the product in the time of product and kernel
EXTRA = "extra."  # prefix of results without a profile field: they widen spreads or reveal cliffs
ALONE, LOADED = f"{EXTRA}alone.", f"{EXTRA}beside."  # a benchmark of a kind, without and with load on other lanes
QUICKER = {"host_bytes": 6, "point_s": 2, "batch_s": 2, "window_s": 2, "longest_s": 4, "warm_up_s": 3, "soak_s": 5}  # divisors
Shape = tuple[int, int, int]
REFERENCE, NODES, CLOCK = f"{EXTRA}reference.", f"{EXTRA}nodes.", f"{EXTRA}clock"
FP8 = f"{EXTRA}fp8"  # products as large as the reference's


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one number."""

    field: str  # key in the profile, e.g. `link.h2d.latency_s`, or a name with prefix `EXTRA`; *_per_s is a rate, other *_s seconds
    work: Benchmark
    key: str = ""  # key in a grid point, e.g. `flop_per_s`
    background: tuple[Benchmark, ...] = ()  # repeated concurrently
    overhead: str | None = None  # field of the overhead per call, which is subtracted
    soak_s: float = 0.0  # warm-up with the same benchmark
    is_optional: bool = False  # if the device fails, the whole field is omitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Grid of points, and time per point: `point_s`, within the limits of `repeats`. Defaults are for a GPU."""

    repeats: tuple[int, int] = (5, 11)  # minimum, maximum
    point_s: float = 0.5
    batch_s: float = 0.04  # repetitions timed as one batch
    window_s: float = 0.04  # batch of several threads or under load, where threads take turns on cores
    longest_s: float = 1.5  # a longer benchmark is run once or omitted
    sustained_s: float = 1.5  # duration of a host benchmark
    piece_s: float = 0.1  # pieces of this duration; their median is the result
    host_bytes: int = 12 * GB  # maximum slab of host benchmarks
    warm_up_s: float = 8.0  # of the reference product
    soak_s: float = 2.5  # warm-up of each product: it reduced another team's largest error of a step from 10 to 4 %
    every: Mapping[Dtype, int] = field(default_factory=lambda: {"bf16": 1, "fp32": 2})  # every n-th point below
    # Tokens (m of products) and widths (k, n) of models from 1 to 400 billion parameters; odd shapes are MLPs and vocabularies.
    # Odd shapes share their m with square products at every stride of `every`, because a row of one point covers no other widths.
    tokens: Sequence[int] = (512, 1024, 2048, 4096, 8192, 16384)
    widths: Sequence[int] = (1024, 2048, 4096, 8192, 16384)
    odd_shapes: Sequence[Shape] = ((8192, 8192, 29568), (4096, 4096, 14336), (2048, 4096, 131072), (4096, 14336, 4096))
    reference: int = 8192  # m = k = n of the product that is measured first and last
    seq_lens: Sequence[int] = (1024, 2048, 4096, 8192, 16384, 32768)
    n_heads: int = 16
    layer: Shape = (8192, 3584, 18944)  # tokens, hidden and intermediate width of eager calls and the norm
    tiny_bytes: int = 4 * KiB  # copy for the latency
    copy_bytes: Sequence[int] = tuple(64 * KiB * 4**i for i in range(8))
    piece_bytes: int = 64 * MiB  # copy under load

    def quick(self) -> "Effort":
        """Return an effort with every other point and less time per point."""
        every = {dtype: 2 * n for dtype, n in self.every.items()}
        faster: dict[str, Any] = {name: type(value)(value / n) for name, n in QUICKER.items() for value in [getattr(self, name)]}
        return replace(self, repeats=(3, self.repeats[1] // 2), every=every, **faster)


CPU = Effort(
    repeats=(5, 15), point_s=0.12, batch_s=0.002, window_s=0.2, longest_s=1.2, warm_up_s=0.0, soak_s=0.0,
    every={"bf16": 1, "fp32": 1}, tokens=(64, 128, 256, 512, 1024, 2048, 4096), widths=(128, 192, 256, 384, 512, 768, 1024, 1536),
    odd_shapes=((1024, 512, 2048), (4096, 2048, 512), (1024, 2048, 512), (4096, 512, 2048), (1024, 512, 8192)), reference=512,
    seq_lens=(128, 256, 512, 1024, 2048, 4096), n_heads=2, layer=(512, 576, 1536), tiny_bytes=64,
    copy_bytes=tuple(64 * KiB * 4**i for i in range(6)), piece_bytes=8 * MiB,
)  # fmt: skip
GPU = Effort()


def measurements(effort: Effort, facts: Facts, room_bytes: int) -> Iterator[Measurement]:
    """Yield the measurements in order, without benchmarks that need more than `room_bytes` of device memory. Raise
    DeviceOutOfMemory if a required field has no benchmark that fits."""
    sizes = [n for n in effort.copy_bytes[:: effort.every["bf16"]] if 2 * n <= room_bytes and 4 * n <= facts.host_bytes]
    if not sizes:
        raise DeviceOutOfMemory(f"not even two pieces of {show_bytes(effort.copy_bytes[0])} fit device and host")
    piece_bytes = min(effort.piece_bytes, sizes[-1])
    # A CPU copies with a core, and a run uses one core for copies.
    copies = tuple(kernels.copy(direction, piece_bytes) for direction in DIRECTIONS[: 1 if facts.is_cpu else 2])
    slab_bytes = host_kernels.slab_bytes(facts.host_bytes, effort.host_bytes)
    load = (*copies, host_kernels.updates(facts.n_host_cores, slab_bytes))
    yield Measurement("host.dram_bytes_per_s", host_kernels.traffic(facts.n_cores, slab_bytes))
    yield Measurement("host.reduce_bytes_per_s", host_kernels.squares(facts.n_host_cores, slab_bytes))
    yield Measurement("host.page_fault_bytes_per_s", host_kernels.first_touch(slab_bytes))
    yield from _copies(effort, facts, sizes, piece_bytes, load[-1])
    yield from _optimizer(effort, facts, copies, slab_bytes)
    width = effort.reference
    while (reference := kernels.product("bf16", width, width, width)).n_bytes > room_bytes:
        width //= 2
    yield Measurement(REFERENCE + "first", reference, soak_s=effort.warm_up_s)
    for dtype in DTYPES:
        every = effort.every[dtype]
        square = {(m, width, width) for m, width in product(effort.tokens[::every], effort.widths[::every])}
        shapes = sorted(square | {*effort.odd_shapes[::every]})
        products = [work for work in (kernels.product(dtype, *shape) for shape in shapes) if work.n_bytes <= room_bytes]
        yield from _slowdown(products[len(products) // 2], load)
        yield from (Measurement(f"device.matmul.{dtype}", work, "flop_per_s", soak_s=effort.soak_s) for work in products)
    for dtype in DTYPES:
        yield from _attention(effort, facts.is_cpu, dtype, room_bytes, load)
    yield from _kernels(effort, facts.is_cpu, load)
    yield Measurement(FP8, kernels.scaled_product(width, width, width), soak_s=effort.soak_s, is_optional=True)
    yield Measurement(REFERENCE + "last", reference)


def _slowdown(work: Benchmark, load: tuple[Benchmark, ...]) -> Iterator[Measurement]:
    """Yield a benchmark alone and under load of other lanes. The slowdown widens the spreads of its kind."""
    yield Measurement(ALONE + work.kind, work)
    yield Measurement(LOADED + work.kind, work, background=load)


def _copies(effort: Effort, facts: Facts, sizes: Sequence[int], piece_bytes: int, optimizer: Benchmark) -> Iterator[Measurement]:
    """Yield copies in each direction: by size, pageable, with the other direction, with the optimizer, and by NUMA node."""
    for direction, reverse in (DIRECTIONS, DIRECTIONS[::-1]):
        way, latency, piece = f"link.{direction}", f"link.{direction}.latency_s", kernels.copy(direction, piece_bytes)
        yield Measurement(latency, kernels.copy(direction, effort.tiny_bytes))
        yield from (Measurement(f"{way}.bytes_per_s", kernels.copy(direction, n), "rate", overhead=latency) for n in sizes)
        yield Measurement(f"{way}.pageable_bytes_per_s", kernels.copy(direction, piece_bytes, "pageable"))
        yield Measurement(f"{way}.duplex_bytes_per_s", piece, background=(kernels.copy(reverse, piece_bytes),))
        yield Measurement(f"{way}.under_optimizer_bytes_per_s", piece, background=(optimizer,))
    nodes = [node for node, cores in enumerate(facts.nodes) if cores]
    if len(nodes) > 1 and not facts.is_cpu:
        yield from (Measurement(f"{NODES}{node}", kernels.copy("h2d", piece_bytes, node=node)) for node in nodes)


def _optimizer(effort: Effort, facts: Facts, copies: tuple[Benchmark, ...], slab_bytes: int) -> Iterator[Measurement]:
    """Yield the optimizer by threads: alone, during uploads, and during copies in both directions. A CPU has no measurement during
    uploads, because its uploads are copies by a host core."""
    if facts.is_cpu:
        yield from _slowdown(host_kernels.updates(1, slab_bytes), (kernels.product("fp32", 512, 512, 512),))
    n_cores = facts.n_host_cores
    for n in sorted({*[2**i for i in range(n_cores.bit_length())][:: effort.every["bf16"]], n_cores}):
        work = host_kernels.updates(n, slab_bytes)
        yield Measurement("host.optimizer", work, "params_per_s")
        yield Measurement("host.optimizer", work, "params_per_s_under_copies", copies)
        if not facts.is_cpu:
            yield Measurement("host.optimizer", work, "params_per_s_under_uploads", copies[:1])


def _attention(effort: Effort, is_cpu: bool, dtype: Dtype, room_bytes: int, load: tuple[Benchmark, ...]) -> Iterator[Measurement]:
    """Yield forward and backward of each attention kernel; all have the same number of tokens, in sequences of several lengths."""
    heads, widest = effort.n_heads, max(HEAD_DIMS)
    seq_lens = effort.seq_lens[:: effort.every[dtype]]
    lengths = [n for n in seq_lens if kernels.attention(dtype, 1, heads, n, widest)["forward"].n_bytes <= room_bytes]
    if not lengths:
        raise DeviceOutOfMemory(f"not even {seq_lens[0]} tokens fit the free device memory")
    yield from _slowdown(kernels.attention(dtype, 1, heads, lengths[-1], HEAD_DIMS[0])["backward"], load)
    names: tuple[AttentionKernel, ...] = ("flash",) if is_cpu else ("flash", "cudnn")
    for kernel, head_dim, seq_len in product(names, HEAD_DIMS, lengths):
        for way, work in kernels.attention(dtype, lengths[-1] // seq_len, heads, seq_len, head_dim, kernel).items():
            yield Measurement(f"device.attention.{kernel}.{dtype}", work, f"{way}_flop_per_s", is_optional=kernel != "flash")


def _kernels(effort: Effort, is_cpu: bool, load: tuple[Benchmark, ...]) -> Iterator[Measurement]:
    """Yield library calls, hand-overs between lanes, and memory-bound kernels. The memory rate of a CPU is the rate of a layer's
    eager calls. A GPU has one rate for a large kernel and one for eager calls."""
    call_s, eager_calls, calls = "device.kernel_overhead_s", kernels.eager(*effort.layer), kernels.library_calls(is_cpu)
    if is_cpu:
        yield from _slowdown(calls, load)
    yield Measurement(call_s, calls)
    yield Measurement("device.op_overhead_s", kernels.HANDOVER)
    if is_cpu:
        yield from _slowdown(eager_calls, load)
        yield Measurement("device.memory_bytes_per_s", eager_calls, overhead=call_s)
        return
    large = kernels.pointwise(LARGE_BYTES)
    yield from _slowdown(large, load)
    yield Measurement("device.memory_bytes_per_s", large)
    yield Measurement("device.eager_bytes_per_s", eager_calls, overhead=call_s)
    for way, work in kernels.norm(*effort.layer[:2]).items():
        yield Measurement(f"device.norms.torch-fused.{way}_bytes_per_s", work)
    clocked = kernels.product("bf16", *CLOCKED)
    yield Measurement(CLOCK, clocked)
    n_tokens, width, inner = effort.layer
    behind = {"fused": kernels.activation(n_tokens, inner), "loss": kernels.loss(*LOGITS)}
    behind["unpack"] = kernels.unpacking("int8", 3 * ((inner, width), (width, inner)))
    behind["narrow"] = kernels.narrow(n_tokens, width, inner, RANK)
    for name, work in behind.items():
        yield Measurement(f"device.{name}_bytes_per_s", kernels.behind(clocked, work), overhead=CLOCK, is_optional=True)
