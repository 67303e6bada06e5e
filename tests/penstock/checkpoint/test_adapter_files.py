"""Adapters in PEFT's file format: write and read, bitwise identical."""

import json
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

from penstock.checkpoint.adapter_files import CONFIG_FILE, PREFIX, TENSOR_FILE, read_adapter
from penstock.runtime.plan.train import TARGETS, Lora
from tests import checkpoints
from tests.adapters_of_peft import ATTENTION, LORA, TOKENS, factors_of, logits_with, lora_of, model_of, peft_saved, write_adapter
from tests.lanes import mostly_slow
from tests.tiny import EXPERT_TYPES, MODEL_TYPES


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("error::UserWarning")
@mostly_slow("model_type", MODEL_TYPES)
def test_peft_loads_what_we_write_and_computes_the_same(tmp_path: Path, model_type: str) -> None:
    model, lora = model_of(model_type), lora_of(model_type)
    factors = factors_of(model, lora)
    expected = logits_with(model, lora, factors)
    with torch.no_grad():
        assert not torch.allclose(model(TOKENS).logits, expected, atol=1e-3)
    adapted = PeftModel.from_pretrained(model, write_adapter(tmp_path / "a", lora, factors))  # an unused key is a warning
    loaded = {name.replace(".default", "") for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert loaded == {PREFIX + name for name in factors}
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
    model = model_of(model_type)
    shapes = shapes_of(model)
    names = ["experts.down_proj", "mlp.experts.gate_up_proj"]
    stacks: dict[str, Any] = {"target_parameters": names} if model_type in EXPERT_TYPES else {}
    init = True if stacks else (True, False, "gaussian", "orthogonal")[MODEL_TYPES.index(model_type) % 4]
    targets, left_out = ["v_proj", "q_proj", "k_proj"], ["k_proj"]
    stacks["use_rslora"] = rslora = model_type in ("qwen2", "gpt_oss")
    expected = peft_saved(tmp_path, model, target_modules=targets, init_lora_weights=init, exclude_modules=left_out, **stacks)
    lora, factors = read_adapter(tmp_path, shapes)
    assert lora == Lora(4, 6.0, 0.0, ("q_proj", "v_proj", *(("experts",) if model_type in EXPERT_TYPES else ())), rslora)
    assert factors.keys() == expected.keys()
    assert all(torch.equal(factors[name], factor) for name, factor in expected.items())


def test_narrower_factors_are_widened(tmp_path: Path) -> None:
    factors = factors_of(model_of())
    folder = write_adapter(tmp_path / "adapter", LORA, factors)
    save_file({PREFIX + name: factor.bfloat16() for name, factor in factors.items()}, folder / TENSOR_FILE)
    _, read = read_adapter(folder, shapes_of(model_of()))
    assert all(torch.equal(read[name], factor.bfloat16().float()) for name, factor in factors.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", LORA, factors_of(model_of()))


def refused(folder: Path, **overrides: Any) -> str:
    """Return the error message of an adapter that does not fit a tiny llama with `overrides`."""
    return checkpoints.refused(lambda: read_adapter(folder, shapes_of(model_of(**overrides))))


def set_config(folder: Path, **changes: Any) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps(json.loads((folder / CONFIG_FILE).read_text()) | changes))


NOT_COMPUTED: dict[str, Any] = {
    **{"use_dora": True, "bias": "all", "task_type": "TOKEN_CLS", "peft_type": "IA3"},
    **{"rank_pattern": {"q_proj": 8}, "layers_to_transform": [0], "modules_to_save": ["lm_head"]},
    **{"init_lora_weights": "pissa", "target_parameters": ["mlp.experts.down_proj"], "a key\nof tomorrow": "on"},
}


def test_an_option_is_refused_by_name_unless_it_is_off(folder: Path) -> None:
    for key, value in NOT_COMPUTED.items():
        set_config(folder, **{key: value})
        assert f"{key.encode('unicode_escape').decode()} is {json.dumps(value)}, not supported" in refused(folder)
        set_config(folder, **{key: {"peft_type": "LORA", "bias": "none", "task_type": None, "init_lora_weights": True}.get(key)})
    assert read_adapter(folder, shapes_of(model_of()))[0] == LORA


def test_a_configuration_that_means_nothing_is_refused(folder: Path) -> None:
    content = (folder / CONFIG_FILE).read_bytes()
    for changes, expected in (
        ({"r": 10**300}, "rank is 1000"),
        ({"r": 0}, "rank is 0"),
        ({"lora_alpha": float("nan")}, "alpha is nan"),
        ({"lora_dropout": 1.0}, "dropout is 1"),
        ({"r": 8}, "lora_A.weight is (4, "),
        ({"target_modules": "(q_proj"}, "unterminated subpattern"),
        ({"target_modules": 7}, "is not iterable"),
        ({"target_modules": ["k_proj"]}, "is no factor of its target_modules"),
    ):
        (folder / CONFIG_FILE).write_bytes(content)
        set_config(folder, **changes)
        assert expected in refused(folder)


def put(key: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({key: torch.ones(shape)})


def lacking_part(part: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
KEYS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "an-adapter's-name": (put(f"{Q0}.lora_A.default.weight", 4, 32), "lora_A.default.weight"),
    "the-head": (put(f"{PREFIX}lm_head.lora_A.weight", 4, 32), "lm_head"),
    "a-path": (put(f"{PREFIX}../../etc\n/passwd", 1), "passwd"),
    "no-b": (lacking_part("0.self_attn.q_proj.lora_B"), f"no tensor {Q0}.lora_B.weight"),
    "nothing": (dict.clear, "no tensor "),
    "turned": (put(f"{Q0}.lora_A.weight", 32, 4), f"{Q0}.lora_A.weight is (32, 4)"),
}


@pytest.mark.parametrize(("edit", "expected"), KEYS.values(), ids=KEYS)
def test_a_tensor_missing_or_left_over_is_refused(folder: Path, edit: Callable[[dict[str, Tensor]], object], expected: str) -> None:
    edit(tensors := load_file(folder / TENSOR_FILE))
    save_file(tensors, folder / TENSOR_FILE)
    message = refused(folder)
    assert expected in message
    assert TENSOR_FILE in message


def test_the_adapter_of_another_model_is_refused(folder: Path) -> None:
    for overrides, expected in (
        ({"hidden_size": 64}, "down_proj.lora_B.weight is (32, 4), and (64, 4) by"),
        ({"num_hidden_layers": 3}, f"no tensor {PREFIX}model.layers.2."),
        ({"num_hidden_layers": 1}, f"{PREFIX}model.layers.1.mlp.down_proj.lora_A.weight is no factor"),
    ):
        assert expected in refused(folder, **overrides)


def test_nothing_is_unpickled(folder: Path) -> None:
    (folder / TENSOR_FILE).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(pytest.fail))
    assert "pickled (adapter_model.bin)" in refused(folder)
