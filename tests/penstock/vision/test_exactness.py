"""Steps with images: the loss and gradients of transformers' own forward, in bits, for each supported type."""

from dataclasses import replace

import pytest
import torch

from penstock.data import sampling
from penstock.data.image_processor import TYPES
from penstock.planner.model.workload import supported_attention
from penstock.runtime.batch import Batch, Images
from penstock.runtime.plan import Policy, Semantics, saves
from penstock.runtime.plan.workload import Model
from tests.lanes import mostly_slow
from tests.runtime.test_replay import device_bytes
from tests.seers import data_with_images, length_of, own_inputs, own_model, streamed, write_drawings, write_seer
from tests.training import plan_of

TESTED = [*TYPES, "pixtral"]
NOT_PACKED = ("qwen3_5", "qwen3_5_moe")  # linear attention
KEPT = Policy(save=saves(all=(1, 2, 3, 4)))


@pytest.fixture
def seer(tmp_path, model_type):
    config = write_seer(tmp_path / model_type, model_type)
    attention = supported_attention(Model(config))[0]
    fields = {"compute_dtype": "fp32", "gradient_dtype": "fp32", "clip_norm": None}
    return tmp_path / model_type, Semantics(length_of(model_type), 1, 1, attention=attention, loss_tile_tokens=64, **fields)


def differing(gradients, model):
    wanted = {name: p.grad for name, p in model.named_parameters() if name in gradients}
    return [
        name for name, g in gradients.items() if not torch.equal(g, torch.zeros_like(g) if wanted[name] is None else wanted[name])
    ]


@mostly_slow("model_type", TESTED, fast=(2, 3, 6, 10, 18, 20))
def test_a_step_with_an_image_has_the_bits_of_transformers_own_forward(tmp_path, seer, model_type):
    """Tower, projector, positions, masks and features of later layers included, with and without recompute."""
    folder, semantics = seer
    data, model = data_with_images(folder, write_drawings(tmp_path / "rows", 1), tmp_path, semantics), own_model(folder, semantics)
    inputs = own_inputs(data, model, 0, semantics.seq_len - data.parts[0].documents.lengths[0])
    expected = model(**inputs).loss
    expected.backward()
    assert torch.equal(data.batch(0).input_ids, inputs["input_ids"])
    for policy in (Policy(), KEPT):
        loss, gradients = streamed(model, semantics, policy, data.batch(0))
        assert torch.tensor(loss, dtype=torch.float32) == expected
        assert differing(gradients, model) == []
    no_images = replace(data.batch(0), images=None)
    assert streamed(model, semantics, Policy(), no_images)[0] != pytest.approx(expected.item(), rel=1e-4), "images matter"


@mostly_slow("model_type", [name for name in TESTED if name not in NOT_PACKED], fast=(2, 6, 19))
def test_packed_documents_with_images_are_those_alone(tmp_path, seer, model_type):
    """Two images a turn, and a row of text, in one sequence: each document as transformers computes it alone, up to rounding."""
    folder, semantics = seer
    rows = write_drawings(tmp_path / "rows", 3, n_each=2)
    text = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Fine."}]}\n'
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([lines[0], text, *lines[1:]]))
    semantics, model = replace(semantics, seq_len=4 * semantics.seq_len), own_model(folder, semantics)
    data = data_with_images(folder, rows, tmp_path, semantics, packing="documents")
    assert len(data.parts[0].sequences) == 1
    total, n = 0.0, int((data.batch(0).targets >= 0).sum())
    for document, _, _ in data.parts[0].sequences[0]:
        inputs = own_inputs(data, model, document, 0)
        n_targets = int((inputs["labels"][:, 1:] >= 0).sum())
        loss = model(**inputs).loss * n_targets / n
        loss.backward()
        total += float(loss.detach())
    for policy in (Policy(), KEPT):
        loss, gradients = streamed(model, semantics, policy, data.batch(0))
        assert loss == pytest.approx(total, rel=1e-6)
        wanted = {name: p.grad for name, p in model.named_parameters() if name in gradients and p.grad is not None}
        assert [name for name, g in wanted.items() if (g - gradients[name]).abs().max() > 1e-5 * g.abs().max() + 1e-9] == []


@mostly_slow("model_type", ["qwen3_vl", "gemma3", "llava"], fast=(0,))
def test_micro_batches_and_policies_change_no_bit(tmp_path, seer, model_type):
    """Sequences with one, two and no images in four micro-batches; checkpointing, offload and order of layers."""
    folder, semantics = seer
    rows = write_drawings(tmp_path / "rows", 2, n_each=2)
    rows.write_text(rows.read_text() + write_drawings(tmp_path / "rows", 2, "more.jsonl", first=7).read_text())
    semantics, model = replace(semantics, batch_size=4, mlp_tile_tokens=40), own_model(folder, semantics)
    batch: Batch = data_with_images(folder, rows, tmp_path, semantics).batch(0)
    assert batch.images is not None
    first = streamed(model, semantics, Policy(), batch)
    offload = Policy(save=saves(products=(1, 2)), offload_blocks=(1,), accumulation_group=2)
    for policy in (
        KEPT,
        offload,
        Policy(accumulation_group=2, boundary_stride=2),
        Policy(accumulation_group=4, prefetch_depth=2, resident_blocks=(0,)),
    ):
        loss, gradients = streamed(model, semantics, policy, batch)
        assert loss == first[0]
        assert [name for name, g in gradients.items() if not torch.equal(g, first[1][name])] == []


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_joined_batches_of_texts_and_images_keep_the_places_of_images(tmp_path, seer, model_type):
    """As an evaluation joins them: texts before, between and after images, and padding."""
    folder, semantics = seer
    rows = write_drawings(tmp_path / "rows", 2)
    text = '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Fine."}]}\n'
    rows.write_text(text + text.join(rows.read_text().splitlines(keepends=True)) + text)
    data = data_with_images(folder, rows, tmp_path, semantics)
    batch = sampling.joined([data.batch_of_samples([data.sample(n)]) for n in range(5)], 6)
    token = data.parts[0].documents.reader.images.token_id
    assert [len(features) for features in batch.images.features] == (batch.input_ids == token).sum(1).tolist()
    assert [len(features) > 0 for features in batch.images.features] == [False, True, False, True, False, False]
    whole = [data.batch_of_samples([data.sample(n)]).images for n in range(5)]
    for name in ("positions", "token_types"):
        joined, parts = getattr(batch.images, name), [getattr(images, name) for images in whole]
        assert joined is None if parts[0] is None else torch.equal(joined[:5], torch.cat(parts))


@mostly_slow("model_type", ["qwen3_vl", "llava", "gemma3"], fast=(0,))
def test_features_take_no_memory_beyond_the_block_being_computed(tmp_path, model_type):
    """Two micro-batches with an image token at every position: the largest features of any layer. No activation is saved."""
    n_tokens, width = 96, 128
    config = write_seer(tmp_path, model_type, hidden_size=width, intermediate_size=352)
    semantics = Semantics(n_tokens, 2, 1, attention="sdpa", compute_dtype="fp32", gradient_dtype="fp32", loss_tile_tokens=16)
    plan = plan_of(config, semantics, Policy(accumulation_group=2))
    n_added, has_types = 2 * (model_type == "qwen3_vl"), model_type == "gemma3"
    token = config.get("image_token_id", config.get("image_token_index"))
    ids, places = torch.full((2, n_tokens), token), torch.arange(n_tokens)
    images = Images(
        **{"features": (torch.randn(n_tokens, width * (1 + n_added)),) * 2, "places": (places, places), "is_listed": not has_types},
        **{"n_added": n_added, "width": width, "token_types": torch.ones_like(ids) if has_types else None},
        positions=torch.arange(n_tokens).expand(2, 3, -1) if n_added else None,
    )
    of_text, with_images = (device_bytes(plan, [Batch(ids, ids % 300, images=part)])[1] for part in (None, images))
    masks_bytes = 2 * 2 * n_tokens**2 * has_types  # of a micro-batch and kind of layer
    assert of_text < with_images - masks_bytes <= plan.kept_bytes + plan.transient_bytes
    assert plan.transient_bytes > 13 * n_tokens * width * 4, "with the copies that CUDA makes"
