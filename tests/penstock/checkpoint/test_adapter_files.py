"""Adapters in PEFT's files: PEFT loads what we write, and we read what PEFT saves, to the bit."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.checkpoint.adapter_files import CONFIG_FILE, PREFIX, TENSOR_FILE, config_bytes, peft_name, read_adapter
from runtime.errors import CheckpointError
from runtime.plan.train import TARGETS, Lora
from tests.adapters_of_peft import ATTENTION, LORA, TOKENS, factors_of, logits_with, lora_of, model_of, peft_saved, write_adapter
from tests.tiny import MODEL_TYPES


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


# -- by PEFT


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_peft_loads_what_we_write_and_computes_the_same(tmp_path: Path, model_type: str) -> None:
    model, lora = model_of(model_type), lora_of(model_type)
    factors = factors_of(model, lora)
    expected = logits_with(model, lora, factors)
    with torch.no_grad():
        assert not torch.allclose(model(TOKENS).logits, expected, atol=1e-3)
    adapted = PeftModel.from_pretrained(model, write_adapter(tmp_path / "a", lora, factors))  # a key left over is a warning
    loaded = {name.replace(".default", "") for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert loaded == {peft_name(name) for name in factors}
    in_peft = {name: adapted.get_parameter(PREFIX + name.replace(".weight", ".default.weight")) for name in factors}
    assert all(torch.equal(in_peft[name], factor) for name, factor in factors.items())
    with torch.no_grad():
        torch.testing.assert_close(adapted(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)


def test_transformers_finds_the_base_of_an_adapter(tmp_path: Path) -> None:
    model = model_of("qwen2")
    factors = factors_of(model)
    model.save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(write_adapter(tmp_path / "adapter", LORA, factors, str(tmp_path / "base")))
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, logits_with(model, LORA, factors), atol=1e-5, rtol=1e-5)


def test_the_configuration_is_pefts_and_the_same_every_time() -> None:
    """Its targets are those that have factors, sorted: PEFT keeps a set, whose order differs from process to process."""
    factors = factors_of(model_of("mixtral"))
    fields = json.loads(config_bytes(LORA, factors, "mixtral"))
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "mixtral", "inference_mode": True}
    expected |= {"r": 4, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": sorted(ATTENTION), "bias": "none"}
    assert fields.items() >= expected.items()
    assert json.loads(config_bytes(Lora(4, 2.5), (), None))["lora_alpha"] == 2.5


# -- by us


KINDS_OF_TARGETS: dict[str, Any] = {
    "leaves": list(TARGETS),
    "suffixes": [f"{'self_attn' if target in ATTENTION else 'mlp'}.{target}" for target in TARGETS],
    "pattern": r".*\.(self_attn|mlp)\.[a-z]+_proj",
    "all-linear": "all-linear",
}


@pytest.mark.parametrize("targets", KINDS_OF_TARGETS.values(), ids=KINDS_OF_TARGETS)
def test_what_peft_saved_is_read_however_targets_are_given(tmp_path: Path, targets: Any) -> None:
    expected = peft_saved(tmp_path, model_of(), target_modules=targets, lora_dropout=0.25)
    lora, factors = read_adapter(tmp_path, shapes_of(model_of()))
    assert lora == Lora(4, 6.0, 0.25, TARGETS)
    assert factors.keys() == expected.keys()
    assert len(factors) == 2 * 7 * 2
    assert all(torch.equal(factors[name], factor) for name, factor in expected.items())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_adapters_of_every_type_and_beginning_are_read(tmp_path: Path, model_type: str) -> None:
    """Of the beginnings that leave the base's weights as they are."""
    model = model_of(model_type)
    shapes = shapes_of(model)
    init = (True, False, "gaussian", "orthogonal")[MODEL_TYPES.index(model_type) % 4]
    expected = peft_saved(tmp_path, model, target_modules=["v_proj", "q_proj"], init_lora_weights=init, exclude_modules=["lm_head"])
    lora, factors = read_adapter(tmp_path, shapes)
    assert lora == Lora(4, 6.0, 0.0, ("q_proj", "v_proj"))
    assert all(torch.equal(factors[name], factor) for name, factor in expected.items())


def test_targets_that_peft_was_told_to_leave_out_are_not_missed(tmp_path: Path) -> None:
    peft_saved(tmp_path, model_of(), target_modules=list(ATTENTION), exclude_modules=["k_proj"])
    assert read_adapter(tmp_path, shapes_of(model_of()))[0].targets == ("q_proj", "v_proj", "o_proj")


def test_what_we_write_we_read(tmp_path: Path) -> None:
    model, lora = model_of(), Lora(3, 2.5, 0.125, ("k_proj", "down_proj"))
    factors = factors_of(model, lora)
    read_lora, read = read_adapter(write_adapter(tmp_path / "adapter", lora, factors), shapes_of(model))
    assert read_lora == lora
    assert all(torch.equal(read[name], factor) for name, factor in factors.items())


def test_narrower_factors_are_widened(tmp_path: Path) -> None:
    factors = factors_of(model_of())
    folder = write_adapter(tmp_path / "adapter", LORA, factors)
    save_file({PREFIX + name: factor.bfloat16() for name, factor in factors.items()}, folder / TENSOR_FILE)
    _, read = read_adapter(folder, shapes_of(model_of()))
    assert all(torch.equal(read[name], factor.bfloat16().float()) for name, factor in factors.items())


# -- what is refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", LORA, factors_of(model_of()))


def refused(folder: Path, **overrides: Any) -> str:
    """In one line, by an adapter beside a tiny llama with `overrides`."""
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder, shapes_of(model_of(**overrides)))
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert said.isprintable()
    assert said.startswith(str(folder))
    assert "; " in said, "what to do is said too"
    return said


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | changes))


def set_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / TENSOR_FILE)
    edit(tensors)
    save_file(tensors, folder / TENSOR_FILE)


NOT_COMPUTED: dict[str, Any] = {
    **{"use_dora": True, "use_rslora": True, "lora_bias": True, "fan_in_fan_out": True, "bias": "all", "task_type": "SEQ_CLS"},
    **{"rank_pattern": {"q_proj": 8}, "layers_to_transform": [0], "modules_to_save": ["lm_head"], "peft_type": "IA3"},
    **{"target_parameters": ["mlp.experts.down_proj"], "trainable_token_indices": [1, 2], "layer_replication": [[0, 1]]},
    **{"init_lora_weights": "pissa", "a key\nof tomorrow": "on"},
}


@pytest.mark.parametrize("key", NOT_COMPUTED)
def test_an_option_that_is_not_computed_is_refused_by_name(folder: Path, key: str) -> None:
    set_config(folder, **{key: NOT_COMPUTED[key]})
    said = refused(folder)
    assert repr(key)[1:-1] in said
    assert f"is {json.dumps(NOT_COMPUTED[key])}, which is not computed here" in said


@pytest.mark.parametrize("off", [None, False, "", [], {}], ids=repr)
def test_an_option_that_is_off_is_no_reason_to_refuse(folder: Path, off: Any) -> None:
    sometimes = ("bias", "init_lora_weights", "peft_type", "task_type")
    set_config(folder, **{key: off for key in NOT_COMPUTED if key not in sometimes})
    assert read_adapter(folder, shapes_of(model_of()))[0] == LORA


CONFIGS: dict[str, tuple[Any, str]] = {
    "no-rank": ({"r": None}, "r: "),
    "rank-of-text": ({"r": "4"}, "r: "),
    "rank-true": ({"r": True}, "r: "),
    "rank-huge": ({"r": 10**300}, "r: "),
    "rank-zero": ({"r": 0}, "rank is 0"),
    "alpha-nan": ({"lora_alpha": float("nan")}, "lora_alpha: "),
    "alpha-zero": ({"lora_alpha": 0}, "alpha is 0"),
    "dropout-one": ({"lora_dropout": 1.0}, "dropout is 1"),
    "another-rank": ({"r": 8}, "lora_A.weight is (4, "),
    "targets-no-list": ({"target_modules": {"q_proj": 1}}, "target_modules: "),
    "targets-no-names": ({"target_modules": [1]}, "target_modules: "),
    "targets-no-pattern": ({"target_modules": "(q_proj"}, "target_modules: "),
    "fewer-targets": ({"target_modules": ["k_proj"]}, "is none of the target_modules"),
}


@pytest.mark.parametrize(("changes", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_that_means_nothing_is_refused(folder: Path, changes: dict[str, Any], expected: str) -> None:
    set_config(folder, **changes)
    assert expected in refused(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe\x00", b"[" * 200_000, b" " * (16 * 2**20 + 1)], ids=len)
def test_a_configuration_that_is_no_object_is_refused(folder: Path, content: bytes) -> None:
    (folder / CONFIG_FILE).write_bytes(content)
    assert CONFIG_FILE in refused(folder)


def add(key: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({key: torch.ones(shape)})


Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
KEYS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no-prefix": (lambda t: t.update({Q0.removeprefix(PREFIX) + ".lora_A.weight": t.pop(f"{Q0}.lora_A.weight")}), "model.layers.0"),
    "an-adapter's-name": (add(f"{Q0}.lora_A.default.weight", 4, 32), "lora_A.default.weight"),
    "a-layer-numbered-twice": (add(f"{PREFIX}model.layers.00.self_attn.q_proj.lora_A.weight", 4, 32), "layers.00"),
    "dora": (add(f"{Q0}.lora_magnitude_vector", 32), "lora_magnitude_vector"),
    "the-head": (add(f"{PREFIX}lm_head.lora_A.weight", 4, 32), "lm_head"),
    "experts": (add(f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight", 4, 32), "mlp.experts"),
    "a-path": (add(f"{PREFIX}../../etc\n/passwd", 1), "passwd"),
    "no-a": (lambda t: t.pop(f"{Q0}.lora_A.weight"), f"no tensor {Q0}.lora_A.weight"),
    "no-b": (lambda t: t.pop(f"{Q0}.lora_B.weight"), f"no tensor {Q0}.lora_B.weight"),
    "nothing": (dict.clear, "holds no tensors"),
    "one-dimension": (add(f"{Q0}.lora_B.weight", 128), f"{Q0}.lora_B.weight is (128,)"),
    "turned": (add(f"{Q0}.lora_A.weight", 32, 4), f"{Q0}.lora_A.weight is (32, 4)"),
    "whole-numbers": (lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones((4, 32), dtype=torch.int8)}), "torch.int8"),
}


@pytest.mark.parametrize(("edit", "expected"), KEYS.values(), ids=KEYS)
def test_a_tensor_missing_or_left_over_is_refused(folder: Path, edit: Callable[[dict[str, Tensor]], object], expected: str) -> None:
    set_tensors(folder, edit)
    said = refused(folder)
    assert expected in said
    assert TENSOR_FILE in said


def without(part: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


BASES: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], object], str]] = {
    "wider": ({"hidden_size": 64}, len, f"{Q0}.lora_A.weight is (4, 32), and (4, 64) by"),
    "other-heads": ({"num_key_value_heads": 4}, len, "layers.0.self_attn.k_proj.lora_B.weight is (16, 4)"),
    "deeper": ({"num_hidden_layers": 3}, len, f"no tensor {PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight"),
    "shallower": ({"num_hidden_layers": 1}, len, "adapts model.layers.1.self_attn.q_proj, which this model does not have"),
    "experts": (
        {"model_type": "mixtral", "head_dim": 8},
        len,
        "adapts model.layers.0.mlp.gate_proj, which this model does not have",
    ),
    "some-layers": ({}, without(".0."), f"no tensor {Q0}.lora_A.weight"),
    "a-target-of-a-layer": ({}, without("1.mlp.up_proj"), "no tensor base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"),
    "a-target-that-is-named": ({}, without("k_proj"), "no tensor base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"),
}


@pytest.mark.parametrize(("overrides", "edit", "expected"), BASES.values(), ids=BASES)
def test_the_adapter_of_another_model_is_refused(
    folder: Path, overrides: dict[str, Any], edit: Callable[[dict[str, Tensor]], object], expected: str
) -> None:
    set_tensors(folder, edit)
    assert expected in refused(folder, **overrides)


def test_nothing_is_unpickled(folder: Path) -> None:
    (folder / TENSOR_FILE).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(pytest.fail))
    assert "pickled (adapter_model.bin)" in refused(folder)


@pytest.mark.parametrize("file", [CONFIG_FILE, TENSOR_FILE])
@pytest.mark.parametrize("is_there", ["nothing", "a-folder", "a-pipe", "a-part"])
def test_a_file_that_is_not_whole_is_refused(folder: Path, file: str, is_there: str) -> None:
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    match is_there:
        case "a-folder":
            (folder / file).mkdir()
        case "a-pipe":
            os.mkfifo(folder / file)
        case "a-part":
            (folder / file).write_bytes(content[: len(content) // 2])
    assert file in refused(folder)
