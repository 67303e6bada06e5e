"""Merged adapters, compared with transformers, PEFT and a reference implementation."""

import gc
import json
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.checkpoint import merging
from penstock.checkpoint.adapter_files import PREFIX, TENSOR_FILE, stack_factors
from penstock.checkpoint.merging import merge
from penstock.checkpoint.model_files import INDEX_FILE
from penstock.checkpoint.tensor_files import Shards
from penstock.runtime.errors import CheckpointError
from penstock.runtime.plan.train import Lora
from tests import checkpoints
from tests.accidents import forked_to_die
from tests.adapters_of_peft import ATTENTION, LORA, TOKENS, factors_of, lora_of, model_of, with_deltas, write_adapter
from tests.every_type import tiny
from tests.lanes import diagonal
from tests.penstock.checkpoint.test_dequantised import published
from tests.real_layers import load_model
from tests.running import weights_in
from tests.tiny import MODEL_TYPES

ELSEWHERE = ("jamba", "granitemoe")  # its experts and other MLPs are not named mlp
SHARD = "20KB"  # tiny models then have several shards


def folders(tmp_path: Path, model_type: str = "llama", dtype: torch.dtype = torch.float32, shard: str = SHARD) -> tuple[Path, Path]:
    model, lora = model_of(model_type, dtype), lora_of(model_type)
    model.save_pretrained(tmp_path / "base", max_shard_size=shard)
    return tmp_path / "base", write_adapter(tmp_path / "adapter", lora, factors_of(model, lora))


def plainly_merged(base: Path, adapter: Path, scale: float) -> dict[str, Tensor]:
    """Reference implementation: W + s B A in fp32, rounded once; experts have the names in transformers' files."""
    factors = {name.removeprefix(PREFIX): factor for name, factor in load_file(adapter / TENSOR_FILE).items()}
    if any(".experts." in name for name in factors):
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        with_deltas(model, Lora(4, 4 * scale, targets=("experts",)), factors).save_pretrained(adapter / "plain")
        base = adapter / "plain"
    weights, factors = weights_in(base), load_file(adapter / TENSOR_FILE)
    for name, weight in weights.items():
        module = PREFIX + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in factors:
            delta = scale * (factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"])
            weights[name] = (weight.float() + delta).to(weight.dtype)
    return weights


@diagonal(("model_type", [*MODEL_TYPES, *ELSEWHERE]), ("dtype", [torch.float32, torch.bfloat16]), ids=str)
def test_a_merged_model_is_what_peft_merges(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    """Results are bitwise identical to the reference implementation; tied embeddings remain tied."""
    base, adapter = folders(tmp_path, model_type, dtype)
    merge(base, adapter, tmp_path / "out")
    plain, merged = plainly_merged(base, adapter, lora_of(model_type).scale), weights_in(tmp_path / "out")
    assert merged.keys() == plain.keys()
    assert all(torch.equal(merged[name], weight) and merged[name].dtype == dtype for name, weight in plain.items())
    loaded = load_model(tmp_path / "out")
    assert loaded.dtype == dtype
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == ("lm_head.weight" not in merged)
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    with torch.no_grad():
        # PEFT sums in the same order; matmuls of another machine may differ by one unit in the last place per layer
        tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
        torch.testing.assert_close(loaded(TOKENS).logits, by_peft(TOKENS).logits, **tolerance)
        initial = AutoModelForCausalLM.from_pretrained(base)(TOKENS).logits
        assert (loaded(TOKENS).logits - initial).abs().max() > 0.1 * initial.abs().max()


def test_experts_without_adapters_stay_in_mxfp4(tmp_path: Path) -> None:
    published(tmp_path, "gpt_oss")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    adapter = write_adapter(tmp_path / "adapter", lora := Lora(4, 6.0, targets=ATTENTION), factors_of(model, lora))
    merge(tmp_path / "few", adapter, tmp_path / "out")
    initial, final = weights_in(tmp_path / "few"), weights_in(tmp_path / "out")
    assert initial.keys() == final.keys()
    assert {name.split(".")[-2] for name in initial if not initial[name].equal(final[name])} == {*ATTENTION}
    experts = [whole.model.layers[0].mlp.experts.down_proj for whole in (load_model(tmp_path / "out"), model)]
    assert experts[0].equal(experts[1])


def test_experts_are_unpacked_from_codes_and_scales_in_two_files(tmp_path: Path) -> None:
    published(tmp_path, "gpt_oss")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    adapter = write_adapter(tmp_path / "adapter", lora := Lora(4, 6.0, targets=("experts",)), factors_of(model, lora))
    merge(tmp_path / "few", adapter, tmp_path / "one")
    weights = load_file(tmp_path / "few" / "model.safetensors")
    (tmp_path / "few" / "model.safetensors").unlink()
    file_of = {name: f"model-{1 + name.endswith('_scales')}.safetensors" for name in weights}
    for file in {*file_of.values()}:
        save_file({name: weight for name, weight in weights.items() if file_of[name] == file}, tmp_path / "few" / file)
    (tmp_path / "few" / INDEX_FILE).write_text(json.dumps({"weight_map": file_of}))
    merge(tmp_path / "few", adapter, tmp_path / "two")
    one, two = (weights_in(tmp_path / folder) for folder in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)
    load_model(tmp_path / "two")


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_an_adapter_of_experts_the_other_way_round_is_refused(tmp_path: Path, model_type: str) -> None:
    base, adapter = folders(tmp_path, model_type)
    path = adapter / TENSOR_FILE
    factors = load_file(path)
    for name in [name for name in factors if name.endswith("experts.lora_A.weight")]:
        counterpart = name.replace("lora_A", "lora_B")
        factors |= {name: factors[counterpart].t().contiguous(), counterpart: factors[name].t().contiguous()}
    save_file(factors, path)
    assert "as inputs, like older versions of PEFT" in checkpoints.refused(lambda: merge(base, adapter, tmp_path / "out"))


def test_experts_are_matched_without_the_memory_of_a_stack() -> None:
    pieces = merging._pieces(tiny("olmoe"), {"model.layers.0.mlp.experts.gate_up_proj": (8, 192, 2**50)})
    assert len(pieces) == 2 * 8
    assert all(piece.outputs.shape == (1, 96) and not piece.swaps for piece in pieces.values())


def test_a_stack_of_experts_is_merged_in_the_layout_of_its_file() -> None:
    """Published Qwen3-VL files have rows of inputs; those that transformers saves have rows of outputs."""
    stack, lora, weight = "model.language_model.layers.0.mlp.experts.gate_up_proj", Lora(4, 4.0), torch.randn(8, 96, 64)
    pieces = merging._pieces(tiny("qwen3_vl_moe"), {stack: (8, 96, 64)})
    factors = {
        f"{stack_factors(stack)}.lora_{side}.weight": torch.randn(shape) for side, shape in (("A", (32, 64)), ("B", (96, 32)))
    }
    merge_of = partial(merging._merged_experts, Path(), factors=factors, name=stack, lora=lora, piece=pieces[stack])
    saved, published = (torch.stack([*merge_of(stored={stack: stored})]) for stored in (weight, weight.mT.contiguous()))
    assert not torch.equal(saved, weight)
    assert torch.equal(saved, published.mT)


@pytest.mark.parametrize("shard", [SHARD, "1GB"], ids=["shards", "one-file"])
def test_shards_configuration_and_tokenizer_stay_as_they_were(tmp_path: Path, shard: str) -> None:
    base, adapter = folders(tmp_path, shard=shard)
    for name in ("tokenizer.json", "chat_template.jinja", "training_args.bin", "secrets.txt"):
        (base / name).write_text(name)
    merge(base, adapter, out := tmp_path / "a" / "out")
    assert {p.name for p in out.iterdir()} == {p.name for p in base.iterdir()} - {"training_args.bin", "secrets.txt"}
    for path in out.iterdir():
        if path.suffix == ".safetensors":
            shapes = [{name: tensor.shape for name, tensor in load_file(file).items()} for file in (path, base / path.name)]
            assert shapes[0] == shapes[1]
        else:
            assert path.name == INDEX_FILE or path.read_bytes() == (base / path.name).read_bytes()
    assert (out / INDEX_FILE).exists() == (shard == SHARD)


def test_one_tensor_of_the_model_is_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Piece size changes results only by rounding."""
    base, adapter = folders(tmp_path)
    read, held, peak = Shards.__getitem__, list[weakref.ref[Tensor]](), 0

    def counted(shards: Shards, name: str) -> Tensor:
        nonlocal peak
        tensor = read(shards, name)
        if ".lora_" not in name:
            held.append(weakref.ref(tensor))
            peak = max(peak, sum(reference() is not None for reference in held))
        return tensor

    monkeypatch.setattr(merging, "PIECE_BYTES", 32 * 4 * 5)
    gc.disable()  # garbage is freed at once
    try:
        monkeypatch.setattr(Shards, "__getitem__", counted)
        merge(base, adapter, tmp_path / "out")
    finally:
        gc.enable()
    assert len(held) > len(weights_in(base))
    assert peak == 1
    merged = weights_in(tmp_path / "out")
    for name, weight in plainly_merged(base, adapter, 1.5).items():
        torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=1e-6)


def refused(base: Path, adapter: Path, out: Path) -> str:
    initial = {path: path.read_bytes() for path in (*base.rglob("*"), *out.rglob("*")) if path.is_file()}
    message = checkpoints.refused(lambda: merge(base, adapter, out))
    assert not out.with_name("out.partial").exists()
    assert initial == {path: path.read_bytes() for path in (*base.rglob("*"), *out.rglob("*")) if path.is_file()}
    return message


def set_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_tensor(base: Path, name: str, tensor: Tensor) -> None:
    save_file(load_file(base / "model.safetensors") | {name: tensor}, base / "model.safetensors")


Q0 = "model.layers.0.self_attn.q_proj"


def in_two_files(base: Path) -> None:
    name, tensors = f"{Q0}.weight", load_file(base / "model.safetensors")
    save_file({name: tensors[name]}, base / "second.safetensors")
    (base / "model.safetensors").rename(base / "first.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "first.safetensors") | {name: "second.safetensors"}}
    (base / INDEX_FILE).write_text(json.dumps(index))


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "quantised": (lambda base: set_json(base / "config.json", quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "no-projection": (lambda base: set_tensor(base, f"{Q0}.weight", torch.ones(32)), f"{Q0}.lora_A.weight is no factor"),
    "a-tensor-in-two-files": (in_two_files, "is in another file too"),
}


@pytest.mark.parametrize(("spoil", "expected"), MODELS.values(), ids=MODELS)
def test_a_model_that_cannot_be_merged_is_refused(tmp_path: Path, spoil: Callable[[Path], object], expected: str) -> None:
    base, adapter = folders(tmp_path, shard="1GB")
    spoil(base)
    assert expected in refused(base, adapter, tmp_path / "out")


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    base, _ = folders(tmp_path, dtype=torch.float16)
    factors = {name: torch.full_like(factor, 1e5) for name, factor in factors_of(model_of()).items()}
    assert "not finite in torch.float16" in refused(base, write_adapter(tmp_path / "broken", LORA, factors), tmp_path / "out")


def test_a_model_is_not_merged_into_a_folder_that_is_in_use(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    (tmp_path / "link").symlink_to(base)
    for place in ("base", "link/out", "a/../base/out"):
        assert "own folder" in refused(base, adapter, tmp_path / place)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert "is not empty" in refused(base, adapter, tmp_path / "out")
    assert "no adapter_model.safetensors" in refused(base, tmp_path / "nothing", tmp_path / "new")


def test_a_disk_without_room_is_refused_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = folders(tmp_path)
    monkeypatch.setattr(merging.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"takes .* KB, and 1.* KB are free; make room"):
        merge(base, adapter, tmp_path / "out", lambda *_: pytest.fail("was written"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_merge_that_is_killed_leaves_nothing_that_loads(tmp_path: Path) -> None:
    """Configuration is written last; the next merge succeeds."""
    base, adapter = folders(tmp_path)
    forked_to_die(lambda: merge(base, adapter, tmp_path / "out"), (merging, "write_new"), 1)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / INDEX_FILE).exists()
    assert not (tmp_path / "out.partial" / "config.json").exists()
    merge(base, adapter, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]
    load_model(tmp_path / "out")
