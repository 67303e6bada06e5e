"""Is a merged model the model with its adapter: to transformers, to PEFT, and bit for bit?"""

import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.checkpoint import merging
from penstock.checkpoint.adapter_files import CONFIG_FILE, PREFIX, TENSOR_FILE, write_adapter
from penstock.checkpoint.checkpoint import INDEX_FILE
from penstock.checkpoint.merging import Merged, merge
from penstock.checkpoint.room import NoRoomError
from penstock.checkpoint.tensor_files import Shards
from runtime.errors import CheckpointError
from tests.tiny import MODEL_TYPES
from tests.tour import ROOT

from .test_adapter_files import LORA, TOKENS, factors_of, lora_of, model_of, peft_saved

SHARD = "20KB"  # so that tiny models have several


def folders(tmp_path: Path, model_type: str = "llama", dtype: torch.dtype = torch.float32, shard: str = SHARD) -> tuple[Path, Path]:
    """A model's folder and an adapter's."""
    model, lora = model_of(model_type, dtype), lora_of(model_type)
    model.save_pretrained(tmp_path / "base", max_shard_size=shard)
    write_adapter(tmp_path / "adapter", lora, factors_of(model, lora), None)
    return tmp_path / "base", tmp_path / "adapter"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def plainly_merged(base: Path, adapter: Path, scale: float) -> dict[str, Tensor]:
    """All at once: W + s B A in fp32, rounded once."""
    weights, factors = tensors_of(base), load_file(adapter / TENSOR_FILE)
    for name, weight in weights.items():
        module = PREFIX + name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in factors:
            delta = scale * (factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"])
            weights[name] = (weight.float() + delta).to(weight.dtype)
    return weights


# What it is


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_merged_model_of_every_type_is_what_peft_merges_and_a_plain_loop_bit_for_bit(
    tmp_path: Path, model_type: str, dtype: torch.dtype
) -> None:
    base, adapter = folders(tmp_path, model_type, dtype)
    merge(base, adapter, tmp_path / "out")
    plain, merged = plainly_merged(base, adapter, 1.5), tensors_of(tmp_path / "out")
    assert merged.keys() == plain.keys()
    assert all(torch.equal(merged[name], weight) and merged[name].dtype == dtype for name, weight in plain.items())
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert loaded.dtype == dtype
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    with torch.no_grad():
        # PEFT's order of sums is ours; of another machine's matmuls no more is asked than a unit in the last place, layer by layer
        tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
        torch.testing.assert_close(loaded(TOKENS).logits, by_peft(TOKENS).logits, **tolerance)
        before = AutoModelForCausalLM.from_pretrained(base)(TOKENS).logits
        assert (loaded(TOKENS).logits - before).abs().max() > 0.1


@pytest.mark.parametrize("shard", [SHARD, "1GB"], ids=["shards", "one-file"])
def test_files_and_all_that_stands_beside_the_weights_stay_as_they_were(tmp_path: Path, shard: str) -> None:
    base, adapter = folders(tmp_path, shard=shard)
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"):
        (base / name).write_text(name)
    for name in ("training_args.bin", "secrets.txt"):
        (base / name).write_text(name)
    merged = merge(base, adapter, tmp_path / "a" / "out")
    assert merged.path == tmp_path / "a" / "out"
    assert {p.name for p in merged.path.iterdir()} == {p.name for p in base.iterdir()} - {"training_args.bin", "secrets.txt"}
    for path in merged.path.iterdir():
        if path.suffix == ".safetensors":
            assert {name: tensor.shape for name, tensor in load_file(path).items()} == {
                name: tensor.shape for name, tensor in load_file(base / path.name).items()
            }
        elif path.name == INDEX_FILE:
            assert json.loads(path.read_text()) == json.loads((base / path.name).read_text())
        else:
            assert path.read_bytes() == (base / path.name).read_bytes()
    assert (merged.path / INDEX_FILE).exists() == (shard == SHARD)


def test_the_index_says_where_tensors_lie_whatever_it_said_before(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    index = json.loads((base / INDEX_FILE).read_text())
    stale = dict(index["weight_map"])
    left_out, misplaced, *_ = [name for name, file in stale.items() if list(stale.values()).count(file) > 2]
    del stale[left_out]
    stale[misplaced] = next(file for file in stale.values() if file != stale[misplaced])
    set_json(base / INDEX_FILE, weight_map=stale)
    merge(base, adapter, tmp_path / "out")
    assert json.loads((tmp_path / "out" / INDEX_FILE).read_text()) == index


def test_what_was_done_is_counted_and_told_on_the_way(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    told: list[tuple[str, int, int]] = []
    merged = merge(base, adapter, tmp_path / "out", lambda *step: told.append(step))
    weights = tensors_of(base)
    n_bytes = sum(weight.nbytes for weight in weights.values())
    assert merged == Merged(tmp_path / "out", LORA, len(weights), 14, n_bytes)
    assert sorted(name for name, _, _ in told) == sorted(weights)
    n_done_bytes = 0
    for name, n_told_bytes, of_bytes in told:
        n_done_bytes += weights[name].nbytes
        assert (n_told_bytes, of_bytes) == (n_done_bytes, n_bytes)
    assert n_done_bytes == n_bytes


def test_what_peft_itself_saved_is_merged(tmp_path: Path) -> None:
    model = model_of("qwen2")
    model.save_pretrained(tmp_path / "base")
    peft_saved(tmp_path / "adapter", model, target_modules="all-linear")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, by_peft(TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path, "gemma2")
    merge(base, adapter, tmp_path / "out")
    assert "lm_head.weight" not in tensors_of(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, tensors_of(base)["model.embed_tokens.weight"])


# What it takes


def test_no_two_tensors_of_a_model_are_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = folders(tmp_path)
    read, held = Shards.__getitem__, list[tuple[str, weakref.ref[Tensor]]]()
    most = {"weights": 0, "factors": 0}

    def counted(shards: Shards, name: str) -> Tensor:
        tensor = read(shards, name)
        held.append((name, weakref.ref(tensor)))
        alive = [name for name, reference in held if reference() is not None]
        n_factors = sum(".lora_" in name for name in alive)
        most["factors"], most["weights"] = max(most["factors"], n_factors), max(most["weights"], len(alive) - n_factors)
        return tensor

    gc.disable()  # what goes, goes at once
    try:
        monkeypatch.setattr(Shards, "__getitem__", counted)
        merge(base, adapter, tmp_path / "out")
    finally:
        gc.enable()
    assert len(held) > 2 * len(tensors_of(base))
    assert most == {"weights": 1, "factors": 2}


@pytest.mark.parametrize("piece_bytes", [1, 32 * 4 * 5])
def test_a_weight_is_computed_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    base, adapter = folders(tmp_path)
    monkeypatch.setattr(merging, "PIECE_BYTES", piece_bytes)
    merge(base, adapter, tmp_path / "out")
    merged = tensors_of(tmp_path / "out")
    for name, weight in plainly_merged(base, adapter, 1.5).items():
        torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=1e-6)


# What is refused


def refused(base: Path, adapter: Path, out: Path) -> str:
    before = {path: path.read_bytes() for path in (*base.rglob("*"), *out.rglob("*")) if path.is_file()}
    with pytest.raises(CheckpointError) as caught:
        merge(base, adapter, out)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert said.isprintable()
    assert "; " in said, "what to do is said too"
    assert not out.with_name("out.partial").exists()
    assert before == {path: path.read_bytes() for path in (*base.rglob("*"), *out.rglob("*")) if path.is_file()}
    return said


def set_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_tensor(base: Path, name: str, tensor: Tensor, file: str = "model.safetensors") -> None:
    save_file(load_file(base / file) | {name: tensor}, base / file)


Q0 = "model.layers.0.self_attn.q_proj"
MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "quantised": (lambda base: set_json(base / "config.json", quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "scales": (lambda base: set_tensor(base, f"{Q0}.weight_scale", torch.ones(1)), "weight_scale"),
    "fp8": (lambda base: set_tensor(base, f"{Q0}.weight", torch.ones(32, 32).to(torch.float8_e4m3fn)), "F8_E4M3"),
    "fp64": (lambda base: set_tensor(base, f"{Q0}.weight", torch.ones(32, 32).double()), "torch.float64"),
    "a-mask": (lambda base: set_tensor(base, "model.mask", torch.ones(3, dtype=torch.bool)), "torch.bool"),
    "no-configuration": (lambda base: (base / "config.json").unlink(), "config.json"),
    "no-weights": (lambda base: (base / "model.safetensors").unlink(), "no model.safetensors"),
    "pickled": (lambda base: (base / "model.safetensors").rename(base / "pytorch_model.bin"), "pickled"),
    "half-a-file": (lambda base: os.truncate(base / "model.safetensors", 30_000), "not a whole safetensors file"),
    "another-shape": (lambda base: set_tensor(base, f"{Q0}.weight", torch.ones(32, 31)), f"{Q0} is (32, 31)"),
    "no-projection": (lambda base: set_tensor(base, f"{Q0}.weight", torch.ones(32)), f"{Q0}, which this model has not"),
    "nothing": (lambda base: set_tensor(base, f"{Q0}.weight", torch.ones(0, 32)), f"{Q0}, which this model has not"),
    "a-path": (lambda base: (base / INDEX_FILE).write_text('{"weight_map": {"a": "../a.safetensors"}}'), "is no file name"),
    "an-index-of-more": (
        lambda base: (base / INDEX_FILE).write_text('{"weight_map": {"b": "model.safetensors"}}'),
        "'b' is in none of its files",
    ),
}


@pytest.mark.parametrize(("spoil", "expected"), MODELS.values(), ids=MODELS)
def test_a_model_that_cannot_be_merged_is_refused(tmp_path: Path, spoil: Callable[[Path], object], expected: str) -> None:
    base, adapter = folders(tmp_path, shard="1GB")
    spoil(base)
    assert expected in refused(base, adapter, tmp_path / "out")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    first, second = sorted(base.glob("model-*"))[:2]
    set_tensor(base, "model.norm.weight", torch.ones(32), first.name)
    set_tensor(base, "model.norm.weight", torch.ones(32), second.name)
    assert "'model.norm.weight' lies in another file too" in refused(base, adapter, tmp_path / "out")


def test_the_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base, _ = folders(tmp_path)
    model = model_of(num_hidden_layers=3)
    write_adapter(tmp_path / "another", LORA, factors_of(model, LORA), None)
    assert "model.layers.2.self_attn.q_proj, which this model has not" in refused(base, tmp_path / "another", tmp_path / "out")
    assert CONFIG_FILE in refused(base, tmp_path / "nothing", tmp_path / "out")


@pytest.mark.parametrize(("dtype", "value"), [(torch.float32, float("nan")), (torch.float16, 1e5)], ids=["nan", "overflow"])
def test_weights_that_are_no_numbers_are_not_written(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    base, _ = folders(tmp_path, dtype=dtype)
    factors = {name: torch.full_like(factor, value) for name, factor in factors_of(model_of(), LORA).items()}
    write_adapter(tmp_path / "broken", LORA, factors, None)
    assert f"not finite in {dtype}" in refused(base, tmp_path / "broken", tmp_path / "out")


@pytest.mark.parametrize("place", ["base", "base/out", "link/out", "base/a/b/out", "a/../base/out"])
def test_a_model_is_not_merged_into_its_own_folder(tmp_path: Path, place: str) -> None:
    base, adapter = folders(tmp_path)
    (tmp_path / "link").symlink_to(base)
    assert "own folder" in refused(base, adapter, tmp_path / place)


def test_a_place_where_something_lies_is_refused(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert "is not empty" in refused(base, adapter, tmp_path / "out")
    assert "Not a directory" in refused(base, adapter, tmp_path / "out" / "mine.txt")
    (tmp_path / "empty").mkdir()
    assert merge(base, adapter, tmp_path / "empty").path == tmp_path / "empty"


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = folders(tmp_path)
    monkeypatch.setattr(merging, "free_bytes", lambda _: 1000)
    with pytest.raises(NoRoomError, match=r"takes .* KB, and 1.* KB are free; make room"):
        merge(base, adapter, tmp_path / "out", lambda *_: pytest.fail("was written"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


# What is left of it


def test_a_merge_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)

    def stop(_: str, n_bytes: int, of_bytes: int) -> None:
        if 2 * n_bytes > of_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(base, adapter, tmp_path / "out", stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_the_configuration_without_which_nothing_is_loaded_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = folders(tmp_path)
    written, write = list[str](), merging.write_new
    monkeypatch.setattr(merging, "write_new", lambda path, content: written.append(path.name) or write(path, content))
    merge(base, adapter, tmp_path / "out")
    assert written == [INDEX_FILE, "generation_config.json", "config.json"]


def test_a_merge_that_is_killed_leaves_nothing_that_looks_whole_and_the_next_one_succeeds(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    code = (
        "import os, signal\nfrom pathlib import Path\nfrom penstock.checkpoint.merging import merge\n"
        "def stop(_, n_bytes, of_bytes):\n    if n_bytes == of_bytes: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"merge(Path({str(base)!r}), Path({str(adapter)!r}), Path({str(tmp_path / 'out')!r}), stop)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial" / "config.json").exists()
    with pytest.raises(ValueError, match=r"Unrecognized model in .*config\.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out.partial")
    merge(base, adapter, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
