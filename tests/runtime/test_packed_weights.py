"""Packed base weights (NF4, INT8, FP8, MXFP4): the bits of bitsandbytes and transformers, and the bytes that plans book."""

from collections import Counter
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from math import copysign, frexp, prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.hwprofiles.schema import read_profile
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel
from penstock.planner.predict.memory import frame
from penstock.runtime.cuda.nvrtc import MOST_ELEMENTS
from penstock.runtime.layers import packed_weights as room
from penstock.runtime.layers.packed_weights import NF4, pack, parts, prepare, unpack_into
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan import packed as packing
from penstock.runtime.plan.packed import FP8_BLOCK, MXFP4_BLOCK, NF4_BLOCK, UNPACK_CHUNK_ELEMENTS, UNPACK_KERNELS, is_packed, layout
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import SLOT_ALIGN_BYTES
from tests.cuda_in_cpp import NEEDS_A_COMPILER, by_two_threads, in_cpp
from tests.lanes import diagonal
from tests.training import same_bits as same

with suppress(ModuleNotFoundError):  # optional on a GPU's machine; tests that need it fail there
    from bitsandbytes import functional as bnb

BASES = ("nf4", "int8", "fp8", "mxfp4")
DTYPES = st.sampled_from((torch.bfloat16, torch.float32))
ODD = (0.0, -0.0, 1e-45, -1e-39, 3e-38, 1e-6, 1.0, -448.0, 3.3e38)
EDGES = ((NF4[:-1] + NF4[1:]) / 2).tolist()  # between two codes: both must choose the same one

n_columns = st.integers(1, 5).map(lambda n: n * NF4_BLOCK)
narrow = st.tuples(st.integers(1, 9), n_columns) | st.tuples(st.integers(1, 3), st.integers(1, 4), n_columns)
edges = st.sampled_from((1, 100, FP8_BLOCK, FP8_BLOCK + 1, 2 * FP8_BLOCK))
blocky = st.tuples(edges, edges) | st.tuples(st.integers(1, 3), edges, edges)


@st.composite
def weights(draw, shapes=narrow, odd=ODD):
    """Return rows of all magnitudes, with rows of zeros and some odd numbers."""
    shape, dtype = draw(shapes), draw(DTYPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(shape, generator=generator)
    rows = weight.view(-1, shape[-1])
    magnitudes = torch.tensor(draw(st.lists(st.sampled_from((0.0, 1e-30, 0.02, 1.0, 1e30)), min_size=1, max_size=4)))
    rows *= magnitudes[torch.arange(len(rows)) % len(magnitudes), None]
    for number in draw(st.lists(st.sampled_from(odd), max_size=4)):
        weight.view(-1)[draw(st.integers(0, weight.numel() - 1))] = number
    return weight.to(dtype)


@contextmanager
def chunks_of(n_elements):
    """Reduce the chunk size: small weights then have many chunks."""
    size, room.UNPACK_CHUNK_ELEMENTS = room.UNPACK_CHUNK_ELEMENTS, n_elements
    try:
        yield
    finally:
        room.UNPACK_CHUNK_ELEMENTS = size


sizes_of_chunks = st.sampled_from((NF4_BLOCK * 5, FP8_BLOCK * 130, UNPACK_CHUNK_ELEMENTS))


def unpacked(packed, shape, base, dtype=torch.bfloat16):
    out = torch.full(shape, float("nan"), dtype=dtype)
    unpack_into(packed, out, base)
    return out


@given(weight=weights(), size=sizes_of_chunks)
@example(weight=torch.zeros(2, NF4_BLOCK), size=NF4_BLOCK)
@example(weight=torch.tensor([1.0, *EDGES, *(-e for e in EDGES), *[0.5] * 33])[None], size=NF4_BLOCK)
def test_nf4_has_the_bits_of_bitsandbytes(weight, size):
    with chunks_of(size):
        packed = pack(weight, "nf4")
        back = {dtype: unpacked(packed, weight.shape, "nf4", dtype) for dtype in (torch.bfloat16, torch.float32)}
    codes, state = bnb.quantize_4bit(weight.reshape(1, -1), quant_type="nf4", blocksize=NF4_BLOCK)
    our_codes, scales = parts(packed, tuple(weight.shape), "nf4")
    assert same(our_codes, codes.flatten())
    assert same(scales, state.absmax)
    for dtype, actual in back.items():
        state.dtype = dtype
        expected = bnb.dequantize_4bit(codes, state).view(weight.shape)
        is_normal = actual.float().abs() >= 2.0**-126  # bitsandbytes on the processor makes other bf16 numbers zero
        assert same(actual[is_normal], expected[is_normal])
        assert bool((expected[~is_normal].abs() <= actual[~is_normal].abs()).all())


@given(weight=weights(odd=(0.0, -0.0, 1e-6, 1.0, -448.0, 1e36)), size=sizes_of_chunks)
def test_int8_has_the_bits_of_bitsandbytes(weight, size):
    with chunks_of(max(size, weight.shape[-1])):
        packed = pack(weight, "int8")
        back = {dtype: unpacked(packed, weight.shape, "int8", dtype) for dtype in (torch.bfloat16, torch.float32)}
    rows = weight.reshape(-1, weight.shape[-1])
    codes, scales, _ = bnb.int8_vectorwise_quant(rows.clone())
    codes[scales == 0] = 0  # which the processor also computes
    our_codes, our_scales = parts(packed, tuple(weight.shape), "int8")
    assert same(our_codes.view(rows.shape), codes)
    assert same(our_scales, scales)
    for dtype, actual in back.items():
        assert same(actual, bnb.int8_vectorwise_dequant(codes, scales).to(dtype).view(weight.shape))


def blocks_of(shape):
    """Yield (matrix, rows, columns, index of the scale) of every block."""
    *_, n_rows, n_columns = shape
    for e in range(prod(shape[:-2])):
        for g, row in enumerate(range(0, n_rows, FP8_BLOCK)):
            for h, column in enumerate(range(0, n_columns, FP8_BLOCK)):
                yield (e, slice(row, row + FP8_BLOCK), slice(column, column + FP8_BLOCK)), (e, g, h)


@given(weight=weights(blocky), size=sizes_of_chunks)
@example(weight=torch.randn(2, 130, 130), size=NF4_BLOCK)
def test_fp8_is_a_loop_over_blocks(weight, size):
    original = weight.clone()
    with chunks_of(size):
        packed = pack(weight, "fp8")
        back = {dtype: unpacked(packed, weight.shape, "fp8", dtype) for dtype in (torch.bfloat16, torch.float32)}
    assert same(weight, original)
    matrices = weight.view(-1, *weight.shape[-2:]).float()
    codes, scales = parts(packed, tuple(weight.shape), "fp8")
    codes, scales = codes.view(matrices.shape), scales.view(len(matrices), *scales.shape[-2:])
    for block, place in blocks_of(weight.shape):
        largest = matrices[block].abs().max()
        factor = 448.0 / largest
        factor = torch.ones(()) if factor.isinf() else factor
        assert same(codes[block], (matrices[block] * factor).clamp(-448, 448).to(torch.float8_e4m3fn))
        assert same(scales[place], 1.0 / factor)
        for dtype, actual in back.items():
            expected = (codes[block].float() * scales[place]).to(dtype)
            assert same(actual.view(matrices.shape)[block], expected)


@given(weight=weights(blocky.filter(lambda shape: shape[-1] % FP8_BLOCK == shape[-2] % FP8_BLOCK == 0), odd=(0.0, 1e-6, 448.0)))
def test_fp8_has_the_bits_of_transformers(weight):
    config = SimpleNamespace(weight_block_size=(FP8_BLOCK, FP8_BLOCK), scale_fmt="float")
    converted = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": weight})
    packed = pack(weight, "fp8")
    codes, scales = parts(packed, tuple(weight.shape), "fp8")
    assert same(codes, converted["a.weight"])
    assert same(scales, converted["a.weight_scale_inv"])
    for dtype in (torch.bfloat16, torch.float32):
        expected = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype)
        assert same(unpacked(packed, weight.shape, "fp8", dtype), expected)


def published_mxfp4(codes, scales, shape):
    """Return (blocks, scales) in the file's layout, (.., outputs, inputs), by a loop over single numbers."""
    _, n_in, n_out = shape
    numbers = torch.stack((codes & 15, codes >> 4), -1).view(-1, n_in, n_out).transpose(1, 2)  # one code each
    numbers = numbers.reshape(-1, n_out, n_in // MXFP4_BLOCK, MXFP4_BLOCK // 2, 2)
    return numbers[..., 0] | numbers[..., 1] << 4, scales.view(-1, n_in // MXFP4_BLOCK, n_out).transpose(1, 2)


stacks = st.tuples(st.integers(1, 3), st.sampled_from((32, 96)), st.sampled_from((2, 6, 64)))


@given(shape=stacks, size=st.sampled_from((64, 300, UNPACK_CHUNK_ELEMENTS)), seed=st.integers(0, 99), dtype=DTYPES)
@example(shape=(1, 8192, 32), size=UNPACK_CHUNK_ELEMENTS, seed=0, dtype=torch.bfloat16)  # every scale with every code
def test_mxfp4_has_the_bits_of_transformers(shape, size, seed, dtype):
    packed = torch.zeros(layout(shape, "mxfp4").n_bytes, dtype=torch.uint8)
    codes, scales = parts(packed, shape, "mxfp4")
    codes.random_(256, generator=torch.Generator().manual_seed(seed))
    scales.view(-1).copy_((torch.arange(scales.numel()) + seed) % 255)
    with chunks_of(size):
        actual = unpacked(packed, shape, "mxfp4", dtype)
    expected = convert_moe_packed_tensors(*published_mxfp4(codes, scales, shape), dtype=dtype)
    assert same(actual, expected)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@given(weight=weights(stacks, odd=(*ODD[:8], 3.3e37, *(1.0 + e for e in (0.25, 0.75, 1.25, 1.5)))), size=st.sampled_from((64, 300)))
def test_mxfp4_is_packed_to_the_nearest_and_once_for_good(weight, size):
    with chunks_of(size):
        packed = pack(weight, "mxfp4")
        back = unpacked(packed, weight.shape, "mxfp4", torch.float32)
    again = unpacked(pack(back, "mxfp4"), weight.shape, "mxfp4", torch.float32)
    assert same(again, back), "of an unpacked weight nothing is lost"
    columns = weight.double().view(-1, MXFP4_BLOCK, weight.shape[-1]).transpose(1, 2).reshape(-1, MXFP4_BLOCK).tolist()
    packed_columns = back.double().view(-1, MXFP4_BLOCK, weight.shape[-1]).transpose(1, 2).reshape(-1, MXFP4_BLOCK).tolist()
    for column, packed_column in zip(columns, packed_columns, strict=True):
        largest = max(map(abs, column))
        scale = 2.0 ** max(frexp(largest)[1] - 3, -127)
        for number, mine in zip(column, packed_column, strict=True):
            codes = sorted(range(8), key=lambda code: (abs(E2M1[code] - abs(number) / scale), code % 2))
            assert mine == copysign(E2M1[codes[0]] * scale, number)


@pytest.mark.parametrize("base", BASES)
def test_a_weight_that_is_not_finite_is_refused_in_one_line(base):
    for number, dtype in product((float("nan"), -float("inf")), (torch.bfloat16, torch.float16, torch.float32)):
        weight = torch.randn(160, 192).to(dtype)
        weight[129, 5] = weight[0, 191] = number
        with pytest.raises(ValueError, match=rf"^2 of its 30720 numbers are not finite and cannot be packed as {base}$"):
            pack(weight, base)


@given(shape=blocky | narrow, base=st.sampled_from(BASES))
def test_parts_begin_at_multiples_of_256_bytes_and_apart(shape, base):
    if (base == "nf4" and prod(shape) % NF4_BLOCK) or (base == "mxfp4" and (shape[-2] % MXFP4_BLOCK or shape[-1] % 2)):
        return
    sizes, packed = layout(shape, base), torch.zeros(layout(shape, base).n_bytes, dtype=torch.uint8)
    codes, scales = parts(packed, shape, base)
    starts = [part.data_ptr() - packed.data_ptr() for part in (codes, scales)]
    assert starts == [0, sizes.scales_at]
    assert codes.nbytes == sizes.code_bytes <= sizes.scales_at
    assert sizes.scales_at + scales.nbytes <= sizes.n_bytes == len(packed)
    assert sizes.scales_at % SLOT_ALIGN_BYTES == sizes.n_bytes % SLOT_ALIGN_BYTES == 0
    assert sizes.n_bytes - codes.nbytes - scales.nbytes < 2 * SLOT_ALIGN_BYTES


def test_a_large_weight_takes_what_its_format_says():
    shape = (4096, 14336)
    per_element = {base: layout(shape, base).n_bytes / prod(shape) for base in BASES}
    assert per_element == {"nf4": 0.5625, "int8": 1 + 4 / 14336, "fp8": 1 + 4 / FP8_BLOCK**2, "mxfp4": 0.5 + 1 / MXFP4_BLOCK}
    nf4, mxfp4 = (sum(t.nbytes for t in prepare(torch.device("cpu"), base, torch.float32)) for base in ("nf4", "mxfp4"))
    assert UNPACK_CHUNK_ELEMENTS * 4 + nf4 == packing.UNPACK_SCRATCH_BYTES > UNPACK_CHUNK_ELEMENTS * (2 + 8 / MXFP4_BLOCK) + mxfp4


def test_only_matrices_of_projections_and_experts_are_packed():
    table = {
        ("self_attn.q_proj.weight", (64, 64)): BASES[:3],
        ("mlp.down_proj.weight", (33, 63)): ("int8", "fp8"),
        ("mlp.experts.gate_up_proj", (4, 64, 32)): BASES,
        ("mlp.experts.down_proj", (4, 48, 32)): BASES[:3],
        ("mlp.experts.gate_up_proj_bias", (4, 64)): (),
        ("mlp.gate.weight", (4, 64)): (),
        ("self_attn.q_proj.bias", (64,)): (),
        ("input_layernorm.weight", (64,)): (),
    }
    assert {(n, s): tuple(b for b in BASES if is_packed(f"model.layers.3.{n}", s, b)) for n, s in table} == table
    assert not any(is_packed(name, (64, 64), base) for name in ("model.embed_tokens.weight", "lm_head.weight") for base in BASES)


class Counting(TorchDispatchMode):
    """Record compute calls, the bytes that they read and write, and those that they allocate."""

    def __init__(self):
        super().__init__()
        self.calls, self.moved_bytes, self.made_bytes, self.others = Counter(), 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        match name:
            case "empty":
                self.made_bytes += out.nbytes
            case "copy_" | "index_select" | "mul" | "mul_":
                self.calls[name] += 1
                read = [a for a in args[1 if name in ("copy_", "index_select") else 0 :] if isinstance(a, torch.Tensor)]
                self.moved_bytes += sum(a.nbytes for a in (*read, out))
            case _ if not func.is_view:
                self.others.add(name)
        return out


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", [(1024, 256), (4, 256, 256)])
def test_unpacking_costs_what_the_planner_books(base, shape):
    packed, out = pack(torch.randn(shape), base), torch.empty(shape, dtype=torch.bfloat16)
    prepare(out.device, base, out.dtype)
    n_chunks = 4
    with chunks_of(prod(shape) // n_chunks), Counting() as counted:
        unpack_into(packed, out, base)
    assert counted.calls.total() == n_chunks * UNPACK_KERNELS[base]
    assert counted.moved_bytes / prod(shape) == pytest.approx(packing.UNPACK_BYTES_PER_ELEMENT[base], rel=0.005)
    assert counted.made_bytes <= prod(shape) // n_chunks * 4
    assert counted.others == set()


@NEEDS_A_COMPILER
@diagonal(("base", BASES), ("dtype", [torch.bfloat16, torch.float32]))
def test_a_kernel_unpacks_to_the_bits_of_torchs_calls(base, dtype, tmp_path):
    """Check every code, by one launch and by several, and into unaligned memory. One wrong element is detected."""
    cpu, kernel = torch.device("cpu"), by_two_threads(room.kernel_of(base, dtype, partial(in_cpp, tmp_path)))
    assert room.unpacking_fault(kernel, cpu, base, dtype) == ""
    for shape, limit in product(room.PROBE_SHAPES[base], (MOST_ELEMENTS, 2**14)):
        packed, n_launches = pack(torch.randn(shape), base), Counter()

        def counted(grid, block, args, n_launches=n_launches):
            n_launches["all"] += 1
            kernel(grid, block, args)

        for offset in (0, 1):
            out = torch.full((prod(shape) + 1,), float("nan"), dtype=dtype)[offset : offset + prod(shape)].view(shape)
            room.unpack_by_kernel(packed, out, base, counted, limit)
            assert same(out, unpacked(packed, shape, base, dtype)), (shape, limit, offset)
        assert (n_launches["all"] == 2) == (prod(shape) <= limit or limit == MOST_ELEMENTS)

    def wrong(grid, block, args):
        kernel(grid, block, args)
        args[2].view(-1)[-1] = 12345.0

    assert room.unpacking_fault(wrong, cpu, base, dtype).startswith("1 of its kernel's ")


@pytest.mark.parametrize("base", BASES)
def test_without_a_compiler_unpacking_runs_by_calls_and_says_so(base, monkeypatch):
    def broken(*_, **defined):
        raise OSError("no NVRTC library")

    monkeypatch.setattr(room, "compiled_kernel", broken)
    room.unpack_kernel.cache_clear()
    calls, why = UNPACK_KERNELS[base], r"moves \d\.\d times the bytes: .* \(no NVRTC library\)$"
    message = rf"^unpacking {base} runs by {calls} calls a chunk on cuda, and {why}"
    with pytest.warns(RuntimeWarning, match=message):
        assert room.unpack_kernel(torch.device("cuda"), base, torch.bfloat16) is None
    room.unpack_kernel.cache_clear()


def test_a_gpu_is_booked_one_kernel_a_matrix_and_its_bytes_once():
    """A plan for a CPU books torch's calls."""
    model, semantics = read_model("qwen2.5-0.5b"), Semantics(64, 2, 1, base="int8", train=Train(lora=Lora(8, 16.0)))
    plan = frame(model, build_workload(model, semantics), semantics, Policy())
    block = plan.workload.blocks[1]
    packed = [p for p in block.parameters if plan.is_packed(p)]
    rest = [p for p in block.parameters if not plan.is_packed(p) and (p.frozen or not plan.is_apart(1))]
    n_bytes, n_kernels = CostModel(read_profile("h100-sxm"))._unpacked(plan, 1)
    assert n_kernels == len(packed) + len(rest)
    once = sum(prod(p.shape) * (1 + 2) + 4 * p.shape[0] for p in packed)
    assert n_bytes == once + sum(4 * prod(p.shape) for p in rest)
    on_cpu_bytes, on_cpu_kernels = CostModel(read_profile("cpu-2core"))._unpacked(plan, 1)
    assert on_cpu_bytes > 3 * n_bytes
    assert on_cpu_kernels > n_kernels


@pytest.mark.gpu
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_packs_and_unpacks_to_the_processors_bits(base, dtype):
    weight = torch.randn(3, 224, 192) * torch.logspace(-40, 30, 224)[:, None]
    packed = pack(weight, base)
    assert same(pack(weight.cuda(), base).cpu(), packed)
    out = torch.empty(weight.shape, dtype=dtype, device="cuda")
    kernel = room.unpack_kernel(out.device, base, dtype)
    assert kernel is not None
    for unpack in (unpack_into, room.unpack_by_calls, partial(room.unpack_by_kernel, kernel=kernel, limit=2**14)):
        out.fill_(float("nan"))
        unpack(packed.cuda(), out, base)
        assert same(out.cpu(), unpacked(packed, weight.shape, base, dtype))
