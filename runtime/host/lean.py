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
    return np.tile(x ^ x >> 9, 2).astype(np.uint32)


@cache
def halves() -> Bits:
    return np.full(TURN, HALF, np.uint32)


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
def load(source: Bits, wide: Bits) -> None:
    """Numbers as fp32."""
    if source.itemsize == 2:
        for i in range(len(wide)):
            wide[i] = np.uint32(source[i]) << NARROW
    else:
        for i in range(len(wide)):
            wide[i] = source[i]


@compiled
def store(wide: Bits, random: Bits, to: Bits) -> None:
    """As fp32; or as bf16, up where what is cut off and the random number carry. NaN stays NaN."""
    if to.itemsize == 2:
        for i in range(len(wide)):
            is_nan = (wide[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            to[i] = np.uint32(0x7FC0) if is_nan else (wide[i] + random[i]) >> NARROW
    else:
        for i in range(len(wide)):
            to[i] = wide[i]


@compiled
def there(of: Bits, at: int, end: int) -> Bits:
    """Elements at .. end - 1; of what is in groups, whole packs."""
    return of[at // PACK * PACK_BYTES : -(-end // PACK) * PACK_BYTES] if of.itemsize == 1 else of[at:end]


@compiled
def load_moment(source: Bits, is_root: bool, wide: Bits, other: Bits) -> None:
    """As `load`, or as `unpacked`. Loops are such that compilers make vectors of them: a number of a group is spread first."""
    if source.itemsize > 1:
        load(source, wide[: len(source)])
        return
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
        store(wide[: len(to)], random, to)
        return
    x, by, bits = wide.view(np.float32), other.view(np.float32), np.empty(1, np.uint32)
    for g in range(len(x) // GROUP):
        first, most = g * GROUP, LEAST
        for i in range(GROUP):
            most = max(most, wide[first + i] & np.uint32(0x7FFFFFFF))
        bits[0] = min(most, INFINITE)
        of_group = bits.view(np.float32)[0]
        if is_root:
            bits.view(np.float32)[0] = np.divide(of_group, np.float32(255))
            of_group = np.divide(np.float32(255), of_group)
        scale = (bits[0] + random[first]) >> NARROW
        if scale <= LEAST >> NARROW or scale > MOST >> NARROW:
            wide[first : first + GROUP] = 0
            scale = INFINITE >> NARROW if scale > MOST >> NARROW else np.uint32(0)
        at = first // PACK * PACK_BYTES + PACK + g % (PACK // GROUP) * 2
        to[at], to[at + 1] = np.uint8(scale), np.uint8(scale >> np.uint32(8))
        by[first : first + GROUP] = of_group
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
def join(remainder: Bits, wide: Bits) -> None:
    if remainder.itemsize == 1:
        for i in range(len(wide)):
            wide[i] += np.uint32(remainder[i]) << EIGHT
    else:
        for i in range(len(wide)):
            wide[i] += np.uint32(remainder[i])


@compiled
def cut(wide: Bits, random: Bits, remainder: Bits) -> None:
    """Of 24 bits, up where what is cut off and the random number's upper half carry. NaN stays NaN."""
    if remainder.itemsize == 1:
        for i in range(len(wide)):
            is_nan = (wide[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            wide[i] = np.uint32(0x7FC00000) if is_nan else (wide[i] + (random[i] >> EIGHT)) & np.uint32(0xFFFFFF00)
        for i in range(len(wide)):
            remainder[i] = np.int8(wide[i] >> EIGHT)
    else:
        for i in range(len(wide)):
            remainder[i] = np.int16(wide[i])


@compiled
def sum_gradient(parts: tuple[Bits, Bits], n_parts: int, is_rounded: bool, factor: Any, wide: Bits, other: Bits) -> None:
    """Of one or two parts, rounded to bf16 (to even), times a factor."""
    load(parts[0], wide)
    numbers, others = wide.view(np.float32), other.view(np.float32)
    if n_parts == 2:
        load(parts[1], other)
        for i in range(len(numbers)):
            numbers[i] += others[i]
    if is_rounded:
        for i in range(len(wide)):
            is_odd = (wide[i] >> NARROW) & np.uint32(1)
            wide[i] = (wide[i] + np.uint32(0x7FFF) + is_odd) & np.uint32(0xFFFF0000)
    for i in range(len(numbers)):
        numbers[i] *= factor


@compiled
def adamw(w: Any, g: Any, m: Any, v: Any, by: Any, keeps_root: bool) -> None:
    decay, towards, beta2, of_square, correction, eps, rate = by[0], by[1], by[2], by[3], by[4], by[5], by[6]
    for i in range(len(w)):
        first = m[i] + towards * (g[i] - m[i])
        second = v[i] * beta2 + (of_square * g[i]) * g[i]
        root = np.sqrt(second)
        m[i] = first
        v[i] = root if keeps_root else second
        w[i] = w[i] * decay + np.divide(rate * first, root * correction + eps)


@compiled
def lion(w: Any, g: Any, m: Any, by: Any) -> None:
    decay, towards, away, lr = by[0], by[1], by[2], by[3]
    for i in range(len(w)):
        d = g[i] - m[i]
        u = m[i] + towards * d
        step = lr if u > 0 else (-lr if u < 0 else u)  # 0 and NaN stay
        w[i] = w[i] * decay - step
        m[i] = m[i] + away * d


@compiled
def update(
    start: int, end: int, keys: Keys, is_master_drawn: bool, first: int, order: Bits, halves: Bits, is_lion: bool, by: Any,
    to: State, before: State, is_split: bool, parts: tuple[Bits, Bits], n_parts: int, is_rounded: bool, factor: Any,
) -> None:  # fmt: skip
    """Elements start .. end - 1 of a parameter, of which `first` is the place of element 0."""
    weight, remainder, m, v = to
    weight_before, remainder_before, m_before, v_before = before
    scratch = np.empty((5, BLOCK_ELEMENTS), np.uint32)
    at = start
    while at < end:
        turn, within = (first + at) // TURN, (first + at) % TURN
        n = min(BLOCK_ELEMENTS, end - at, TURN - within)
        w, g, a, b, next = scratch[0, :n], scratch[1, :n], scratch[2, :n], scratch[3, :n], at + n
        whole = -(-n // PACK) * PACK  # what a last pack lacks is zero
        first_whole, second_whole, other = scratch[2, :whole], scratch[3, :whole], scratch[4]
        sum_gradient((parts[0][at:next], parts[1][at:next]), n_parts, is_rounded, factor, g, w)
        load(weight_before[at:next], w)
        if is_split:
            join(remainder_before[at:next], w)
        load_moment(there(m_before, at, next), False, first_whole, other)
        if is_lion:
            lion(w.view(np.float32), g.view(np.float32), a.view(np.float32), by)
        else:
            load_moment(there(v_before, at, next), True, second_whole, other)
            adamw(w.view(np.float32), g.view(np.float32), a.view(np.float32), b.view(np.float32), by, v.itemsize == 1)
            second_whole[n:] = 0
            store_moment(second_whole, True, order[(begin(keys[2], turn) + within) % TURN :], there(v, at, next), other)
        first_whole[n:] = 0
        store_moment(first_whole, False, order[(begin(keys[1], turn) + within) % TURN :], there(m, at, next), other)
        random = order[(begin(keys[0], turn) + within) % TURN :] if is_master_drawn else halves
        if is_split:
            cut(w, random, remainder[at:next])
        store(w, halves if is_split else random, weight[at:next])
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
