"""Components of a profile: device, link, host, peers, network, disk and price, as JSON objects.

Rates that depend on size are measured points, which `curves.py` interpolates, or a law of `op_laws.py`.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, AliasChoices, Discriminator, Field, Tag

from .curves import Row, check_rising, rows_of
from .op_laws import AttentionLaw, CollectiveLaw, ProductLaw
from .quantity import Day, Dtype, Money, Part, Quantity, Share, Size, Text

Direction = Literal["h2d", "d2h"]
AttentionKernel = Literal["flash", "cudnn", "fa3", "aiter"]  # `flash`: torch's FlashAttention-2; fp32: its memory-efficient kernel
NormKernel = Literal["torch-fused", "torch-compile"]
Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "alltoall"]
ITEM_BYTES: dict[Dtype, int] = {"bf16": 2, "fp32": 4}
FORMS = ("points", "law")  # pydantic tags of a rate over size; they are not keys in a file
BACKWARD_ATTENTION = 2.5  # FLOP of attention's backward over those of its forward in all rates: five products against two
# Relative rate of FlashAttention-2's deterministic backward: 166 of 290 TFLOP/s (Dao-AILab/flash-attention#1893, H100, head width
# 128, 8k tokens, causal); the default for devices without a measurement.
DETERMINISTIC_FRACTION = 0.57


class MatmulPoint(Part):
    """Rate of (m, k) @ (k, n), which counts 2 m k n FLOP."""

    m: Size
    k: Size
    n: Size
    flop_per_s: Quantity
    clock_hz: float | None = None  # multiprocessor clock and power draw during the measurement; None: not reported by the driver
    watts: float | None = None


class AttentionPoint(Part):
    """Rate of causal attention. FLOP count the causal half; backward FLOP are 2.5 times the forward's."""

    seq_len: Size
    head_dim: Size
    forward_flop_per_s: Quantity
    backward_flop_per_s: Quantity
    clock_hz: float | None = None
    watts: float | None = None


class CopyPoint(Part):
    """Rate of one copy of n_bytes, latency subtracted."""

    n_bytes: Size
    rate: Quantity


class OptimizerPoint(Part):
    """Rate of AdamW on fp32 master weights: alone, during uploads at the full rate, and during copies in both directions."""

    threads: Size
    params_per_s: Quantity
    params_per_s_under_copies: Quantity
    params_per_s_under_uploads: Quantity | None = None  # None: not measured; the update shares host DRAM by counted bytes


def matmul_rows(points: Sequence[MatmulPoint]) -> list[Row]:
    return rows_of((p.m, math.sqrt(p.k * p.n), p.flop_per_s.value) for p in points)


def attention_rows(points: Sequence[AttentionPoint], backward: bool) -> list[Row]:
    return rows_of((p.head_dim, p.seq_len, (p.backward_flop_per_s if backward else p.forward_flop_per_s).value) for p in points)


def _rising(points: tuple[Any, ...]) -> tuple[Any, ...]:
    is_matmul = isinstance(points[0], MatmulPoint)
    for rows in [matmul_rows(points)] if is_matmul else [attention_rows(points, backward) for backward in (False, True)]:
        check_rising(rows, y_power=2)
    return points


def _sorted_by(key: str, points: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(getattr(following, key) <= getattr(point, key) for point, following in pairwise(points)):
        raise ValueError(f"sort the points by rising {key}")
    return points


def _rising_copies(points: tuple[CopyPoint, ...]) -> tuple[CopyPoint, ...]:
    check_rising([(1.0, [(p.n_bytes, p.rate.value) for p in _sorted_by("n_bytes", points)])], y_power=1)
    return points


def _in_both_dtypes(rates: dict[Any, Any]) -> dict[Any, Any]:
    """Check that rates by dtype, or by kernel and dtype, have every dtype (of the kernel `flash`)."""
    if missing := [dtype for dtype in get_args(Dtype) if dtype not in rates.get("flash", rates)]:
        raise ValueError(f"no {' and no '.join(missing)}; give points or a law for each")
    return rates


AtLeastOne = Field(min_length=1)
RISING, POINTS, LAW = AfterValidator(_rising), Tag(FORMS[0]), Tag(FORMS[1])
EITHER = Discriminator(lambda value: FORMS[not isinstance(value, list | tuple)])
Matmuls = Annotated[Annotated[tuple[MatmulPoint, ...], AtLeastOne, RISING, POINTS] | Annotated[ProductLaw, LAW], EITHER]
Attentions = Annotated[Annotated[tuple[AttentionPoint, ...], AtLeastOne, RISING, POINTS] | Annotated[AttentionLaw, LAW], EITHER]


class AttentionCall(NamedTuple):
    """Shape of an attention call; `grouped`: grouped-query attention."""

    dtype: Dtype
    seq_len: int
    head_dim: int
    grouped: bool
    causal: bool = True


class NormRates(Part):
    """Rates of a fused RMS norm: bytes of input and output per second. The backward counts twice the bytes of the forward."""

    forward_bytes_per_s: Quantity
    backward_bytes_per_s: Quantity


class Device(Part):
    """Compute device: a GPU, or the CPU cores of the gpu lane with a memory arena."""

    name: Text
    kind: Literal["cuda", "cpu"]
    instructions: Text | None = None  # instruction set of a CPU; None: a GPU, or not known
    memory_bytes: Quantity
    context_bytes: Share
    memory_bytes_per_s: Quantity
    eager_bytes_per_s: Quantity | None = None  # unfused pointwise modules, bytes of every call; None: `memory_bytes_per_s`
    fused_bytes_per_s: Quantity | None = None  # fused activation and rotary kernels; None: `memory_bytes_per_s`
    loss_bytes_per_s: Quantity | None = None  # passes of the fused loss over logits; None: `memory_bytes_per_s`
    unpack_bytes_per_s: Quantity | None = None  # dequantisation, bytes as in `plan/packed.py`; None: `memory_bytes_per_s`
    narrow_bytes_per_s: Quantity | None = None  # products with an adapter's rank as k or n; None: `memory_bytes_per_s`
    # Rate of FP8 products (E4M3, a scale per row of both operands, fp32 sums) over bf16 products of one shape; None: it has none
    fp8_rate_fraction: Quantity | None = None
    sustained_fraction: Quantity | None = None  # rate of products in a step over their burst rate; None: rates are a step's
    kernel_overhead_s: Quantity
    op_overhead_s: Quantity
    compute_threads: Size | None
    workspace_bytes: Share | None = None  # workspaces of kernels and libraries, without the context
    matmul: Annotated[dict[Dtype, Matmuls], AfterValidator(_in_both_dtypes)]
    attention: Annotated[dict[AttentionKernel, dict[Dtype, Attentions]], AfterValidator(_in_both_dtypes)]
    norms: dict[NormKernel, NormRates] = {}
    pool_bytes: Quantity | None = None  # unified memory that device and host share; None: separate memories


class CopyCurve(Part):
    """One direction of the link: seconds = latency_s + n_bytes / rate. Also rates under load, if measured."""

    latency_s: Quantity
    bytes_per_s: Annotated[tuple[CopyPoint, ...], AtLeastOne, AfterValidator(_rising_copies)]
    pageable_bytes_per_s: Quantity
    duplex_bytes_per_s: Quantity | None = None
    under_optimizer_bytes_per_s: Quantity | None = None


class Link(Part):
    """Link between host and device memory."""

    h2d: CopyCurve
    d2h: CopyCurve
    duplex_bytes_per_s: Quantity
    host_cores_per_copy: Share
    dram_bytes_per_byte: Annotated[float, Field(ge=0, le=100)]


class Host(Part):
    """Host: stores and updates the training state."""

    memory_bytes: Quantity
    runtime_bytes: Quantity
    n_cores: Size
    dram_bytes_per_s: Quantity
    optimizer: Annotated[tuple[OptimizerPoint, ...], AtLeastOne, AfterValidator(partial(_sorted_by, "threads"))]
    reduce_bytes_per_s: Quantity
    page_fault_bytes_per_s: Quantity
    # Maximum memory: all slots of the board filled, or soldered memory (`soldered_bytes` in older files)
    most_bytes: Annotated[Quantity | None, Field(validation_alias=AliasChoices("most_bytes", "soldered_bytes"))] = None


class Peers(Part):
    """Devices of the host that share a step, and their interconnect."""

    n_devices: Size | None = None  # of the host; None: no limit
    latency_s: Quantity  # synchronisation of devices that reached an op
    collectives: dict[Collective, CollectiveLaw]
    through_host: bool = False  # no peer access: exchanges pass through host memory


class Network(Part):
    """Network between hosts."""

    bytes_per_s: Quantity  # full duplex, per host, shared by its devices
    latency_s: Quantity  # from one host to the next
    n_hosts: Size = 1  # hosts that share a step


class Disk(Part):
    """Disk, or striped disks, from which frozen weights are read by large direct reads."""

    read_bytes_per_s: Quantity  # alone
    under_copies_bytes_per_s: Quantity | None = None  # while host memory and link are busy; None: as alone


class Price(Part):
    """Prices on a day: rent, purchase and power. Host memory with a price per GB is bought in addition to `usd`."""

    usd_per_hour: Money | None
    usd: Money | None = None
    ram_usd_per_gb: Money | None
    watts: Quantity | None = None  # whole machine under load
    usd_per_kwh: Quantity | None = None  # None: an assumed price
    date: Day | None


class OpRatio(Part):
    """Measured over predicted seconds of the work of one kind of op on one class of blocks, in a run on this machine."""

    kind: Text
    block: Annotated[int, Field(ge=0)]  # the first of its class
    ratio: Annotated[float, Field(ge=0.01, le=100)]
    n_samples: Annotated[int, Field(ge=0)]  # 0: not measured, the ratio of ops with the same kind of work
