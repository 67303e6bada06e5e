"""Layer traces: shipped traces equal recordings of transformers modules, evaluated traces equal recorded ones."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from penstock.planner.model import config, fused, layer_traces, trace_cache, workload
from penstock.planner.model.config import essence_of, library_kernels, outlines, shipped_model
from penstock.planner.model.memory_replay import Tape, Tensor
from penstock.planner.model.sizes import Kernels, evaluated, fitted, monomials
from penstock.planner.model.workload import build_workload, can_tile_mlp, fusible, supported_attention
from penstock.runtime.errors import WorkloadError
from penstock.runtime.layers.kernels import gate_of, is_rotary_call
from penstock.runtime.layers.meta_models import meta_model
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.workload import Model, Workload
from tests.every_type import tiny
from tests.lanes import mostly_slow
from tests.tiny import tiny_config

SHIPPED = ["qwen2.5-0.5b", "gpt-oss-20b", "gemma3-1b", "glm-4.5-air-106b", "qwen3-30b-a3b", "qwen3.5-0.8b", "qwen3-vl-8b"]


def test_a_folder_of_a_shipped_model_is_planned_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Additional config keys without effect on the computation are ignored; another value is another model."""
    config = shipped_model("qwen3-8b").config | {"transformers_version": "4.51.0", "torch_dtype": "bfloat16", "bos_token_id": 1}
    config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 36, "rope_scaling": None}
    monkeypatch.setattr("penstock.planner.model.config._recorder", lambda: pytest.fail("this asks for torch"))
    local = build_workload(Model(config, "/somewhere", "Qwen3-8B"), Semantics(64, 2, 1))
    assert local == build_workload(shipped_model("qwen3-8b"), Semantics(64, 2, 1))
    multimodal = shipped_model("qwen3-vl-8b").config
    text = multimodal["text_config"] | {"dtype": "bfloat16", "initializer_range": 0.02, "bos_token_id": 151643, "use_cache": True}
    assert build_workload(Model(multimodal | {"text_config": text}), Semantics(64, 2, 1)).n_params == local.n_params
    with pytest.raises(pytest.fail.Exception):
        build_workload(Model(config | {"rms_norm_eps": 1e-5}), Semantics(64, 2, 1))


def test_a_folder_that_is_planned_again_is_not_recorded_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A damaged file or other library versions cause a new recording."""
    token = trace_cache.folder.set(tmp_path / "outlines")
    model, sizes = Model(tiny_config("gemma2", sliding_window=300, num_hidden_layers=3)), Semantics(512, 4, 2, attention="eager")
    first = build_workload(model, sizes)
    (file,) = (tmp_path / "outlines").iterdir()
    content = file.read_bytes()

    def planned() -> Workload:
        for memoised in (config._known, config._at_size, workload._built):
            memoised.cache_clear()
        return build_workload(model, sizes)

    with monkeypatch.context() as patch:
        patch.setattr(config, "_recorder", lambda: pytest.fail("this asks for torch"))
        assert planned() == first
        for damaged in (b"", content[:-9], b"[]", b'{"attention": ["sdpa"]}'):
            file.write_bytes(damaged)
            with pytest.raises(pytest.fail.Exception):
                planned()
        file.write_bytes(content)
        patch.setattr(trace_cache, "_versions", lambda: ("2.99", "6.0", "other code"))
        with pytest.raises(pytest.fail.Exception):
            planned()
    for nowhere in (file, None):
        trace_cache.folder.set(nowhere)
        assert planned() == first
    trace_cache.folder.reset(token)


def test_micro_batches_of_known_models_are_chosen_without_torch(tmp_path: Path) -> None:
    """A shipped model, and one that another process has traced; torch cannot be imported."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", num_hidden_layers=5, intermediate_size=96)))
    token = trace_cache.folder.set(tmp_path / "cache" / "outlines")
    build_workload(config.read_model(str(tmp_path)), Semantics(512, 4, 2))
    trace_cache.folder.reset(token)
    code = """
import sys
sys.modules["torch"] = None
from penstock import api
for model in sys.argv[1:]:
    assert api.plan(model, "rtx4090-desktop", seq_len=512, batch_size=4, policy="megatrain").plan.semantics.micro_batch
"""
    environment = os.environ | {"PENSTOCK_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code, "qwen3-0.6b", str(tmp_path)], env=environment, check=True)


@mostly_slow("name", SHIPPED)
def test_shipped_outlines_are_what_is_recorded_at_any_size(name: str) -> None:
    """This includes sizes outside those of the polynomial fit."""
    model = shipped_model(name)
    key = json.dumps(model.config, sort_keys=True)
    (attention, *_) = layer_traces.about(key)["attention"]
    for n_sequences, seq_len in ((1, 37), (2, 80), (5, 101)):
        shipped = outlines(model, attention, n_sequences, seq_len)
        trace = layer_traces.recorded(key, Kernels(attention, library_kernels(model)), n_sequences, seq_len)
        assert json.loads(json.dumps(trace)) == shipped, (n_sequences, seq_len)


def test_what_is_no_polynomial_is_recorded_itself() -> None:
    """Linear attention in PyTorch loops over chunks of a sequence, but scales with the number of sequences."""
    key = json.dumps(tiny("qwen3_next"), sort_keys=True)
    sizes = [(n, seq_len) for n in (1, 2) for seq_len in (32, 80, 160)]
    with pytest.raises(ValueError, match="sizes have different"):
        fitted({size: layer_traces.recorded(key, Kernels("sdpa"), *size) for size in sizes})
    for n, seq_len in ((5, 80), (1, 300), (2, 520)):
        assert layer_traces.outlines(key, Kernels("sdpa"), n, seq_len) == layer_traces.recorded(key, Kernels("sdpa"), n, seq_len)


def test_a_kernel_of_another_package_is_one_call_among_the_same() -> None:
    key = json.dumps(tiny("qwen3_next"), sort_keys=True)
    kernels = tuple(layer_traces.about(key)["library_kernels"])
    trees = (layer_traces.recorded(key, Kernels("sdpa", names), 1, 80) for names in ((), kernels))
    torch_calls, library_calls = ([call[0] for call in tree["kinds"][0]["calls"]] for tree in trees)
    first, second = map(library_calls.index, kernels)
    prefix, between, suffix = library_calls[:first], library_calls[first + 1 : second], library_calls[second + 1 :]
    begin = next(i for i in range(first, len(torch_calls)) if torch_calls[i : i + len(between)] == between)
    assert (torch_calls[:first], torch_calls[-len(suffix) :]) == (prefix, suffix)
    assert first < begin < len(torch_calls) - len(suffix) - len(between) - 60
    assert len(torch_calls) < len(layer_traces.recorded(key, Kernels("sdpa"), 1, 200)["kinds"][0]["calls"])


def test_the_delta_rule_moves_what_its_kernels_read_and_write() -> None:
    """Kernels in the launch order of fla's `chunk_gated_delta_rule_fwd`; 100 tokens are two chunks."""
    n, n_tokens, heads, v_heads, width, v_width = 3, 100, 2, 4, 8, 16
    size = {
        **{"q": n * n_tokens * heads * width, "k": n * n_tokens * v_heads * width, "v": n * n_tokens * v_heads * v_width},
        **{"A": n * n_tokens * v_heads * 64, "h": n * 2 * v_heads * width * v_width, "g": 2 * n * n_tokens * v_heads},
    }
    copies, norms = ("q q", "q q", "v v"), ("q q", "q q")  # queries and keys, contiguous by head
    launches = (*copies, *norms, "g g", "A", "k A", "A v k k v", "k k v h v", "k k h v v")
    tape, q = Tape(2), [Tensor(size[name], 2) for name in ("q", "q", "v", "g", "g")]
    fused.delta_rule(tape, q, [[n, n_tokens, heads, width]] * 2 + [[n, n_tokens, v_heads, v_width]], 0, 0)
    assert tape.work.n_kernels == len(launches)
    moved_bytes = 2 * sum(size[name] for launch in launches for name in launch.split())
    assert tape.work.pointwise_bytes == tape.work.fused_bytes == moved_bytes
    scales_bytes = 2 * 4 * n * n_tokens * heads
    kept_bytes = 2 * sum(size[name] for name in ("q", "q", "v", "g", "A")) + scales_bytes
    assert sum(t.n_bytes for t in tape.steps[0].outputs[1:]) == kept_bytes


def test_polynomials_give_back_the_numbers_they_were_made_of() -> None:
    coefficients = [3, -1, 2, 5, 0, 7]
    sizes = [(n, seq_len) for n in (1, 2) for seq_len in (16, 32, 48)]
    value = {size: sum(c * m for c, m in zip(coefficients, monomials(*size), strict=True)) for size in sizes}
    tree = fitted({size: {"a": [value[size], "name"], "b": 7} for size in sizes})
    assert tree == {"a": [{"p": coefficients}, "name"], "b": 7}
    assert evaluated(tree, 9, 1000)["a"][0] == sum(c * m for c, m in zip(coefficients, monomials(9, 1000), strict=True))
    with pytest.raises(ValueError, match="no whole"):
        fitted({(n, t): n * t // 3 for n, t in sizes})


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("hy_v4", "layer 2 reads an output of another layer"),
        ("openai-gpt", "computation after the layers is not supported"),
        ("megatron-bert", "the head is no single product"),
        ("jetmoe", "cannot be recorded by layers"),
    ],
)
def test_a_model_that_is_no_chain_of_layers_is_refused_with_why(model_type: str, why: str) -> None:
    model = Model(tiny(model_type))
    with pytest.raises(WorkloadError, match=why) as caught:
        build_workload(model, Semantics(16, 2, 1, attention=supported_attention(model)[0]))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(find_spec("transformers.models.gemma4") is None, reason="this version of transformers has no Gemma 4")
def test_rotary_tables_are_made_in_an_order_without_hashes() -> None:
    """Transformers takes the order of a set of strings; a trace would differ with PYTHONHASHSEED."""
    model: Any = meta_model(tiny_config("gemma4_text"), Semantics(8, 1, 1)).base_model
    assert model.unique_layer_types == ["full_attention", "sliding_attention"]


def test_layers_are_told_apart_by_what_they_compute() -> None:
    """Layers differ in the MLP, dense or sparse (qwen3_moe), or in rotary embeddings (smollm3); kinds are in model order."""
    for name, overrides, kinds in (("qwen3_moe", {}, [0, 1, 0]), ("smollm3", {}, [0, 1]), ("llama", {}, [0, 0])):
        key = json.dumps(tiny_config(name, **overrides), sort_keys=True)
        assert layer_traces.recorded(key, Kernels("sdpa"), 1, 16)["layers"] == kinds, name


def test_kernels_are_fused_only_where_they_compute_the_same() -> None:
    """Not fused: partial rotary embedding, an MLP with additional constants, a head with scaling."""

    class ScaledMlp(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 0.5  # type: ignore[no-any-return]

    config = LlamaConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2)
    gates = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
    gates |= dict.fromkeys(("gelu_python", "gelu_new", "relu"))
    for activation, gate in gates.items():
        config.hidden_act = activation
        assert gate_of(LlamaMLP(config)) == gate
        assert gate_of(ScaledMlp(config)) is None
    assert is_rotary_call((torch.ones(1, 1, 1, 8), 0, torch.ones(1, 1, 8), 0), {})
    assert not is_rotary_call((torch.ones(1, 1, 1, 8), 0, torch.ones(1, 1, 4), 0), {})
    fused = {name: fusible(Model(tiny(name))) for name in ("llama", "glm4_moe", "minicpm3", "granite")}
    assert {name for name, parts in fused.items() if "loss" not in parts} == {"minicpm3", "granite"}
    rotated = {name: {g[0] for k in outlines(Model(tiny(name)), "sdpa", 1, 16)["kinds"] for g in k["groups"]} for name in fused}
    assert {name for name, kinds in rotated.items() if "rotary" in kinds} == {"llama", "minicpm3", "granite"}


def test_only_an_mlp_that_ends_its_layer_runs_by_tiles() -> None:
    """Not tiled: shared experts, and MLPs with scaled or normalised outputs outside the tile."""
    assert {name: can_tile_mlp(Model(tiny(name))) for name in ("llama", "olmo2", "deepseek_v3", "glm4", "granite")} == {
        "llama": True, "olmo2": True, "deepseek_v3": False, "glm4": False, "granite": False,
    }  # fmt: skip


def test_a_null_window_is_no_missing_one() -> None:
    config = shipped_model("mistral-7b").config
    assert config["sliding_window"] is None
    missing = {key: value for key, value in config.items() if key != "sliding_window"}
    assert essence_of(config) != essence_of(missing), "the type's own default is a window"
