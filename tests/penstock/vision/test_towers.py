"""Towers: the features and weights of transformers' own, and planned sizes against a counter of FLOP."""

import json
import re
from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from penstock.data.image_processor import TYPES, ImageReader
from penstock.data.tokenizer import read_tokenizer
from penstock.planner.model.vision import PLANNED, processor_limits, vision_tower
from penstock.runtime.errors import CheckpointError, WorkloadError
from penstock.vision.tower import Tower, tower_digest
from tests.lanes import mostly_slow
from tests.running import one_line, penstock, succeeded
from tests.seers import drawing, write_seer


@mostly_slow("model_type", [*TYPES, "pixtral"], fast=(2, 6, 10, 25))
def test_features_and_flop_are_those_of_transformers(tmp_path, model_type):
    config = write_seer(tmp_path, model_type)
    reader = ImageReader(tmp_path, read_tokenizer(tmp_path), None, tmp_path)
    size = (112, 56) if model_type in ("internvl", "smolvlm") else (84, 56)  # of two tiles
    image, _ = drawing(3, size)
    _, inputs = reader.tower_inputs(image, "here")
    tower = Tower(tmp_path, config, torch.float32, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # fused attention on a CPU is not counted
        features = tower.features(inputs)["features"]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    out = model.base_model.get_image_features(**{k: v for k, v in inputs.items() if k in tower._accepted}, return_dict=True)
    pooled = out.pooler_output if isinstance(out.pooler_output, torch.Tensor) else torch.cat(list(out.pooler_output))
    assert torch.equal(tower.features(inputs)["features"][:, : pooled.shape[-1]], pooled.detach().flatten(0, -2))
    if config["model_type"] not in PLANNED:
        return
    planned = vision_tower(config, *size, processor_limits(tmp_path))
    assert (planned.n_features, planned.width) == features.shape
    assert planned.n_tokens == (inputs["input_ids"].shape[1] if model_type in ("mistral3", "pixtral") else len(features))
    assert planned.file_bytes(2, 4) == 2 * features.nbytes
    assert planned.flop == pytest.approx(counter.get_total_flops(), rel=0.05)


@mostly_slow("model_type", [*sorted(PLANNED), "pixtral"], fast=(1, 5, 10, 13))
def test_planned_tokens_are_those_of_the_processor(tmp_path, model_type):
    """Also for images that a processor enlarges, shrinks or cuts into tiles."""
    config = write_seer(tmp_path, model_type)
    reader, limits = ImageReader(tmp_path, read_tokenizer(tmp_path), None, tmp_path), processor_limits(tmp_path)
    for size in product((20, 57, 112, 333), (20, 70, 240)):
        _, inputs = reader.tower_inputs(drawing(0, size)[0], "here")
        assert vision_tower(config, *size, limits).n_features == int((inputs["input_ids"] == reader.token_id).sum()), size


def test_planned_types_are_read(tmp_path):
    assert {*TYPES} >= PLANNED
    (tmp_path / "preprocessor_config.json").write_text("[")
    with pytest.raises(WorkloadError, match="no JSON object; copy it again"):
        processor_limits(tmp_path)
    with pytest.raises(WorkloadError, match="not supported for qwen3 models"):
        vision_tower({"model_type": "qwen3"}, 10, 10)


def test_a_tower_without_a_weight_is_refused_and_its_digest_ignores_the_decoder(tmp_path):
    from safetensors.torch import load_file, save_file

    config = write_seer(tmp_path, "llava")
    digest, weights = tower_digest(tmp_path, config), load_file(tmp_path / "model.safetensors")
    decoder = next(name for name in weights if "language_model" in name)
    save_file(weights | {decoder: weights[decoder] + 1}, tmp_path / "model.safetensors", {"format": "pt"})
    assert tower_digest(tmp_path, config) == digest
    name = next(name for name in weights if name.endswith("linear_2.weight"))
    save_file({k: v for k, v in weights.items() if k != name}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no tensor for .*linear_2\.weight of its vision tower"):
        tower_digest(tmp_path, config)


def test_plan_counts_images(tmp_path):
    """768 tokens: 48 x 64 patches of 16 pixels, four patches a token; features of four layers in bf16."""
    words = ["plan", "qwen3-vl-8b", "--machine", "rtx4090-desktop", "--train", "lora", "--policy", "megatrain", "--images", 1000]
    fields = json.loads(succeeded(penstock(*words, "--image-size", "1024x768", "--json")).output)["images"]
    assert (fields["tokens_each"], fields["file_bytes"]) == (768, 1000 * 768 * 4 * 4096 * 2)
    assert fields["weights_bytes"] == pytest.approx(2 * 576e6, rel=0.05), "published: 576 million parameters"
    text = succeeded(penstock(*words)).output
    assert re.search(r"^images +1,000 of 1024 x 768: 768 tokens each; the tower's pass [\d.]+ s", text, re.M)
    one_line(penstock(*words, "--image-size", "4096x4096"), 2, "16,384 tokens an image, and a sequence holds 4,096")
    one_line(penstock(*words, "--image-size", "20000x20000"), 2, "above 67,108,864 pixels, which no run reads")
    one_line(penstock(*words, "--image-size", "big", "-o", tmp_path / "p.json"), 2, "no width and height")
    assert not (tmp_path / "p.json").exists(), "sizes are validated before a plan is written"
    one_line(penstock(*words[:-2], "--image-size", "64x64"), 2, "--image-size does nothing without --images")
    one_line(penstock("plan", "qwen3-8b", *words[2:]), 2, "not supported for qwen3 models")
