"""Can a checkpoint be trusted: by transformers, by a resumed run, and after a crash?"""

import errno
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.checkpoint.checkpoint import (
    State,
    has_weights,
    latest,
    load_state,
    load_weights,
    refuse_quantised,
    sum_of,
    writable_folder,
)
from penstock.checkpoint.resuming import refuse_another
from penstock.checkpoint.saving import save
from penstock.checkpoint.tensor_files import Shards, TensorFile
from runtime.errors import CheckpointError
from runtime.plan import Semantics
from tests.tiny import EXPERT_TYPES, STRUCTURES, tiny_config

TIED = [(model_type, tied) for model_type in STRUCTURES for tied in (False, True) if model_type != "gpt_oss" or not tied]


def build(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    return model


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def small(folder: Path, step: int = 3, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "weights": {"model.a": torch.arange(6.0).reshape(2, 3), "model.b": torch.ones(4)},
        "optimizer": [("000", {"m": torch.arange(5.0), "v": torch.zeros(3)}), ("001", {"n": torch.ones(2)})],
        "config": {"model_type": "llama"},
        "state": {"seed": 1, "semantics": {"seq_len": 8}},
    }
    return save(folder, step, **(arguments | changes))


# By transformers


@pytest.mark.fast("values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("model_type", "tied"), TIED)
def test_transformers_loads_the_checkpoint_of_every_type(tmp_path: Path, model_type: str, tied: bool, dtype: torch.dtype) -> None:
    config = tiny_config(model_type, tie_word_embeddings=tied)
    model = build(config, dtype)
    path = save(tmp_path, 1, weights_of(model), [], config, {})
    loaded, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert {what: names for what, names in report.items() if names} == {}
    assert loaded.dtype == dtype
    for (name, expected), (found_name, found) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == found_name
        assert torch.equal(expected, found), name


@pytest.mark.parametrize(("model_type", "tied"), TIED)
def test_the_files_hold_what_transformers_itself_would_publish(tmp_path: Path, model_type: str, tied: bool) -> None:
    config = tiny_config(model_type, tie_word_embeddings=tied)
    model = build(config)
    weights = weights_of(model)
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # is not written twice
    path = save(tmp_path / "ours", 1, weights, [], config, {})
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = load_file(path / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors")
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("model_type", STRUCTURES)
def test_weights_that_transformers_saved_are_read_under_their_module_names(tmp_path: Path, model_type: str) -> None:
    model = build(tiny_config(model_type), torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    weights = weights_of(model)
    found = dict(load_weights(tmp_path, weights, {name: tuple(w.shape) for name, w in weights.items()}))
    assert list(found) == list(weights)
    assert all(torch.equal(found[name], weights[name]) and found[name].dtype == torch.bfloat16 for name in weights)


@pytest.mark.parametrize("model_type", EXPERT_TYPES)
def test_weights_stored_under_module_names_are_read_as_they_lie(tmp_path: Path, model_type: str) -> None:
    weights = weights_of(build(tiny_config(model_type)))
    save_file({name: w.contiguous() for name, w in weights.items()}, tmp_path / "model.safetensors")
    assert all(torch.equal(w, weights[name]) for name, w in load_weights(tmp_path, weights))


def test_a_large_model_is_sharded_with_an_index_that_transformers_reads(tmp_path: Path) -> None:
    config = tiny_config("mixtral")
    model = build(config)
    path = save(tmp_path, 1, weights_of(model), [], config, {}, max_shard_bytes=30_000)
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(sum(tensor.nbytes for tensor in load_file(shard).values()) <= 30_000 for shard in shards)
    loaded, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())


def test_the_configuration_says_how_the_weights_are_stored_now(tmp_path: Path) -> None:
    config = {"model_type": "llama", "torch_dtype": "float16", "quantization_config": {"quant_method": "mxfp4"}, "n": 1}
    path = small(tmp_path, config=config, weights={"a": torch.ones(2, dtype=torch.bfloat16)})
    assert json.loads((path / "config.json").read_text()) == {"model_type": "llama", "n": 1, "dtype": "bfloat16"}
    assert config["torch_dtype"] == "float16"


def test_the_tokenizer_travels_with_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "pytorch_model.bin", "secrets.txt"):
        (model / name).write_text(name)
    path = small(tmp_path, tokenizer_from=model)
    copied = {p.name for p in path.iterdir()} - {p.name for p in small(tmp_path, 4).iterdir()}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert (path / "tokenizer.json").read_text() == "tokenizer.json"
    load_state(path)


# The files


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A whole file, tensor by tensor; its size and SHA-256."""
    file = TensorFile(path, tensors)
    for name in file.in_order:
        file.put(name, tensors[name])
    return file.close()


@given(
    shapes=st.lists(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5), max_size=5),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
)
def test_tensors_are_written_as_the_safetensors_library_reads_them(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]
) -> None:
    tensors = {
        f"t{i}": torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    if "t0" in tensors and tensors["t0"].dim():
        tensors["view"] = tensors["t0"].transpose(0, -1)
    path = tmp_path_factory.mktemp("tensors") / "x.safetensors"
    written = write_tensors(path, tensors)
    assert written == {"n_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    for found in (load_file(path), dict(Shards([path]))):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())


def test_every_tensor_of_a_file_starts_aligned_to_its_items(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3), "c": torch.ones(1, dtype=torch.uint8)}
    write_tensors(tmp_path / "x", tensors)
    content = (tmp_path / "x").read_bytes()
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    assert n % 8 == 0
    assert all(header[name]["data_offsets"][0] % t.element_size() == 0 for name, t in tensors.items())


# By a resumed run


def test_the_state_comes_back(tmp_path: Path) -> None:
    path = small(tmp_path)
    state = load_state(path)
    assert (state.path, state.step, state.fields) == (path, 3, {"seed": 1, "semantics": {"seq_len": 8}})
    assert sorted(state.optimizer) == ["m", "n", "v"]
    assert torch.equal(state.optimizer["m"], torch.arange(5.0))
    assert torch.equal(state.optimizer["n"], torch.ones(2))


def test_the_latest_checkpoint_is_the_whole_one_of_the_highest_step(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for step in (9, 10, 2):
        small(tmp_path, step)
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-12.partial").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    assert latest(tmp_path) == tmp_path / "checkpoint-10"


def test_optimizer_files_are_written_one_by_one(tmp_path: Path) -> None:
    """When the next is asked for, the one before is on disk: no two need to be in memory."""

    def files() -> Iterator[tuple[str, dict[str, Tensor]]]:
        for i in range(3):
            yield f"{i:03d}", {f"m{i}": torch.ones(i + 1)}
            assert (tmp_path / "checkpoint-1.partial" / f"optimizer-{i:03d}.safetensors").exists()

    assert len(load_state(small(tmp_path, 1, optimizer=files())).optimizer) == 3


# After a crash


@pytest.mark.parametrize("when", range(1, 9))
def test_a_full_disk_leaves_nothing_half_written_and_the_older_checkpoint_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    older = small(tmp_path, 3)
    before = {p: p.read_bytes() for p in older.iterdir()}
    n_syncs = 0
    whole = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal n_syncs
        n_syncs += 1
        if n_syncs == when:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    if when <= 7:  # four files of tensors and configuration, the state, two folders
        assert "No space left" in refused(lambda: small(tmp_path, 4))
    else:
        small(tmp_path, 4)
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.partial"))
    assert {p: p.read_bytes() for p in older.iterdir()} == before
    load_state(latest(tmp_path) or tmp_path)


def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path) -> None:
    def files() -> Iterator[tuple[str, dict[str, Tensor]]]:
        yield "0", {"m": torch.ones(2)}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small(tmp_path, optimizer=files())
    assert list(tmp_path.iterdir()) == []


def test_what_a_stopped_run_left_behind_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3.partial").mkdir()
    (tmp_path / "checkpoint-3.partial" / "model.safetensors").write_bytes(b"half")
    load_state(small(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    small(tmp_path)
    assert load_state(small(tmp_path, state={"seed": 2})).fields == {"seed": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-3"]


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="--out"):
            writable_folder(out)
        with pytest.raises(CheckpointError, match="--out"):
            small(out)
    assert writable_folder(tmp_path / "new" / "deep").is_dir()
    assert list((tmp_path / "new" / "deep").iterdir()) == []


# What can be wrong with what is read


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        read()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 500
    return message


FILES = ["config.json", "model.safetensors", "optimizer-000.safetensors", "optimizer-001.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "link"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = small(tmp_path) / name
    content = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(content[:-1])
        case "flip":
            path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        case "missing":
            path.unlink()
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
    assert name in refused(lambda: load_state(path.parent))


def _edited(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        fields = json.loads(path.read_text())
        edit(fields)
        path.write_text(json.dumps(fields | {"sha256": sum_of(fields)}))

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(""),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("[" * 10**5),
        lambda path: path.write_text('{"step": ' + "9" * 5000 + "}"),
        lambda path: path.write_bytes(b"\xff"),
        _edited(lambda fields: fields.update(format_version=1)),
        _edited(lambda fields: fields.update(step=-1)),
        _edited(lambda fields: fields.update(step=True)),
        _edited(lambda fields: fields.update(step="3")),
        _edited(lambda fields: fields.update(state=[])),
        _edited(lambda fields: fields.update(files=None)),
        _edited(lambda fields: fields["files"].update({"config.json": 3})),
        _edited(lambda fields: fields["files"].update({"config.json": {"n_bytes": "3", "sha256": ""}})),
        _edited(lambda fields: fields["files"].update({"../up": {"n_bytes": 3, "sha256": ""}})),
        _edited(lambda fields: fields["files"].update({"/etc/hostname": {"n_bytes": 3, "sha256": ""}})),
        _edited(lambda fields: fields["files"].update({"..": {"n_bytes": 3, "sha256": ""}})),
        _edited(lambda fields: fields["files"].update({"a\nb": {"n_bytes": 3, "sha256": ""}})),
        _edited(lambda fields: fields["files"].update({"optimizer-x": {"n_bytes": 3, "sha256": ""}})),
    ],
)
def test_a_damaged_state_is_refused_in_one_line(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = small(tmp_path)
    damage(path / "trainer_state.json")
    refused(lambda: load_state(path))


def test_a_state_of_which_any_bit_has_changed_is_refused(tmp_path: Path) -> None:
    path = small(tmp_path) / "trainer_state.json"
    content = path.read_bytes()
    for at in range(len(content)):
        changed = content[:at] + bytes([content[at] ^ 1 << at % 7]) + content[at + 1 :]
        path.write_bytes(changed)
        with suppress(ValueError):
            if json.loads(changed) == json.loads(content):
                continue  # another blank
        refused(lambda: load_state(path.parent))


def read_all(folder: Path, *names: str) -> list[tuple[str, Tensor]]:
    return list(load_weights(folder, names))


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "", ".", "..", 3, None])
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, target: object) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}))
    assert "is no file name" in refused(lambda: read_all(inside, "a"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_malformed_index_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "index.json" in refused(lambda: read_all(tmp_path, "a"))


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert "model-1.safetensors" in refused(lambda: read_all(tmp_path, "a"))


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(16)}, path)
    whole = path.read_bytes()
    for end in range(0, len(whole), 5):
        path.write_bytes(whole[:end])
        assert "model.safetensors" in refused(lambda: read_all(tmp_path, "a"))


class Touch:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (self.path, 0o700)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_nothing_is_unpickled(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Touch(str(tmp_path / "trace"))))
    assert has_weights(tmp_path)
    message = refused(lambda: read_all(tmp_path, "a"))
    assert name.endswith(".safetensors") or "pickled" in message
    assert not (tmp_path / "trace").exists()


def test_a_missing_tensor_or_another_shape_is_named(tmp_path: Path) -> None:
    assert "no model.safetensors" in refused(lambda: read_all(tmp_path, "a"))
    assert not has_weights(tmp_path)
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert has_weights(tmp_path)
    assert "no tensor model.b" in refused(lambda: read_all(tmp_path, "a", "model.b"))
    for shape in ((3, 2), (6,), (1, 2, 3)):
        assert "a is (2, 3)" in refused(lambda shape=shape: list(load_weights(tmp_path, ["a"], {"a": shape})))


@pytest.mark.parametrize(
    ("found", "config", "named"),
    [
        ({"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1)}, {}, "(F8_E4M3)"),
        ({"a.weight": torch.ones(2, 2).to(torch.float8_e5m2)}, {}, "a.weight (F8_E5M2)"),
        ({"a.weight": torch.ones(2, 2, dtype=torch.int8)}, {}, "a.weight (I8)"),
        ({"a.weight": torch.ones(2, 2, dtype=torch.uint8)}, {}, "a.weight (U8)"),
        ({"a.weight": torch.ones(2, 2), "a.input_scale": torch.ones(1)}, {}, "a.input_scale (F32)"),
        ({"a.qweight": torch.ones(2, dtype=torch.int32), "a.scales": torch.ones(1)}, {}, "belongs to quantised weights"),
        ({"a.weight_blocks": torch.ones(2)}, {}, "a.weight_blocks"),
        ({"a.weight": torch.ones(2, 2)}, {"quantization_config": {"quant_method": "fp8"}}, "a quantization_config (fp8)"),
        ({"a.weight": torch.ones(2, 2)}, {"compression_config": "x"}, "a compression_config ()"),
    ],
    ids=["fp8", "fp8 e5m2", "int8", "uint8", "a scale", "gptq", "mxfp4", "said so", "said oddly"],
)
def test_weights_that_mean_nothing_without_scales_are_refused_by_name(
    tmp_path: Path, found: dict[str, Tensor], config: dict[str, Any], named: str
) -> None:
    save_file(found, tmp_path / "model.safetensors")
    words = refused(lambda: refuse_quantised(tmp_path, config, {"a.weight", "b.scale"}))
    assert named in words
    assert "bf16" in words


def test_other_tensors_beside_weights_are_no_scales(tmp_path: Path) -> None:
    """A buffer that an old file holds, and a weight of the model that is called a scale."""
    names = {"a.weight": torch.bfloat16, "b.scale": torch.float16, "position_ids": torch.int64, "mask": torch.bool}
    save_file({name: torch.ones(2, dtype=dtype) for name, dtype in names.items()}, tmp_path / "model.safetensors")
    refuse_quantised(tmp_path, {"quantization_config": None}, {"a.weight", "b.scale"})


@pytest.mark.parametrize("damage", ["missing", "shape", "dtype", "rank"])
def test_experts_that_do_not_fit_together_are_named(tmp_path: Path, damage: str) -> None:
    path = "model.layers.0.mlp.experts"
    tensors = {f"{path}.{e}.{part}_proj.weight": torch.ones(4, 2) for e in range(3) for part in ("gate", "up")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_all(tmp_path, f"{path}.gate_up_proj")[0][1].shape == (3, 8, 2)
    name = f"{path}.1.up_proj.weight"
    match damage:
        case "missing":
            del tensors[name]
        case "shape":
            tensors[name] = torch.ones(2, 4)
        case "dtype":
            tensors[name] = torch.ones(4, 2, dtype=torch.bfloat16)
        case "rank":
            tensors[name] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert name in refused(lambda: read_all(tmp_path, f"{path}.gate_up_proj"))


def test_a_state_from_before_there_was_a_choice_is_of_the_usual_one():
    semantics = json.loads(json.dumps(asdict(Semantics(seq_len=32, batch_size=4, micro_batch=2))))
    older = {name: value for name, value in semantics.items() if name not in ("train", "base", "ranks", "sum_groups")}
    state = State(Path("checkpoint-3"), 3, {"semantics": older}, Shards([]))
    refuse_another(state, {"semantics": semantics})
    with pytest.raises(CheckpointError, match="meaning of a step"):
        refuse_another(state, {"semantics": semantics | {"base": "nf4"}})
