"""Host optimizer kernels, compiled by numba: update rules on all state layouts, sums of squares, sums of gradients.

A kernel passes over memory once, block by block; scratch memory of a block fits a core's L1 or L2 cache. Numba compiles a kernel
for each combination of dtypes. Arrays hold the bits of numbers: uint32 for fp32, uint16 for bf16, int16 or int8 for a remainder,
uint8 for groups of int8 codes. An absent array is None.

Loads and stores carry LLVM alias scopes, one per operand. Without them LLVM compares the addresses of all pairs of arrays before a
loop, gives up at seven arrays and emits a scalar loop, ten times slower. The scopes are valid because operands never overlap.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numpy.typing import NDArray

from penstock.runtime.compiled import compiled_kernel, compiled_loop

from . import rounding
from .chunks import CHUNK_ELEMENTS, Scratch, scalars_of
from .param_state import ParamState, SummedGradient, UpdateArguments
from .rounding import GROUP, HALF, INFINITE, LARGEST, NEAREST, PACK, PACK_BYTES, SMALLEST, TURN

Bits = NDArray[Any]
intrinsic: Callable[..., Callable[..., Any]] = extending.intrinsic  # its type hints describe the Python function, not its calls
function_of: Callable[..., Any] = cgutils.get_or_insert_function
BLOCK_ELEMENTS = 2**11  # divides TURN
SCRATCH_ELEMENTS = 4 * BLOCK_ELEMENTS  # gradient, two moments, scales of groups
NARROW, EIGHT, NAN = np.uint32(16), np.uint32(8), np.uint32(0x7FC0)
# Operands, one alias scope each; MOMENT: unpacked elements of either moment, which an update reads as FIRST or SECOND
WEIGHT, REMAINDER, FIRST, SECOND, GRADIENT, RANDOM, GROUPS, MOMENT = range(8)
INT = ir.IntType(32)
VECTOR = ir.VectorType(INT, GROUP)  # elements of a group; LLVM would unroll a loop over them to scalar instructions
begin = compiled_loop(rounding.begin)


# -- elements ------------------------------------------------------------------------------------------------------------


def _place(context: Any, builder: Any, array_type: Any, array: Any, i: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [i])


def _disjoint(builder: Any, access: Any, operand: int) -> Any:
    """Mark a load or store as disjoint from accesses of other operands."""
    module = builder.module
    domain = module.add_metadata(["host optimizer"])
    scopes = [module.add_metadata([f"operand {i}", domain]) for i in range(MOMENT)]
    operands = (FIRST, SECOND) if operand == MOMENT else (operand,)
    access.set_metadata("alias.scope", module.add_metadata([scopes[i] for i in operands]))
    access.set_metadata("noalias", module.add_metadata([s for i, s in enumerate(scopes) if i not in operands]))
    return access


@intrinsic(prefer_literal=True)
def load(typing: Any, array: Any, i: Any, operand: Any) -> Any:
    """Bits of an element as uint32; signed elements are sign-extended."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = _disjoint(builder, builder.load(_place(context, builder, array, *args[:2])), operand.literal_value)
        widen = builder.sext if array.dtype.signed else builder.zext
        return element if element.type.width == 32 else widen(element, ir.IntType(32))

    return types.uint32(array, types.intp, operand), generate


@intrinsic(prefer_literal=True)
def store(typing: Any, array: Any, i: Any, bits: Any, operand: Any) -> Any:
    """Store the low bits of a uint32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _place(context, builder, array, *args[:2])
        element = place.type.pointee
        value = args[2] if element.width == 32 else builder.trunc(args[2], element)
        _disjoint(builder, builder.store(value, place), operand.literal_value)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint32, operand), generate


@intrinsic
def number(typing: Any, bits: Any) -> Any:
    """fp32 number with these bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def bits_of(typing: Any, number: Any) -> Any:
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once."""
    return types.float32(*[types.float32] * 3), lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def item_bytes(typing: Any, array: Any) -> Any:
    """Bytes of an element as a compile-time constant; numba reads `itemsize` from memory, and branches on it in a loop."""
    return types.intp(array), lambda context, builder, signature, args: ir.Constant(ir.IntType(64), array.dtype.bitwidth // 8)


@compiled_loop
def narrow(array: Bits) -> Any:
    """Bits that an element is narrower than fp32: a shift, not a branch, so that LLVM vectorises loops over any dtype."""
    return NARROW if item_bytes(array) == 2 else np.uint32(0)


@compiled_loop
def master_of(weight: Bits, remainder: Bits | None, i: int) -> Any:
    """fp32 bits of a master weight. A split master is the weight as upper half, plus the remainder."""
    wide = load(weight, i, WEIGHT) << narrow(weight)
    if remainder is None:
        return wide
    return wide + (load(remainder, i, REMAINDER) << (EIGHT if item_bytes(remainder) == 1 else np.uint32(0)))


@compiled_loop
def store_master(weight: Bits, remainder: Bits | None, random: Bits | None, i: int, master: Any) -> None:
    """Round half up, or stochastically: add a 16-bit random number (for a 24-bit master its upper half) and truncate. NaN remains
    NaN. The weight of a split master is always rounded half up, because the remainder holds the difference."""
    bits, is_nan, carried = bits_of(master), master != master, np.uint32(HALF)
    if random is not None:
        carried = load(random, i, RANDOM)
    if remainder is not None:
        if item_bytes(remainder) == 1:
            bits = NAN << NARROW if is_nan else (bits + (carried >> EIGHT)) & np.uint32(0xFFFFFF00)
        store(remainder, i, bits >> (EIGHT if item_bytes(remainder) == 1 else np.uint32(0)), REMAINDER)
        carried = np.uint32(HALF)
    if item_bytes(weight) == 2:
        bits = NAN if is_nan else (bits + carried) >> NARROW
    store(weight, i, bits, WEIGHT)


@compiled_loop
def rounded(array: Bits, x: Any, random: Bits | None, i: int) -> Any:
    """Bits of fp32, or of bf16 rounded stochastically. NaN remains NaN."""
    bits = bits_of(x)
    if random is not None:
        carried = load(random, i, RANDOM)  # in a branch numba would count references to the array
        if item_bytes(array) == 2:
            bits = NAN if x != x else (bits + carried) >> NARROW
    return bits


@compiled_loop
def apply_rule(
    weight: Bits, remainder: Any, m: Bits, v: Any, gradients: Bits, weight_random: Any, m_random: Any, v_random: Any, n: int,
    scale: Any, scalars: Any, keeps_root: bool,
) -> None:  # fmt: skip
    """Update n elements by the operations of docs/optimizers.md: Lion if `v` is None, else AdamW. AdamW without random numbers for
    moments is bitwise identical to torch's fused kernel. `keeps_root`: store the square root of the second moment."""
    decay, lerp_weight, beta2, one_minus_beta2 = scalars[0], scalars[1], scalars[2], scalars[3]
    correction, eps, rate = scalars[4], scalars[5], scalars[6]
    moment_weight, lr = scalars[2], scalars[3]  # of Lion
    is_near = abs(lerp_weight) < np.float32(0.5)  # torch's `lerp` starts at the nearer end
    nearer_weight = lerp_weight if is_near else lerp_weight - np.float32(1)
    for i in range(n):
        g = number(load(gradients, i, GRADIENT) << narrow(gradients)) * scale
        first, master = number(load(m, i, FIRST) << narrow(m)), number(master_of(weight, remainder, i)) * decay
        if v is None:
            d = g - first
            u = first + lerp_weight * d
            master -= lr if u > 0 else (-lr if u < 0 else u)  # 0 and NaN remain
            first = first + moment_weight * d
        else:
            second = number(load(v, i, SECOND) << narrow(v))
            if m_random is None:
                first = fma(nearer_weight, g - first, first if is_near else g)
                second = fma(one_minus_beta2 * g, g, second * beta2)
                root = np.sqrt(second)
                denominator = root / correction + eps
            else:
                first = first + lerp_weight * (g - first)
                second = second * beta2 + (one_minus_beta2 * g) * g
                root = np.sqrt(second)
                denominator = root * correction + eps
            master += (rate * first) / denominator
            store(v, i, rounded(v, root if keeps_root else second, v_random, i), SECOND)
        store(m, i, rounded(m, first, m_random, i), FIRST)
        store_master(weight, remainder, weight_random, i, master)


# -- groups of int8 codes ------------------------------------------------------------------------------------------------


@intrinsic
def largest_of_group(typing: Any, array: Any, i: Any) -> Any:
    """Largest bits, without signs, of the group from element i on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.bitcast(_place(context, builder, array, *args), VECTOR.as_pointer())
        bits = builder.and_(_disjoint(builder, builder.load(place, align=4), MOMENT), VECTOR([0x7FFFFFFF] * GROUP))
        kind, name = ir.FunctionType(INT, [VECTOR]), f"llvm.vector.reduce.umax.v{GROUP}i32"
        return builder.call(function_of(builder.module, kind, name), [bits])

    return types.uint32(array, types.intp), generate


@intrinsic
def fill_group(typing: Any, array: Any, i: Any, bits: Any) -> Any:
    """Store bits to each element of the group from element i on, of the operand GRADIENT."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.bitcast(_place(context, builder, array, *args[:2]), VECTOR.as_pointer())
        first = builder.insert_element(VECTOR(ir.Undefined), args[2], INT(0))
        each = builder.shuffle_vector(first, VECTOR(ir.Undefined), VECTOR([0] * GROUP))
        _disjoint(builder, builder.store(each, place, align=4), GRADIENT)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint32), generate


@compiled_loop
def unpack(groups: Any, start: int, n: int, is_root: bool, wide: Any, scales: Bits) -> None:
    """Unpack n elements from `start` on, a multiple of PACK, as `rounding.unpacked` to fp32 bits in `wide`. Scales are first spread
    over their groups in `scales`, so that LLVM vectorises the loops."""
    if groups is None:
        return
    n_packs, block = -(-n // PACK), groups[start // PACK * PACK_BYTES :]
    for k in range(n_packs):
        begin = k * PACK_BYTES
        for i in range(PACK):
            code = load(block, begin + i, GROUPS)
            store(wide, k * PACK + i, code if is_root else np.uint32(np.int32(code << np.uint32(24)) >> np.int32(24)), MOMENT)
        for j in range(PACK // GROUP):
            low, high = load(block, begin + PACK + 2 * j, GROUPS), load(block, begin + PACK + 2 * j + 1, GROUPS)
            fill_group(scales, k * PACK + j * GROUP, (low << NARROW) | (high << np.uint32(24)))
    for i in range(n_packs * PACK):
        code, scale = np.float32(np.int32(load(wide, i, MOMENT))), number(load(scales, i, GRADIENT))
        x = scale * code
        store(wide, i, bits_of(x * x if is_root else x / (np.float32(254) - abs(code))), MOMENT)


@compiled_loop
def pack(groups: Any, start: int, n: int, is_root: bool, random: Any, wide: Any, scales: Bits) -> None:
    """Pack the first n numbers of `wide` as `rounding.packed`; `is_root`: they are square roots. Overwrites `wide`."""
    if groups is None:
        return
    n_packs, block = -(-n // PACK), groups[start // PACK * PACK_BYTES :]
    wide[n : n_packs * PACK] = 0  # padding of the last pack
    for g in range(n_packs * PACK // GROUP):
        first = g * GROUP
        largest_bits = min(max(largest_of_group(wide, first), SMALLEST), INFINITE)
        largest = number(largest_bits)
        if is_root:
            largest_bits, largest = bits_of(largest / np.float32(255)), np.float32(255) / largest
        scale = (largest_bits + np.uint32(random[first])) >> NARROW
        if scale <= SMALLEST >> NARROW or scale > LARGEST >> NARROW:
            for i in range(GROUP):
                store(wide, first + i, np.uint32(0), MOMENT)
            scale = INFINITE >> NARROW if scale > LARGEST >> NARROW else np.uint32(0)
        place = first // PACK * PACK_BYTES + PACK + g % (PACK // GROUP) * 2
        store(block, place, scale, GROUPS)
        store(block, place + 1, scale >> np.uint32(8), GROUPS)
        fill_group(scales, first, bits_of(largest))
    for k in range(n_packs):
        for i in range(PACK):
            x, factor = number(load(wide, k * PACK + i, MOMENT)), number(load(scales, k * PACK + i, GRADIENT))
            code = factor * x if is_root else (np.float32(254) * x) / (factor + abs(x))
            store(block, k * PACK_BYTES + i, bits_of(code + NEAREST), GROUPS)


# -- kernels -------------------------------------------------------------------------------------------------------------


@compiled_loop
def sum_gradient(parts: Any, n_parts: int, is_rounded: bool, start: int, n: int, wide: Bits) -> None:
    """Write fp32 bits of one part or of the sum of two to `wide`; `is_rounded`: to bf16, ties to even. NaN remains NaN."""
    first, second = parts[0][start:], parts[1][start:]
    for i in range(n):
        total = number(load(first, i, FIRST) << narrow(first))
        if n_parts == 2:
            total += number(load(second, i, SECOND) << narrow(second))
        bits = bits_of(total)
        if is_rounded:
            even = (bits + np.uint32(0x7FFF) + ((bits >> NARROW) & np.uint32(1))) & np.uint32(0xFFFF0000)
            bits = NAN << NARROW if total != total else even
        store(wide, i, bits, GRADIENT)


@compiled_loop
def gradient_of(parts: Any, n_parts: int, is_rounded: bool, start: int, n: int, sums: Any) -> Any:
    if sums is None:
        return parts[0][start : start + n]
    sum_gradient(parts, n_parts, is_rounded, start, n, sums)
    return sums[:n]


@compiled_loop
def part(target: Any, source: Any, is_elsewhere: bool, start: int, n: int) -> Any:
    """Elements start .. start + n - 1 of a state array, first copied from `source` if the step is not in place."""
    if target is None:
        return target
    part, old = target[start : start + n], source[start : start + n]
    if is_elsewhere:
        for i in range(n):
            part[i] = old[i]
    return part


@compiled_loop
def numbers(order: Any, key: Any, turn: Any, within: Any) -> Any:
    """Random numbers of the elements from position `within` of a turn on."""
    if order is None:
        return order
    return order[(begin(key, turn) + within) % TURN :]


@compiled_kernel
def update(start: int, end: int, state: Any, random: Any, gradient: Any, scalars: Bits, scratch: Bits) -> None:
    """Update elements start .. end - 1 of a parameter.

    state      target, source: each a weight or master, a remainder and moments; `is_elsewhere`: these are different arrays;
               groups: int8 groups of two moments to write and two to read, with block scratch memory in `target`, or None
    random     position of element 0 in the whole parameter, keys, orders of numbers for moments and weight, or None
    gradient   parts, their number, `is_rounded`, clip factor; sums: `scratch`, for a summed gradient in fp32, or None
    """
    target, source, is_elsewhere, groups = state
    first, keys, moment_order, weight_order = random
    parts, n_parts, is_rounded, scale, sums = gradient
    position, is_packed, scales = start, groups[0] is not None, scratch[3 * BLOCK_ELEMENTS :]
    while position < end:
        turn, within = (first + position) // TURN, (first + position) % TURN
        n = min(BLOCK_ELEMENTS, end - position, TURN - within)
        weight = part(target[0], source[0], is_elsewhere, position, n)
        remainder = part(target[1], source[1], is_elsewhere, position, n)
        unpack(groups[2], position, n, False, target[2], scales)
        unpack(groups[3], position, n, True, target[3], scales)
        first_moment = 0 if is_packed else position
        m = part(target[2], source[2], is_elsewhere, first_moment, n)
        v = part(target[3], source[3], is_elsewhere, first_moment, n)
        gradients = gradient_of(parts, n_parts, is_rounded, position, n, sums)
        weight_random = numbers(weight_order, keys[0], turn, within)
        m_random, v_random = numbers(moment_order, keys[1], turn, within), numbers(moment_order, keys[2], turn, within)
        apply_rule(weight, remainder, m, v, gradients, weight_random, m_random, v_random, n, scale, scalars, is_packed)
        pack(groups[0], position, n, False, m_random, target[2], scales)
        pack(groups[1], position, n, True, v_random, target[3], scales)
        position += n


@compiled_loop
def add_half(total: Bits, addend: Bits, n: int) -> None:
    """Add `addend` to `total`. They are parts of one array, hence of one alias scope."""
    for i in range(n):
        store(total, i, bits_of(number(load(total, i, GRADIENT)) + number(load(addend, i, GRADIENT))), GRADIENT)


@compiled_loop
def halved_squares(gradient: Bits, begin: int, n: int, x: Bits) -> Any:
    """Bits of the fp32 sum of n squares in the order of `chunks.squares`; n is a power of two, at least 8. The three widest levels
    of the tree, (0 + 4) + (2 + 6) and so on in eighths, take one pass over eight sequential streams."""
    eighth = n // 8
    for i in range(eighth):
        first = begin + i
        a, b = square(gradient, first), square(gradient, first + eighth)
        c, d = square(gradient, first + 2 * eighth), square(gradient, first + 3 * eighth)
        a, b = a + square(gradient, first + 4 * eighth), b + square(gradient, first + 5 * eighth)
        c, d = c + square(gradient, first + 6 * eighth), d + square(gradient, first + 7 * eighth)
        store(x, i, bits_of((a + c) + (b + d)), GRADIENT)
    half = eighth // 2
    while half > 0:
        add_half(x, x[half:], half)
        half //= 2
    return x[0]


@compiled_loop
def square(gradient: Bits, i: int) -> Any:
    value = number(load(gradient, i, FIRST) << narrow(gradient))
    return value * value


@compiled_kernel
def squares(start: int, end: int, parts: Any, n_parts: int, is_rounded: bool, out: Bits, x: Bits) -> None:
    """fp32 sums of squares of chunks, each in the order of `chunks.squares`. A shorter last chunk, padded with zeros, and summed
    gradients are computed in temporary memory."""
    for c in range(len(out)):
        begin = start + c * CHUNK_ELEMENTS
        n = min(CHUNK_ELEMENTS, end - begin)
        if n == CHUNK_ELEMENTS and n_parts == 1 and not is_rounded:
            out[c] = halved_squares(parts[0], begin, n, x)
        else:
            n_filled = 8
            while n_filled < n:
                n_filled *= 2
            wide = np.zeros(n_filled, np.uint32)
            sum_gradient(parts, n_parts, is_rounded, begin, n, wide)
            out[c] = halved_squares(wide, 0, n_filled, x)


@compiled_kernel
def add(start: int, end: int, total: Bits, part: Bits, is_first: bool) -> None:
    """Add to an fp32 sum; the first part is added to zero."""
    for i in range(start, end):
        x = np.float32(0) if is_first else number(load(total, i, FIRST))  # -0.0 becomes 0.0
        store(total, i, bits_of(x + number(load(part, i, SECOND) << narrow(part))), FIRST)


# -- calls ---------------------------------------------------------------------------------------------------------------


@cache
def order() -> Bits:
    """All 16-bit numbers in a mixed order (a bijection), twice, because a turn begins at any of them."""
    return np.resize(rounding.mixed(np.arange(TURN)).astype(np.uint16), 2 * TURN)


def bits(tensor: torch.Tensor) -> Bits:
    """Bits of a flat tensor, as an array that shares its memory."""
    if tensor.dtype in (torch.int16, torch.int8, torch.uint8):
        return tensor.numpy()
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16).numpy().view(f"u{tensor.itemsize}")


def state_bits(state: ParamState) -> tuple[Bits | None, ...]:
    """Weight or master, remainder, moments."""
    tensors = state.master.weight, state.master.remainder, *state.moments, None
    return tuple(None if tensor is None else bits(tensor) for tensor in tensors[:4])


def update_of(step: UpdateArguments) -> Callable[[int, int, Scratch], None]:
    """Return a function that updates elements start .. end - 1 with a thread's scratch memory."""
    stochastic, gradient, target = step.rounding, step.gradient, state_bits(step.target)
    source = target if step.source is None else state_bits(step.source)
    parts, is_packed = tuple(map(bits, gradient.parts)), step.target.moments[0].dtype is torch.uint8
    random: tuple[Any, ...] = 0, (0, 0, 0), None, None
    if stochastic is not None:
        random = stochastic.first, stochastic.keys, order(), order() if stochastic.is_master_stochastic else None
    summed = (parts[0], parts[-1]), len(parts), gradient.is_rounded, np.float32(step.factor)
    scalars = np.array(scalars_of(step), np.float32)

    def run(start: int, end: int, scratch: Scratch) -> None:
        memory, arrays = bits(scratch.block), (target, source)
        groups: tuple[Bits | None, ...] = (None, None, None, None)
        if is_packed:
            wide = memory[BLOCK_ELEMENTS:], None if target[3] is None else memory[2 * BLOCK_ELEMENTS :]
            arrays, groups = ((*target[:2], *wide), (*source[:2], *wide)), (*target[2:], *source[2:])
        state = *arrays, source is not target, groups
        update(start, end, state, random, (*summed, None if parts[0].itemsize == 2 else memory), scalars, memory)

    return run


def squares_of(gradient: SummedGradient, start: int, end: int, scratch: Scratch) -> list[float]:
    parts, out = tuple(map(bits, gradient.parts)), np.empty(-(-(end - start) // CHUNK_ELEMENTS), np.uint32)
    squares(start, end, (parts[0], parts[-1]), len(parts), gradient.is_rounded, out, bits(scratch.block))
    return out.view(np.float32).tolist()


def add_part(total: torch.Tensor, part: torch.Tensor, is_first: bool, start: int, end: int) -> None:
    add(start, end, bits(total), bits(part), is_first)
