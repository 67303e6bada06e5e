"""Workloads against transformers models: weights, FLOP, memory traffic and bytes saved by autograd."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from penstock.planner.model.workload import build_workload, read_model, shipped_models, supported_attention
from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan.objective import parse_objective
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import Model
from tests import real_layers
from tests.every_type import tiny
from tests.lanes import diagonal, mostly_slow
from tests.real_layers import DTYPES, MANY, Traffic, cases, hf_model, layer_calls, layers_of, peak_bytes, saved_bytes, semantics
from tests.tiny import EAGER_ONLY, EXPERT_TYPES, MODEL_TYPES, STRUCTURES, tiny_config
from tests.training import fused

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((t, {}) for t in MODEL_TYPES),
    *((t, {"tie_word_embeddings": True}) for t in MODEL_TYPES),
    *((t, {"head_dim": ...}) for t in MODEL_TYPES if "head_dim" in tiny_config(t)),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    ("llama", {"num_key_value_heads": 4, "head_dim": None}),
    ("qwen2", {"num_key_value_heads": None}),
    ("gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_hidden_layers": 4, "attention_bias": True}),
    ("gemma", {"attention_bias": True, "hidden_act": "gelu"}),
    ("ernie4_5", {"use_bias": True, "num_key_value_heads": None, "head_dim": None}),
    ("internlm3", {"qkv_bias": True, "bias": True, "head_dim": None}),
    ("internlm3", {"qkv_bias": ..., "bias": ..., "attention_bias": True, "mlp_bias": True}),
]
CONFIGS = [
    *({k: v for k, v in tiny_config(t, **overrides).items() if v is not ...} for t, overrides in VARIANTS if t in MODEL_TYPES),
    *(config for name in shipped_models() if (config := read_model(name).config)["model_type"] in MODEL_TYPES),
]


def attention_of(model_type: str) -> str:
    return "eager" if model_type in EAGER_ONLY else "sdpa"


@mostly_slow("config", CONFIGS, ids=lambda config: config["model_type"])
def test_weights_have_the_names_shapes_and_order_of_transformers(config: dict[str, Any]) -> None:
    with torch.device("meta"):
        expected = [(n, tuple(p.shape)) for n, p in hf_model(config).named_parameters()]
    workload = build_workload(Model(config), semantics(attention=attention_of(config["model_type"])))
    assert [(p.name, p.shape) for block in workload.blocks for p in block.parameters if p.tied_to is None] == expected
    head = workload.blocks[-1].parameters[-1]
    assert workload.tied == (head.tied_to == "model.embed_tokens.weight") == (expected[-1][0] != "lm_head.weight")
    assert head.shape == workload.blocks[0].parameters[0].shape


@mostly_slow("model_type", MODEL_TYPES)
def test_matmul_work_is_what_the_flop_counter_counts(model_type: str) -> None:
    """Eager attention computes all seq_len x seq_len scores; plans count the causal half within the window."""
    config, batch, seq_len = tiny_config(model_type), 3, 21
    options = {"experts_implementation": "eager"} if model_type in EXPERT_TYPES else {}
    model = hf_model(config, attn_implementation="eager", **options)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(0, config["vocab_size"], (batch, seq_len)), use_cache=False)
    how = semantics(batch, seq_len, attention="eager", loss_tile_tokens=10)
    blocks = build_workload(Model(config), how).blocks
    squares = [4 * a.n_sequences * a.n_heads * a.head_dim * seq_len**2 for b in blocks if (a := b.attention)]
    assert len(squares) == config["num_hidden_layers"]
    # Older versions of transformers compute rotary tables once, with an outer product
    tables = [sum(counts.values()) for module, counts in counter.get_flop_counts().items() if module.endswith("rotary_emb")]
    assert sum(m.flop for b in blocks for m in b.matmuls) + sum(squares) == counter.get_total_flops() - sum(tables)


@mostly_slow(
    ("model_type", "overrides"),
    [
        *((t, {}) for t in MODEL_TYPES),
        ("mistral", {"sliding_window": None}),
        ("mixtral", {"sliding_window": 5}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}),
        ("gemma2", {"layer_types": ["full_attention", "full_attention"]}),
        ("gpt_oss", {"sliding_window": 100}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [0, 1, 1]}),
    ],
    fast=(0, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20),
)
def test_attention_counts_the_pairs_that_the_models_mask_admits(model_type: str, overrides: dict[str, Any]) -> None:
    config, seq_len = tiny_config(model_type, **overrides), 24
    blocks = build_workload(Model(config), semantics(1, seq_len, attention="eager")).blocks[1:-1]
    calls = layer_calls(hf_model(config, attn_implementation="eager"), config["vocab_size"], 1, seq_len)
    for block, (_, _, kwargs) in zip(blocks, calls, strict=True):
        assert block.attention is not None
        n_pairs = int((kwargs["attention_mask"][0, 0] == 0).sum())
        assert block.attention.flop == 4 * block.attention.n_heads * block.attention.head_dim * n_pairs


def test_experts_share_rows_evenly_and_lose_none() -> None:
    config = tiny_config("mixtral", num_local_experts=4, num_experts_per_tok=2)
    for tokens in (1, 2, 5, 48):
        block = build_workload(Model(config), semantics(1, tokens)).blocks[1]
        rows = [m for m in block.matmuls if m.n == 2 * config["intermediate_size"]]
        assert sum(m.m * m.count for m in rows) == 2 * tokens
        assert sum(m.count for m in rows) == min(4, 2 * tokens)
        assert max(m.m for m in rows) - min(m.m for m in rows) <= 1


@mostly_slow("case", cases(MODEL_TYPES), fast=(0, 9, 10, 12, 14, 16, 18, 22), ids="-".join)
def test_kept_bytes_are_what_autograd_saves(case: tuple[str, str, str]) -> None:
    """Kernel calls and traffic match the layer; the backward peak is at most `transient_bytes` and at least two thirds of it."""
    for size in real_layers.SIZES:
        for block, layer, x, kwargs in layers_of(case, *size):
            weights = list(layer.parameters())
            assert block.kept_bytes == pytest.approx(saved_bytes(layer, x, kwargs, weights), rel=0.02)
            assert block.boundary_bytes == x.numel() * x.element_size()
            with Traffic() as traffic:
                layer(x, **kwargs)
            assert abs(block.n_kernels - traffic.calls.total()) <= 1
            assert block.pointwise_bytes == pytest.approx(traffic.n_bytes, rel=0.08)
            gradient = torch.randn_like(x)
            peak = peak_bytes(lambda: torch.autograd.grad(layer(x, **kwargs), [x, *weights], gradient))  # noqa: B023
            assert peak <= block.transient_bytes <= 1.5 * peak


TRAINED = {
    "adapters": Train(lora=Lora(rank=8, alpha=4.0)),
    "adapters that drop": Train(lora=Lora(rank=8, alpha=4.0, dropout=0.1, targets=("q_proj", "v_proj", "o_proj", "down_proj"))),
    "norms": Train(names=("*norm*",)),
    "a projection": Train(names=("*.o_proj.weight",)),
}


def partly(case: tuple[str, str, str]) -> list[dict[str, Any]]:
    """Return kernel options for partial training of a layer, with and without fused kernels."""
    ways = [{"train": train} for name, train in TRAINED.items() if "drop" not in name or case[0] not in EXPERT_TYPES]
    if case[0] in EXPERT_TYPES:
        ways.append({"train": Train(lora=Lora(rank=8, targets=("q_proj", "experts")))})
    return [*ways, ways[0] | fused(case[0])][case[2] == "fp32" :: 2]  # half of them in each dtype


@mostly_slow("case", cases(STRUCTURES), ids="-".join)
def test_layers_trained_in_part_keep_and_need_what_is_booked(case: tuple[str, str, str]) -> None:
    for how in partly(case):
        for block, layer, x, kwargs in layers_of(case, *real_layers.SIZES[0], kernels=how):
            measured = saved_bytes(layer, x, kwargs, list(layer.parameters()))
            assert block.kept_bytes == pytest.approx(measured, rel=0.02), (how, block.name)
            gradient, weights = torch.randn_like(x), [p for p in layer.parameters() if p.requires_grad]
            peak = peak_bytes(lambda: torch.autograd.grad(layer(x, **kwargs), [x, *weights], gradient))  # noqa: B023
            assert peak * 0.996 <= block.transient_bytes <= 1.6 * peak, (how, block.name, peak, block.transient_bytes)


@diagonal(("model_type", EXPERT_TYPES), ("dtype", DTYPES), ("overrides", real_layers.ROW_HEAVY))
def test_rows_of_experts_keep_what_autograd_saves_of_them(model_type: str, dtype: str, overrides: dict[str, Any]) -> None:
    """Exact up to row counters, and up to the row mask that only some versions of transformers save."""
    case = (model_type, attention_of(model_type), dtype)
    for block, layer, x, kwargs in layers_of(case, *MANY, **overrides):
        measured = saved_bytes(layer, x, kwargs, list(layer.parameters()))
        n_rows = MANY[0] * MANY[1] * overrides["num_experts_per_tok"]
        assert measured - 100 < block.kept_bytes <= measured + n_rows


def test_the_bound_holds_at_a_width_of_real_models() -> None:
    config = read_model("qwen2.5-0.5b").config | {"num_hidden_layers": 1, "vocab_size": 64}
    model = hf_model(config, attn_implementation="sdpa").to(torch.bfloat16)
    block = build_workload(Model(config), semantics(1, 512, "bf16")).blocks[1]
    ((layer, x, kwargs),) = layer_calls(model, 64, 1, 512)
    x, gradient, weights = x.requires_grad_(), torch.randn_like(x), list(layer.parameters())
    peak = peak_bytes(lambda: torch.autograd.grad(layer(x, **kwargs), [x, *weights], gradient))
    assert peak <= block.transient_bytes <= 1.5 * peak
    assert block.kept_bytes == pytest.approx(saved_bytes(layer, x, kwargs, weights), rel=0.02)


@mostly_slow("dtype", DTYPES)
@mostly_slow("model_type", ["llama", "gemma", "gemma2"])
def test_an_embedding_keeps_indices_alone(model_type: str, dtype: str) -> None:
    config = tiny_config(model_type, **real_layers.WIDER, vocab_size=1000)
    block = build_workload(Model(config), semantics(2, 48, dtype, attention="eager")).blocks[0]
    table = hf_model(config).to(DTYPES[dtype]).model.embed_tokens  # type: ignore[union-attr]
    ids = torch.randint(0, 1000, (2, 48))
    assert saved_bytes(table.forward, ids, {}, [*table.parameters(), *table.buffers()]) <= 8  # excluding the indices
    assert block.kept_bytes == 8 * ids.numel()
    with Traffic() as traffic:
        table(ids)
    assert block.n_kernels == traffic.calls.total()
    gradient = torch.randn(2, 48, config["hidden_size"], dtype=DTYPES[dtype])
    peak = peak_bytes(lambda: torch.autograd.grad(table(ids), list(table.parameters()), gradient))
    assert peak <= block.transient_bytes <= 1.5 * peak
    assert block.boundary_bytes == gradient.numel() * gradient.element_size()


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def test_a_model_is_a_folder_a_file_or_a_shipped_name(tmp_path: Path) -> None:
    config = tiny_config("llama")
    file = write(tmp_path, config)
    for source in (tmp_path, file):
        model = read_model(str(source))
        assert (model.config, model.path, model.name) == (config, None, tmp_path.name)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    assert read_model(str(tmp_path)).path == read_model(str(file)).path == str(tmp_path.resolve()), "weights are there"
    shipped = read_model("llama-3.1-8b")
    assert (shipped.path, shipped.name, shipped.config["hidden_size"]) == (None, "llama-3.1-8b", 4096)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model_type": ...}, "`model_type` is missing"),
    ({"num_hidden_layers": 10**6}, "at most 10000"),
    ({"hidden_size": 2**31}, "at most 2147483647"),
    ({"architectures": ["Qwen3MoeForQuestionAnswering"]}, "not a causal language model"),
]


@pytest.mark.parametrize(("change", "complaint"), WRONG)
def test_a_wrong_configuration_is_refused_with_its_key(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    file = write(tmp_path, {k: v for k, v in (tiny_config("qwen3_moe") | change).items() if v is not ...})
    with pytest.raises(WorkloadError, match=rf"^{re.escape(str(file))}.*{complaint}.*$") as caught:
        read_model(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "change", "complaint"),
    [
        ("nobodys", {}, "transformers cannot build this model"),
        ("qwen3", {"hidden_size": "wide"}, "transformers cannot build this model"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types"),
        ("llama", {"attention_dropout": 0.1}, "draws random numbers"),
    ],
)
def test_what_transformers_refuses_is_refused_in_one_line(model_type: str, change: dict[str, Any], complaint: str) -> None:
    config = tiny_config("qwen3" if model_type == "nobodys" else model_type, **change) | {"model_type": model_type}
    with pytest.raises(WorkloadError, match=complaint) as caught:
        build_workload(Model(config), semantics(attention=attention_of(model_type)))
    assert "\n" not in str(caught.value)


def test_a_classifier_is_not_taken_for_a_language_model() -> None:
    model = Model(tiny("qwen3") | {"architectures": ["Qwen3ForSequenceClassification"]})
    assert build_workload(model, semantics(objective=parse_objective("classify")))
    with pytest.raises(WorkloadError, match="scores sequences, not a causal language model; plan it with --loss reward"):
        build_workload(model, semantics())


def test_experts_that_are_called_otherwise_have_no_adapters() -> None:
    """The last weight stack has the name of a LoRA target but gets no adapter."""
    model = Model(tiny("nemotron_h"))
    blocks = build_workload(model, semantics(train=Train(lora=Lora()))).blocks
    assert not [p.name for block in blocks for p in block.parameters if ".experts.lora_" in p.name]
    with pytest.raises(WorkloadError, match="no experts that support adapters"):
        build_workload(model, semantics(train=Train(lora=Lora(targets=("experts",)))))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.touch()
    os.truncate(file, 2**40)
    with pytest.raises(WorkloadError, match="larger than any configuration"):
        read_model(str(file))


@pytest.mark.parametrize("name", ["", "x" * 5000, "nul\0byte"])
def test_a_name_of_no_model_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no such folder") as caught:
        read_model(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800
    with pytest.raises(WorkloadError, match=r"similar: qwen2\.5-72b"):
        read_model("Qwen2.5-72B-Instruct")
    with pytest.raises(WorkloadError, match=r"no config\.json in this folder"):
        read_model(str(tmp_path))


def fused_is_the_models_own(config: dict[str, Any]) -> bool:
    """True if transformers supports SDPA with equal logits. Older versions accept gemma2 but ignore its score cap."""
    logits = []
    for attention in ("eager", "sdpa"):
        torch.manual_seed(0)
        try:
            model = hf_model(config, attn_implementation=attention)
        except ValueError:
            return False
        with torch.no_grad():
            logits.append(model(torch.arange(24)[None], use_cache=False).logits)
    return torch.allclose(*logits, atol=1e-4)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_fused_attention_is_refused_where_the_model_has_another(model_type: str) -> None:
    model = Model(tiny_config(model_type, initializer_range=0.2))  # large scores, to reach the cap
    supports_sdpa = fused_is_the_models_own(model.config)
    assert ("sdpa" in supported_attention(model)) == supports_sdpa == (model_type not in EAGER_ONLY)
    if supports_sdpa:
        assert build_workload(model, semantics()).n_layers == model.config["num_hidden_layers"]
    else:
        with pytest.raises(WorkloadError, match="use eager"):
            build_workload(model, semantics())
