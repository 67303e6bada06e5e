"""Packed base weights: packed once and cached, or read from quantised published files."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import bitsandbytes as bnb
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import OlmoeConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.checkpoint import disk
from penstock.checkpoint import packed_base as cache_of
from penstock.checkpoint.packed_base import packed_base, published_base
from penstock.planner.model.config import note_on_weights
from penstock.runtime.layers.packed_weights import pack, parts
from penstock.runtime.plan.packed import published_as
from penstock.runtime.plan.workload import Model
from tests.accidents import forked_to_die
from tests.checkpoints import refused
from tests.penstock.checkpoint import test_dequantised
from tests.penstock.checkpoint.test_dequantised import in_mxfp4, random
from tests.runtime.test_packed_weights import unpacked
from tests.tiny import tiny_config

NAMES = ("self_attn.q_proj.weight", "mlp.down_proj.weight", "mlp.experts.gate_up_proj")
Q, DOWN, GATE_UP = (f"model.layers.0.{name}" for name in NAMES)
EMBEDDING = "model.embed_tokens.weight"
SHAPES = {Q: (64, 128), DOWN: (130, 192)}
DENSE, EXPERTS = {"model_type": "llama"}, tiny_config("qwen3_moe")
SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_experts": 4}
OLMOE = OlmoeConfig(vocab_size=96, pad_token_id=0, **SMALL).to_dict()
NF4 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
FP8 = {"quantization_config": test_dequantised.FP8}


@pytest.fixture
def folder(tmp_path):
    """Folder of a model published in bf16."""
    return published(tmp_path / "model", {name: random(shape).bfloat16() for name, shape in SHAPES.items()})


def published(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    embedding = {} if EMBEDDING in tensors else {EMBEDDING: random((96, 64)).bfloat16()}
    save_file({name: tensor.clone() for name, tensor in (tensors | embedding | config).items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def made(monkeypatch):
    calls = []
    monkeypatch.setattr(cache_of, "pack", lambda weight, base: calls.append(tuple(weight.shape)) or pack(weight, base))
    return calls


@pytest.mark.parametrize("base", ["nf4", "int8", "fp8", "fp8-rows"])
def test_weights_are_packed_once_and_kept(folder, tmp_path, made, base):
    weights = load_file(folder / "model.safetensors")
    for _ in range(2):
        read = packed_base(folder, DENSE, SHAPES, base, tmp_path / "cache")
        assert all(torch.equal(read(name), pack(weights[name], base)) for name in SHAPES)
    assert made == list(SHAPES.values())


def test_the_cache_depends_on_the_weights_and_the_base_alone(folder, tmp_path, made):
    cache = tmp_path / "cache"
    packed_base(folder, DENSE, SHAPES, "nf4", cache)
    packed_base(folder.rename(tmp_path / "moved"), DENSE, SHAPES, "nf4", cache)
    assert len(made) == 2
    packed_base(tmp_path / "moved", DENSE, SHAPES, "int8", cache)
    packed_base(tmp_path / "moved", DENSE, {Q: SHAPES[Q]}, "nf4", cache)
    assert len(made) == 5
    other_folder = published(tmp_path / "others", {name: random(shape, seed=1).bfloat16() for name, shape in SHAPES.items()})
    packed_base(other_folder, DENSE, SHAPES, "nf4", cache)
    assert len(made) == 7
    assert len(list(cache.glob("base-*"))) == 4


DAMAGE = {
    "half a file": lambda place: os.truncate(place / "packed.safetensors", 1_000),
    "a half-written one": lambda place: shutil.move(place, place.with_name(place.name + ".partial")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_cache_that_is_not_whole_is_packed_anew(folder, tmp_path, made, damage):
    cache = tmp_path / "cache"
    read = packed_base(folder, DENSE, SHAPES, "nf4", cache)
    initial = {name: read(name).clone() for name in SHAPES}
    DAMAGE[damage](next(cache.glob("base-*-*")))
    repacked = packed_base(folder, DENSE, SHAPES, "nf4", cache)
    assert all(torch.equal(repacked(name), initial[name]) for name in SHAPES)
    assert len(made) == 4
    assert not list(cache.glob("*.partial"))


@pytest.mark.parametrize(("where", "n"), [((cache_of, "pack"), 1), ((disk, "sync"), 0)], ids=["mid-file", "named"])
def test_a_run_killed_while_it_packs_leaves_no_cache(folder, tmp_path, made, where, n):
    cache = tmp_path / "cache"
    forked_to_die(lambda: packed_base(folder, DENSE, SHAPES, "nf4", cache), where, n)
    assert [path.suffix for path in cache.glob("base-*")] == [".partial"]
    assert packed_base(folder, DENSE, SHAPES, "nf4", cache)(DOWN).numel()
    assert len(made) == 2
    assert not list(cache.glob("*.partial"))


def test_runs_that_begin_together_pack_once(folder, tmp_path, made):
    with ThreadPoolExecutor(4) as runs:
        unpacked_weights = list(runs.map(lambda _: packed_base(folder, DENSE, SHAPES, "fp8", tmp_path / "cache")(Q), range(4)))
    assert all(torch.equal(packed, unpacked_weights[0]) for packed in unpacked_weights)
    assert len(made) == 2


def test_weights_that_cannot_be_packed_leave_no_cache(folder, tmp_path):
    weights = {Q: random(SHAPES[Q]), DOWN: random(SHAPES[DOWN])}
    weights[DOWN][7, 7] = float("nan")
    odd = published(tmp_path / "odd", weights)
    for model, shapes, message in (
        (odd, SHAPES, "down_proj.weight: 1 of its 24960 numbers are not finite"),
        (folder, SHAPES | {Q.replace("q_", "k_"): (64, 128)}, "no tensor"),
        (folder, SHAPES | {Q: (128, 64)}, "the configuration requires"),
    ):
        assert message in refused(partial(packed_base, model, DENSE, shapes, "nf4", tmp_path / "cache"))
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["base.lock"]


# Gate and up projections of three experts, published as separate tensors
EXPERT_NAMES = [f"model.layers.0.mlp.experts.{e}.{part}_proj.weight" for e in range(3) for part in ("gate", "up")]


def test_experts_published_one_by_one_are_packed_together(tmp_path):
    experts = {name: random((32, 64), i) for i, name in enumerate(EXPERT_NAMES)}
    read = packed_base(published(tmp_path / "model", experts), EXPERTS, {GATE_UP: (3, 64, 64)}, "int8", tmp_path / "cache")
    assert torch.equal(read(GATE_UP), pack(torch.cat([*experts.values()]).view(3, 64, 64), "int8"))


def gathered(parts):
    """Return ({name: tensor} of several published weights, their dequantised values)."""
    return {name: tensor for tensors, _ in parts for name, tensor in tensors.items()}, [meant for _, meant in parts]


def of_bitsandbytes(name, weight, nested=False, block=64, storage=torch.uint8):
    """Return ({name: tensor}, dequantised weight) of a bitsandbytes layer."""
    how = {"compress_statistics": nested, "quant_type": "nf4", "quant_storage": storage}
    layer = bnb.nn.Linear4bit(*reversed(weight.shape), False, **how)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=layer, blocksize=block, **how).to("cpu")
    tensors = {name.removesuffix("weight") + key: tensor.detach().clone() for key, tensor in layer.state_dict().items()}
    state = layer.weight.quant_state
    state.shape = torch.Size((1, weight.numel()))  # the CPU kernel assumes that blocks end within a row
    return tensors, bnb.functional.dequantize_4bit(layer.weight.data.view(torch.uint8), state).view(weight.shape)


@given(
    nested=st.booleans(),
    block=st.sampled_from((64, 128, 256)),
    storage=st.sampled_from((torch.uint8, torch.bfloat16)),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    seed=st.integers(0, 9),
)
def test_bitsandbytes_weights_unpack_to_its_own_bits(tmp_path_factory, nested, block, storage, dtype, seed):
    weights = {name: random(shape, seed).to(dtype) for name, shape in SHAPES.items()}
    tensors, means = gathered([of_bitsandbytes(name, weight, nested, block, storage) for name, weight in weights.items()])
    assert any("nested" in name for name in tensors) == nested
    folder = published(tmp_path_factory.mktemp("model"), tensors)
    read = packed_base(folder, DENSE | NF4, SHAPES, "nf4", folder / "cache")
    for name, meant in zip(SHAPES, means, strict=True):
        assert torch.equal(unpacked(read(name), meant.shape, "nf4", dtype), meant)
    assert not (folder / "cache").exists()


@pytest.mark.parametrize("nested", [False, True])
def test_experts_of_bitsandbytes_unpack_to_its_own_bits(tmp_path, nested):
    weights = [random((32, 64), i).bfloat16() for i in range(len(EXPERT_NAMES))]
    tensors, means = gathered([of_bitsandbytes(name, weight, nested) for name, weight in zip(EXPERT_NAMES, weights, strict=True)])
    read = packed_base(published(tmp_path / "model", tensors), EXPERTS | NF4, {GATE_UP: (3, 64, 64)}, "nf4", tmp_path)
    assert torch.equal(unpacked(read(GATE_UP), (3, 64, 64), "nf4"), torch.cat(means).view(3, 64, 64))


ODD = {
    "another table": lambda t: t[f"{Q}.quant_map"].mul_(2),
    "no words": lambda t: t[f"{Q}.quant_state.bitsandbytes__nf4"].fill_(91),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_file_bitsandbytes_would_not_write_is_refused(tmp_path, odd):
    tensors, _ = of_bitsandbytes(Q, random(SHAPES[Q]).bfloat16(), nested=True)
    ODD[odd](tensors)
    read = packed_base(published(tmp_path / "model", tensors), DENSE | NF4, {Q: SHAPES[Q]}, "nf4", tmp_path)
    assert "copy the model again" in refused(lambda: read(Q))


def of_fp8(name, shape, seed=0, scale_dtype=torch.float32):
    """Return ({name: tensor}, dequantised weight) of random finite codes with scales."""
    codes = random(shape, seed).mul(3000).to(torch.float8_e4m3fn)
    scales = random([-(-n // 128) for n in shape], seed + 1).abs().to(scale_dtype)
    wide = scales.float().repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    return {name: codes, f"{name}_scale_inv": scales}, (codes.float() * wide).bfloat16()


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_weights_unpack_to_the_bits_of_transformers(tmp_path, scale_dtype):
    shapes = {Q: (256, 384), DOWN: (130, 200)}
    tensors, means = gathered([of_fp8(name, shape, scale_dtype=scale_dtype) for name, shape in shapes.items()])
    reference = Fp8Dequantize(None)._dequantize_one(tensors[Q], tensors[f"{Q}_scale_inv"], output_dtype=torch.bfloat16)
    assert torch.equal(means[0], reference)
    read = packed_base(published(tmp_path / "model", tensors), DENSE | FP8, shapes, "fp8", tmp_path)
    assert all(torch.equal(unpacked(read(name), meant.shape, "fp8"), meant) for name, meant in zip(shapes, means, strict=True))


ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
BY_ROW = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {"weights": ROWS}}}
BY_ROW = {"quantization_config": BY_ROW | {"ignore": ["lm_head"]}}


def test_fp8_with_a_scale_per_row_is_read_as_published(tmp_path):
    shapes, tensors = {Q: (64, 128), DOWN: (32, 192)}, {}
    for name, shape in shapes.items():
        tensors[name] = random(shape).mul(300).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = random((shape[0], 1), 5).abs().bfloat16()
    folder = published(tmp_path / "model", tensors)
    read = packed_base(folder, DENSE | BY_ROW, shapes, "fp8-rows", tmp_path)
    for name, shape in shapes.items():
        codes, scales = parts(read(name), shape, "fp8-rows")
        assert torch.equal(codes.view(torch.uint8), tensors[name].view(torch.uint8))
        assert torch.equal(scales, tensors[f"{name}_scale"][:, 0].float())
    assert "plan with --base fp8-rows" in refused(partial(packed_base, folder, DENSE | BY_ROW, shapes, "int8", tmp_path))
    assert "--base fp8-rows --compute fp8, or make" in note_on_weights(Model(DENSE | BY_ROW), "nf4")
    scale = f"{Q}_scale"
    for wrong in ({scale: torch.ones(1, 64)}, {scale: torch.full((64, 1), torch.inf)}, {Q: torch.zeros(64, 128).char()}):
        odd = packed_base(published(tmp_path / "odd", tensors | wrong), DENSE | BY_ROW, shapes, "fp8-rows", tmp_path)
        assert "is not in FP8 with a finite scale for each row" in refused(partial(odd, Q))
    for change in ({"strategy": "tensor"}, {"num_bits": 4}):
        groups = {"group_0": {"weights": ROWS | change}}
        assert published_as({"quantization_config": BY_ROW["quantization_config"] | {"config_groups": groups}}) is None


def test_experts_in_fp8_with_a_scale_per_row_are_read_as_published(tmp_path):
    pieces = {name: random((48, 160), i).to(torch.float8_e4m3fn) for i, name in enumerate(EXPERT_NAMES)}
    scales = {f"{name}_scale": random((48, 1), i).abs() for i, name in enumerate(EXPERT_NAMES)}
    folder = published(tmp_path / "model", pieces | scales)
    packed = packed_base(folder, EXPERTS | BY_ROW, {GATE_UP: (3, 96, 160)}, "fp8-rows", tmp_path)(GATE_UP)
    for part, stored in zip(parts(packed, (3, 96, 160), "fp8-rows"), (pieces, scales), strict=True):
        assert torch.equal(part.float().flatten(), torch.cat([t.float().flatten() for t in stored.values()]))


def test_fp8_in_blocks_is_quantised_again_by_row(tmp_path):
    shapes = {Q: (256, 384)}
    tensors, mean = of_fp8(Q, shapes[Q])
    read = packed_base(published(tmp_path / "model", tensors), DENSE | FP8, shapes, "fp8-rows", tmp_path)
    assert torch.equal(read(Q), pack(mean, "fp8-rows"))
    assert "reads their values in bf16, and quantises these by row" in note_on_weights(Model(DENSE | FP8), "fp8-rows")


@pytest.mark.parametrize("config", [EXPERTS, OLMOE], ids=["qwen3_moe", "olmoe"])
def test_experts_in_fp8_are_the_same_stored_either_way(tmp_path, config):
    """Module layout: the gate of an expert precedes its up projection, not the gate of the next expert."""
    tensors, means = gathered([of_fp8(name, (128, 160), 2 * i) for i, name in enumerate(EXPERT_NAMES)])
    shapes, expected = {GATE_UP: (3, 256, 160)}, torch.cat(means).view(3, 256, 160)
    separate = packed_base(published(tmp_path / "apart", tensors), config | FP8, shapes, "fp8", tmp_path)
    assert torch.equal(unpacked(separate(GATE_UP), (3, 256, 160), "fp8"), expected)
    ends = (".weight", "_scale_inv")
    codes, scales = (torch.stack([t for name, t in tensors.items() if name.endswith(end)]) for end in ends)
    together = {GATE_UP: codes.view(3, 256, 160), f"{GATE_UP}_scale_inv": scales.view(3, 2, 2)}
    read = packed_base(published(tmp_path / "together", together), config | FP8, shapes, "fp8", tmp_path)
    assert torch.equal(read(GATE_UP), separate(GATE_UP))


def test_experts_whose_blocks_would_not_meet_are_refused(tmp_path):
    """Two weights of 224 rows have the same number of block rows as one of 448, but other blocks."""
    tensors, _ = gathered([of_fp8(name, (224, 128)) for name in EXPERT_NAMES[:2]])
    folder, shapes = published(tmp_path / "model", tensors), {GATE_UP: (1, 448, 128)}
    message = refused(lambda: packed_base(folder, EXPERTS | FP8, shapes, "fp8", tmp_path))
    assert "gate_proj.weight does not end at a block boundary" in message


def test_mxfp4_experts_unpack_to_the_bits_of_transformers(tmp_path):
    shape, config = (3, 64, 96), {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    stored = in_mxfp4(GATE_UP, shape, 0)
    blocks, scales = stored.values()
    read = packed_base(published(tmp_path / "model", stored), config, {GATE_UP: shape}, "mxfp4", tmp_path)
    assert torch.equal(unpacked(read(GATE_UP), shape, "mxfp4"), convert_moe_packed_tensors(blocks, scales))
    cases = {
        "is not in MXFP4 numbers": stored | {f"{GATE_UP}_scales": scales + (scales == scales.max()) * (255 - scales)},
        "is not in MXFP4 of (3, 64, 96)": in_mxfp4(GATE_UP, (3, 96, 64), 0),
        "no tensor model.layers.0.mlp.experts.gate_up_proj_scales": {f"{GATE_UP}_blocks": blocks},
        "down_proj is packed too": stored | in_mxfp4(GATE_UP.replace("gate_up", "down"), shape, 0),
        "gate_up_proj is not packed in mxfp4": {GATE_UP: random(shape)},
    }
    for i, (message, tensors) in enumerate(cases.items()):
        folder = published(tmp_path / str(i), tensors)
        assert message in refused(lambda: packed_base(folder, config, {GATE_UP: shape}, "mxfp4", tmp_path)(GATE_UP))  # noqa: B023
    assert "plan with --base mxfp4" in refused(lambda: packed_base(tmp_path / "model", config, {GATE_UP: shape}, "nf4", tmp_path))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, '"bnb_4bit_quant_type": "fp4"'),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, '"weight_block_size": [64, 128]'),
    ],
)
def test_other_methods_are_refused_by_name(folder, settings, named):
    for key in ("quantization_config", "compression_config"):
        assert named in refused(partial(packed_base, folder, DENSE | {key: settings}, SHAPES, "nf4", folder))
        for base in ("bf16", "nf4", "fp8"):
            noted = note_on_weights(Model(DENSE | {key: settings}), base)
            assert noted is not None, "a plan says so first, whatever it is for"
            assert "--train lora" not in noted


def test_weights_packed_in_part_are_refused(tmp_path):
    q, down = of_bitsandbytes(Q, random(SHAPES[Q]).bfloat16())[0], of_bitsandbytes(DOWN, random(SHAPES[DOWN]).bfloat16())[0]
    head = of_bitsandbytes("lm_head.weight", random((96, 64)).bfloat16(), storage=torch.bfloat16)[0]
    cases = [
        (q | down | head, NF4, "lm_head.weight is packed too"),
        (q | {DOWN: random(SHAPES[DOWN]).bfloat16()}, NF4, "down_proj.weight is not packed in nf4, as others are"),
        (q, NF4, "no tensor model.layers.0.mlp.down_proj.weight"),
    ]
    for i, (tensors, config, message) in enumerate(cases):
        base, folder = published_base(tmp_path, config), published(tmp_path / str(i), tensors)
        assert message in refused(lambda: packed_base(folder, DENSE | config, SHAPES, base, tmp_path)(DOWN))  # noqa: B023
