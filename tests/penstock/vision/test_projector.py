"""Trained projectors: the bits of transformers' own forward with a frozen tower, runs, checkpoints, adapters, plans."""

import json
import re
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForImageTextToText

from penstock.data.image_processor import ImageReader
from penstock.data.tokenizer import read_tokenizer
from penstock.planner.model.config import projector_trace
from penstock.planner.model.vision import FIXED, processor_limits, vision_tower
from penstock.planner.model.workload import build_workload, supported_attention
from penstock.runtime.layers.meta_models import PROJECTORS
from penstock.runtime.plan import Policy, Semantics, saves
from penstock.runtime.plan.train import IN_PROJECTOR, Lora, Train, parse_train
from penstock.runtime.plan.workload import Model
from penstock.vision.tower import Tower
from tests.lanes import mostly_slow
from tests.penstock.test_chat import talk
from tests.penstock.vision.test_exactness import KEPT, differing
from tests.penstock.vision.test_image_runs import planned, words, write_the_same_bytes
from tests.running import lines_of, one_line, penstock, succeeded
from tests.seers import data_with_images, drawing, own_inputs, own_model, streamed, write_drawings, write_seer

TEXT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Fine."}]}


def semantics_for(config, train):
    exact = {"compute_dtype": "fp32", "gradient_dtype": "fp32", "clip_norm": None, "loss_tile_tokens": 64}
    return Semantics(64, 1, 1, attention=supported_attention(Model(config))[0], train=parse_train(train), **exact)


FORMS = [(train, name) for train in ("all,projector", "projector") for name in PROJECTORS]


@mostly_slow("train,model_type", FORMS, fast=(0, 3, 5, 7, 15))
def test_a_step_has_the_bits_of_transformers_own_forward_with_a_frozen_tower(tmp_path, model_type, train):
    semantics = semantics_for(write_seer(tmp_path / model_type, model_type), train)
    data = data_with_images(tmp_path / model_type, write_drawings(tmp_path / "rows", 1), tmp_path, semantics)
    model = own_model(tmp_path / model_type, semantics)
    for name, p in model.named_parameters():
        p.requires_grad_(bool(IN_PROJECTOR.search(name)) or not re.search("vision|visual", name))
    expected = model(**own_inputs(data, model, 0, 64 - data.parts[0].documents.lengths[0])).loss
    expected.backward()
    for policy in (Policy(), KEPT):
        loss, gradients = streamed(model, semantics, policy, data.batch(0))
        assert torch.tensor(loss, dtype=torch.float32) == expected
        assert differing(gradients, model) == []
        in_projector = [name for name in gradients if IN_PROJECTOR.search(name)]
        assert len(in_projector) == sum(bool(IN_PROJECTOR.search(name)) for name, _ in model.named_parameters())
        assert all(gradients[name].any() for name in in_projector)
        assert (len(gradients) == len(in_projector)) is (train == "projector")


@mostly_slow(
    "train,model_type", [("projector", "qwen2_5_vl"), ("all,projector", "mistral3"), ("projector", "qwen3_vl")], fast=(0, 1)
)
@pytest.mark.parametrize("packing", ["one", "documents"])
def test_micro_batches_of_several_images_and_of_none_are_those_of_transformers(tmp_path, model_type, train, packing):
    """Sequences with two, one and no images, in micro-batches of two and one; every policy gives the same bits."""
    config, rows = write_seer(tmp_path / model_type, model_type), write_drawings(tmp_path / "rows", 1, n_each=2)
    rows.write_text(
        rows.read_text() + write_drawings(tmp_path / "rows", 2, "more.jsonl", first=7).read_text() + json.dumps(TEXT) + "\n"
    )
    sizes = {"batch_size": 4} if packing == "one" else {"seq_len": 256}
    semantics = replace(semantics_for(config, train), **sizes)
    data = data_with_images(tmp_path / model_type, rows, tmp_path, semantics, packing)
    model = own_model(tmp_path / model_type, semantics)
    total, n = 0.0, int((data.batch(0).targets >= 0).sum())
    for document in range(4):
        inputs = own_inputs(data, model, document, 0)
        loss = model(**inputs).loss * int((inputs["labels"][:, 1:] >= 0).sum()) / n
        loss.backward()
        total += float(loss.detach())
    first = streamed(model, semantics, Policy(), data.batch(0))
    assert first[0] == pytest.approx(total, rel=1e-6)
    wanted = {name: p.grad for name, p in model.named_parameters() if name in first[1] and p.grad is not None}
    assert [name for name, g in wanted.items() if (g - first[1][name]).abs().max() > 1e-5 * g.abs().max() + 1e-9] == []
    offload = Policy(save=saves(products=(1, 2)), offload_blocks=(1,))
    for policy in (KEPT, offload, *([Policy(accumulation_group=2), Policy(accumulation_group=4)] if packing == "one" else [])):
        loss, gradients = streamed(model, semantics, policy, data.batch(0))
        assert loss == first[0]
        assert [name for name, g in gradients.items() if not torch.equal(g, first[1][name])] == []


@mostly_slow(
    "train,model_type", [("lora:r=4,projector", "llava"), ("projector", "qwen2_5_vl"), ("projector", "gemma3")], fast=(0, 1)
)
def test_a_killed_run_and_two_ranks_write_the_same_bytes(home, train, model_type):
    write_the_same_bytes(home, model_type, "--train", train)


@mostly_slow("model_type", ["llava", "qwen2_5_vl", "idefics3"], fast=(0, 1))
def test_adapters_of_a_projector_are_read_by_peft_and_merged(home, model_type):
    plan = planned(home, model_type, "--train", "lora:r=4,alpha=8,projector")
    succeeded(penstock(*words(home, plan, "--lr", "1e-2", steps=6)))
    losses = [line["eval_loss"] for line in lines_of(home, "out") if "eval_loss" in line]
    assert losses[-1] < losses[0]
    last, folder = home / "out" / "checkpoint-6", home / model_type
    factors = [name for name in load_file(last / "adapter_model.safetensors") if IN_PROJECTOR.search(name)]
    assert len(factors) == (2 if model_type == "idefics3" else 4)
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, last).eval()
    succeeded(penstock("merge", folder, last, "--out", home / "merged"))
    merged = AutoModelForImageTextToText.from_pretrained(home / "merged", dtype=torch.float32).eval()
    data = data_with_images(folder, home / "rows" / "images.jsonl", home, Semantics(64, 1, 1, compute_dtype="fp32"))
    inputs = own_inputs(data, merged, 0, 0)
    losses = [model(**inputs).loss.item() for model in (adapted, merged)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    with adapted.disable_adapter():
        assert adapted(**inputs).loss.item() != pytest.approx(losses[1], rel=1e-3)
    second = planned(home, model_type, "--train", "lora:r=4,alpha=8,projector", name="second.json")
    succeeded(penstock(*words(home, second, "--adapter", last, steps=1, out="second")))
    first = next(line["loss"] for line in lines_of(home, "second") if "loss" in line)
    assert first < next(line["loss"] for line in lines_of(home, "out") if "loss" in line)
    assert succeeded(talk(folder, "--adapter", last, "--context", 128)).output
    decoder = planned(home, model_type, "--train", "lora:r=4,alpha=8", name="decoder.json")
    one_line(penstock(*words(home, decoder, "--adapter", last, out="b")), 2, "adapts the projector, too; plan with `,projector`")


def test_a_checkpoint_holds_the_trained_projector_in_the_whole_model(home):
    plan = planned(home, "llava", "--train", "projector")
    succeeded(penstock(*words(home, plan, steps=2)))
    base, trained = (
        dict(AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).named_parameters())
        for path in (home / "llava", home / "out" / "checkpoint-2")
    )
    changed = {name for name in base if not torch.equal(base[name], trained[name])}
    assert changed == {name for name in base if IN_PROJECTOR.search(name)}
    stored = [name for path in (home / "out" / "checkpoint-2").glob("model-*.safetensors") for name in load_file(path)]
    assert len(stored) == len({*stored}) == len(base)
    frozen = planned(home, "llava", "--train", "lora:r=4", name="frozen.json")
    (features,) = (home / "cache" / "towers").iterdir()
    one_line(penstock(*words(home, frozen, "--tower", features, out="b")), 2, "image features of another stage")
    succeeded(penstock(*words(home, plan, "--model", home / "out" / "checkpoint-2", steps=1, out="c")))
    assert [*(home / "cache" / "towers").iterdir()] == [features], "features do not depend on the projector"
    (home / "rows" / "images.jsonl").write_text(json.dumps(TEXT) + "\n")
    one_line(penstock(*words(home, plan, out="d")), 2, "--train projector: the data has no images to train a projector")


@mostly_slow("model_type", [*PROJECTORS], fast=(0, 3, 4, 5))
def test_a_plan_counts_the_projector_in_the_embedding(tmp_path, model_type):
    config = write_seer(tmp_path, model_type)
    plain, trained = (build_workload(Model(config), semantics_for(config, train)).blocks[0] for train in ("all", "all,projector"))
    model = own_model(tmp_path, semantics_for(config, "all,projector"))
    shapes = {name: p.shape for name, p in model.named_parameters() if IN_PROJECTOR.search(name) and "deepstack" not in name}
    assert {p.name: p.shape for p in trained.parameters[len(plain.parameters) :]} == shapes
    flop = sum(2 * 64 * a * b for a, b in (shape for shape in shapes.values() if len(shape) == 2))
    assert sum(m.flop for m in trained.matmuls) - sum(m.flop for m in plain.matmuls) == flop, "all 64 tokens"
    reader = ImageReader(tmp_path, read_tokenizer(tmp_path), None, tmp_path)
    size = (56, 56) if model_type in FIXED else (84, 56)
    _, inputs = reader.tower_inputs(drawing(3, size)[0], "here")
    tower = Tower(tmp_path, config, torch.float32, torch.device("cpu"), projects=False)
    features = tower.features(inputs)
    assert (
        vision_tower(config, *size, processor_limits(tmp_path)).file_bytes(2, 4, projects=False) == 2 * features["features"].nbytes
    )
    name, tree = projector_trace(Model(config), 64)
    arguments = [torch.randn(tree["made"][0][0]).view(-1, *tower.shape), *[torch.tensor([[28, 28 * 64]])] * ("sizes" in features)]
    saved = list[torch.Tensor]()
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model.get_submodule(name)(*arguments)
    n_bytes = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}.values())
    assert n_bytes <= trained.side_bytes - plain.side_bytes <= 2.5 * n_bytes


def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path, monkeypatch):
    fixed = ["--machine", "cpu-2core", "--seq-len", 64, "--batch-size", 1, "--policy", "megatrain", "-o", tmp_path / "p.json"]
    one_line(penstock("plan", "qwen3-0.6b", *fixed, "--train", "projector"), 2, "not supported for qwen3 models")
    one_line(penstock("plan", "qwen3-0.6b", *fixed, "--train", "projector:r=4"), 2, "or projector")
    write_seer(tmp_path / "gemma3", "gemma3")
    lora = [*fixed, "--train", "lora:r=4,projector"]
    one_line(penstock("plan", tmp_path / "gemma3", *lora), 2, "no linear layer for adapters")
    assert not (tmp_path / "p.json").exists()


def test_words_of_train_are_read_back():
    for train in (Train(projector=True), Train(lora=Lora(), projector=True), Train(layers=(1, 2), projector=True)):
        assert parse_train(str(train)) == train
    everything = parse_train("all,projector")
    assert (str(everything), everything.all, everything.trains("model.embed_tokens.weight")) == ("all,projector", True, True)
    stage_one, name = parse_train("projector"), "model.visual.merger.mlp.0.weight"
    frozen = map(parse_train, ("layers:0-1", "all"))
    assert (stage_one.trains(name), everything.trains(name), [train.trains(name) for train in frozen]) == (
        True,
        True,
        [False, False],
    )
    assert not stage_one.trains("model.language_model.norm.weight")
