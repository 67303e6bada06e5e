"""Low-bit optimizer state: stochastic rounding, and moments as groups of int8 codes.

A group has 32 codes and a bf16 scale (docs/optimizers.md). An element of the first moment is `scale code / (254 - |code|)`, with a
signed code; the square root of an element of the second moment is `scale code`. The largest element of a group is exact, and
packing unpacked numbers changes no bit. A pack of 136 bytes holds the codes of four groups, then their scales.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Keys = tuple[int, int, int]  # for the master and the moments
TURN = 2**16
GROUP, PACK, PACK_BYTES = 32, 128, 136
# Bits of the bounds of scales, 2^-58 and 2^120: a group becomes zero unless its scale is above LEAST, and NaN if its scale is above
# MOST. The rounded scale is compared, so that packing unpacked numbers changes no bit.
SMALLEST, LARGEST, INFINITE = np.uint32(0x22800000), np.uint32(0x7B800000), np.uint32(0x7F800000)
NEAREST = np.float32(3 * 2**22)  # the low byte of code + NEAREST is the code rounded to nearest, ties to even
HALF = 0x8000  # in place of a random number, rounds half up
PIECE_ELEMENTS = 2**20  # unpacked at a time


class StochasticRounding(NamedTuple):
    """Keys for stochastic rounding of moments, and of the master if `is_master_stochastic`. `first`: position of the first local
    element in the whole parameter."""

    keys: Keys
    is_master_stochastic: bool
    first: int = 0


def stochastic_rounding(seed: int, n_updates: int, name: str, first: int, is_master_stochastic: bool) -> StochasticRounding:
    """32-bit keys of a parameter for one update of a run."""
    digest = blake2b(f"{seed} {n_updates} {name}".encode(), digest_size=12).digest()
    master, moment, second = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))
    return StochasticRounding((master, moment, second), is_master_stochastic, first)


def begin(key: int, turn: Any) -> Any:
    """Position in the mixed order at which a turn begins: a hash with products below 2^63."""
    x = (key + turn) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0xFFFF


def mixed(x: Any) -> Any:
    """16-bit numbers at positions of the mixed order: a bijection."""
    x = ((x ^ (x >> 8)) * 0x88B5) & 0xFFFF
    x = ((x ^ (x >> 7)) * 0xDB2D) & 0xFFFF
    return x ^ (x >> 9)


def numbers(key: int, first: int, n: int) -> Any:
    """16-bit random numbers of n elements from position `first` on, as int32."""
    places = np.arange(first, first + n)
    return mixed((begin(key, places // TURN) + places) % TURN).astype(np.int32)


def signed(key: int) -> int:
    """A 32-bit key as a signed kernel argument."""
    return key - 2**32 if key >= 2**31 else key


def group_bytes(n_elements: int) -> int:
    """Bytes of n elements in whole packs."""
    return -(-n_elements // PACK) * PACK_BYTES


def unpacked(groups: NDArray[Any], n: int, is_root: bool) -> NDArray[np.float32]:
    """First n numbers of flat groups, in fp32."""
    packs = groups.reshape(-1, PACK_BYTES)
    scales = (np.ascontiguousarray(packs[:, PACK:]).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    codes = (packs[:, :PACK] if is_root else packs[:, :PACK].view(np.int8)).astype(np.float32)
    values = scales.repeat(GROUP, 1) * codes
    return (values * values if is_root else values / (254 - np.abs(codes))).reshape(-1)[:n]


def packed(x: NDArray[np.float32], is_root: bool, random: Any = HALF) -> NDArray[np.uint8]:
    """Flat groups of fp32 numbers. `random`: one number per group, to round its scale."""
    groups = np.pad(x, (0, -len(x) % PACK)).reshape(-1, GROUP)
    groups = np.sqrt(groups) if is_root else groups
    largest_bits = (groups.view(np.uint32) & 0x7FFFFFFF).max(1, keepdims=True)
    largest = largest_bits.clip(SMALLEST, INFINITE).view(np.float32)
    codes = np.float32(255) / largest * groups if is_root else np.float32(254) * groups / (largest + np.abs(groups))
    scales = (largest / np.float32(255) if is_root else largest).view(np.uint32)
    scales = scales + np.resize(np.asarray(random, np.uint32), scales.shape) >> 16  # padding remains zero
    is_regular = (scales > SMALLEST >> 16) & (scales <= LARGEST >> 16)
    scales = np.where(is_regular, scales, (scales > SMALLEST >> 16) * (INFINITE >> 16))
    code_bytes = ((codes + NEAREST).view(np.uint32) * is_regular).astype(np.uint8).reshape(-1, PACK)
    scale_bytes = scales.astype(np.uint16).view(np.uint8).reshape(-1, PACK_BYTES - PACK)
    return np.concatenate([code_bytes, scale_bytes], 1).ravel()


@dataclass(frozen=True, slots=True)
class Int8Moment:
    """Flat moment of n elements in groups, on any device."""

    groups: torch.Tensor
    n: int
    is_root: bool

    def values(self) -> torch.Tensor:
        """Unpack to fp32."""
        result = torch.empty(self.n)
        for start in range(0, self.n, PIECE_ELEMENTS):  # temporaries are several times as large as a piece
            target = result[start : start + PIECE_ELEMENTS]
            packs = self.groups[group_bytes(start) :][: group_bytes(len(target))]
            target.copy_(torch.from_numpy(unpacked(packs.cpu().numpy(), len(target), self.is_root)))
        return result

    def copy_(self, values: torch.Tensor) -> None:
        """Pack flat numbers of any dtype: scales rounded half up, codes to nearest."""
        for start in range(0, self.n, PIECE_ELEMENTS):
            groups = torch.from_numpy(packed(values[start : start + PIECE_ELEMENTS].float().numpy(), self.is_root))
            self.groups[group_bytes(start) :][: len(groups)] = groups
