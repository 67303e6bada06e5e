"""Comparison of the model in a folder with the model of a plan."""

import json
import re
from typing import Any

import pytest

from penstock.planner.model.config import hub_name, shipped_model, shipped_models
from penstock.runtime.layers.meta_models import difference
from tests.tiny import MODEL_TYPES, tiny_config

# Fields of published files that a shipped configuration lacks, written from memory except for the sizes.
_USUAL = {"bos_token_id": 1, "eos_token_id": [2], "initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {"max_window_layers": 24, "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False},
    "qwen3-8b": {"rope_scaling": None, "max_window_layers": 36, "sliding_window": None, "use_sliding_window": False},
    "qwen3-30b-a3b": {"rope_scaling": None, "max_window_layers": 48, "output_router_logits": False, "mlp_only_layers": []},
    "llama-3.1-8b": {"rope_scaling": _LLAMA3 | {"factor": 8.0}, "pretraining_tp": 1, "max_position_embeddings": 4096},
    "llama-3.2-1b": {"rope_scaling": _LLAMA3 | {"factor": 32.0}, "head_dim": 64, "pad_token_id": 128004},
    "mixtral-8x7b": {"router_aux_loss_coef": 0.02, "sliding_window": None},
    "gpt-oss-120b": {
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 4096},
        "quantization_config": {"quant_method": "mxfp4"},
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "swiglu_limit": 7.0,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_model_is_the_published_one(name: str) -> None:
    config = shipped_model(name).config
    assert difference(config | _USUAL | PUBLISHED[name], config) is None


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("qwen2.5-0.5b", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, not 1e-06"),
        ("qwen2.5-0.5b", {"rope_theta": 10000.0}, "rope_parameters.rope_theta is 10000.0, not 1000000.0"),
        ("qwen2.5-0.5b", {"use_sliding_window": True, "max_window_layers": 3}, "layer_types is "),
        ("qwen3-8b", {"model_type": "qwen2"}, "model_type is qwen2, not qwen3"),
        ("qwen3-30b-a3b", {"norm_topk_prob": False}, "norm_topk_prob is False, not True"),
        ("llama-3.1-8b", {"rope_scaling": None}, "rope_parameters."),
        ("gpt-oss-120b", {"swiglu_limit": 6.0}, "swiglu_limit is 6.0, not 7.0"),
        ("gpt-oss-120b", {"max_position_embeddings": 4096}, "max_position_embeddings is 4096, not 131072"),  # YaRN may depend on it
    ],
)
def test_another_model_is_named_by_the_first_difference(name: str, changes: dict[str, Any], expected: str) -> None:
    message = difference(shipped_model(name).config | changes, shipped_model(name).config)
    assert message is not None
    assert message.startswith(expected)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_is_alike_to_what_transformers_writes_of_it(model_type: str, tmp_path: Any) -> None:
    from transformers import AutoConfig

    config = tiny_config(model_type)
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    assert difference(json.loads((tmp_path / "config.json").read_text()), config) is None


def test_every_shipped_model_names_its_weights() -> None:
    assert [name for name in shipped_models() if not re.fullmatch(r"[\w.-]+/[\w.-]+", hub_name(name) or "")] == []
