"""Tiny configurations of supported model types, in the format of `config.json`.

Few and narrow layers with every structural feature of the type (grouped key-value heads, biases, alternating windows, experts), so
that results carry over to large models.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

_COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_SILU: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_dropout": 0.0}
_GELU = "gelu_pytorch_tanh"
_ALTERNATING = ["sliding_attention", "full_attention"]

_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

_BY_TYPE: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **_SILU},
    "mistral": {"architectures": ["MistralForCausalLM"], **_SILU, "head_dim": 8, "sliding_window": 8},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **_SILU},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **_SILU, "head_dim": 16},
    "gemma": {"architectures": ["GemmaForCausalLM"], **_SILU, "hidden_act": _GELU, "head_dim": 16, "tie_word_embeddings": True},
    "ernie4_5": {"architectures": ["Ernie4_5ForCausalLM"], **_SILU, "head_dim": 16, "use_bias": False},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], **_SILU, "no_rope_layer_interval": 2},
    "internlm3": {"architectures": ["InternLM3ForCausalLM"], **_SILU, "head_dim": 16, "qkv_bias": False, "bias": False},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "hidden_activation": _GELU, "rms_norm_eps": 1e-6, "head_dim": 16,
        "query_pre_attn_scalar": 16, "sliding_window": 8, "layer_types": _ALTERNATING, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], **_SILU, **_EXPERTS, "sliding_window": None},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], **_SILU, "head_dim": 16, "moe_intermediate_size": 48,
        "num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3, "decoder_sparse_step": 1,
        "mlp_only_layers": [1], "norm_topk_prob": True,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "head_dim": 16, **_EXPERTS,
        "sliding_window": 8, "layer_types": _ALTERNATING, "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip

_EXTRA_TYPES: dict[str, dict[str, Any]] = {  # for features that no other type has
    "bloom": {"n_head": 4, "hidden_dropout": 0.0},
    "gemma4_text": {
        **_SILU, "hidden_activation": _GELU, "head_dim": 16, "global_head_dim": 16, "sliding_window": 8,
        "layer_types": _ALTERNATING, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
        "num_kv_shared_layers": 0,
    },
}  # fmt: skip

# Types in the installed transformers; the oldest supported version lacks some
MODEL_TYPES: tuple[str, ...] = tuple(t for t in _BY_TYPE if find_spec(f"transformers.models.{t}"))
# Types for tests of every property. The others consist of the same parts; their loss, gradients, bits and bytes are tested in
# test_outside, test_exactness, test_documents, test_footprint and test_workload.
STRUCTURES: tuple[str, ...] = tuple(t for t in MODEL_TYPES if t not in ("gemma", "smollm3", "internlm3"))
EAGER_ONLY: tuple[str, ...] = ("gemma2", "bloom")  # no fused attention
WITH_SINKS: tuple[str, ...] = ("gpt_oss",)  # fused by our attention, not by transformers
EXPERT_TYPES: tuple[str, ...] = ("mixtral", "qwen3_moe", "gpt_oss")
SAME_PATHS = {"mistral": "llama", "qwen2": "llama", "qwen3": "llama", "qwen3_moe": "mixtral"}  # layers with the same code paths


def families(types: Sequence[str]) -> list[tuple[str, ...]]:
    """Group types with the same code paths; a property may be tested with one sampled type per group."""
    return [tuple(name for name in types if SAME_PATHS.get(name, name) == first) for first in types if first not in SAME_PATHS]


def tiny_config(model_type: str, **overrides: Any) -> dict[str, Any]:
    """Return a `config.json` of the type, updated with `overrides`; alternating layer types follow `num_hidden_layers`."""
    config = {"model_type": model_type, **_COMMON, **(_BY_TYPE | _EXTRA_TYPES)[model_type], **overrides}
    if "layer_types" in config and "layer_types" not in overrides:
        config["layer_types"] = [_ALTERNATING[i % 2] for i in range(config["num_hidden_layers"])]
    if "rope_parameters" in config:
        config.pop("rope_theta", None)
    return config
