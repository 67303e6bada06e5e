"""Closed-form cost models ("laws") of matrix products, attention and collectives, with a few constants per device.

`benchmarks/op_fit.py` fits the constants by least squares to published measurements (`benchmarks/published_ops.csv`); docs/ops.md
has the errors on held-out rows. In every law time is monotonic in the amount of work.
"""

import math
from typing import Annotated

from pydantic import Field

from .quantity import Part, Quantity, Size

# Output tiles (rows, columns) of one thread block, as in cuBLAS, and numbers of parts into which k may be split
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 3, 4, 6, 8)
FP32_BYTES = 4
HOT_FLOP = 1e11  # product size above which clocks fall during the kernel
WIDE = 128  # head width to which a law's rate refers

Positive = Annotated[float, Field(gt=0, le=1e15)]
Natural = Annotated[float, Field(ge=0, le=1e15)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Range = tuple[Size, Size]


class ProductLaw(Part):
    """Time of a matrix product by tiles, waves and memory traffic: minimum over all tile sizes and splits of k."""

    flop_per_s: Quantity  # all multiprocessors, tiles of infinite k
    n_processors: Size
    short_k: Natural  # latency of a tile, in steps of k
    reload: Natural  # relative extra time of a 64 x 64 tile for reading its operands
    rounding: Fraction  # wave quantisation: 1, whole waves; 0, no processor is idle in the last wave
    split_s: Natural  # fixed cost of splitting k, without the time of the sums
    memory_fraction: Positive  # rate of reading operands, relative to the device's memory rate
    overlap: Annotated[float, Field(ge=1, le=100)]  # exponent of the p-norm of compute and memory time: 1, sum; large, maximum
    heat: Annotated[float, Field(ge=0, le=0.5)]  # the rate falls as (FLOP / HOT_FLOP) to this power
    m: Range  # fitted range of m; of sqrt(k n) in `width`
    width: Range

    def seconds(self, m: int, k: int, n: int, item_bytes: int, memory_bytes_per_s: float) -> float:
        """Return the seconds of (m, k) @ (k, n), without launch overhead."""
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
        """True if a product of this shape is in the fitted range."""
        return self.m[0] <= m <= self.m[1] and self.width[0] <= math.sqrt(k * n) <= self.width[1]


class PassLaw(Part):
    """Forward or backward of attention. FLOP count the causal half; backward FLOP are 2.5 times the forward's."""

    flop_per_s: Quantity  # head width WIDE, limit of long sequences
    short_tokens: Natural  # sequence length at which half of that rate is reached
    unmasked: Fraction  # factor on `short_tokens` without a causal mask
    narrow: Positive  # factor on the rate when the head width is halved
    grouped: Positive  # factor on the rate for grouped-query attention
    paged_passes: Natural = 0.0  # memory passes over keys and values into a paged cache (published rows of serving engines)

    def rate(self, seq_len: int, head_dim: int, grouped: bool, causal: bool = True) -> float:
        """Return FLOP/s at this sequence length and head width."""
        narrow = self.narrow ** max(0.0, math.log2(WIDE / head_dim))
        short = self.short_tokens * (1.0 if causal else self.unmasked) / seq_len
        return float(self.flop_per_s.value * narrow * (self.grouped if grouped else 1.0) / (1 + short))


class AttentionLaw(Part):
    """Law of one attention kernel."""

    forward: PassLaw
    backward: PassLaw
    deterministic_fraction: Quantity | None = None  # rate of the deterministic backward relative to the default one
    seq_len: Range  # fitted range

    def pass_of(self, backward: bool) -> PassLaw:
        return self.backward if backward else self.forward

    def covers(self, seq_len: int) -> bool:
        return self.seq_len[0] <= seq_len <= self.seq_len[1]


class CollectiveLaw(Part):
    """Law of a collective among the devices of a host; sizes in bytes as in nccl-tests."""

    latency_s: Quantity  # between two devices
    growth: Natural  # relative increase of the latency per further device
    fill_s: Natural  # extra latency of large messages, because the high-bandwidth protocol starts slowly
    fill_bytes: Positive  # message size with 1 - 1/e of `fill_s`
    fill_growth: float  # exponent: `fill_s` is for 4 devices and grows as this power of their number
    bytes_per_s: Quantity  # rate between two devices
    crowding: Natural  # exponent: the rate falls as this power of the number of peers that share the interconnect
    here: Natural  # bytes copied within a device at the same rate, as a fraction of the message

    def latency_of(self, n_devices: int) -> float:
        """Return the seconds of an empty message."""
        return self.latency_s.value * (1 + self.growth * max(0, n_devices - 2))

    def moving_s(self, n_devices: int, n_bytes: float, n_parts: int | None = None) -> float:
        """Return the seconds beyond the latency. `n_parts`: shards of the message on all hosts, by default `n_devices`."""
        n_parts = n_parts or n_devices
        filled_s = self.fill_s * (n_devices / 4) ** self.fill_growth * -math.expm1(-n_bytes / self.fill_bytes)
        bytes_per_s = self.bytes_per_s.value / max(1, n_devices - 1) ** self.crowding
        return float(filled_s + n_bytes * ((n_parts - 1) / n_parts + self.here) / bytes_per_s)
