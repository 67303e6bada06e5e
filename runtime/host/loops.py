"""The host optimizer's kernels, compiled by numba: an update rule on a state layout, a sum of squares, a sum of gradients.

A kernel passes once over memory, block by block; what a block needs besides fits a core's first caches. The layout follows from the
dtypes of the arguments, and numba compiles a kernel for each. Arrays hold the bits of numbers: uint32 of fp32, uint16 of bf16,
int16 or int8 of a remainder, uint8 of groups of int8 codes. An absent array is None.

Loads and stores carry LLVM's alias scopes, one for each operand. Without them LLVM compares the addresses of all pairs of arrays
before a loop, gives up at seven arrays and emits a scalar loop, ten times as slow. The scopes hold: operands never overlap.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import extending, types
from numpy.typing import NDArray

from penstock.runtime.compiled import compiled_kernel, compiled_loop

from . import rounding
from .chunks import CHUNK_ELEMENTS, Scratch
from .param_state import ParamState, SummedGradient, UpdateArguments
from .rounding import GROUP, HALF, INFINITE, LEAST, MOST, NEAREST, PACK, PACK_BYTES, TURN

Bits = NDArray[Any]
intrinsic: Callable[..., Callable[..., Any]] = extending.intrinsic  # its own types are those of Python functions, not of calls
BLOCK_ELEMENTS = 2**11  # a turn consists of whole blocks
SCRATCH_ELEMENTS = 4 * BLOCK_ELEMENTS  # gradient, two moments, scales of groups
ROW_ELEMENTS = 2**8  # of a chunk of the norm, which is a square of so many rows
NARROW, EIGHT, NAN = np.uint32(16), np.uint32(8), np.uint32(0x7FC0)
# Operands, each an alias scope; MOMENT: numbers of either moment, which an update reads as FIRST or SECOND
WEIGHT, REMAINDER, FIRST, SECOND, GRADIENT, OF_WEIGHT, OF_FIRST, OF_SECOND, GROUPS, MOMENT = range(10)
begin = compiled_loop(rounding.begin)


def chosen(by_types: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose body is chosen by the types of its arguments: an absent array has a type of its own."""

    def name(*args: Any) -> Any:
        raise NotImplementedError

    extending.overload(name, jit_options={"error_model": "numpy"}, strict=False)(by_types)
    return name


def _is_absent(of: Any) -> bool:
    return isinstance(of, types.NoneType)


# -- elements ------------------------------------------------------------------------------------------------------------


def _place(context: Any, builder: Any, of: Any, array: Any, i: Any) -> Any:
    return builder.gep(context.make_array(of)(context, builder, array).data, [i])


def _apart(builder: Any, access: Any, operand: int) -> Any:
    """Mark a load or store: it overlaps no access of another operand."""
    module = builder.module
    domain = module.add_metadata(["host optimizer"])
    scopes = [module.add_metadata([f"operand {i}", domain]) for i in range(MOMENT)]
    own = (FIRST, SECOND) if operand == MOMENT else (operand,)
    access.set_metadata("alias.scope", module.add_metadata([scopes[i] for i in own]))
    access.set_metadata("noalias", module.add_metadata([s for i, s in enumerate(scopes) if i not in own]))
    return access


@intrinsic(prefer_literal=True)
def load(typing: Any, array: Any, i: Any, operand: Any) -> Any:
    """An element's bits as uint32, with the sign of a signed one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = _apart(builder, builder.load(_place(context, builder, array, *args[:2])), operand.literal_value)
        widen = builder.sext if array.dtype.signed else builder.zext
        return element if element.type.width == 32 else widen(element, ir.IntType(32))

    return types.uint32(array, types.intp, operand), generate


@intrinsic(prefer_literal=True)
def store(typing: Any, array: Any, i: Any, bits: Any, operand: Any) -> Any:
    """Store the lowest bits of a uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, array, *args[:2])
        element = place.type.pointee
        value = args[2] if element.width == 32 else builder.trunc(args[2], element)
        _apart(builder, builder.store(value, place), operand.literal_value)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint32, operand), generate


@intrinsic
def number(typing: Any, bits: Any) -> Any:
    """fp32 of its bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def bits_of(typing: Any, number: Any) -> Any:
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once."""
    return types.float32(*[types.float32] * 3), lambda context, builder, signature, args: builder.fma(*args)


@compiled_loop
def narrow(of: Bits) -> Any:
    """Bits of fp32 that its numbers lack: a shift, not a branch, so that LLVM vectorises loops over numbers of any kind."""
    return NARROW if of.itemsize == 2 else np.uint32(0)


@compiled_loop
def master_of(weight: Bits, remainder: Bits | None, i: int) -> Any:
    """A master's bits as fp32; of a split one the weight is the upper half, and the remainder is added."""
    wide = load(weight, i, WEIGHT) << narrow(weight)
    if remainder is None:
        return wide
    return wide + (load(remainder, i, REMAINDER) << (EIGHT if remainder.itemsize == 1 else np.uint32(0)))


@compiled_loop
def store_master(weight: Bits, remainder: Bits | None, random: Bits | None, i: int, master: Any) -> None:
    """Round half up, or up where the bits cut off and the random number carry; one of 24 bits by the number's upper half. NaN stays
    NaN. A split master's weight is rounded half up always: nothing is lost."""
    bits, is_nan, carried = bits_of(master), master != master, np.uint32(HALF)
    if random is not None:
        carried = load(random, i, OF_WEIGHT)
    if remainder is not None:
        if remainder.itemsize == 1:
            bits = NAN << NARROW if is_nan else (bits + (carried >> EIGHT)) & np.uint32(0xFFFFFF00)
        store(remainder, i, bits >> (EIGHT if remainder.itemsize == 1 else np.uint32(0)), REMAINDER)
        carried = np.uint32(HALF)
    if weight.itemsize == 2:
        bits = NAN if is_nan else (bits + carried) >> NARROW
    store(weight, i, bits, WEIGHT)


@compiled_loop
def rounded(of: Bits, x: Any, random: Any) -> Any:
    """Bits of fp32, or of bf16 rounded stochastically. NaN stays NaN."""
    bits = bits_of(x)
    if of.itemsize == 2:
        bits = NAN if x != x else (bits + random) >> NARROW
    return bits


# -- update rules --------------------------------------------------------------------------------------------------------


@compiled_loop
def fused(weight: Bits, remainder: Any, m: Bits, v: Bits, gradients: Bits, n: int, scale: Any, by: Any) -> None:
    """AdamW by the operations of torch's fused kernel, to its bits."""
    decay, towards, beta2, of_square, correction, eps, rate = by[0], by[1], by[2], by[3], by[4], by[5], by[6]
    is_near = abs(towards) < np.float32(0.5)  # as `lerp` chooses the end to begin with
    towards = towards if is_near else towards - np.float32(1)
    for i in range(n):
        g = number(load(gradients, i, GRADIENT) << narrow(gradients)) * scale
        first, second = number(load(m, i, FIRST)), number(load(v, i, SECOND))
        first = fma(towards, g - first, first if is_near else g)
        second = fma(of_square * g, g, second * beta2)
        master = number(master_of(weight, remainder, i)) * decay + (rate * first) / (np.sqrt(second) / correction + eps)
        store(m, i, bits_of(first), FIRST)
        store(v, i, bits_of(second), SECOND)
        store_master(weight, remainder, None, i, master)


@compiled_loop
def adamw(
    weight: Bits, remainder: Any, m: Bits, v: Bits, gradients: Bits, of_weight: Any, of_m: Any, of_v: Any, n: int, scale: Any,
    by: Any, keeps_root: bool,
) -> None:  # fmt: skip
    """AdamW by the operations of docs/optimizers.md. `keeps_root`: store the root of the second moment."""
    decay, towards, beta2, of_square, correction, eps, rate = by[0], by[1], by[2], by[3], by[4], by[5], by[6]
    for i in range(n):
        g = number(load(gradients, i, GRADIENT) << narrow(gradients)) * scale
        first, second = number(load(m, i, FIRST) << narrow(m)), number(load(v, i, SECOND) << narrow(v))
        first = first + towards * (g - first)
        second = second * beta2 + (of_square * g) * g
        root = np.sqrt(second)
        master = number(master_of(weight, remainder, i)) * decay + (rate * first) / (root * correction + eps)
        store(m, i, rounded(m, first, load(of_m, i, OF_FIRST)), FIRST)
        store(v, i, rounded(v, root if keeps_root else second, load(of_v, i, OF_SECOND)), SECOND)
        store_master(weight, remainder, of_weight, i, master)


@compiled_loop
def lion(
    weight: Bits, remainder: Any, m: Bits, gradients: Bits, of_weight: Any, of_m: Any, n: int, scale: Any, by: Any
) -> None:  # fmt: skip
    decay, towards, away, lr = by[0], by[1], by[2], by[3]
    for i in range(n):
        g, first = number(load(gradients, i, GRADIENT) << narrow(gradients)) * scale, number(load(m, i, FIRST) << narrow(m))
        d = g - first
        u = first + towards * d
        step = lr if u > 0 else (-lr if u < 0 else u)  # 0 and NaN stay
        master = number(master_of(weight, remainder, i)) * decay - step
        store(m, i, rounded(m, first + away * d, load(of_m, i, OF_FIRST)), FIRST)
        store_master(weight, remainder, of_weight, i, master)


# -- groups of int8 codes ------------------------------------------------------------------------------------------------


@compiled_loop
def unpack(groups: Bits, is_root: bool, wide: Bits, other: Bits) -> None:
    """As `rounding.unpacked`, into fp32 bits. A scale is first spread over its group, so that LLVM vectorises the loops."""
    for k in range(len(groups) // PACK_BYTES):
        at = k * PACK_BYTES
        for i in range(PACK):
            code = load(groups, at + i, GROUPS)
            store(wide, k * PACK + i, code if is_root else np.uint32(np.int32(code << np.uint32(24)) >> np.int32(24)), MOMENT)
        for j in range(PACK // GROUP):
            low, high = load(groups, at + PACK + 2 * j, GROUPS), load(groups, at + PACK + 2 * j + 1, GROUPS)
            for i in range(GROUP):
                store(other, k * PACK + j * GROUP + i, (low << NARROW) | (high << np.uint32(24)), GRADIENT)
    for i in range(len(wide)):
        code, scale = np.float32(np.int32(load(wide, i, MOMENT))), number(load(other, i, GRADIENT))
        x = scale * code
        store(wide, i, bits_of(x * x if is_root else x / (np.float32(254) - abs(code))), MOMENT)


@compiled_loop
def pack(wide: Bits, is_root: bool, random: Bits, groups: Bits, other: Bits) -> None:
    """As `rounding.packed`, of roots where `is_root`; `wide` is lost."""
    for g in range(len(wide) // GROUP):
        first, most = g * GROUP, LEAST
        for i in range(GROUP):
            most = max(most, load(wide, first + i, MOMENT) & np.uint32(0x7FFFFFFF))
        most = min(most, INFINITE)
        largest = number(most)
        if is_root:
            most, largest = bits_of(largest / np.float32(255)), np.float32(255) / largest
        scale = (most + np.uint32(random[first])) >> NARROW
        if scale <= LEAST >> NARROW or scale > MOST >> NARROW:
            for i in range(GROUP):
                store(wide, first + i, np.uint32(0), MOMENT)
            scale = INFINITE >> NARROW if scale > MOST >> NARROW else np.uint32(0)
        at = first // PACK * PACK_BYTES + PACK + g % (PACK // GROUP) * 2
        store(groups, at, scale, GROUPS)
        store(groups, at + 1, scale >> np.uint32(8), GROUPS)
        for i in range(GROUP):
            store(other, first + i, bits_of(largest), GRADIENT)
    for k in range(len(groups) // PACK_BYTES):
        for i in range(PACK):
            x, by = number(load(wide, k * PACK + i, MOMENT)), number(load(other, k * PACK + i, GRADIENT))
            code = by * x if is_root else (np.float32(254) * x) / (by + abs(x))
            store(groups, k * PACK_BYTES + i, bits_of(code + NEAREST), GROUPS)


# -- kernels -------------------------------------------------------------------------------------------------------------


@compiled_loop
def sum_gradient(first: Bits, second: Bits, n_parts: int, is_rounded: bool, n: int, wide: Bits) -> None:
    """fp32 bits of one or two parts, rounded to bf16 (ties to even) if asked. NaN stays NaN."""
    for i in range(n):
        total = number(load(first, i, FIRST) << narrow(first))
        if n_parts == 2:
            total += number(load(second, i, SECOND) << narrow(second))
        bits = bits_of(total)
        if is_rounded:
            even = (bits + np.uint32(0x7FFF) + ((bits >> NARROW) & np.uint32(1))) & np.uint32(0xFFFF0000)
            bits = NAN << NARROW if total != total else even
        store(wide, i, bits, GRADIENT)


@chosen
def part(of: Any, at: Any, n: Any) -> Any:
    return (lambda of, at, n: None) if _is_absent(of) else lambda of, at, n: of[at : at + n]


@compiled_loop
def packs(of: Any, at: int, n: int, wide: Any) -> Any:
    """A moment's elements; whole packs where it is in groups, which need `wide` memory."""
    if wide is None:
        return part(of, at, n)
    return part(of, at // PACK * PACK_BYTES, -(-n // PACK) * PACK_BYTES)


@chosen
def numbers(order: Any, key: Any, turn: Any, within: Any) -> Any:
    """Random numbers of elements from a place in a turn on."""
    if _is_absent(order):
        return lambda order, key, turn, within: None
    return lambda order, key, turn, within: order[(begin(key, turn) + within) % TURN :]


@compiled_loop
def gradient_of(parts: Any, n_parts: int, is_rounded: bool, at: int, n: int, wide: Any) -> Any:
    if wide is None:
        return parts[0][at : at + n]
    sum_gradient(parts[0][at : at + n], parts[1][at : at + n], n_parts, is_rounded, n, wide)
    return wide[:n]


@chosen
def copy(to: Any, source: Any) -> Any:
    def copied(to: Any, source: Any) -> None:
        for i in range(len(to)):
            to[i] = source[i]

    return (lambda to, source: None) if _is_absent(to) else copied


@chosen
def apply(w: Any, r: Any, m: Any, v: Any, g: Any, of_w: Any, of_m: Any, of_v: Any, n: Any, scale: Any, by: Any, root: Any) -> Any:
    """The update rule: torch's AdamW where nothing is drawn; Lion where there is no second moment. `root`: keep that of the second
    moment."""
    if _is_absent(of_m):
        return lambda w, r, m, v, g, of_w, of_m, of_v, n, scale, by, root: fused(w, r, m, v, g, n, scale, by)
    if _is_absent(v):
        return lambda w, r, m, v, g, of_w, of_m, of_v, n, scale, by, root: lion(w, r, m, g, of_w, of_m, n, scale, by)
    return lambda w, r, m, v, g, of_w, of_m, of_v, n, scale, by, root: adamw(  # noqa: PLW0108
        w, r, m, v, g, of_w, of_m, of_v, n, scale, by, root
    )  # fmt: skip


@chosen
def unpack_into(groups: Any, is_root: Any, wide: Any, other: Any) -> Any:
    def unpacked(groups: Bits, is_root: bool, wide: Bits, other: Bits) -> Bits:
        whole = len(groups) // PACK_BYTES * PACK
        unpack(groups, is_root, wide[:whole], other)
        return wide[:whole]

    return (lambda groups, is_root, wide, other: None) if _is_absent(groups) else unpacked


@chosen
def pack_from(wide: Any, is_root: Any, n: Any, random: Any, groups: Any, other: Any) -> Any:
    def packed(wide: Bits, is_root: bool, n: int, random: Bits, groups: Bits, other: Bits) -> None:
        wide[n:] = 0  # elements that the last pack lacks
        pack(wide, is_root, random, groups, other)

    return (lambda wide, is_root, n, random, groups, other: None) if _is_absent(wide) else packed


@chosen
def update_block(
    w: Any, r: Any, m: Any, v: Any, g: Any, of_w: Any, of_m: Any, of_v: Any, n: Any, scale: Any, by: Any, wide: Any
) -> Any:
    """A block. `wide`: memory to unpack moments into, where they are in groups."""

    def unpacked(
        w: Bits, r: Any, m: Bits, v: Any, g: Bits, of_w: Any, of_m: Any, of_v: Any, n: int, scale: Any, by: Any, wide: Bits
    ) -> None:
        other = wide[2 * BLOCK_ELEMENTS :]
        first = unpack_into(m, False, wide[:BLOCK_ELEMENTS], other)
        second = unpack_into(v, True, wide[BLOCK_ELEMENTS : 2 * BLOCK_ELEMENTS], other)
        apply(w, r, first, second, g, of_w, of_m, of_v, n, scale, by, True)
        pack_from(first, False, n, of_m, m, other)
        pack_from(second, True, n, of_v, v, other)

    if _is_absent(wide):
        return lambda w, r, m, v, g, of_w, of_m, of_v, n, scale, by, wide: apply(
            w, r, m, v, g, of_w, of_m, of_v, n, scale, by, False
        )  # fmt: skip
    return unpacked


@compiled_kernel
def update(
    start: int, end: int, first: int, keys: Any, order: Any, order_of_weight: Any, to: Any, before: Any, is_elsewhere: bool,
    parts: Any, n_parts: int, is_rounded: bool, scale: Any, by: Any, sums: Any, wide: Any,
) -> None:  # fmt: skip
    """Elements start .. end - 1 of a parameter; `first` is the place of element 0. `to`, `before`: weight or master, remainder,
    moments. `sums`: memory for a block's gradient in fp32, where it may be a sum."""
    at = start
    while at < end:
        turn, within = (first + at) // TURN, (first + at) % TURN
        n = min(BLOCK_ELEMENTS, end - at, TURN - within)
        weight, remainder, m, v = part(to[0], at, n), part(to[1], at, n), packs(to[2], at, n, wide), packs(to[3], at, n, wide)
        if is_elsewhere:
            copy(weight, part(before[0], at, n))
            copy(remainder, part(before[1], at, n))
            copy(m, packs(before[2], at, n, wide))
            copy(v, packs(before[3], at, n, wide))
        gradients = gradient_of(parts, n_parts, is_rounded, at, n, sums)
        of_weight = numbers(order_of_weight, keys[0], turn, within)
        of_m, of_v = numbers(order, keys[1], turn, within), numbers(order, keys[2], turn, within)
        update_block(weight, remainder, m, v, gradients, of_weight, of_m, of_v, n, scale, by, wide)
        at += n


@compiled_loop
def row_squares(first: Bits, second: Bits, n_parts: int, is_rounded: bool, n: int, to: Bits) -> None:
    """Squares of a row of the gradient, zero from element n on."""
    sum_gradient(first, second, n_parts, is_rounded, n, to)
    for i in range(n):
        x = number(load(to, i, GRADIENT))
        store(to, i, bits_of(x * x), GRADIENT)
    to[n:ROW_ELEMENTS] = 0


@compiled_loop
def add_half(to: Bits, of: Bits, n: int) -> None:
    """Both are parts of one memory, which other additions write: of one alias scope."""
    for i in range(n):
        store(to, i, bits_of(number(load(to, i, GRADIENT)) + number(load(of, i, GRADIENT))), GRADIENT)


@compiled_kernel
def squares(start: int, end: int, parts: Any, n_parts: int, is_rounded: bool, out: Bits, x: Bits) -> None:
    """fp32 sums of squares of chunks, each in the order of `chunks.squares`, in one pass over its rows.

    The order adds the second half of a chunk's rows to the first, and so on, then that of the last row's elements: a binary tree
    over rows whose numbers are read from the lowest bit. Rows in that order are summed as a binary counter counts, on a stack of
    partial sums. Rows beyond the end are zero, and left out by whole halves.
    """
    for c in range(len(out)):
        begin = start + c * CHUNK_ELEMENTS
        n, n_bits = min(CHUNK_ELEMENTS, end - begin), 0
        while ROW_ELEMENTS << n_bits < n:
            n_bits += 1
        top = 0
        for k in range(1 << n_bits):
            row = 0
            for b in range(n_bits):
                row |= (k >> b & 1) << (n_bits - 1 - b)
            at = begin + min(row * ROW_ELEMENTS, n)
            row_squares(parts[0][at:], parts[1][at:], n_parts, is_rounded, max(min(ROW_ELEMENTS, begin + n - at), 0), x[top:])
            top += ROW_ELEMENTS
            left = k + 1
            while left & 1 == 0:
                top -= ROW_ELEMENTS
                add_half(x[top - ROW_ELEMENTS :], x[top:], ROW_ELEMENTS)
                left >>= 1
        half = ROW_ELEMENTS // 2
        while half > 0:
            add_half(x, x[half:], half)
            half //= 2
        out[c] = x[0]


@compiled_kernel
def add(start: int, end: int, total: Bits, part: Bits, is_first: bool) -> None:
    """Add to an fp32 sum; the first part is added to zero."""
    if is_first:
        for i in range(start, end):
            x = np.float32(0) + number(load(part, i, SECOND) << narrow(part))  # -0.0 becomes 0.0
            store(total, i, bits_of(x), FIRST)
    else:
        for i in range(start, end):
            x = number(load(total, i, FIRST)) + number(load(part, i, SECOND) << narrow(part))
            store(total, i, bits_of(x), FIRST)


# -- calls ---------------------------------------------------------------------------------------------------------------


@cache
def order() -> Bits:
    """All 16-bit numbers in a mixed order (by a bijection), twice: a turn begins at any of them."""
    return np.resize(rounding.mixed(np.arange(TURN)).astype(np.uint16), 2 * TURN)


def bits(tensor: torch.Tensor) -> Bits:
    """A flat tensor's memory as kernels take it."""
    if tensor.dtype in (torch.int16, torch.int8, torch.uint8):
        return tensor.numpy()
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16).numpy().view(f"u{tensor.itemsize}")


def state_bits(state: ParamState) -> tuple[Bits | None, ...]:
    """Weight or master, remainder, moments."""
    of = state.master
    return (
        *(bits(of.weight), None if of.remainder is None else bits(of.remainder), bits(state.moments[0])),
        bits(state.moments[1]) if len(state.moments) > 1 else None,
    )


def update_of(step: UpdateArguments) -> Callable[[int, int, Scratch], None]:
    """The step on elements start .. end - 1, with a thread's scratch memory."""
    drawn, gradient, to = step.drawn, step.gradient, state_bits(step.to)
    before = to if step.start_from is None else state_bits(step.start_from)
    parts = tuple(map(bits, gradient.parts))
    first, keys = (0, (0, 0, 0)) if drawn is None else (drawn.first, drawn.keys)
    mixed = None if drawn is None else order()
    mixed_of_weight = mixed if drawn is not None and drawn.is_master_drawn else None
    both, scale = (parts[0], parts[-1]), np.float32(step.factor)
    by = np.array(step.scalars, np.float32)

    def run(start: int, end: int, own: Scratch) -> None:
        x = bits(own.block)
        sums = None if parts[0].itemsize == 2 else x[:BLOCK_ELEMENTS]
        wide = x[BLOCK_ELEMENTS:] if step.to.moments[0].dtype is torch.uint8 else None
        elsewhere, n_parts, is_rounded = before is not to, len(parts), gradient.is_rounded
        update(
            start, end, first, keys, mixed, mixed_of_weight, to, before, elsewhere, both, n_parts, is_rounded, scale, by, sums, wide
        )  # fmt: skip

    return run


def squares_of(gradient: SummedGradient, start: int, end: int, own: Scratch) -> list[float]:
    parts, out = tuple(map(bits, gradient.parts)), np.empty(-(-(end - start) // CHUNK_ELEMENTS), np.uint32)
    squares(start, end, (parts[0], parts[-1]), len(parts), gradient.is_rounded, out, bits(own.block))
    return out.view(np.float32).tolist()


def add_part(total: torch.Tensor, part: torch.Tensor, is_first: bool, start: int, end: int) -> None:
    add(start, end, bits(total), bits(part), is_first)
