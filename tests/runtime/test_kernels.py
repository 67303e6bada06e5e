"""Fused kernels: equality with eager ones, and the bytes and calls that plans count for them."""

import dataclasses
import sys
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.integrations import use_kernel_func_from_hub_with_fallback
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3_next import modeling_qwen3_next

from penstock.model_checks.missing_kernels import refuse_missing_libraries
from penstock.planner.model.kernels import FUSED
from penstock.planner.model.workload import build_workload, fusible
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.cuda.nvrtc import compiled_kernel
from penstock.runtime.errors import PlanError, WorkloadError
from penstock.runtime.layers import kernels, pointwise
from penstock.runtime.layers.kernels import rms_norm, rotary, use_kernels
from penstock.runtime.layers.pointwise import CALL_BY_CALL, ROTATE, OneKernel, fastest, several
from penstock.runtime.layers.transformers_patches import ACTIVATIONS, use_own_calls
from penstock.runtime.plan.workload import Model
from tests.every_type import tiny
from tests.lanes import diagonal, mostly_slow
from tests.real_layers import DTYPES, SIZES, WIDER, cases, hf_model, layer_calls, layers_of, peak_bytes, saved_bytes, semantics
from tests.tiny import STRUCTURES, tiny_config
from tests.training import fused, plain, same_bits, semantics_of

GATE_OF = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
SAMPLED = settings(max_examples=40, deadline=None, derandomize=True)


def same_bytes(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Compare bitwise, including signs of zeros and memory order, which can determine the order of a sum."""
    return all(a.stride() == b.stride() and same_bits(a, b) for a, b in zip(actual, expected, strict=True))


def random_tensor(draw: st.DataObject, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of all magnitudes, including zeros of both signs."""
    generator = torch.Generator().manual_seed(draw.draw(st.integers(0, 2**32), label="seed"))
    numbers = torch.randn(*shape, generator=generator) * 10.0 ** draw.draw(st.integers(-20, 4), label="magnitude")
    for zero, threshold in ((0.0, 0.05), (-0.0, 0.1)):
        numbers[torch.rand(*shape, generator=generator) < threshold] = zero
    return numbers.to(dtype)


@SAMPLED
@given(data=st.data(), dtype=st.sampled_from(list(DTYPES.values())), activation=st.sampled_from(ACTIVATIONS))
def test_an_activation_in_one_node_has_transformers_bits(data: st.DataObject, dtype: torch.dtype, activation: str) -> None:
    gate, up = (random_tensor(data, 33, 24, dtype=dtype).requires_grad_() for _ in range(2))
    gradient = random_tensor(data, 33, 24, dtype=dtype)
    inputs = gate.flatten(), up.flatten()
    actual = kernels._OneNode.apply(*CALL_BY_CALL[GATE_OF[activation]], *inputs).view_as(gate)
    expected = ACT2FN[activation](gate) * up
    assert same_bytes((actual,), (expected,))
    assert same_bytes(*(torch.autograd.grad(out, (gate, up), gradient) for out in (actual, expected)))


@SAMPLED
@given(data=st.data(), dtype=st.sampled_from(list(DTYPES.values())))
def test_a_rotary_embedding_in_one_node_has_transformers_bits(data: st.DataObject, dtype: torch.dtype) -> None:
    x = random_tensor(data, 2, 7, 3, 8, dtype=dtype).transpose(1, 2).requires_grad_()
    cos, sin = (random_tensor(data, 2, 7, 8, dtype=dtype) for _ in range(2))
    gradient = random_tensor(data, 2, 3, 7, 8, dtype=dtype)
    if data.draw(st.booleans(), label="token after token"):  # memory order after fused attention; otherwise head by head
        gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    actual, _ = rotary(CALL_BY_CALL[ROTATE], x, x.detach(), cos, sin)
    expected, _ = apply_rotary_pos_emb(x, x.detach(), cos, sin)
    assert same_bytes((actual,), (expected,))
    assert same_bytes(*(torch.autograd.grad(out, (x,), gradient) for out in (actual, expected)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_a_gpu_has_a_kernel_of_eagers_bits_for_each_function(dtype: torch.dtype) -> None:
    """Use several launches, too. A fault must warn, and fall back to the function."""
    cuda = torch.device("cuda")
    fast = pointwise.compiled(cuda, dtype, tuple(pointwise.GATES))
    for function, kernel in ((CALL_BY_CALL[key][k], fast[key][k]) for key in fast for k in (0, 1)):
        name = function.__name__
        assert isinstance(kernel, OneKernel), name
        compiled = pointwise.kernel_of(name, dtype, partial(compiled_kernel, device=cuda))
        by_pieces = OneKernel(function, compiled, limit=30_000)
        for inputs in pointwise.probes(function, cuda, dtype):
            expected = several(function(*inputs))
            for actual in (kernel(*inputs), by_pieces(*inputs)):
                for a, b in zip(several(actual), expected, strict=True):
                    assert a.stride() == b.stride()
                    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) or same_bits(a.nan_to_num(), b.nan_to_num())
        assert kernel.is_in_use
        assert by_pieces.is_in_use


@pytest.mark.parametrize("n_rows", [1, 1024, 2600])
def test_a_norms_gradients_are_those_of_pytorchs_function(n_rows: int) -> None:
    """Compare with fp64: thousands of rows and their sums change only the last digits."""
    x, gradient = (torch.randn(n_rows, 24, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    x, weight = x.requires_grad_(), torch.rand(24).requires_grad_()
    y = rms_norm(x, weight, 1e-6)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = F.rms_norm(exact_x, (24,), exact_weight, 1e-6)
    assert same_bytes((y,), (F.rms_norm(x, (24,), weight, 1e-6),))
    actual = torch.autograd.grad(y, (x, weight), gradient)
    wanted = torch.autograd.grad(exact, (exact_x, exact_weight), gradient.double())
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@diagonal(("model_type", ["llama", "qwen3_moe"]), ("dtype,tolerance", [("fp32", 2e-6), ("bf16", 2e-2)]))
def test_losses_and_norms_are_those_of_eager_kernels(model_type: str, dtype: str, tolerance: float) -> None:
    """Compare relative to the largest element: 2e-6 in fp32; 2e-2 in bf16, a few of its last digits."""
    eager = semantics_of(model_type, compute_dtype=dtype)
    at_once = plain(model_type, dataclasses.replace(eager, **fused(model_type)))
    usual = plain(model_type, eager)
    assert at_once.losses == pytest.approx(usual.losses, rel=tolerance)
    assert at_once.norms == pytest.approx(usual.norms, rel=10 * tolerance)


@mostly_slow("case", [c for c in cases(STRUCTURES) if c[0] != "gemma2"], fast=(0, 9, 10, 14), ids="-".join)
def test_bytes_of_fused_layers_are_those_of_real_ones(case: tuple[str, str, str]) -> None:
    """Allow two percent for a scale per row, which only a GPU saves."""
    for size in SIZES:
        for block, layer, x, kwargs in layers_of(case, *size, fused(case[0])):
            gradient, weights = torch.randn_like(x), list(layer.parameters())
            assert block.kept_bytes == pytest.approx(saved_bytes(layer, x, kwargs, weights), rel=0.03)
            peak = peak_bytes(lambda: torch.autograd.grad(layer(x, **kwargs), [x, *weights], gradient))  # noqa: B023
            assert peak <= block.transient_bytes <= 1.6 * peak


@diagonal(("model_type", ["llama", "gemma2"]), ("kernels", ["fused", "eager"]), ("dtype,tile", [("bf16", 32), ("fp32", 500)]))
def test_a_loss_stays_within_the_heads_transient_bytes(model_type: str, kernels: str, dtype: str, tile: int) -> None:
    """The cap of gemma2's logits has no fused kernel."""
    config = tiny_config(model_type, **WIDER, vocab_size=3000, tie_word_embeddings=False)
    how = semantics(2, 64, dtype, attention="eager", loss_tile_tokens=tile, **(fused(model_type) if kernels == "fused" else {}))
    workload = build_workload(Model(config), how)
    templates, head = Templates(config, workload, how), workload.blocks[-1]
    weights = {name: w.to(DTYPES[dtype]) for name, w in templates.initial_weights(3, 5).items()}
    hidden, targets = torch.randn(2, 64, 128).to(DTYPES[dtype]), torch.randint(0, 3000, (2, 64))
    total = torch.zeros(3000, 128)

    def work() -> object:
        with torch.no_grad():
            return templates.head.loss(weights, hidden, targets, 128, total)

    peak = peak_bytes(work)
    assert peak <= head.transient_bytes <= 1.8 * peak


def test_fused_layers_move_and_keep_less() -> None:
    """By hand: a norm reads and writes once, an activation reads two and writes one, queries and keys are read and written once."""
    width, inner, n_tokens, n_q, n_kv, head = 128, 352, 96, 4, 2, 16
    model = Model(tiny_config("qwen3", **WIDER))
    eager, fast = (build_workload(model, semantics(2, 48, "bf16", **k)).blocks[1] for k in ({}, fused("qwen3")))
    turned = n_tokens * (n_q + n_kv) * head
    rotary = 2 * 2 * turned + 2 * 2 * 2 * (48 * head)  # a table of cosines and one of sines, for queries and for keys
    norms = 2 * (2 * 2 * n_tokens * width + 2 * width) + 2 * 2 * turned + 2 * 2 * head
    activation, residuals = 3 * 2 * n_tokens * inner, 2 * 3 * 2 * n_tokens * width
    assert fast.fused_bytes == norms + activation + rotary
    assert fast.pointwise_bytes == fast.fused_bytes + residuals < 0.5 * eager.pointwise_bytes
    assert fast.kept_bytes < 0.8 * eager.kept_bytes
    assert fast.n_kernels < 0.6 * eager.n_kernels
    assert (eager.fused_bytes, eager.matmuls, eager.parameters) == (0, fast.matmuls, fast.parameters)


def test_what_no_fused_kernel_computes_is_refused_in_one_line() -> None:
    parts = {"gemma2": {"pointwise"}, "gemma": {"loss", "pointwise"}, "ernie4_5": {"norm", "loss"}, "gpt_oss": {"norm", "loss"}}
    assert {name: fusible(Model(tiny_config(name))) for name in parts} == parts
    for name, part in (("gemma2", "norm"), ("gemma2", "loss"), ("gpt_oss", "pointwise")):
        how = semantics(attention="eager", **{part: FUSED[part]})
        with pytest.raises(WorkloadError, match=f"no fused kernel computes the {part} of this model; plan with --kernels eager"):
            build_workload(Model(tiny_config(name)), how)
    layer = hf_model(tiny_config("gemma2")).model.layers[0]  # type: ignore[union-attr]
    part_types = [type(part) for part in layer.modules()]
    use_kernels(layer, semantics(norm="fused", pointwise="fused"))
    assert [type(part) for part in layer.modules()] == part_types, "modules with another computation are unchanged"


def test_a_packages_kernel_computes_where_the_plan_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed here as a sum over taps. Transformers alone would always use it."""
    lengths: list[int] = []

    def causal_conv1d_fn(x_BDT: torch.Tensor, weight_DW: torch.Tensor, bias: None, activation: str) -> torch.Tensor:
        lengths.append(x_BDT.shape[-1])
        padded = F.pad(x_BDT, (weight_DW.shape[1] - 1, 0))
        taps = [weight_DW[:, i, None] * padded[..., i : i + x_BDT.shape[-1]] for i in range(weight_DW.shape[1])]
        return F.silu(sum(taps[1:], taps[0]))

    tokens, named = torch.arange(24)[None], semantics(library_kernels=("causal_conv1d.causal_conv1d_fn",))
    model = hf_model(tiny("qwen3_next"))
    logits = model(input_ids=tokens).logits
    monkeypatch.setitem(sys.modules, "taps", types.SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn))  # type: ignore[arg-type]
    wrapped = use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "taps")(modeling_qwen3_next.causal_conv1d_fn.__wrapped__)
    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", wrapped)
    torch.testing.assert_close(model(input_ids=tokens).logits, logits)
    assert lengths == [24, 24, 24], "a layer each, but for attention's"
    use_own_calls(model)  # like the start of a run
    assert torch.equal(model(input_ids=tokens).logits, logits)
    assert len(lengths) == 3
    for layer in model.model.layers:  # type: ignore[union-attr]
        use_kernels(layer, named)
    torch.testing.assert_close(model(input_ids=tokens).logits, logits)
    assert len(lengths) == 6
    for device, why in (("cpu", "needs a GPU"), ("cuda", "not installed here: pip install causal-conv1d")):
        with pytest.raises(PlanError, match=f"causal_conv1d_fn, which .*{why}.* plan again with --kernels eager$"):
            refuse_missing_libraries(named, device)


def test_other_models_of_transformers_keep_their_kernels() -> None:
    config = tiny_config("llama")
    changed, untouched = hf_model(config), hf_model(config)
    use_kernels(changed.model.layers[0], semantics(**fused("llama")))  # type: ignore[union-attr]
    assert "forward" in vars(changed.model.layers[0].mlp)  # type: ignore[union-attr]
    for model in (untouched, hf_model(config)):
        assert not any("forward" in vars(part) for part in model.model.layers[0].modules())  # type: ignore[union-attr]
        assert len(layer_calls(model, 96, 1, 8)) == 2


@pytest.mark.parametrize("pointwise", ["eager", "fused"])
def test_activations_are_compiled_for_fused_layers_alone(pointwise, monkeypatch):
    calls = []
    monkeypatch.setattr("penstock.runtime.compute.blocks.fastest", lambda *args: calls.append(args) or fastest(*args))
    semantics, config = semantics_of("llama", pointwise=pointwise), tiny_config("llama")
    Templates(config, build_workload(Model(config), semantics), semantics)
    assert len(calls) == (pointwise == "fused")
