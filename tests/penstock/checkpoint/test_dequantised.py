"""Full training of weights published in FP8 or MXFP4, compared with a bf16 copy."""

import json
from collections.abc import Sequence

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.checkpoint.dequantised import Dequantised
from penstock.checkpoint.tensor_files import Shards
from tests.checkpoints import refused
from tests.every_type import tiny
from tests.lanes import mostly_slow
from tests.real_layers import hf_model
from tests.running import SIZES, UNSEARCHED, penstock, succeeded, train, weights_sha

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def random(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def in_fp8(name: str, weight: torch.Tensor, scale_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rows, columns = (-(-n // 128) for n in weight.shape)
    scales = (0.5 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(1))).to(scale_dtype) * 1e-3
    return {name: (weight / 1e-3).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def in_mxfp4(name: str, shape: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    """Make random MXFP4 blocks and scales of a stack of experts (experts, inputs, outputs)."""
    n_experts, n_inputs, n_outputs = shape
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (n_experts, n_outputs, n_inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 122, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def stored(folder, tensors: dict[str, torch.Tensor]) -> Dequantised:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return Dequantised(folder, Shards([folder / "model.safetensors"]))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_transformers(tmp_path, scale_dtype):
    packed = in_fp8("q.weight", random((256, 384)), scale_dtype) | in_mxfp4("experts.down_proj", (3, 64, 96), 2)
    dequantised = stored(tmp_path, packed | {"norm.weight": torch.ones(5)})
    expected = {
        "q.weight": Fp8Dequantize(None)._dequantize_one(packed["q.weight"], packed["q.weight_scale_inv"], torch.bfloat16),
        "experts.down_proj": convert_moe_packed_tensors(packed["experts.down_proj_blocks"], packed["experts.down_proj_scales"]),
        "norm.weight": torch.ones(5),
    }
    assert set(dequantised) == expected.keys() == dict(dequantised.dtypes()).keys()
    for name, tensor in expected.items():
        assert (dequantised[name].dtype, name in dequantised) == (tensor.dtype, True)
        assert torch.equal(dequantised[name], tensor), name


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("q.weight", {"q.weight_scale_inv": torch.ones(1, 3)}),
        ("q.weight", {"q.weight": torch.ones(256, 384)}),
        ("experts.down_proj", {"experts.down_proj_scales": torch.ones(3, 96, 1, dtype=torch.uint8)}),
        ("experts.down_proj", {"experts.down_proj_blocks": torch.ones(3, 96, 2, 8, dtype=torch.uint8)}),
    ],
)
def test_codes_and_scales_that_do_not_match_are_refused(tmp_path, name, changes):
    packed = in_fp8("q.weight", random((256, 384)), torch.float32) | in_mxfp4("experts.down_proj", (3, 64, 96), 2)
    dequantised = stored(tmp_path, packed | changes)
    assert f"{name} is not in" in refused(lambda: dequantised[name])


def published(home, model_type: str) -> None:
    """Return a folder with some quantised weights, and its bf16 copy."""
    config = tiny(model_type)
    torch.manual_seed(0)
    hf_model(config, dtype=torch.bfloat16).save_pretrained(home / "bf16")
    full_weights = load_file(home / "bf16" / "model.safetensors")
    packed = dict[str, torch.Tensor]()
    for i, (name, weight) in enumerate(full_weights.items()):
        if model_type == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj")):
            packed |= in_mxfp4(name, tuple(weight.shape), i)
        elif model_type != "gpt_oss" and "_proj" in name:
            packed |= in_fp8(name, weight.float(), torch.float32)
        else:
            packed[name] = weight
    for folder, tensors in (("few", packed), ("bf16", {**stored(home / "few", packed)})):
        (home / folder).mkdir(exist_ok=True)
        save_file(tensors, home / folder / "model.safetensors")
        quantization = {"quantization_config": MXFP4 if model_type == "gpt_oss" else FP8} if folder == "few" else {}
        (home / folder / "config.json").write_text(json.dumps(config | quantization))


@mostly_slow("model_type", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_weights_in_few_bits_train_as_a_bf16_copy_of_them(home, model_type):
    published(home, model_type)
    for folder in ("few", "bf16"):
        planned = succeeded(penstock("plan", home / folder, *SIZES, *UNSEARCHED, "-o", home / f"{folder}.json"))
        assert ("and saves its own, in bf16" in planned.stderr) == (folder == "few")
        succeeded(train(home, home / f"{folder}.json", "--tokenizer", "bytes", out=f"out-{folder}", steps=2, scratch=()))
    few, bf16 = (home / f"out-{folder}" / "checkpoint-2" for folder in ("few", "bf16"))
    assert weights_sha(few) == weights_sha(bf16)
    assert "quantization_config" not in json.loads((few / "config.json").read_text())
