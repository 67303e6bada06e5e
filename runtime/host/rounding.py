"""Rounding of a parameter's state to fewer bits: keys of random numbers, and moments in groups of int8 codes.

A group is 32 codes and a bf16 scale (docs/optimizers.md). Its first moment is `scale code / (254 - |code|)`, of a signed code; of
the second it has the root, `scale code`. So its largest element is exact, and packing what was unpacked changes no bit. In memory
there are the codes of four groups, then their scales.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Keys = tuple[int, int, int]  # of the master and the moments
TURN = 2**16
GROUP, PACK, PACK_BYTES = 32, 128, 136
# Bits of scales, 2^-58 and 2^120: a group with one that is not above the first is zero, with one above the second all of it is NaN.
# They bound what is kept: a largest element above a bound may be rounded to it, and is not to be another when it is read again
LEAST, MOST, INFINITE = np.uint32(0x22800000), np.uint32(0x7B800000), np.uint32(0x7F800000)
NEAREST = np.float32(3 * 2**22)  # added to a code, it leaves that to the nearest, ties to even, in the lowest byte of the sum
HALF = 0x8000  # in place of a random number: half up
PIECE_ELEMENTS = 2**20  # unpacked at a time


class Drawn(NamedTuple):
    """`first`: the place in the whole parameter of the first element that is here. A bf16 master that is not drawn is rounded
    half up."""

    keys: Keys
    is_master_drawn: bool
    first: int = 0


def drawn(seed: int, n_updates: int, name: str, first: int, is_master_drawn: bool) -> Drawn:
    """Of a parameter, at one update of a run: keys of 32 bits."""
    digest = blake2b(f"{seed} {n_updates} {name}".encode(), digest_size=12).digest()
    master, moment, second = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))
    return Drawn((master, moment, second), is_master_drawn, first)


def begin(key: int, turn: Any) -> Any:
    """The place in the mixed order at which a turn begins: a hash, whose products stay below 2^63."""
    x = (key + turn) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0xFFFF


def mixed(x: Any) -> Any:
    """The 16-bit numbers at places of the mixed order, by a bijection."""
    x = ((x ^ (x >> 8)) * 0x88B5) & 0xFFFF
    x = ((x ^ (x >> 7)) * 0xDB2D) & 0xFFFF
    return x ^ (x >> 9)


def numbers(key: int, first: int, n: int) -> Any:
    """16-bit random numbers of n elements from a place on, as int32."""
    places = np.arange(first, first + n)
    return mixed((begin(key, places // TURN) + places) % TURN).astype(np.int32)


def signed(key: int) -> int:
    """As a kernel takes it: in 32 bits, with a sign."""
    return key - 2**32 if key >= 2**31 else key


def group_bytes(n_elements: int) -> int:
    """Of the groups of so many elements, the last of which may be short."""
    return -(-n_elements // PACK) * PACK_BYTES


def unpacked(groups: NDArray[Any], n: int, is_root: bool) -> NDArray[np.float32]:
    """The first n numbers of flat groups, as fp32."""
    of = groups.reshape(-1, PACK_BYTES)
    scales = (np.ascontiguousarray(of[:, PACK:]).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    codes = (of[:, :PACK] if is_root else of[:, :PACK].view(np.int8)).astype(np.float32)
    found = scales.repeat(GROUP, 1) * codes
    return (found * found if is_root else found / (254 - np.abs(codes))).reshape(-1)[:n]


def packed(x: NDArray[np.float32], is_root: bool, random: Any = HALF) -> NDArray[np.uint8]:
    """Flat groups of fp32 numbers. `random`: of each group, what rounds its scale."""
    of = np.pad(x, (0, -len(x) % PACK)).reshape(-1, GROUP)
    of = np.sqrt(of) if is_root else of
    most = (of.view(np.uint32) & 0x7FFFFFFF).max(1, keepdims=True)
    largest = most.clip(LEAST, INFINITE).view(np.float32)
    codes = np.float32(255) / largest * of if is_root else np.float32(254) * of / (largest + np.abs(of))
    scales = (largest / np.float32(255) if is_root else largest).view(np.uint32)
    scales = scales + np.resize(np.asarray(random, np.uint32), scales.shape) >> 16  # what a last pack lacks is zero with any number
    is_there = (scales > LEAST >> 16) & (scales <= MOST >> 16)
    scales = np.where(is_there, scales, (scales > LEAST >> 16) * (INFINITE >> 16))
    kept = ((codes + NEAREST).view(np.uint32) * is_there).astype(np.uint8), scales.astype(np.uint16)
    return np.concatenate(
        [of.view(np.uint8).reshape(-1, n) for of, n in zip(kept, (PACK, PACK_BYTES - PACK), strict=True)], 1
    ).ravel()


@dataclass(frozen=True, slots=True)
class Int8Moment:
    """A flat moment of n elements, in groups on any device."""

    groups: torch.Tensor
    n: int
    is_root: bool

    def whole(self) -> torch.Tensor:
        """As fp32."""
        found = torch.empty(self.n)
        for at in range(0, self.n, PIECE_ELEMENTS):  # unpacking takes several times a piece
            to = found[at : at + PIECE_ELEMENTS]
            here = self.groups[group_bytes(at) :][: group_bytes(len(to))]
            to.copy_(torch.from_numpy(unpacked(here.cpu().numpy(), len(to), self.is_root)))
        return found

    def copy_(self, given: torch.Tensor) -> None:
        """Take flat numbers of any dtype: scales half up, codes to the nearest."""
        for at in range(0, self.n, PIECE_ELEMENTS):
            groups = torch.from_numpy(packed(given[at : at + PIECE_ELEMENTS].float().numpy(), self.is_root))
            self.groups[group_bytes(at) :][: len(groups)] = groups
