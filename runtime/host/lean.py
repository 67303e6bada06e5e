"""AdamW and Lion on less state: moments in bf16 or int8, and bf16 masters, rounded stochastically, in one pass over memory.

Every operation is of fp32 and rounds once, so that processors agree on every element (docs/optimizers.md). numba compiles the
loops; without it no run begins.

The random number of an element follows from a key (of run, update, parameter and tensor) and its place in the whole parameter:
neither plan, rank, thread nor restart changes it. The 65,536 places of a turn take all 16-bit numbers, each once, in one fixed and
mixed order, from where key and turn say.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.compiled import compiled

from .rounding import GROUP, HALF, INFINITE, LEAST, MOST, NEAREST, PACK, PACK_BYTES, TURN, Drawn, Keys

# Of numbers, as unsigned integers: 16 are those of bf16, 32 of fp32, 8 of int8 groups; of a remainder, int16 or, of 24 bits, int8
Bits = NDArray[Any]
State = tuple[Bits, Bits, Bits, Bits]  # weight or master, remainder, first and second moment
BLOCK_ELEMENTS = 2**13  # that a loop has in a core's cache; turns consist of whole ones
NARROW, EIGHT = np.uint32(16), np.uint32(8)  # bits that bf16 lacks, and a master of 24


@cache
def order() -> Bits:
    """All 16-bit numbers in a mixed order (by a bijection), twice: a turn begins at any of them."""
    x: Any = np.arange(TURN, dtype=np.uint32)
    x = (x ^ x >> 8) * 0x88B5 & 0xFFFF
    x = (x ^ x >> 7) * 0xDB2D & 0xFFFF
    return np.tile(x ^ x >> 9, 2).astype(np.uint16)


@cache
def halves() -> Bits:
    return np.full(TURN, HALF, np.uint16)


def scalars(rule: str, numbers: list[float], n_updates: int) -> NDArray[np.float32]:
    """What one update multiplies by and adds, each rounded to fp32 once."""
    lr, beta1, beta2, weight_decay, eps = numbers
    decay, rate, correction = 1 - lr * weight_decay, lr / (1 - beta1**n_updates), 1 / math.sqrt(1 - beta2**n_updates)
    of_lion, of_adamw = [decay, 1 - beta1, 1 - beta2, lr, 0, 0, 0], [decay, 1 - beta1, beta2, 1 - beta2, correction, eps, -rate]
    return np.array(of_lion if rule == "lion" else of_adamw, np.float32)


# -- the loops -----------------------------------------------------------------------------------------------------------


@compiled
def begin(key: int, turn: Any) -> Any:
    """Where in `order` a turn begins: a hash, whose products stay below 2^63."""
    x = (key + turn) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0xFFFF


@compiled
def number(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@compiled
def bits(number: Any) -> Any:
    return np.float32(number).view(np.uint32)


@compiled
def narrow(of: Bits) -> Any:
    """How many bits of fp32 its numbers lack: a shift, not a branch, so that loops over numbers of any kind become vectors."""
    return NARROW if of.itemsize == 2 else np.uint32(0)


@compiled
def store(wide: Bits, random: Bits, to: Bits) -> None:
    """As fp32; or as bf16, up where what is cut off and the random number carry. NaN stays NaN."""
    if to.itemsize == 2:
        for i in range(len(to)):
            is_nan = (wide[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            to[i] = np.uint32(0x7FC0) if is_nan else (wide[i] + np.uint32(random[i])) >> NARROW
    else:
        for i in range(len(to)):
            to[i] = wide[i]


@compiled
def there(of: Bits, at: int, end: int) -> Bits:
    """Elements at .. end - 1; of what is in groups, whole packs."""
    return of[at // PACK * PACK_BYTES : -(-end // PACK) * PACK_BYTES] if of.itemsize == 1 else of[at:end]


@compiled
def load_moment(source: Bits, is_root: bool, wide: Bits, other: Bits) -> None:
    """Of groups, as `unpacked`. Loops are such that compilers make vectors of them: a number of a group is spread first."""
    x, scales = wide.view(np.float32), other.view(np.float32)
    for k in range(len(source) // PACK_BYTES):
        at = k * PACK_BYTES
        for i in range(PACK):
            x[k * PACK + i] = np.float32(source[at + i])
        for j in range(PACK // GROUP):
            low, high = np.uint32(source[at + PACK + 2 * j]), np.uint32(source[at + PACK + 2 * j + 1])
            first = k * PACK + j * GROUP
            other[first : first + GROUP] = (low << NARROW) | (high << np.uint32(24))
    if is_root:
        for i in range(len(x)):
            x[i] = (scales[i] * x[i]) * (scales[i] * x[i])
    else:
        for i in range(len(x)):
            code = x[i] if x[i] < np.float32(128) else x[i] - np.float32(256)  # signed
            x[i] = np.divide(scales[i] * code, np.float32(254) - abs(code))


@compiled
def store_moment(wide: Bits, is_root: bool, random: Bits, to: Bits, other: Bits) -> None:
    """As `store`, or as `packed`, of roots where `is_root`; numbers in groups are lost."""
    if to.itemsize > 1:
        store(wide, random, to)
        return
    x, by = wide.view(np.float32), other.view(np.float32)
    for g in range(len(x) // GROUP):
        first, most = g * GROUP, LEAST
        for i in range(GROUP):
            most = max(most, wide[first + i] & np.uint32(0x7FFFFFFF))
        most = min(most, INFINITE)
        largest = number(most)
        if is_root:
            most, largest = bits(np.divide(largest, np.float32(255))), np.divide(np.float32(255), largest)
        scale = (most + np.uint32(random[first])) >> NARROW
        if scale <= LEAST >> NARROW or scale > MOST >> NARROW:
            wide[first : first + GROUP] = 0
            scale = INFINITE >> NARROW if scale > MOST >> NARROW else np.uint32(0)
        at = first // PACK * PACK_BYTES + PACK + g % (PACK // GROUP) * 2
        to[at], to[at + 1] = np.uint8(scale), np.uint8(scale >> np.uint32(8))
        by[first : first + GROUP] = largest
    if is_root:
        for i in range(len(x)):
            x[i] = by[i] * x[i] + NEAREST
    else:
        for i in range(len(x)):
            x[i] = np.divide(np.float32(254) * x[i], by[i] + abs(x[i])) + NEAREST
    for k in range(len(to) // PACK_BYTES):
        for i in range(PACK):
            to[k * PACK_BYTES + i] = np.uint8(wide[k * PACK + i])


@compiled
def store_split(wide: Bits, random: Bits, remainder: Bits, weight: Bits) -> None:
    """A master in two parts; of 24 bits, up where what is cut off and the random number's upper half carry. NaN stays NaN."""
    lacks = EIGHT if remainder.itemsize == 1 else np.uint32(0)
    if remainder.itemsize == 1:
        for i in range(len(weight)):
            is_nan = (wide[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            up = (wide[i] + np.uint32(random[i] >> np.uint16(8))) & np.uint32(0xFFFFFF00)
            wide[i] = np.uint32(0x7FC00000) if is_nan else up
    for i in range(len(weight)):
        is_nan = (wide[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        remainder[i] = wide[i] >> lacks
        weight[i] = np.uint32(0x7FC0) if is_nan else (wide[i] + np.uint32(HALF)) >> NARROW


@compiled
def sum_gradient(parts: tuple[Bits, Bits], n_parts: int, is_rounded: bool, factor: Any, wide: Bits) -> None:
    """Of one or two parts, rounded to bf16 (to even), times a factor."""
    by, of_second = narrow(parts[0]), narrow(parts[1])
    for i in range(len(wide)):
        total = number(np.uint32(parts[0][i]) << by)
        if n_parts == 2:
            total += number(np.uint32(parts[1][i]) << of_second)
        if is_rounded:
            of = bits(total)
            total = number((of + np.uint32(0x7FFF) + ((of >> NARROW) & np.uint32(1))) & np.uint32(0xFFFF0000))
        wide[i] = bits(total * factor)


@compiled
def adamw(w: Bits, remainder: Bits, is_split: bool, m: Bits, v: Bits, keeps_root: bool, by: Any, x: Bits) -> None:
    """Of the gradient in the first row of `x`; there and in two rows more are the master and the moments then. One array for all
    that is written: a compiler would have to prove of each that it is not among those that are read."""
    decay, towards, beta2, of_square, correction, eps, rate = by[0], by[1], by[2], by[3], by[4], by[5], by[6]
    of_w, of_m, of_v, lacks = narrow(w), narrow(m), narrow(v), EIGHT if remainder.itemsize == 1 else np.uint32(0)
    for i in range(len(w)):
        g, master, first = number(x[i]), np.uint32(w[i]) << of_w, number(np.uint32(m[i]) << of_m)
        if is_split:
            master += np.uint32(remainder[i]) << lacks
        first = first + towards * (g - first)
        second = number(np.uint32(v[i]) << of_v) * beta2 + (of_square * g) * g
        root = np.sqrt(second)
        x[i] = bits(number(master) * decay + np.divide(rate * first, root * correction + eps))
        x[i + BLOCK_ELEMENTS] = bits(first)
        x[i + 2 * BLOCK_ELEMENTS] = bits(root if keeps_root else second)


@compiled
def lion(w: Bits, remainder: Bits, is_split: bool, m: Bits, by: Any, x: Bits) -> None:
    """The same, with one moment."""
    decay, towards, away, lr = by[0], by[1], by[2], by[3]
    of_w, of_m, lacks = narrow(w), narrow(m), EIGHT if remainder.itemsize == 1 else np.uint32(0)
    for i in range(len(w)):
        g, master, first = number(x[i]), np.uint32(w[i]) << of_w, number(np.uint32(m[i]) << of_m)
        if is_split:
            master += np.uint32(remainder[i]) << lacks
        d = g - first
        u = first + towards * d
        step = lr if u > 0 else (-lr if u < 0 else u)  # 0 and NaN stay
        x[i] = bits(number(master) * decay - step)
        x[i + BLOCK_ELEMENTS] = bits(first + away * d)


@compiled
def update(
    start: int, end: int, keys: Keys, is_master_drawn: bool, first: int, order: Bits, halves: Bits, is_lion: bool, by: Any,
    to: State, before: State, is_split: bool, parts: tuple[Bits, Bits], n_parts: int, is_rounded: bool, factor: Any,
) -> None:  # fmt: skip
    """Elements start .. end - 1 of a parameter, of which `first` is the place of element 0."""
    weight, remainder, m, v = to
    x = np.empty(6 * BLOCK_ELEMENTS, np.uint32)  # gradient, then master; moments; what they were, in groups; scratch
    at, other = start, x[5 * BLOCK_ELEMENTS :]
    while at < end:
        turn, within = (first + at) // TURN, (first + at) % TURN
        n = min(BLOCK_ELEMENTS, end - at, TURN - within)
        next, whole = at + n, -(-n // PACK) * PACK  # what a last pack lacks is zero
        moment, second = x[BLOCK_ELEMENTS:][:whole], x[2 * BLOCK_ELEMENTS :][:whole]
        sum_gradient((parts[0][at:next], parts[1][at:next]), n_parts, is_rounded, factor, x[:n])
        master = before[0][at:next], before[1][at:next], is_split
        m_before, v_before = there(before[2], at, next), there(before[3], at, next)
        if m.itemsize == 1:
            m_wide, v_wide = x[3 * BLOCK_ELEMENTS :][:whole], x[4 * BLOCK_ELEMENTS :][:whole]
            load_moment(m_before, False, m_wide, other)
            if is_lion:
                lion(*master, m_wide, by, x)
            else:
                load_moment(v_before, True, v_wide, other)
                adamw(*master, m_wide, v_wide, True, by, x)
        elif is_lion:
            lion(*master, m_before, by, x)
        else:
            adamw(*master, m_before, v_before, False, by, x)
        moment[n:] = second[n:] = 0
        store_moment(moment, False, order[(begin(keys[1], turn) + within) % TURN :], there(m, at, next), other)
        if not is_lion:
            store_moment(second, True, order[(begin(keys[2], turn) + within) % TURN :], there(v, at, next), other)
        random = order[(begin(keys[0], turn) + within) % TURN :] if is_master_drawn else halves
        if is_split:
            store_split(x[:n], random, remainder[at:next], weight[at:next])
        else:
            store(x[:n], random, weight[at:next])
        at = next


# -- what calls them -----------------------------------------------------------------------------------------------------


def bits_of(tensor: torch.Tensor) -> Bits:
    """Of a flat tensor on the host, as `update` takes them, in its memory."""
    if tensor.dtype in (torch.int16, torch.int8, torch.uint8):
        return tensor.numpy()
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16).numpy().view(f"u{tensor.itemsize}")


def state_of(master: torch.Tensor, remainder: torch.Tensor | None, moments: Sequence[torch.Tensor]) -> State:
    """A parameter's state as `update` takes it: what an optimizer does not keep is there as something that it does not touch."""
    split = torch.empty(0, dtype=torch.int16) if remainder is None else remainder
    return bits_of(master), bits_of(split), bits_of(moments[0]), bits_of(moments[-1])


class Update(NamedTuple):
    """A step on one parameter, from a state to another, or in place. The gradient's parts are summed, rounded to bf16 if
    `is_rounded`, and multiplied by a factor."""

    rule: str
    drawn: Drawn
    scalars: NDArray[np.float32]
    to: State
    before: State
    parts: tuple[Bits, ...]
    is_rounded: bool
    factor: float

    def run(self, start: int, end: int) -> None:
        """Elements start .. end - 1 of what is here."""
        parts, of_state = (self.parts[0], self.parts[-1]), (self.to, self.before, len(self.to[1]) > 0)
        update(
            start, end, *self.drawn, order(), halves(), self.rule == "lion", self.scalars, *of_state,
            parts, len(self.parts), self.is_rounded, np.float32(self.factor),
        )  # fmt: skip
