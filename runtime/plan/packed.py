"""Layout and size of packed weights: nf4, int8, fp8, mxfp4.

A packed weight is its codes, then its scales, fp32 but for mxfp4, each part from a multiple of 256 bytes on:

    nf4    4-bit NormalFloat (QLoRA): two codes a byte, the first in the upper half; the largest |number| of each 64
    int8   a signed byte a number; the largest |number| of each row
    fp8    float8_e4m3fn; for each 128 x 128 block of each matrix what its numbers are multiplied with
    mxfp4  two E2M1 codes a byte, the first in the lower half; for each 32 numbers along the inputs a byte, s for 2^(s - 127).
           The order is that of gpt_oss's stacks, (experts, inputs, outputs); that of its files is (experts, outputs, inputs)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, assert_never

from .workload import OF_LAYER, SLOT_ALIGN_BYTES

Base = Literal["bf16", "nf4", "int8", "fp8", "mxfp4"]  # what frozen weights come in; bf16: as they are

NF4_BLOCK = 64  # numbers of the flat tensor that share a scale
FP8_BLOCK = 128  # rows, and columns, that do
MXFP4_BLOCK = 32  # rows of a column that do
SCALE_BYTES = 4

# A weight is unpacked a chunk at a time: few enough numbers that a large GPU's cache holds what a chunk is made by way of, and so
# many that a kernel moves tens of megabytes, some ten times what starting it costs.
UNPACK_CHUNK_ELEMENTS = 2**22
NF4_TABLE_BYTES = 256 * 2 * 4  # two fp32 numbers for each byte
UNPACK_SCRATCH_BYTES = UNPACK_CHUNK_ELEMENTS * 4 + NF4_TABLE_BYTES  # at most: a chunk in fp32, and the table, which stays

# A GPU unpacks a matrix by one kernel, which reads codes and scales and writes the weight, each once (`at_once_bytes`). torch's own
# calls are the definition, and run on a CPU. Calls for each chunk, and bytes that they move for each number of a bf16 weight:
#   nf4    widen the codes to indices: read 1/2, write 2. Look them up in the table: read 2, write 4. Times the scale: read
#          4 + 4/64, write 2
#   int8   codes times the scale: read 1, write 4. Times 1/127: read 4, write 2. A scale is shared by a row
#   fp8    widen: read 1, write 2. Times the scale: read 2, write 2. A scale is shared by 16,384 numbers. Blocks that are cut
#          short at the right, or below, take a call of their own
#   mxfp4  widen the codes to indices: read 1/2, write 2. Look them up: read 2, write 2. Times the scale: read 2, write 2. For each
#          32 numbers their scale, before: widen it, read 1, write 4; look it up, read 4, write 2; and read 2
# An fp32 weight takes 2 bytes more of the first two, and 6 of fp8 and mxfp4.
UNPACK_KERNELS: dict[Base, int] = {"nf4": 3, "int8": 2, "fp8": 2, "mxfp4": 5}
UNPACK_BYTES_PER_ELEMENT: dict[Base, float]
UNPACK_BYTES_PER_ELEMENT = {"nf4": 14.5 + SCALE_BYTES / NF4_BLOCK, "int8": 11.0, "fp8": 7.0, "mxfp4": 10.5 + 13 / MXFP4_BLOCK}

DEQUANTISED = ("fp8", "mxfp4")  # forms of published weights that are read as what they stand for, in bf16

_PACKED = ("_proj.weight", "experts.gate_up_proj", "experts.down_proj")


def published_as(config: Mapping[str, object]) -> Base | None:
    """Packed form of the weights by a model's config.json: bf16 if it names none, None for one that is not read."""
    match config.get("quantization_config") or config.get("compression_config"):
        case None:
            return "bf16"
        case {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}:
            return "nf4"
        case {"quant_method": "fp8", "weight_block_size": [128, 128]}:  # FP8_BLOCK
            return "fp8"
        case {"quant_method": "mxfp4"}:
            return "mxfp4"
    return None


@dataclass(frozen=True, slots=True)
class Layout:
    code_bytes: int
    scales: tuple[int, ...]  # their shape
    scale_bytes: int = SCALE_BYTES  # of each

    @property
    def scales_at(self) -> int:
        """The byte at which they begin."""
        return _aligned(self.code_bytes)

    @property
    def n_bytes(self) -> int:
        """All of it, up to where another may begin."""
        return self.scales_at + _aligned(prod(self.scales) * self.scale_bytes)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def is_packed(name: str, shape: tuple[int, ...], base: Base) -> bool:
    """True for matrices of a layer's projections and experts; mxfp4: of experts alone. nf4 and mxfp4 need whole blocks."""
    if base == "bf16" or len(shape) not in (2, 3) or not (OF_LAYER.match(name) and name.endswith(_PACKED)):
        return False
    n_elements = prod(shape)
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
        case "int8":
            return Layout(n_elements, (n_elements // n_columns,))
        case "fp8":
            return Layout(n_elements, (*matrices, -(-n_rows // FP8_BLOCK), -(-n_columns // FP8_BLOCK)))
        case "mxfp4":
            assert n_rows % MXFP4_BLOCK == n_columns % 2 == 0, shape
            return Layout(n_elements // 2, (*matrices, n_rows // MXFP4_BLOCK, n_columns), 1)
        case _:
            assert_never(base)


def at_once_bytes(shape: tuple[int, ...], base: Base, item_bytes: int) -> int:
    """Memory traffic of the kernel that unpacks a matrix into numbers of that many bytes."""
    of = layout(shape, base)
    return of.code_bytes + prod(of.scales) * of.scale_bytes + prod(shape) * item_bytes
