"""Loss and gradients against PyTorch and transformers."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from penstock.model_checks.self_test import differences, reference_step
from penstock.planner.model.workload import supported_attention
from penstock.runtime.errors import WorkloadError
from penstock.runtime.layers.meta_models import read_config
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.workload import Model
from tests.every_type import tiny
from tests.lanes import mostly_slow
from tests.tiny import MODEL_TYPES, tiny_config

# Settings of a type's configuration, in addition to those of the smallest one
OPTIONS = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"attention_bias": True},
    "gemma": {"attention_bias": True, "pad_token_id": 0},
    "ernie4_5": {"use_bias": True},
    "smollm3": {"use_sliding_window": True, "sliding_window": 8, "mlp_bias": True},
    "internlm3": {"qkv_bias": True, "bias": True, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
}


def faults(config, attention=None, compute_dtype="fp32") -> list[str]:
    """Return differences of our first step from transformers' `forward(labels=...)` with the same random weights."""
    semantics = Semantics(1, 1, 1, attention=attention or supported_attention(Model(config))[0])
    names = differences(reference_step(config, semantics, compute_dtype))
    # The two gradients of a tied matrix are added in fp32 here, and rounded once
    rounds = compute_dtype == "bf16" and read_config(config).tie_word_embeddings
    return [name for name in names if not (rounds and "embed" in name)]


@mostly_slow(
    ("model_type", "compute_dtype"), [*product(sorted(MODEL_TYPES), ["fp32"]), *product(["llama", "gemma2", "gpt_oss"], ["bf16"])]
)
def test_every_types_loss_and_gradients_are_transformers(model_type, compute_dtype):
    """Parametrise by the table of types, which covers every type."""
    overrides = [{"tie_word_embeddings": False}, {"tie_word_embeddings": True}, OPTIONS.get(model_type, {})]
    configs = [tiny_config(model_type, **fields) for fields in overrides]
    if model_type not in MODEL_TYPES:
        pytest.skip("this transformers does not know the type")
    for attention in supported_attention(Model(configs[0])):
        for config in configs:
            assert faults(config, attention=attention, compute_dtype=compute_dtype) == [], (attention, config)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_the_gradient_of_the_heads_bias_is_the_sum_over_tiles(micro_batch):
    step = reference_step(tiny("phi"), Semantics(1, 1, 1))
    by_tiles = replace(step, semantics=replace(step.semantics, loss_tile_tokens=12, micro_batch=micro_batch))
    assert differences(by_tiles, partial(torch.allclose, rtol=1e-4, atol=1e-6)) == []


def test_a_type_that_draws_random_numbers_is_refused():
    with pytest.raises(WorkloadError, match="draws random numbers"):
        faults(tiny_config("llama") | {"model_type": "seed_oss", "residual_dropout": 0.1, "head_dim": 16})
