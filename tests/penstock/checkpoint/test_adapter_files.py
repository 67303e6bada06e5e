"""Does PEFT read the adapters that we write, and do we read those that PEFT writes?"""

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.checkpoint.adapter_files import CONFIG_FILE, PREFIX, TENSOR_FILE, peft_config, peft_name, read_adapter, write_adapter
from penstock.checkpoint.tensor_files import LazyTensor, Shards
from runtime.errors import CheckpointError
from runtime.plan.train import TARGETS, Lora
from tests.tiny import EXPERT_TYPES, MODEL_TYPES, tiny_config

ATTENTION = TARGETS[:4]
LORA = Lora(rank=4, alpha=6.0, dropout=0.0, targets=TARGETS)
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 96


def model_of(model_type: str = "llama", dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config(model_type, **overrides)), dtype=dtype).eval()


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def factors_of(model: Any, lora: Lora) -> dict[str, Tensor]:
    """Factors, none of them zero, beside each target of a model that is a linear module."""
    torch.manual_seed(8)
    factors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in lora.targets:
            factors[f"{name}.lora_A.weight"] = torch.randn(lora.rank, module.in_features) / 8
            factors[f"{name}.lora_B.weight"] = torch.randn(module.out_features, lora.rank) / 8
    return factors


def logits_with(model: Any, lora: Lora, factors: dict[str, Tensor]) -> Tensor:
    """By hand: what stands beside a projection is added to what comes out of it."""

    def beside(name: str) -> Callable[..., Tensor]:
        a, b = factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]
        return lambda _, inputs, output: output + lora.scale * (inputs[0] @ a.T @ b.T)

    hooks = [
        module.register_forward_hook(beside(name)) for name, module in model.named_modules() if f"{name}.lora_A.weight" in factors
    ]
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    for hook in hooks:
        hook.remove()
    return logits


def lora_of(model_type: str) -> Lora:
    """Of models with experts PEFT takes the names of an MLP for those of the experts."""
    return Lora(rank=4, alpha=6.0, targets=ATTENTION if model_type in EXPERT_TYPES else TARGETS)


def peft_saved(folder: Path, model: Any, **settings: Any) -> dict[str, Tensor]:
    """An adapter as PEFT saves it, with factors that are not zero; these by our names."""
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings}))
    torch.manual_seed(9)
    factors = {}
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_()
            factors[name.removeprefix(PREFIX).replace(".default", "")] = parameter.detach()
    adapted.save_pretrained(folder)
    return factors


# By PEFT


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_peft_loads_what_we_write_with_nothing_missing_and_computes_what_it_means(tmp_path: Path, model_type: str) -> None:
    model, lora = model_of(model_type), lora_of(model_type)
    factors = factors_of(model, lora)
    write_adapter(tmp_path / "adapter", lora, factors, None)
    expected = logits_with(model, lora, factors)
    with torch.no_grad():
        assert not torch.allclose(model(TOKENS).logits, expected, atol=1e-3)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")  # a key that is missing or left over is a warning
    loaded = {name.replace(".default", "") for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert loaded == {peft_name(name) for name in factors}
    assert all(torch.equal(adapted.get_parameter(_in_peft(name)), factor) for name, factor in factors.items())
    with torch.no_grad():
        torch.testing.assert_close(adapted(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)


def _in_peft(name: str) -> str:
    return PREFIX + name.replace(".weight", ".default.weight")


def test_transformers_finds_the_model_that_an_adapter_stands_beside(tmp_path: Path) -> None:
    model = model_of("qwen2")
    factors = factors_of(model, LORA)
    model.save_pretrained(tmp_path / "base")
    write_adapter(tmp_path / "adapter", LORA, factors, str(tmp_path / "base"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, logits_with(model, LORA, factors), atol=1e-5, rtol=1e-5)


def test_the_configuration_names_the_targets_that_have_factors() -> None:
    factors = factors_of(model_of("mixtral"), LORA)
    assert peft_config(LORA, factors, "mixtral") == {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "mixtral", "inference_mode": True},
        **{"r": 4, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": list(ATTENTION), "modules_to_save": None},
        **{"bias": "none", "fan_in_fan_out": False, "init_lora_weights": True},
    }
    assert peft_config(Lora(4, 2.5), (), None)["lora_alpha"] == 2.5


# By us


KINDS_OF_TARGETS: dict[str, Any] = {
    "leaves": list(TARGETS),
    "suffixes": [f"{'self_attn' if target in ATTENTION else 'mlp'}.{target}" for target in TARGETS],
    "pattern": r".*\.(self_attn|mlp)\.[a-z]+_proj",
    "all-linear": "all-linear",
}


@pytest.mark.parametrize("targets", KINDS_OF_TARGETS.values(), ids=KINDS_OF_TARGETS)
def test_what_peft_saved_is_read_with_equal_bits_however_its_targets_are_given(tmp_path: Path, targets: Any) -> None:
    shapes = shapes_of(model_of())
    expected = peft_saved(tmp_path, model_of(), target_modules=targets, lora_dropout=0.25)
    lora, factors = read_adapter(tmp_path, shapes)
    assert lora == Lora(4, 6.0, 0.25, TARGETS)
    assert sorted(factors) == sorted(factors.names) == sorted(expected)
    assert len(factors) == 2 * 7 * 2
    assert all(torch.equal(factors[name], factor) for name, factor in expected.items())
    assert read_adapter(tmp_path)[0] == lora


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_adapter_of_every_type_is_read_in_every_way_in_which_peft_begins_one_beside_unchanged_weights(
    tmp_path: Path, model_type: str
) -> None:
    model = model_of(model_type)
    shapes = shapes_of(model)
    init = (True, False, "gaussian", "orthogonal")[MODEL_TYPES.index(model_type) % 4]
    expected = peft_saved(tmp_path, model, target_modules=["v_proj", "q_proj"], init_lora_weights=init, exclude_modules=["lm_head"])
    lora, factors = read_adapter(tmp_path, shapes)
    assert lora == Lora(4, 6.0, 0.0, ("q_proj", "v_proj"))
    assert all(torch.equal(factors[name], factor) for name, factor in expected.items())


def test_targets_that_peft_was_told_to_leave_out_are_not_missed(tmp_path: Path) -> None:
    shapes = shapes_of(model_of())
    peft_saved(tmp_path, model_of(), target_modules=list(ATTENTION), exclude_modules=["k_proj"])
    assert read_adapter(tmp_path, shapes)[0].targets == ("q_proj", "v_proj", "o_proj")


def test_what_we_write_we_read(tmp_path: Path) -> None:
    model, lora = model_of(), Lora(3, 2.5, 0.125, ("k_proj", "down_proj"))
    factors = factors_of(model, lora)
    lazy = {
        name: LazyTensor(torch.float32, tuple(factor.shape), lambda factor=factor: iter(factor.reshape(-1).split(5)))  # type: ignore[misc]
        for name, factor in factors.items()
    }
    write_adapter(tmp_path / "adapter", lora, lazy, None)
    read_lora, read = read_adapter(tmp_path / "adapter", shapes_of(model))
    assert read_lora == lora
    assert all(torch.equal(read[name], factor) for name, factor in factors.items())
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["adapter", CONFIG_FILE, TENSOR_FILE])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrower_factors_are_widened(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, factors = written(tmp_path)
    save_file({PREFIX + name: factor.to(dtype) for name, factor in factors.items()}, folder / TENSOR_FILE)
    _, read = read_adapter(folder, shapes_of(model_of()))
    assert {factor.dtype for factor in read.values()} == {torch.float32}
    assert all(torch.equal(read[name], factor.to(dtype).float()) for name, factor in factors.items())


def test_factors_are_read_when_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, factors = written(tmp_path)
    _, read = read_adapter(folder, shapes_of(model_of()))
    asked: list[str] = []
    monkeypatch.setattr(Shards, "__getitem__", lambda _, name: asked.append(name) or torch.ones(2))
    name = min(factors)
    assert (name in read.names, asked) == (True, [])
    assert torch.equal(read[name], torch.ones(2))
    assert asked == [PREFIX + name]


# What is refused


def written(tmp_path: Path, lora: Lora = LORA) -> tuple[Path, dict[str, Tensor]]:
    folder, factors = tmp_path / "adapter", factors_of(model_of(), lora)
    write_adapter(folder, lora, factors, None)
    return folder, factors


def refused(folder: Path, parameters: dict[str, tuple[int, ...]] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder, parameters)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert said.isprintable()
    assert said.startswith(str(folder))
    assert "; " in said, "what to do is said too"
    assert len(said.replace(str(folder), "")) < 400
    return said


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | changes))


def set_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / TENSOR_FILE)
    edit(tensors)
    save_file(tensors, folder / TENSOR_FILE)


NOT_COMPUTED: dict[str, Any] = {
    **{"use_dora": True, "use_rslora": True, "lora_bias": True, "fan_in_fan_out": True, "use_qalora": True, "bias": "all"},
    **{"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 8}, "layers_to_transform": [0], "layers_pattern": "layers"},
    **{"modules_to_save": ["lm_head"], "target_parameters": ["mlp.experts.down_proj"], "trainable_token_indices": [1, 2]},
    **{"alora_invocation_tokens": [5], "layer_replication": [[0, 1]], "megatron_config": {"a": 1}, "ensure_weight_tying": True},
    **{
        "init_lora_weights": "pissa",
        "velora_config": {"num_groups": 4},
        "kasa_config": {"beta": 1e-4},
        "arrow_config": {"top_k": 3},
    },
    **{"monteclora_config": {"n": 1}, "use_bdlora": {"nblocks": 2}, "corda_config": {"a": 1}, "a key\nof tomorrow": "on"},
}


@pytest.mark.parametrize("key", NOT_COMPUTED)
def test_an_option_that_is_not_computed_is_refused_by_its_name(tmp_path: Path, key: str) -> None:
    folder, _ = written(tmp_path)
    set_config(folder, **{key: NOT_COMPUTED[key]})
    said = refused(folder)
    assert repr(key)[1:-1] in said
    assert f"is {json.dumps(NOT_COMPUTED[key])}, which is not computed here" in said


@pytest.mark.parametrize("off", [None, False, "", [], {}], ids=repr)
def test_an_option_that_is_off_is_no_reason_to_refuse(tmp_path: Path, off: Any) -> None:
    folder, _ = written(tmp_path)
    set_config(folder, **{key: off for key in NOT_COMPUTED if key not in ("bias", "init_lora_weights")})
    assert read_adapter(folder)[0] == LORA


def test_the_ways_in_which_peft_itself_begins_beside_other_weights_are_refused(tmp_path: Path) -> None:
    peft_saved(tmp_path, model_of(), target_modules=["q_proj"], init_lora_weights="pissa_niter_2")
    assert 'init_lora_weights is "pissa_niter_2"' in refused(tmp_path)


CONFIGS: dict[str, tuple[Any, str]] = {
    "no-type": ({"peft_type": None}, "peft_type is null"),
    "another-type": ({"peft_type": "IA3"}, 'peft_type is "IA3"'),
    "another-task": ({"task_type": "SEQ_CLS"}, 'task_type is "SEQ_CLS"'),
    "no-rank": ({"r": None}, "r is null"),
    "rank-of-text": ({"r": "4"}, 'r is "4"'),
    "rank-true": ({"r": True}, "r is true"),
    "rank-no-whole": ({"r": 4.0}, "r is 4.0"),
    "rank-zero": ({"r": 0}, "rank is 0"),
    "rank-huge": ({"r": 10**300}, "r is 1000000"),
    "alpha-nan": ({"lora_alpha": float("nan")}, "lora_alpha is NaN"),
    "alpha-infinite": ({"lora_alpha": float("inf")}, "lora_alpha is Infinity"),
    "alpha-zero": ({"lora_alpha": 0}, "alpha is 0"),
    "alpha-below-zero": ({"lora_alpha": -1}, "alpha is -1"),
    "dropout-one": ({"lora_dropout": 1.0}, "dropout is 1"),
    "dropout-text": ({"lora_dropout": [0.1]}, "lora_dropout is [0.1]"),
    "another-rank": ({"r": 8}, "lora_A.weight is (4, "),
    "targets-no-list": ({"target_modules": {"q_proj": 1}}, 'target_modules is {"q_proj": 1}'),
    "targets-no-names": ({"target_modules": [1]}, "target_modules is [1]"),
    "fewer-targets": ({"target_modules": ["k_proj"]}, "stands beside no target_modules"),
}


@pytest.mark.parametrize(("changes", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_that_means_nothing_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    folder, _ = written(tmp_path)
    set_config(folder, **changes)
    assert expected in refused(folder)


TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "a-list": (b"[]", "not a JSON object"),
    "no-text": (b"\xff\xfe\x00", "not JSON"),
    "deep": (b"[" * 200_000, "not JSON"),
    "digits": (b'{"r": ' + b"9" * 10_000 + b"}", "not JSON"),
    "large": (b" " * (16 * 2**20 + 1), "larger than"),
}


@pytest.mark.parametrize(("content", "expected"), TEXTS.values(), ids=TEXTS)
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    folder, _ = written(tmp_path)
    (folder / CONFIG_FILE).write_bytes(content)
    assert expected in refused(folder)


def test_a_value_however_deep_is_refused(tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    for depth in range(sys.getrecursionlimit() - 150, sys.getrecursionlimit() + 10):  # one that can just be read, among others
        (folder / CONFIG_FILE).write_text('{"peft_type": "LORA", "x": ' + "[" * depth + "1" + "]" * depth + "}")
        assert ("x is [[[" in (said := refused(folder))) != ("not JSON" in said)


def add(key: str, *shape: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({key: torch.ones(shape)})


Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"
KEYS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no-prefix": (lambda t: t.update({Q0.removeprefix(PREFIX) + ".lora_A.weight": t.pop(f"{Q0}.lora_A.weight")}), "model.layers.0"),
    "a-second-prefix": (add(f"{PREFIX}{Q0}.lora_A.weight", 4, 32), f"{PREFIX}{PREFIX}"),
    "an-adapter's-name": (add(f"{Q0}.lora_A.default.weight", 4, 32), "lora_A.default.weight"),
    "a-layer-numbered-twice": (add(f"{PREFIX}model.layers.00.self_attn.q_proj.lora_A.weight", 4, 32), "layers.00"),
    "dora": (add(f"{Q0}.lora_magnitude_vector", 32), "lora_magnitude_vector"),
    "a-bias": (add(f"{Q0}.lora_B.bias", 32), "lora_B.bias"),
    "the-head": (add(f"{PREFIX}lm_head.lora_A.weight", 4, 32), "lm_head"),
    "the-embedding": (add(f"{PREFIX}model.embed_tokens.weight", 96, 32), "embed_tokens"),
    "experts": (add(f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight", 4, 32), "mlp.experts"),
    "a-path": (add(f"{PREFIX}../../etc\n/passwd", 1), "passwd"),
    "no-a": (lambda t: t.pop(f"{Q0}.lora_A.weight"), f"no tensor {Q0}.lora_A.weight"),
    "no-b": (lambda t: t.pop(f"{Q0}.lora_B.weight"), f"no tensor {Q0}.lora_B.weight"),
    "nothing": (dict.clear, "holds no tensors"),
    "one-dimension": (add(f"{Q0}.lora_B.weight", 128), f"{Q0}.lora_B.weight is (128,)"),
    "another-rank": (add(f"{Q0}.lora_B.weight", 32, 5), f"{Q0}.lora_B.weight is (32, 5)"),
    "turned": (add(f"{Q0}.lora_A.weight", 32, 4), f"{Q0}.lora_A.weight is (32, 4)"),
    "whole-numbers": (lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones((4, 32), dtype=torch.int8)}), "torch.int8"),
    "wide": (lambda t: t.update({f"{Q0}.lora_A.weight": torch.ones((4, 32), dtype=torch.float64)}), "torch.float64"),
}


@pytest.mark.parametrize(("edit", "expected"), KEYS.values(), ids=KEYS)
def test_a_tensor_that_is_missing_left_over_or_another_is_refused(
    tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], expected: str
) -> None:
    folder, _ = written(tmp_path)
    set_tensors(folder, edit)
    said = refused(folder)
    assert expected in said
    assert TENSOR_FILE in said


def only_in_layer_1(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".0." in name]:
        del tensors[name]


def without(target: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if target in name]


BASES: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], object], str]] = {
    "wider": (
        {"hidden_size": 64},
        len,
        f"{Q0}.lora_A.weight is (4, 32), and this model's model.layers.0.self_attn.q_proj is (64, 64)",
    ),
    "other-heads": ({"num_key_value_heads": 4}, len, "layers.0.self_attn.k_proj.lora_B.weight is (16, 4)"),
    "deeper": ({"num_hidden_layers": 3}, len, f"no tensor {PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight"),
    "shallower": ({"num_hidden_layers": 1}, len, "stands beside model.layers.1.self_attn.q_proj, which this model has not"),
    "some-layers": ({}, only_in_layer_1, f"no tensor {Q0}.lora_A.weight"),
    "a-target-of-a-layer": ({}, without("1.mlp.up_proj"), "no tensor base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"),
    "a-target-that-is-said": ({}, without("k_proj"), "no tensor base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"),
}


@pytest.mark.parametrize(("overrides", "edit", "expected"), BASES.values(), ids=BASES)
def test_the_adapter_of_another_model_is_refused_by_the_first_difference(
    tmp_path: Path, overrides: dict[str, Any], edit: Callable[[dict[str, Tensor]], object], expected: str
) -> None:
    folder, _ = written(tmp_path)
    set_tensors(folder, edit)
    assert expected in refused(folder, shapes_of(model_of(**overrides)))


def test_experts_are_no_projections_that_an_adapter_stands_beside(tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    assert "stands beside model.layers.0.mlp.gate_proj, which" in refused(folder, shapes_of(model_of("mixtral", head_dim=8)))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    (folder / TENSOR_FILE).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(pytest.fail))
    assert "pickled (adapter_model.bin)" in refused(folder)


@pytest.mark.parametrize("file", [CONFIG_FILE, TENSOR_FILE])
@pytest.mark.parametrize("is_there", ["nothing", "a-folder", "a-pipe", "a-part"])
def test_a_file_that_is_not_there_or_is_another_thing_is_refused(tmp_path: Path, file: str, is_there: str) -> None:
    folder, _ = written(tmp_path)
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


def test_a_folder_that_holds_something_is_not_written_over(tmp_path: Path) -> None:
    folder, factors = written(tmp_path)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match="is not empty"):
        write_adapter(folder, LORA, factors, None)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        write_adapter(tmp_path / "file", LORA, factors, None)


def test_what_is_not_whole_leaves_nothing_behind(tmp_path: Path) -> None:
    factors: dict[str, Any] = factors_of(model_of(), LORA)
    name = max(factors)

    def broken() -> Any:
        raise OSError(28, "No space left on device")

    (tmp_path / "adapter.partial").mkdir()  # of a command that was killed
    factors[name] = LazyTensor(torch.float32, tuple(factors[name].shape), broken)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_adapter(tmp_path / "adapter", LORA, factors, None)
    assert list(tmp_path.iterdir()) == []
