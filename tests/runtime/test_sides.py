"""Side inputs of layers that learn: embeddings of each layer, norms with weights before the first, and keys and values of earlier
layers; and hidden states of several streams."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from penstock.planner.model.config import outlines
from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan import Policy, saves
from penstock.runtime.plan.workload import Model
from tests.every_type import tiny
from tests.lanes import diagonal, mostly_slow
from tests.rank_law import trained_alone, trained_by
from tests.tiny import tiny_config
from tests.training import EVERYTHING, differences, plan_of, semantics_of, streamed

from .test_replay import REMEMBERING, device_bytes

TYPES = [name for name in ("gemma4_text", "bloom") if find_spec(f"transformers.models.{name.removesuffix('_text')}")]
SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}  # the last two have keys and values of the first two
STREAMS = {"gemma3n_text": "sdpa", "deepseek_v4": "eager", "glm_moe_dsa": "sdpa"}
STREAMS = {name: attention for name, attention in STREAMS.items() if find_spec(f"transformers.models.{name.removesuffix('_text')}")}
OWN_AND_SHARED = [("gemma4_text", {"num_hidden_layers": 4}), ("gemma4_text", SHARED)]
CASES = [*((name, {"num_hidden_layers": 3}) for name in TYPES), *((name, SHARED) for name in TYPES if name == "gemma4_text")]
KEPT = Policy(save=saves(all=(1, 3)), accumulation_group=2)


@diagonal(
    ("model_type,sizes", [*OWN_AND_SHARED, *((name, {}) for name in STREAMS)]),
    ("policy,compute_dtype", [(Policy(), "bf16"), (KEPT, "fp32"), (EVERYTHING, "bf16"), (EVERYTHING, "fp32")]),
)
def test_gradients_of_sides_and_of_several_streams_are_exact(model_type, sizes, policy, compute_dtype):
    """Use micro-batches of two sizes with embeddings that wait for several backwards, and hidden states with an epilogue."""
    config = tiny(model_type) if model_type in STREAMS else tiny_config(model_type, **sizes)
    fields = {"attention": STREAMS[model_type]} if model_type in STREAMS else {}
    semantics = semantics_of(model_type, compute_dtype=compute_dtype, batch_size=5, micro_batch=2, **fields)
    if (model_type, compute_dtype) == ("deepseek_v4", "bf16"):
        with pytest.raises(WorkloadError, match="of the trained weights in fp32"):
            plan_of(config, semantics, policy)
        return
    machine = streamed(config, semantics, replace(policy, accumulation_group=min(policy.accumulation_group, 3)), delay_seed=1)
    # With several streams the plain loop adds squares of tensors in the order of their names in the model
    assert [name for name in differences(machine) if model_type not in STREAMS or not name.startswith("norm of step")] == []


@pytest.mark.slow
def test_ranks_send_gradients_of_side_inputs_to_the_prologue(tmp_path):
    cases = ["gemma4_text:plain:2", "gemma4_text:deferred:2"]
    assert trained_by(2, cases, tmp_path / "digests") == {case: trained_alone(case) for case in cases}


@mostly_slow("way", ["keep", "boundaries"])
@mostly_slow(("model_type", "sizes"), CASES)
def test_memory_of_side_inputs_is_booked(model_type, sizes, way):
    """For each micro-batch of a group, from its embedding's forward to its backward."""
    semantics = semantics_of(model_type, seq_len=96, batch_size=2, compute_dtype="fp32", loss_tile_tokens=16)
    config = tiny_config(model_type, hidden_size=128, **sizes)
    plan = plan_of(config, semantics, replace(REMEMBERING[way], accumulation_group=2))
    left_bytes, peak_bytes = device_bytes(plan)
    assert 0.7 * (plan.kept_bytes + plan.transient_bytes) < peak_bytes <= plan.kept_bytes + plan.transient_bytes
    shared = outlines(Model(config), semantics.attention, 1, 96)["shared"]
    shared_bytes = sum(4 * n if size == 2 else n * size for n, size in shared)
    assert left_bytes - shared_bytes == pytest.approx(plan.kept_bytes, rel=0.02, abs=1000)
