"""Layout and size of packed weights: nf4, int8, fp8, fp8-rows, mxfp4.

A packed weight is its codes, then its scales (fp32, except mxfp4), each aligned to 256 bytes:

    nf4    4-bit NormalFloat (QLoRA): two codes a byte, the first in the upper half; absolute maximum of each 64 elements
    int8   a signed byte per element; absolute maximum of each row
    fp8    float8_e4m3fn; a factor for each 128 x 128 block of each matrix
    fp8-rows  float8_e4m3fn; a factor for each row (output, or input of gpt_oss's experts). FP8 products multiply it as it is
           (docs/fp8.md): it is never unpacked
    mxfp4  two E2M1 codes a byte, the first in the lower half; a byte s for each 32 elements along the inputs: factor 2^(s - 127).
           The order is that of gpt_oss's parameters, (experts, inputs, outputs); its files have (experts, outputs, inputs)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, assert_never

from .workload import OF_LAYER, SLOT_ALIGN_BYTES

Base = Literal["bf16", "nf4", "int8", "fp8", "mxfp4", "fp8-rows"]  # storage of frozen weights; bf16: not packed

NF4_BLOCK = 64  # elements of the flat tensor per scale
FP8_BLOCK = 128  # rows and columns per scale
FP8_MULTIPLE = 16  # rows and columns of a matrix in fp8-rows: FP8 products on a GPU need whole vectors of 16 bytes
MXFP4_BLOCK = 32  # rows of a column per scale
SCALE_BYTES = 4

# Unpack in chunks: small enough that a large GPU's cache holds their intermediates, large enough that a kernel moves tens of
# megabytes, about ten times its launch cost.
UNPACK_CHUNK_ELEMENTS = 2**22
NF4_TABLE_BYTES = 256 * 2 * 4  # two fp32 values per byte
UNPACK_SCRATCH_BYTES = UNPACK_CHUNK_ELEMENTS * 4 + NF4_TABLE_BYTES  # upper bound: a chunk in fp32, and the persistent table

# FP8 products. A GPU quantises rows by one kernel, which reads them (the second time from a cache) and writes a code of a byte.
# Torch's calls convert to fp32 (r 2, w 4), find the largest (r 4), divide (r 4, w 4) and round (r 4, w 1); with factors, which the
# output's gradient has, r 4, w 4 more.
QUANTISED_CHUNK_ELEMENTS = 2**22  # of rows that torch's calls quantise at a time, in fp32
QUANTISED_BYTES, QUANTISED_BYTES_BY_CALLS, FACTORED_BYTES_BY_CALLS = 3, 23, 8  # per element

# A GPU unpacks a matrix by one kernel, which reads codes and scales and writes the weight once (`at_once_bytes`). The reference
# implementation, which runs on a CPU, makes these torch calls for each chunk; r, w: bytes read and written per bf16 element.
#   nf4    widen codes to indices (r 1/2, w 2), look up (r 2, w 4), multiply by the scale (r 4 + 4/64, w 2)
#   int8   multiply by the row's scale (r 1, w 4), by 1/127 (r 4, w 2)
#   fp8    widen (r 1, w 2), multiply by the scale of 16,384 elements (r 2, w 2). Partial blocks take separate calls
#   mxfp4  widen (r 1/2, w 2), look up (r 2, w 2), multiply (r 2, w 2); first, per scale: widen (r 1, w 4), look up (r 4, w 2), r 2
# An fp32 weight takes 2 bytes more for nf4 and int8, and 6 for fp8 and mxfp4.
UNPACK_KERNELS: dict[Base, int] = {"nf4": 3, "int8": 2, "fp8": 2, "mxfp4": 5}
UNPACK_BYTES_PER_ELEMENT: dict[Base, float]
UNPACK_BYTES_PER_ELEMENT = {"nf4": 14.5 + SCALE_BYTES / NF4_BLOCK, "int8": 11.0, "fp8": 7.0, "mxfp4": 10.5 + 13 / MXFP4_BLOCK}

DEQUANTISED = ("fp8", "mxfp4")  # published formats that are read as their bf16 values

_PACKED = ("_proj.weight", "experts.gate_up_proj", "experts.down_proj")


def published_as(config: Mapping[str, object]) -> Base | None:
    """Return the packed format in a model's config.json: bf16 if it names none, None if it is not supported."""
    match config.get("quantization_config") or config.get("compression_config"):
        case None:
            return "bf16"
        case {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}:
            return "nf4"
        case {"quant_method": "fp8", "weight_block_size": [128, 128]}:  # FP8_BLOCK
            return "fp8"
        case {"quant_method": "mxfp4"}:
            return "mxfp4"
        case {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": dict(groups)}:
            match [*groups.values()]:
                case [{"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}]:
                    return "fp8-rows"
    return None


def is_readable(form: Base, base: Base) -> bool:
    """True if weights published in this format are read with this base, as they are or by their bf16 values."""
    return form in ("bf16", base) or (form in DEQUANTISED and base in ("bf16", "fp8-rows"))


@dataclass(frozen=True, slots=True)
class Layout:
    code_bytes: int
    scales: tuple[int, ...]  # shape
    scale_bytes: int = SCALE_BYTES  # per scale

    @property
    def scales_at(self) -> int:
        return _aligned(self.code_bytes)

    @property
    def n_bytes(self) -> int:
        return self.scales_at + _aligned(prod(self.scales) * self.scale_bytes)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def is_packed(name: str, shape: tuple[int, ...], base: Base) -> bool:
    """True for weights of a layer's projections and experts (mxfp4: experts only; fp8-rows: with sides that are multiples of 16).
    nf4 and mxfp4 need whole blocks."""
    if base == "bf16" or len(shape) not in (2, 3) or not (OF_LAYER.match(name) and name.endswith(_PACKED)):
        return False
    n_elements = prod(shape)
    if base == "fp8-rows":
        is_kind = name.endswith(".weight") if len(shape) == 2 else ".experts." in name
        return n_elements > 0 and is_kind and shape[-2] % FP8_MULTIPLE == shape[-1] % FP8_MULTIPLE == 0
    if base == "mxfp4":
        return n_elements > 0 and len(shape) == 3 and shape[1] % MXFP4_BLOCK == shape[2] % 2 == 0
    return n_elements > 0 and (base != "nf4" or n_elements % NF4_BLOCK == 0)


def layout(shape: tuple[int, ...], base: Base) -> Layout:
    assert base != "bf16", "nothing is packed in bf16"
    *matrices, n_rows, n_columns = shape
    n_elements = prod(shape)
    match base:
        case "nf4":
            assert n_elements % NF4_BLOCK == 0, shape
            return Layout(n_elements // 2, (n_elements // NF4_BLOCK,))
        case "int8" | "fp8-rows":
            return Layout(n_elements, (n_elements // n_columns,))
        case "fp8":
            return Layout(n_elements, (*matrices, -(-n_rows // FP8_BLOCK), -(-n_columns // FP8_BLOCK)))
        case "mxfp4":
            assert n_rows % MXFP4_BLOCK == n_columns % 2 == 0, shape
            return Layout(n_elements // 2, (*matrices, n_rows // MXFP4_BLOCK, n_columns), 1)
        case _:
            assert_never(base)


def scaled_scratch_bytes(m: int, k: int, n: int, item_bytes: int, packed: bool = True, n_experts: int = 0) -> int:
    """Bytes of temporaries of an FP8 product (m, k) @ (k, n) or of its input gradient, whichever needs more: codes, scales and an
    fp32 chunk; in backward also the transposed weight, and a term of the input gradient. Not `packed`: codes of the weight, too.
    `n_experts`, or 0 without: experts with m rows in all; a chunk of factors, and each row's expert."""

    def quantised_bytes(rows: int, width: int) -> int:
        return rows * (width + 2 * SCALE_BYTES) + SCALE_BYTES * max(width, min(rows * width, QUANTISED_CHUNK_ELEMENTS))

    stack, widest = max(n_experts, 1), max(k, n) if n_experts else n  # a stack may have a scale per input
    weight_bytes = 0 if packed else stack * (k * n + 2 * SCALE_BYTES * widest)
    chunk_bytes = 0 if packed else quantised_bytes(stack * n, k)
    backward_bytes = quantised_bytes(m, n) + stack * k * n + m * k * item_bytes
    if n_experts:
        backward_bytes += m * 3 * SCALE_BYTES + SCALE_BYTES * min(m * widest, QUANTISED_CHUNK_ELEMENTS)
    return max(weight_bytes + max(quantised_bytes(m, k), backward_bytes), m * k + chunk_bytes) + 4 * SLOT_ALIGN_BYTES


def at_once_bytes(shape: tuple[int, ...], base: Base, item_bytes: int) -> int:
    """Return the memory traffic of the kernel that unpacks a matrix to elements of `item_bytes`."""
    packed = layout(shape, base)
    return packed.code_bytes + prod(packed.scales) * packed.scale_bytes + prod(shape) * item_bytes
