"""FP8 products: quantisation, products, kernels, and the bits, bytes and refusals of plans and runs."""

import copy
from dataclasses import replace
from functools import partial
from itertools import product as pairs

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._meta_registrations import _meta_grouped_mm_common

from penstock import api
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.check.check import check
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.compute_time import ComputeTime
from penstock.planner.predict.memory import frame
from penstock.planner.show.schedule import scaled_in_words
from penstock.runtime import scaled_products as room
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.cuda.nvrtc import ELEMENT
from penstock.runtime.errors import PlanError, ProfileError, WorkloadError
from penstock.runtime.executor import execute
from penstock.runtime.layers.adapters import use_scaled_products
from penstock.runtime.layers.packed_weights import pack, parts
from penstock.runtime.plan import Kind, PlanFile, Policy, Semantics, Update, saves
from penstock.runtime.plan.footprint import WIDENED, device_needs
from penstock.runtime.plan.objective import parse_objective
from penstock.runtime.plan.optimizer import optimizing
from penstock.runtime.plan.packed import is_packed, layout
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import Matmul, Model
from penstock.runtime.scaled_products import E4M3, input_gradient, product, quantise, scales_of
from tests.cuda_in_cpp import NEEDS_A_COMPILER, by_two_threads, in_cpp
from tests.every_type import tiny
from tests.lanes import diagonal, examples, mostly_slow
from tests.reference import e4m3_rows, scaled_gradient, scaled_product
from tests.running import one_line, penstock
from tests.tiny import EXPERT_TYPES, tiny_config
from tests.training import (
    EVERYTHING,
    N_STEPS,
    NEEDS_FP8,
    batches_of,
    differences,
    machine_for,
    plan_of,
    same_bits,
    same_state,
    semantics_of,
    streamed,
    trained,
)

from .test_replay import device_bytes

pytestmark = NEEDS_FP8
LORA = Train(lora=Lora(rank=8, alpha=8.0))
FP8 = {"base": "fp8-rows", "products": "fp8"}
CPU = torch.device("cpu")
MAGNITUDES = (0.0, 1e-44, 1e-39, 1e-30, 2.0**-120, 1e-5, 1.0, 300.0, 448.0, 449.0, 3e38)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Rows of all magnitudes in bf16 or fp32, with some odd numbers."""
    n, width = draw(st.integers(1, 6)), draw(st.integers(1, 9)) * 16
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))
    x *= torch.tensor(draw(st.lists(st.sampled_from(MAGNITUDES), min_size=n, max_size=n)))[:, None]
    for number in draw(st.lists(st.sampled_from((-0.0, 448.0, 1.0625, 1.1875, 2.0**-10, 3e38)), max_size=3)):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = number
    return x.clamp(-2.5e38, 2.5e38).to(draw(st.sampled_from((torch.bfloat16, torch.float32))))


@settings(max_examples=examples(60), deadline=None)
@given(x=matrices(), factors=st.booleans(), chunk=st.sampled_from((1, 200, 2**22)))
def test_quantising_is_a_loop_over_rows(x: torch.Tensor, factors: bool, chunk: int) -> None:
    """Compare bitwise with one row at a time, one power of two after another and the nearest of all codes."""
    factors_I = torch.exp2(torch.arange(x.shape[1]) % 5 - 2.0) / 3 if factors else None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(room, "QUANTISED_CHUNK_ELEMENTS", chunk)
        codes, scales = quantise(x, factors_I)
    wide = x.float() if factors_I is None else x.float() * factors_I
    values, expected = e4m3_rows(wide)
    assert same_bits(scales, expected)
    assert same_bits(codes.float(), values)
    assert (values.abs().amax(1) <= 448).all()
    is_large = (expected > 2.0**-126)[:, 0]
    assert (values.abs().amax(1)[is_large] >= 224).all(), "a power of two less would do"


def test_a_scale_is_that_of_its_own_row() -> None:
    """The codes and the products of a row have the same bits among any other rows, also infinite ones."""
    torch.manual_seed(0)
    x, weight = torch.randn(300, 512).bfloat16(), torch.randn(384, 512)
    (codes, scales), (weights, of_weights) = quantise(x), quantise(weight)
    y = product(codes, scales, weights, of_weights[:, 0])
    dx = input_gradient(y, weights, of_weights[:, 0])
    for rows in (slice(0, 1), slice(7, 8), slice(3, 40), slice(100, 300), slice(5, 300, 3)):
        larger = torch.cat([x[rows], torch.full((3, 512), 3e38).bfloat16(), torch.full((1, 512), float("inf")).bfloat16()])
        n = len(x[rows])
        for one in (x[rows], larger):
            one_codes, one_scales = quantise(one)
            assert same_bits(one_codes[:n], codes[rows])
            assert same_bits(one_scales[:n], scales[rows])
            one_y = product(one_codes, one_scales, weights, of_weights[:, 0])
            assert same_bits(one_y[:n], y[rows])
            assert same_bits(input_gradient(one_y, weights, of_weights[:, 0])[:n], dx[rows])


def test_zeros_and_what_is_not_finite() -> None:
    x = torch.ones(5, 32)
    x[0], x[1, 3], x[2, 4], x[3, 5] = 0.0, float("nan"), float("inf"), -float("inf")
    codes, scales = quantise(x)
    assert scales[0] == 2.0**-126
    assert not codes[0].view(torch.uint8).any()
    assert torch.equal(scales.isnan()[:, 0], torch.tensor([False, True, True, True, False]))
    assert codes[1:4].float().isnan().all(), "a loss of such a row is not finite, which a step notices"
    weights, of_weights = quantise(torch.ones(16, 32))
    y = product(codes, scales, weights, of_weights[:, 0])
    assert torch.equal(y.isnan().any(1), scales.isnan()[:, 0])
    assert torch.equal(y[[0, 4]], torch.tensor([0.0, 32.0]).bfloat16()[:, None].expand(2, 16))
    assert scales_of(torch.tensor([448.0, 449.0, 3.4e38])).log2().tolist() == [0, 1, 120]
    assert quantise(torch.empty(0, 32))[0].shape == (0, 32)
    for number in ("nan", "inf"):
        with pytest.raises(ValueError, match=r"1 of its 512 numbers are not finite and cannot be packed as fp8-rows"):
            pack(torch.ones(16, 32).index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(float(number))), "fp8-rows")


def test_a_packed_weight_is_its_rows_quantised() -> None:
    weight = torch.randn(48, 80) * torch.logspace(-30, 20, 48)[:, None]
    weight[5] = 0
    packed = pack(weight, "fp8-rows")
    codes, scales = parts(packed, (48, 80), "fp8-rows")
    values, expected = e4m3_rows(weight)
    assert packed.shape == (48 * 80 + 256,) == (layout((48, 80), "fp8-rows").n_bytes,)
    assert same_bits(codes.float(), values)
    assert same_bits(scales, expected[:, 0])


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_fp32_sums_over_quantised_values(has_bias: bool) -> None:
    """Bitwise those of a matrix product in fp32, where torch's CPU kernel is the definition. Of exact sums within the rounding of
    bf16 and of the sum's K terms in fp32. The weight's scales belong to the summed dimension of the gradient."""
    torch.manual_seed(1)
    for n, k, m in ((1, 32, 16), (33, 256, 96), (64, 1024, 160)):
        x, weight, bias = (
            torch.randn(n, k).bfloat16(),
            torch.randn(m, k) * torch.logspace(-3, 3, m)[:, None],
            torch.randn(m).bfloat16(),
        )
        (codes, scales), (weights, of_weights) = quantise(x), quantise(weight)
        y = product(codes, scales, weights, of_weights[:, 0], bias if has_bias else None)
        assert same_bits(y, scaled_product(x, bias if has_bias else None, weights.float(), of_weights[:, 0]))
        exact = (codes.double() * scales) @ (weights.double() * of_weights).t() + (bias.double() if has_bias else 0.0)
        sizes = (codes.double().abs() * scales) @ (weights.double().abs() * of_weights).t() + bias.double().abs() * has_bias
        assert ((y - exact).abs() <= 2.0**-8 * exact.abs() + k * 2.0**-24 * sizes).all()
        dy = torch.randn(n, m).bfloat16()
        dx = input_gradient(dy, weights, of_weights[:, 0])
        assert same_bits(dx, scaled_gradient(dy, weights.float(), of_weights[:, 0]))
        near = dy.float() @ (weights.float() * of_weights)
        assert (dx - near).norm() < 0.05 * near.norm(), "E4M3 has an error of 2.6 % on average"


def by_rows(x, codes, scales, offs, sums_rows):
    """Slow twin of `grouped_product`: one row after another, with the weight of its expert."""
    results, multiply = [], scaled_gradient if sums_rows else lambda row, *weight: scaled_product(row, None, *weight)
    for n in range(len(x)):
        e = sum(end <= n for end in offs.tolist())
        results.append(multiply(x[n : n + 1], codes[e].float(), scales[e]))
    return torch.cat(results)


def stack_and_rows(seed=0):
    """Six experts with rows of all magnitudes, three without a row: x (40, 96), codes (6, 96, 96), scales (6, 96) and ends."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, 40)[torch.randperm(40, generator=generator)]
    x = (torch.randn(40, 96, generator=generator) * sizes[:, None]).bfloat16()
    codes, scales = quantise(torch.randn(576, 96, generator=generator) * torch.logspace(-6, 2, 576)[:, None])
    return x, codes.view(6, 96, 96), scales.view(6, 96), torch.tensor([0, 7, 7, 33, 40, 40], dtype=torch.int32)


@pytest.mark.parametrize("sums_rows", [False, True])
def test_experts_are_multiplied_as_if_row_by_row(sums_rows, monkeypatch) -> None:
    """Also among other rows of an expert, and in chunks. A scale of all rows of an expert, or of the wrong side, is noticed."""
    x, codes, scales, offs = stack_and_rows()
    y = room.grouped_product(x, codes, scales, offs, sums_rows)
    assert same_bits(y, by_rows(x, codes, scales, offs, sums_rows))
    monkeypatch.setattr(room, "QUANTISED_CHUNK_ELEMENTS", 300)
    fewer = [*range(1, 7), *range(20, 33), 39]
    part = room.grouped_product(x[fewer], codes, scales, torch.tensor([0, 6, 6, 19, 20, 20], dtype=torch.int32), sums_rows)
    assert same_bits(part, y[fewer])

    def by_expert(x_NI, factors=None, experts_N=None):
        wide = x_NI.float() if factors is None else x_NI.float() * factors[experts_N]
        of_rows = quantise(wide)[1].split(offs.diff(prepend=offs.new_zeros(1)).tolist())
        shared = torch.cat([part.amax().expand_as(part) if len(part) else part for part in of_rows])
        return (wide / shared).to(E4M3), shared

    monkeypatch.setattr(room, "quantise", by_expert)
    assert not same_bits(room.grouped_product(x, codes, scales, offs, sums_rows), y)
    monkeypatch.undo()
    assert not same_bits(room.grouped_product(x, codes, scales, offs, not sums_rows), y)


def test_all_experts_at_once_get_operands_as_the_kernel_needs_them(monkeypatch) -> None:
    """torch's checks of shapes, dtypes and strides for its kernel of all experts, which this processor lacks."""
    x, codes, scales, offs = stack_and_rows(1)
    expected = [room.grouped_product(x, codes, scales, offs, sums_rows) for sums_rows in (False, True)]

    def at_once(a, b, scales_a, scales_b, offs, out_dtype):
        _meta_grouped_mm_common(a, b, scales_a, scales_b, offs, out_dtype=out_dtype)
        assert all(t.is_contiguous() for t in (scales_a, scales_b))
        wide = (a.float() * scales_a[:, None]).split(offs.diff(prepend=offs.new_zeros(1)).tolist())
        return torch.cat([rows @ e.float() * of_e for rows, e, of_e in zip(wide, b, scales_b, strict=True)]).to(out_dtype)

    monkeypatch.setattr(room, "has_grouped_kernel", lambda device: True)
    monkeypatch.setattr(room, "by_columns", lambda weight: weight.view(torch.uint8).mT.contiguous().view(E4M3).mT)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", at_once)
    for sums_rows, y in zip((False, True), expected, strict=True):
        torch.testing.assert_close(room.grouped_product(x, codes, scales, offs, sums_rows), y, rtol=2**-7, atol=0)
    room.refuse_device(CPU, has_experts=True)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", lambda *args, **kwargs: at_once(*args, **kwargs).roll(1, 0))
    room.refuse_device(CPU)
    with pytest.raises(WorkloadError, match="computes row-wise FP8 products wrongly"):
        room.refuse_device(CPU, has_experts=True)


@NEEDS_A_COMPILER
@diagonal(("dtype", [torch.bfloat16, torch.float32]), ("kind", [0, 1, 2]))
def test_a_kernel_quantises_to_the_bits_of_torchs_calls(dtype, kind, tmp_path) -> None:
    kernel = by_two_threads(in_cpp(tmp_path, "quantise.cu", "quantise", ELEMENT=ELEMENT[dtype], FACTORS=kind))
    assert room.quantising_fault(kernel, CPU, dtype, kind) == ""
    for width in (16, 24, 1040):
        x, factors = torch.randn(9, width).to(dtype) * 100, (None, torch.rand(width), torch.rand(4, width))[kind]
        factors = () if factors is None else (factors, *[torch.tensor([0, 0, 1, 3, 3, 3, 3, 3, 3]).int()] * (kind == 2))
        x = torch.cat([x.flatten(), x.new_zeros(1)])[1:].view(9, width) if width == 24 else x  # not aligned
        codes, scales = torch.empty(x.shape, dtype=E4M3), torch.empty(9, 1)
        room.quantise_by_kernel(kernel, x, codes, scales, *factors)
        expected = quantise(x, *factors)
        assert same_bits(codes, expected[0])
        assert same_bits(scales, expected[1])

    def wrong(grid, block, args):
        kernel(grid, block, args)
        args[3].view(-1)[-1] ^= 1

    assert room.quantising_fault(wrong, CPU, dtype, kind).startswith("1 of its kernel's ")


@NEEDS_A_COMPILER
def test_a_kernel_transposes_codes(tmp_path) -> None:
    kernel = by_two_threads(in_cpp(tmp_path, "quantise.cu", "transpose", ELEMENT="float", FACTORS=0))
    assert room.transposing_fault(kernel, CPU) == ""
    for shape in ((16, 16), (32, 64), (3, 80, 176)):
        x = torch.randint(256, shape, dtype=torch.uint8)
        out = torch.empty(x.mT.shape, dtype=torch.uint8).view(E4M3)
        room.transpose_by_kernel(kernel, x.view(E4M3), out)
        assert torch.equal(out.view(torch.uint8), x.mT)
    assert room.transposing_fault(lambda *args: None, CPU) == "its kernel moves some codes elsewhere"


# -- runs ---------------------------------------------------------------------------------------------------------------

POLICIES = {
    "on the host": Policy(
        accumulation_group=2, prefetch_depth=2, save=saves(products=(1,)), offload_blocks=(1,), spill_blocks=(1,)
    ),
    "kept": Policy(accumulation_group=4, save=saves(all=(1, 3)), resident_blocks=(1, 2), update=Update.DEFERRED),
    "strided": Policy(boundary_stride=2, gradient_slots=2),
}


# Some experts get no token; of mixtral the sides of one stack are no multiples of 16, so that it stays in bf16
EXPERTS = {"qwen3_moe": {"num_experts": 16}, "gpt_oss": {"num_local_experts": 16}, "mixtral": {"intermediate_size": 24}}


@mostly_slow(
    ("model_type", "targets", "tied", "policy"),
    [
        ("qwen2", ("all-linear",), True, "on the host"),  # biases
        ("gemma2", ("q_proj", "down_proj"), True, "kept"),  # linear layers without adapters
        ("qwen3_moe", ("q_proj", "experts"), False, "strided"),
        ("mixtral", ("experts",), False, "on the host"),
        ("gpt_oss", ("q_proj",), False, "kept"),  # a row per input
        ("gpt_oss", ("experts",), False, "strided"),
        ("llama", ("all-linear",), False, "kept"),
        ("mistral", ("v_proj",), False, "on the host"),
    ],
)
def test_training_has_the_bits_of_the_slow_twin(model_type, targets, tied, policy) -> None:
    """The twin quantises one row at a time, and multiplies quantised values in fp32."""
    config = tiny_config(model_type, num_hidden_layers=3, tie_word_embeddings=tied, **EXPERTS.get(model_type, {}))
    semantics = semantics_of(
        model_type, train=Train(lora=Lora(8, 8.0, targets=targets)), gradient_dtype="fp32", micro_batch=2, **FP8
    )
    policy_of = replace(POLICIES[policy], accumulation_group=min(2, POLICIES[policy].accumulation_group))
    machine = streamed(config, semantics, policy_of, delay_seed=1)
    assert machine.plan.arena("packed") is None
    in_fp8, _, in_bf16 = scaled_in_words(machine.plan).partition(" in FP8, ")
    assert ("mlp.experts.gate_up_proj" in in_fp8) == (model_type in EXPERTS)
    assert ("mlp.experts.down_proj" in in_bf16) == (model_type == "mixtral")
    assert not any(op.kind is Kind.DEQUANTISE for op in machine.plan.ops)
    assert differences(machine) == []
    in_bf16 = trained(plan_of(config, replace(semantics, base="bf16", products="compute"), Policy()))
    losses = [[m.results[step].loss for step in range(N_STEPS)] for m in (machine, in_bf16)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


@mostly_slow("model_type", ["deepseek_v3", "phi3", "qwen3_next"])  # latent attention, joined projections, linear attention
def test_any_policy_has_the_bits_of_another(model_type) -> None:
    config = tiny(model_type)
    semantics = semantics_of(model_type, train=Train(lora=Lora(8, 8.0, dropout=0.0)), **FP8)
    layers = config["num_hidden_layers"]
    machines = [
        streamed(config, semantics, policy, delay_seed=2)
        for policy in (
            Policy(save=saves(all=range(1, layers + 1)), accumulation_group=4),
            Policy(prefetch_depth=2, resident_blocks=(1,)),
        )
    ]
    assert same_state(*machines)
    assert [machine.results[2].loss for machine in machines] == [machines[0].results[2].loss] * 2


def test_adapters_that_drop_have_the_bits_of_a_run_that_keeps_all() -> None:
    semantics = semantics_of("llama", train=Train(lora=Lora(4, 8.0, dropout=0.3, targets=("q_proj", "v_proj"))), **FP8)
    config = tiny_config("llama", num_hidden_layers=3)
    saving, recomputing = (streamed(config, semantics, policy, delay_seed=3) for policy in (POLICIES["kept"], Policy()))
    assert same_state(saving, recomputing)


def test_packed_documents_have_the_bits_of_another_policy() -> None:
    config, semantics = tiny_config("llama", num_hidden_layers=3), semantics_of("llama", train=LORA, **FP8)
    cuts = [replace(batch, document_tokens=((1, 7, 3, 5), (16,), (9, 1, 1, 5), (4, 12))) for batch in batches_of(96, 4, 16)]
    first, second = (trained(plan_of(config, semantics, POLICIES[name]), batches=cuts) for name in ("kept", "on the host"))
    assert same_state(first, second)


def test_a_row_that_is_not_finite_is_noticed() -> None:
    """A norm weight of infinity reaches a quantised row; the step's norm is NaN, and no update is made."""
    semantics = semantics_of("llama", train=LORA, on_nonfinite="skip", **FP8)
    machine = machine_for(plan_of(tiny_config("llama"), semantics, Policy()))
    p = next(p for p in machine.host.frozen[1] if p.name.endswith("input_layernorm.weight"))
    machine.host.set_weight(p, torch.full(p.shape, float("inf")))
    execute(machine.plan, machine, 1)
    assert not (machine.results[0].grad_norm < float("inf"))


# -- trained weights ----------------------------------------------------------------------------------------------------

TRAINED: dict[str, tuple[Policy, dict]] = {
    "everything": (EVERYTHING, {"clip_norm": 1e9}),  # shadows are committed
    "clipped": (EVERYTHING, {}),  # and updated again
    "on the device": (
        Policy(accumulation_group=4, device_blocks=(1, 2), resident_blocks=(1,), save=saves(all=(1,)), update=Update.DEFERRED),
        {},
    ),
    "eager": (Policy(update=Update.EAGER, prefetch_depth=2), {"clip_norm": None, "micro_batch": 3}),  # last micro-batch smaller
    "tiles": (Policy(accumulation_group=2, save=saves(all=(2,), products=(1,))), {"mlp_tile_tokens": 7, "micro_batch": 2}),
    "chosen layers": (POLICIES["strided"], {"train": Train(layers=(1, 2)), "gradient_dtype": "fp32"}),
    "chosen names": (POLICIES["kept"], {"train": Train(names=("*k_proj*", "*down_proj.weight", "*norm*"))}),
    "fused": (POLICIES["on the host"], {"pointwise": "fused", "norm": "fused", "loss": "online"}),
    "lean": (POLICIES["on the host"], optimizing("adamw:moments=int8,master=split24", None)),
}


@mostly_slow(
    ("model_type", "tied", "how"),
    [
        ("qwen2", False, "everything"),  # biases
        ("llama", True, "clipped"),
        ("llama", False, "on the device"),
        ("qwen2", True, "eager"),
        ("gemma2", True, "tiles"),
        ("qwen3_moe", False, "everything"),
        ("mixtral", False, "on the device"),
        ("gpt_oss", False, "eager"),  # a row per input
        ("qwen2", False, "chosen layers"),
        ("qwen2", False, "chosen names"),
        ("llama", False, "fused"),
        ("mistral", False, "lean"),
    ],
)
def test_training_weights_has_the_bits_of_the_slow_twin(model_type, tied, how) -> None:
    """Wherever the device gets a weight, its codes are those of its bf16 rows; weight gradients are bf16 products."""
    policy, fields = TRAINED[how]
    config = tiny_config(model_type, num_hidden_layers=4, tie_word_embeddings=tied, **EXPERTS.get(model_type, {}))
    semantics = semantics_of(model_type, products="fp8", **fields)
    policy = replace(policy, accumulation_group=min(policy.accumulation_group, semantics.n_micro_batches))
    machine = streamed(config, semantics, policy, delay_seed=1)
    assert differences(machine) == []
    in_bf16 = trained(plan_of(config, replace(semantics, products="compute"), Policy()))
    losses = [[m.results[step].loss for step in range(N_STEPS)] for m in (machine, in_bf16)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


@mostly_slow("model_type", ["deepseek_v3", "phi3", "qwen3_next"])
def test_any_policy_trains_weights_to_the_bits_of_another(model_type) -> None:
    config, semantics = tiny(model_type), semantics_of(model_type, products="fp8")
    layers = range(1, config["num_hidden_layers"] + 1)
    saving = streamed(config, semantics, Policy(save=saves(all=layers), accumulation_group=4), delay_seed=2)
    streaming = streamed(config, semantics, Policy(prefetch_depth=2, resident_blocks=(1,), update=Update.DEFERRED), delay_seed=3)
    assert same_state(saving, streaming)
    if model_type == "deepseek_v3":
        in_bf16 = scaled_in_words(saving.plan).partition("; layers' matrices in bf16: ")[2].split(", ")
        assert {"self_attn.kv_a_proj_with_mqa", "mlp.gate"} < {*in_bf16}


@pytest.mark.parametrize("fields", [{}, {"objective": parse_objective("orpo"), "micro_batch": 2}], ids=["documents", "pairs"])
def test_losses_of_trained_weights_have_the_bits_of_another_policy(fields) -> None:
    config, semantics = tiny_config("llama", num_hidden_layers=3), semantics_of("llama", products="fp8", **fields)
    cuts = [replace(batch, document_tokens=((1, 7, 3, 5), (16,), (9, 1, 1, 5), (4, 12))) for batch in batches_of(96, 4, 16)]
    batches = () if fields else cuts
    saving, offloading = (replace(POLICIES[name], accumulation_group=2) for name in ("kept", "on the host"))
    first, second = (trained(plan_of(config, semantics, policy), batches=batches) for policy in (saving, offloading))
    assert same_state(first, second)


def test_a_trained_product_has_the_weight_gradients_of_a_linear_layer() -> None:
    """Bitwise, for one output gradient; of several products with one input, each is computed if it is trained."""
    parts = nn.ModuleDict({"a_proj": nn.Linear(48, 32), "b_proj": nn.Linear(48, 64, bias=False)}).bfloat16()
    x, plain = torch.randn(2, 5, 48).bfloat16(), copy.deepcopy(parts)
    use_scaled_products(parts, ["a_proj.weight", "b_proj.weight"], [("a_proj", "b_proj")])
    for trains_b in (True, False):
        parts["b_proj"].requires_grad_(trains_b)
        for modules in (parts, plain):
            modules.zero_grad()
            outputs = [module(x) for module in modules.values()]
            torch.autograd.backward(outputs, [torch.full_like(y, 0.3).cumsum(0) for y in outputs])
        for p, q in zip(parts.parameters(), plain.parameters(), strict=True):
            assert p.grad is None if not p.requires_grad else same_bits(p.grad, q.grad)


# -- plans --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scaled"),
    [
        ("llama-3.1-8b", ["own", "shared", "shared", "own", "own", "shared", "own"]),
        ("qwen3-30b-a3b", ["own", "shared", "shared", "own", "own", "own"]),
        ("gpt-oss-20b", ["own", "shared", "shared", "own", "transposed", "transposed"]),
    ],
)
def test_a_block_takes_a_byte_a_weight_on_link_host_and_device(name, scaled) -> None:
    model, adapters = read_model(name), Train(lora=Lora(16, 32.0))
    semantics = Semantics(2048, 4, 2, train=adapters, gradient_dtype="fp32", **FP8)  # type: ignore[arg-type]
    plan = frame(model, build_workload(model, semantics), semantics, Policy())
    bf16 = frame(model, build_workload(model, s := replace(semantics, base="bf16", products="compute")), s, Policy())
    block = plan.workload.blocks[1]
    packed = [p for p in block.parameters if plan.is_packed(p)]
    n, rows = sum(p.n_elements for p in packed), sum(p.n_elements // p.shape[-1] for p in packed)
    assert len(packed) == len(scaled)
    saved_bytes = n - 4 * rows
    loaded, loaded_bf16 = (sum(run[-1] for run in setup.loaded(1)) for setup in (plan, bf16))
    assert loaded_bf16 - loaded == saved_bytes
    assert bf16.frozen_bytes(1) - plan.frozen_bytes(1) == saved_bytes
    weights, weights_bf16 = (arena.slot_bytes[0] for arena in (plan.arena("weights"), bf16.arena("weights")))  # type: ignore[union-attr]
    assert weights_bf16 - weights == saved_bytes
    assert plan.arena("packed") is None
    assert "in FP8, a scale per row (docs/fp8.md)" in scaled_in_words(plan)
    assert [m.scaled for m in block.matmuls if m.scaled != "no"] == scaled


def test_time_of_a_product_is_that_of_bf16_over_the_fraction_and_quantising_is_counted() -> None:
    profile = read_profile("h200-16core")
    cost, m = ComputeTime(profile), Matmul(8192, 8192, 29568, frozen=True)
    own, shared = (replace(m, scaled=scaled) for scaled in ("own", "shared"))
    assert cost._matmul("bf16", own) == pytest.approx(cost._matmul("bf16", m) / profile.device.fp8_rate_fraction.value)  # type: ignore[union-attr]
    per_byte = 1 / profile.device.memory_bytes_per_s.value
    packed, trained = Semantics(1, 1, 1, train=LORA, **FP8), Semantics(1, 1, 1, products="fp8")  # type: ignore[arg-type]
    assert cost._quantising_s([m], packed, backward=False) == cost._quantising_s([m, shared], packed, backward=False) == 0
    assert cost._quantising_s([own], packed, backward=False) == pytest.approx(per_byte * 8192 * 8192 * 3)
    expected = 8192 * 29568 * (3 + 2)
    assert cost._quantising_s([own], packed, backward=True) == pytest.approx(per_byte * expected)
    assert cost._quantising_s([shared], packed, backward=True) == pytest.approx(per_byte * (expected + 6 * 8192 * 8192))
    transposed = replace(own, scaled="transposed", count=3)  # a stack with a row per input is transposed in forward
    forward_s, backward_s = (cost._quantising_s([transposed], packed, backward) for backward in (False, True))
    assert forward_s == pytest.approx(3 * per_byte * (8192 * 8192 * 3 + 2 * 8192 * 29568))
    assert backward_s == pytest.approx(3 * per_byte * 8192 * 29568 * 3)
    assert ComputeTime(read_profile("cpu-2core"))._quantising_s([own], packed, backward=False) > 0
    of_weight = per_byte * 3 * 8192 * 29568  # quantised at each use, unless it is stored so
    for backward in (False, True):
        both = [cost._quantising_s([replace(own, count=2)], s, backward) for s in (packed, trained)]
        assert both[1] - both[0] == pytest.approx(2 * of_weight)
    both = [cost._backward_matmul("bf16", replace(own, frozen=frozen)) for frozen in (True, False)]
    assert both == pytest.approx([cost._matmul("bf16", own), cost._matmul("bf16", own) + cost._matmul("bf16", m)])


@mostly_slow(
    ("model_type", "targets"),
    [
        *(("llama", ("all-linear",)), ("llama", ("v_proj",)), ("gemma2", ("q_proj", "up_proj")), ("llama", ()), ("qwen2", ())),
        *(("mixtral", ("experts",)), ("qwen3_moe", ("q_proj",)), ("gpt_oss", ("q_proj",)), ("gpt_oss", ()), ("mixtral", ())),
    ],
)
def test_a_step_takes_the_memory_of_its_plan(model_type, targets) -> None:
    """A GPU's copy of a transposed weight is booked, which a CPU does not make; and an expert with all rows."""
    wide = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 96, "num_hidden_layers": 3}
    fields = {"train": Train(lora=Lora(8, 8.0, targets=targets)), **FP8} if targets else {"products": "fp8"}
    semantics = semantics_of(model_type, seq_len=128, loss_tile_tokens=64, **fields)
    tier = "attention" if model_type == "gpt_oss" else "products"
    for policy in (Policy(accumulation_group=2), Policy(accumulation_group=2, save=saves(all=(1,), **{tier: (2,)}))):
        plan = plan_of(tiny_config(model_type, **wide), semantics, policy)
        check(plan)
        _, peak_bytes = device_bytes(plan)
        transposed_bytes = max(p.n_elements for p in plan.workload.blocks[1].parameters if is_packed(p.name, p.shape, "fp8-rows"))
        booked_bytes = plan.kept_bytes + plan.transient_bytes + device_needs(plan, False, None)[WIDENED]
        assert peak_bytes <= booked_bytes <= (2.2 if model_type in EXPERT_TYPES else 1.3) * peak_bytes + transposed_bytes
        assert WIDENED not in device_needs(plan, True, None)


@pytest.mark.parametrize(("name", "experts"), [("qwen3-30b-a3b", "num_experts"), ("gpt-oss-20b", "num_local_experts")])
def test_the_transposed_copy_of_a_stack_is_booked(name, experts) -> None:
    """Twice the experts for the same tokens take as much more as a stack's codes."""
    model, semantics = read_model(name), Semantics(256, 1, 1, train=LORA, gradient_dtype="fp32", **FP8)  # type: ignore[arg-type]
    models = (replace(model, config=model.config | {experts: n * model.config[experts]}) for n in (1, 2))
    fewer, twice = (build_workload(m, semantics).blocks[1] for m in models)
    stack = max(p.n_elements for p in fewer.parameters)
    assert stack <= twice.transient_bytes - fewer.transient_bytes < 1.001 * stack


def test_an_expert_with_all_rows_is_booked_also_of_uneven_counts() -> None:
    """18 rows of 8 experts are products of 2 and of 3 rows."""
    config, needed_bytes = tiny_config("mixtral", num_local_experts=8, num_experts_per_tok=1), []
    for n_rows in (16, 18):
        plan = plan_of(config, semantics_of("mixtral", products="fp8", seq_len=n_rows), Policy())
        needed_bytes.append(device_needs(plan, False, None)[WIDENED])
    assert needed_bytes[0] < needed_bytes[1] < needed_bytes[0] * 18 / 16


REFUSED = [
    (
        {"train": LORA, "base": "fp8-rows", "products": "compute"},
        "--base fp8-rows is multiplied as it is stored: add --compute fp8",
    ),
    ({"train": LORA, "base": "fp8", "products": "fp8"}, "with --base fp8: no kernel here multiplies its blocks of 128 x 128; use"),
    (
        {"train": LORA, "products": "fp8"},
        "with --base bf16: it multiplies E4M3 with a scale per row; use --base fp8-rows",
    ),
    (FP8, "--base fp8-rows is for adapters: leave it out, or use --train lora"),
    (FP8 | {"train": Train(names=("*norm*",))}, "--base fp8-rows is for adapters"),
    ({"products": "fp8", "base": "int8"}, "leave out --base int8, or use"),
    (FP8 | {"train": LORA, "compute_dtype": "fp32"}, "computes all else in bf16, not fp32"),
    ({"products": "fp8", "compute_dtype": "fp32"}, "computes all else in bf16, not fp32"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_fp8_cannot_multiply_is_refused_in_one_line(fields, message) -> None:
    semantics = semantics_of("llama", **fields)
    with pytest.raises(PlanError, match=message) as error:
        build_workload(Model(tiny_config("llama")), semantics)
    assert "\n" not in str(error.value)
    legal = semantics_of("llama", train=LORA, **FP8)
    plan = plan_of(tiny_config("llama"), legal, Policy())
    with pytest.raises(PlanError):
        check(replace(plan, semantics=semantics))


@pytest.mark.parametrize(
    ("model_type", "message"),
    [("gpt2", "attn.c_proj is no plain linear layer"), ("bloom", "no linear layer *_proj has sides that are multiples of 16")],
)
def test_layers_without_a_known_linear_layer_are_named(model_type, message) -> None:
    with pytest.raises(WorkloadError) as error:
        build_workload(Model(tiny(model_type)), semantics_of(model_type, train=LORA, **FP8))
    assert f"{message}; use --base int8" in str(error.value)
    with pytest.raises(WorkloadError, match=f"{message.replace('*', '.')}; leave out --compute fp8"):
        build_workload(Model(tiny(model_type)), semantics_of(model_type, products="fp8"))


def test_a_machine_without_fp8_products_is_refused(tmp_path) -> None:
    with pytest.raises(ProfileError, match=r"^a100-sxm: the profile of NVIDIA A100-SXM4-80GB has no FP8 products \(NVIDIA's"):
        api.plan("qwen2.5-0.5b", "a100-sxm", seq_len=64, batch_size=2, train="lora", base="fp8-rows", compute_dtype="fp8")
    fields = read_profile("cpu-2core").to_json()
    del fields["device"]["fp8_rate_fraction"]
    with pytest.raises(ProfileError, match=r"has no FP8 products; leave out --compute fp8 .*, or measure them"):
        _ = Profile.from_json(fields).fp8_rate_fraction
    with pytest.raises(PlanError, match=r"no argument .products."):
        api.plan("qwen2.5-0.5b", "h100-sxm", train="lora", base="fp8-rows", compute_dtype="fp8", products="compute")
    planned = api.plan("qwen2.5-0.5b", "h100-sxm", seq_len=64, batch_size=2, train="lora", base="fp8-rows", compute_dtype="fp8")
    assert (planned.plan.semantics.compute_dtype, planned.plan.semantics.products) == ("bf16", "fp8")
    device = planned.plan.profile["device"] | {"fp8_rate_fraction": None}
    PlanFile(replace(planned.plan, profile=planned.plan.profile | {"device": device}), None).write(path := tmp_path / "plan.json")
    with pytest.raises(PlanError, match=f"^{path}: h100-sxm: the profile of .* has no FP8 products"):
        api.check(path)


@pytest.mark.parametrize("command", [("plan", "--machine"), ("compare", "--machines"), ("fits", "")])
def test_commands_refuse_what_does_not_work_in_one_line(command) -> None:
    name, flag = command
    arguments = ["h100-sxm"] if name == "fits" else ["llama-3.1-8b", flag, "h100-sxm"]
    one_line(penstock(name, *arguments, "--train", "lora", "--compute", "fp8"), 2, "use --base fp8-rows --compute fp8")
    one_line(penstock(name, *arguments, "--train", "lora", "--base", "fp8-rows"), 2, "add --compute fp8")


def test_a_device_that_lacks_or_mistakes_fp8_products_is_refused(monkeypatch) -> None:
    config, semantics = tiny_config("llama"), semantics_of("llama", train=LORA, **FP8)
    build = partial(Templates, config, build_workload(Model(config), semantics), semantics)
    room.refuse_device(CPU)
    real = torch._scaled_mm

    def lacking(*args, **kwargs):
        raise RuntimeError("rowwise scaling is not\nsupported")

    def without_scales(a, b, scale_a, scale_b, *args, **kwargs):
        return real(a, b, torch.ones_like(scale_a), scale_b, *args, **kwargs)

    for wrong, message in (
        (lacking, "has no row-wise FP8 products on cpu (rowwise scaling"),
        (without_scales, "products wrongly; plan"),
    ):
        monkeypatch.setattr(torch, "_scaled_mm", wrong)
        with pytest.raises(WorkloadError) as error:
            build()
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10G")
    with pytest.raises(WorkloadError, match=r"^--compute fp8: NVIDIA A10G has no FP8 products; plan without --compute fp8"):
        room.refuse_device(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "kind"), [*pairs([torch.bfloat16, torch.float32], [0, 1, 2])])
def test_a_gpu_quantises_to_the_processors_bits(dtype, kind) -> None:
    x = (torch.randn(70, 4096) * torch.logspace(-40, 30, 70)[:, None]).to(dtype)
    factors = (), (torch.rand(4096),), (torch.rand(7, 4096), (torch.arange(70) // 10).int())
    expected, device = quantise(x, *factors[kind]), torch.device("cuda")
    assert room.quantising_kernel(device, dtype, kind) is not None
    for result, wanted in zip(quantise(x.cuda(), *(t.cuda() for t in factors[kind])), expected, strict=True):
        assert same_bits(result.cpu(), wanted)


@pytest.mark.gpu
def test_a_gpus_products_do_not_depend_on_other_rows() -> None:
    """At the sizes of a layer; also twice the same, and near the fp32 twin."""
    room.refuse_device(torch.device("cuda"), has_experts=True)
    x, weight = torch.randn(4096, 8192, device="cuda").bfloat16(), torch.randn(1024, 8192, device="cuda")
    weights, of_weights = quantise(weight)
    y = product(*quantise(x), weights, of_weights[:, 0])
    dx = input_gradient(y, weights, of_weights[:, 0])
    assert same_bits(product(*quantise(x), weights, of_weights[:, 0]), y)
    for n in (1024, 2048):
        assert same_bits(product(*quantise(x[:n]), weights, of_weights[:, 0]), y[:n])
        assert same_bits(input_gradient(y[:n], weights, of_weights[:, 0]), dx[:n])
    stack, scales = weights.view(8, 128, 8192), of_weights.view(8, 128)
    for rows, sums_rows in ((x, False), (y[:, :128], True)):
        whole, half = (torch.tensor([0, 1, 2, 2, 3, 4, 6, 8], dtype=torch.int32, device="cuda") * n for n in (512, 256))
        of_half = torch.cat([torch.arange(256) + 512 * n for n in range(8)])
        results = room.grouped_product(rows, stack, scales, whole, sums_rows)
        assert same_bits(room.grouped_product(rows[of_half], stack, scales, half, sums_rows), results[of_half])
