"""Laws of products, attention and collectives: their seconds by a few constants of a device.

`benchmarks/op_fit.py` fits the constants by least squares to published measurements (`benchmarks/published_ops.csv`); errors on
rows left out are on docs/ops.md. More work never takes less time in any law.
"""

import math
from typing import Annotated

from pydantic import Field

from .quantity import Part, Quantity, Size

# Rows and columns of the output that one thread block computes, as cuBLAS has them, and into how many parts it may split k
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 3, 4, 6, 8)
FP32_BYTES = 4
HOT_FLOP = 1e11  # of a product: from there on clocks fall while it lasts
WIDE = 128  # heads that a law's rate is of

Positive = Annotated[float, Field(gt=0, le=1e15)]
Natural = Annotated[float, Field(ge=0, le=1e15)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Range = tuple[Size, Size]


class ProductLaw(Part):
    """Products by tiles, waves and memory: the fastest of all tile sizes and splits of k."""

    flop_per_s: Quantity  # of all multiprocessors on endless tiles
    n_processors: Size
    short_k: Natural  # steps of k that a tile takes until its first result
    reload: Natural  # of a tile of 64 x 64: how much longer than one without edges, for what it reads
    rounding: Fraction  # of waves: 1, whole ones; 0, processors are never idle
    split_s: Natural  # what splitting k costs besides its sums
    memory_fraction: Positive  # of the device's memory rate that operands come at
    overlap: Annotated[float, Field(ge=1, le=100)]  # of computing and memory: 1, none; large, all
    heat: Annotated[float, Field(ge=0, le=0.5)]  # the rate falls as (FLOP / HOT_FLOP) to this power
    m: Range  # what it was fitted to, in tokens and in width, the root of k n
    width: Range

    def seconds(self, m: int, k: int, n: int, item_bytes: int, memory_bytes_per_s: float) -> float:
        """Of (m, k) @ (k, n), without what every kernel takes to begin."""
        each_flop_per_s = self.flop_per_s.value / self.n_processors
        flop, computing_s = 2 * m * k * n, math.inf
        for rows, columns in TILES:
            n_tiles = -(-m // rows) * -(-n // columns)
            step_s = 2 * rows * columns * (1 + self.reload * (64 / rows + 64 / columns)) / each_flop_per_s
            for n_splits in SPLITS:
                turns = n_tiles * n_splits / self.n_processors
                waves = math.ceil(turns) ** self.rounding * max(turns, 1.0) ** (1 - self.rounding)
                sums_s = self.split_s + FP32_BYTES * m * n * n_splits / memory_bytes_per_s if n_splits > 1 else 0.0
                computing_s = min(computing_s, waves * (k / n_splits + self.short_k) * step_s + sums_s)
        computing_s *= max(1.0, flop / HOT_FLOP) ** self.heat
        moving_s = item_bytes * (m * k + k * n + m * n) / (self.memory_fraction * memory_bytes_per_s)
        shorter, longer = sorted((computing_s, moving_s))
        return float(longer * (1 + (shorter / longer) ** self.overlap) ** (1 / self.overlap))

    def covers(self, m: int, k: int, n: int) -> bool:
        """Whether such products were among those that it was fitted to."""
        return self.m[0] <= m <= self.m[1] and self.width[0] <= math.sqrt(k * n) <= self.width[1]


class PassLaw(Part):
    """One direction of attention. FLOP count the causal half, those of a backward 2.5 times the forward's."""

    flop_per_s: Quantity  # of heads WIDE wide, over endless sequences
    short_tokens: Natural  # sequence length at which half of that is reached
    unmasked: Fraction  # of `short_tokens`, where nothing is masked
    narrow: Positive  # the rate of heads half as wide, over that of wide ones
    grouped: Positive  # the rate where several heads share keys and values, over that where each has its own
    paged_passes: Natural = 0.0  # of keys and values through memory into a serving engine's paged cache, in published rows

    def rate(self, seq_len: int, head_dim: int, grouped: bool, causal: bool = True) -> float:
        """FLOP a second over sequences of that length."""
        narrow = self.narrow ** max(0.0, math.log2(WIDE / head_dim))
        short = self.short_tokens * (1.0 if causal else self.unmasked) / seq_len
        return float(self.flop_per_s.value * narrow * (self.grouped if grouped else 1.0) / (1 + short))


class AttentionLaw(Part):
    """A kernel of attention."""

    forward: PassLaw
    backward: PassLaw
    deterministic_fraction: Quantity | None = None  # of the backward's rate that is left when its sums have a fixed order
    seq_len: Range  # what it was fitted to

    def pass_of(self, backward: bool) -> PassLaw:
        return self.backward if backward else self.forward

    def covers(self, seq_len: int) -> bool:
        return self.seq_len[0] <= seq_len <= self.seq_len[1]


class CollectiveLaw(Part):
    """One collective among the devices of a host; bytes as nccl-tests counts its size."""

    latency_s: Quantity  # of two devices
    growth: Natural  # of the latency, with each further device
    fill_s: Natural  # by which large messages are later: the protocol that carries most begins slowly
    fill_bytes: Positive  # size of a message that has two thirds of that
    fill_growth: float  # the power of the number of devices that it grows with
    bytes_per_s: Quantity  # that cross to other devices, between two
    crowding: Natural  # it falls as the number of others to this power, where they share what joins them
    here: Natural  # bytes that are moved within a device, as a share of all, at the same rate

    def latency_of(self, n_devices: int) -> float:
        """Seconds until the smallest message is everywhere."""
        return self.latency_s.value * (1 + self.growth * max(0, n_devices - 2))

    def moving_s(self, n_devices: int, n_bytes: float, n_parts: int | None = None) -> float:
        """Seconds beyond the latency. `n_parts`: into which the bytes are cut, where other hosts' devices have some."""
        n_parts = n_parts or n_devices
        filled_s = self.fill_s * (n_devices / 4) ** self.fill_growth * -math.expm1(-n_bytes / self.fill_bytes)
        bytes_per_s = self.bytes_per_s.value / max(1, n_devices - 1) ** self.crowding
        return float(filled_s + n_bytes * ((n_parts - 1) / n_parts + self.here) / bytes_per_s)
