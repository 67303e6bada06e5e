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
LEAST, MOST, INFINITE = np.uint32(0x22800000), np.uint32(0x7B800000), np.uint32(0x7F800000)
NEAREST = np.float32(3 * 2**22)  # the low byte of code + NEAREST is the code rounded to nearest, ties to even
HALF = 0x8000  # in place of a random number, rounds half up
PIECE_ELEMENTS = 2**20  # unpacked at a time


class Drawn(NamedTuple):
    """Keys for stochastic rounding. `first`: position of the first local element in the whole parameter. Without `is_master_drawn`
    the master is rounded half up."""

    keys: Keys
    is_master_drawn: bool
    first: int = 0


def drawn(seed: int, n_updates: int, name: str, first: int, is_master_drawn: bool) -> Drawn:
    """32-bit keys of a parameter for one update of a run."""
    digest = blake2b(f"{seed} {n_updates} {name}".encode(), digest_size=12).digest()
    master, moment, second = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))
    return Drawn((master, moment, second), is_master_drawn, first)


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
    of = groups.reshape(-1, PACK_BYTES)
    scales = (np.ascontiguousarray(of[:, PACK:]).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    codes = (of[:, :PACK] if is_root else of[:, :PACK].view(np.int8)).astype(np.float32)
    found = scales.repeat(GROUP, 1) * codes
    return (found * found if is_root else found / (254 - np.abs(codes))).reshape(-1)[:n]


def packed(x: NDArray[np.float32], is_root: bool, random: Any = HALF) -> NDArray[np.uint8]:
    """Flat groups of fp32 numbers. `random`: one number per group, to round its scale."""
    of = np.pad(x, (0, -len(x) % PACK)).reshape(-1, GROUP)
    of = np.sqrt(of) if is_root else of
    most = (of.view(np.uint32) & 0x7FFFFFFF).max(1, keepdims=True)
    largest = most.clip(LEAST, INFINITE).view(np.float32)
    codes = np.float32(255) / largest * of if is_root else np.float32(254) * of / (largest + np.abs(of))
    scales = (largest / np.float32(255) if is_root else largest).view(np.uint32)
    scales = scales + np.resize(np.asarray(random, np.uint32), scales.shape) >> 16  # padding remains zero
    is_there = (scales > LEAST >> 16) & (scales <= MOST >> 16)
    scales = np.where(is_there, scales, (scales > LEAST >> 16) * (INFINITE >> 16))
    kept = ((codes + NEAREST).view(np.uint32) * is_there).astype(np.uint8), scales.astype(np.uint16)
    return np.concatenate(
        [of.view(np.uint8).reshape(-1, n) for of, n in zip(kept, (PACK, PACK_BYTES - PACK), strict=True)], 1
    ).ravel()


@dataclass(frozen=True, slots=True)
class Int8Moment:
    """Flat moment of n elements in groups, on any device."""

    groups: torch.Tensor
    n: int
    is_root: bool

    def whole(self) -> torch.Tensor:
        """Unpack to fp32."""
        found = torch.empty(self.n)
        for at in range(0, self.n, PIECE_ELEMENTS):  # temporaries are several times as large as a piece
            to = found[at : at + PIECE_ELEMENTS]
            here = self.groups[group_bytes(at) :][: group_bytes(len(to))]
            to.copy_(torch.from_numpy(unpacked(here.cpu().numpy(), len(to), self.is_root)))
        return found

    def copy_(self, given: torch.Tensor) -> None:
        """Pack flat numbers of any dtype: scales rounded half up, codes to nearest."""
        for at in range(0, self.n, PIECE_ELEMENTS):
            groups = torch.from_numpy(packed(given[at : at + PIECE_ELEMENTS].float().numpy(), self.is_root))
            self.groups[group_bytes(at) :][: len(groups)] = groups
