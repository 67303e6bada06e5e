"""Checkpoints: transformers loads them, and only complete ones are resumed."""

import hashlib
import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import utils
from transformers.utils import hub

from penstock.checkpoint.checkpoint import State, latest, load_state, put_back, refuse_another, sum_of
from penstock.checkpoint.model_files import has_tensor, has_weights, kept_files, load_weights, note_on_zeros, refuse_quantised
from penstock.checkpoint.tensor_files import Shards, write_tensors
from penstock.runtime.errors import CheckpointError
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.train import ALL, Lora, Train
from tests.checkpoints import refused, save, small
from tests.lanes import mostly_slow
from tests.real_layers import hf_model, load_model
from tests.sessions import session_of, train
from tests.tiny import EXPERT_TYPES, STRUCTURES, tiny_config
from tests.training import LEAN, state_of

TIED = [(model_type, tied) for model_type in STRUCTURES for tied in (False, True) if model_type != "gpt_oss" or not tied]


def build(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(7)
    return hf_model(config, dtype=dtype)


def weights_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@mostly_slow(("model_type", "tied"), TIED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_transformers_loads_the_checkpoint_of_every_type(tmp_path: Path, model_type: str, tied: bool, dtype: torch.dtype) -> None:
    config = tiny_config(model_type, tie_word_embeddings=tied)
    model = build(config, dtype)
    path = save(tmp_path, 1, weights_of(model), config=config)
    model.save_pretrained(tmp_path / "theirs")
    written, reference = load_file(path / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors")
    assert written.keys() == reference.keys()
    assert all(torch.equal(written[name], reference[name]) for name in written)
    loaded = load_model(path)
    assert loaded.dtype == dtype
    for (name, expected), (found_name, tensor) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == found_name
        assert torch.equal(expected, tensor), name


@pytest.mark.parametrize("model_type", STRUCTURES)
def test_published_weights_are_read_under_module_names(tmp_path: Path, model_type: str) -> None:
    model = build(tiny_config(model_type), torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    weights = weights_of(model)
    loaded = dict(load_weights(tmp_path, tiny_config(model_type), weights, {name: tuple(w.shape) for name, w in weights.items()}))
    assert list(loaded) == list(weights)
    assert all(torch.equal(loaded[name], weights[name]) and loaded[name].dtype == torch.bfloat16 for name in weights)


@pytest.mark.parametrize("model_type", EXPERT_TYPES)
def test_weights_stored_under_module_names_are_read(tmp_path: Path, model_type: str) -> None:
    weights = weights_of(build(tiny_config(model_type)))
    save_file({name: w.contiguous() for name, w in weights.items()}, tmp_path / "model.safetensors")
    shapes = {name: tuple(w.shape) for name, w in weights.items()}
    assert all(torch.equal(w, weights[name]) for name, w in load_weights(tmp_path, tiny_config(model_type), weights, shapes))


def test_tokenizer_and_state_travel_with_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "pytorch_model.bin", "secrets.txt"):
        (model / name).write_text(name)
    path = small(tmp_path, tokenizer_from=model)
    copied = {p.name for p in path.iterdir()} - {p.name for p in small(tmp_path, 4).iterdir()}
    assert copied == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    state = load_state(path)
    assert (state.path, state.step, state.fields) == (path, 3, {"seed": 1, "semantics": {"seq_len": 8}})
    assert sorted(state.optimizer) == ["m", "n", "v"]


def test_every_file_that_a_tokenizer_of_transformers_reads_is_kept(tmp_path: Path) -> None:
    """The names are taken from transformers' sources: vocabularies, templates, processors, settings of generation."""
    root = Path(transformers.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in root.glob("models/*/tokenization_*.py")]
    tables = [table for text in texts for table in re.findall(r"VOCAB_FILES_NAMES = (\{[^{}]*\})", text)]
    names = {file for table in tables for file in re.findall(r': "([^"]+\.[^"]+)"', table)}
    names |= {getattr(hub, name) for name in dir(hub) if name.endswith(("_TEMPLATE_FILE", "PROCESSOR_NAME", "EXTRACTOR_NAME"))}
    names |= {utils.AUDIO_TOKENIZER_NAME, utils.GENERATION_CONFIG_NAME, utils.VIDEO_PROCESSOR_NAME, utils.PROCESSOR_NAME}
    names |= {"tokenizer.4.0.0.json", f"{utils.hub.CHAT_TEMPLATE_DIR}/rag.jinja", "tekken.json", utils.FEATURE_EXTRACTOR_NAME}
    assert len(names) > 20
    (tmp_path / utils.hub.CHAT_TEMPLATE_DIR).mkdir()
    for name in (*names, "model.safetensors", "evil.py", "README.md", "pytorch_model.bin", "config.json"):
        (tmp_path / name).write_text("{}")
    assert kept_files(tmp_path).keys() == names
    path = small(tmp_path / "run", tokenizer_from=tmp_path)
    assert all((path / name).read_text() == "{}" for name in names)
    assert load_state(path).step == 3, "also names in a folder are verified"


def test_a_single_file_is_read_before_shards_as_transformers_does(tmp_path: Path) -> None:
    old, new = (build(tiny_config("llama")) for _ in range(2))
    with torch.no_grad():
        new.model.norm.weight.fill_(2.0)
    old.save_pretrained(tmp_path / "old", max_shard_size="20KB")
    new.save_pretrained(tmp_path / "new")
    shutil.copy(tmp_path / "new" / "model.safetensors", tmp_path / "old")
    name, shape = "model.norm.weight", tuple(new.model.norm.weight.shape)
    ((_, read),) = load_weights(tmp_path / "old", tiny_config("llama"), [name], {name: shape})
    assert torch.equal(read, load_model(tmp_path / "old").model.norm.weight)
    (tmp_path / "old" / "model.safetensors").write_bytes((tmp_path / "new" / "model.safetensors").read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
        has_tensor(tmp_path / "old", name)


def test_matrices_that_end_in_zeros_are_named_without_embedding_and_head(tmp_path: Path) -> None:
    model = build(tiny_config("llama"))
    with torch.no_grad():
        for zeros in (model.model.embed_tokens.weight, model.lm_head.weight, model.model.norm.weight):
            zeros.zero_()
        model.model.layers[0].mlp.up_proj.weight[-8:] = 0
        model.model.layers[1].self_attn.o_proj.weight.zero_()
        model.model.layers[1].mlp.down_proj.weight[-7:] = 0
    model.save_pretrained(tmp_path)
    named = "model.layers.0.mlp.up_proj.weight, model.layers.1.self_attn.o_proj.weight, as"
    assert f"rows of zeros at the end of {named} an interrupted copy has" in (note_on_zeros(tmp_path) or "")


@given(
    shapes=st.lists(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5), max_size=5),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]), min_size=5, max_size=5),
    n_pieces=st.integers(1, 3),
)
def test_tensors_written_in_pieces_are_read_by_safetensors(tmp_path_factory, shapes, dtypes, n_pieces):
    saved = [torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    tensors = {f"t{i}": tensor for i, tensor in enumerate(saved)}
    if "t0" in tensors and tensors["t0"].dim():
        tensors["view"] = tensors["t0"].transpose(0, -1)
    path = tmp_path_factory.mktemp("tensors") / "x.safetensors"
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    written = write_tensors(path, tensors, (piece for t in tensors.values() for piece in t.reshape(-1).chunk(n_pieces)))
    content = path.read_bytes()
    assert written == {"n_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for loaded in (load_file(path), dict(Shards([path]))):
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[n], t) and loaded[n].dtype == t.dtype for n, t in tensors.items())
    header = json.loads(content[8 : (n := 8 + int.from_bytes(content[:8], "little"))])
    assert n % 8 == 0
    assert all(header[name]["data_offsets"][0] % t.element_size() == 0 for name, t in tensors.items()), "aligned"


def test_the_latest_checkpoint_is_whole_and_of_the_highest_step(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is latest(tmp_path) is None
    for step in (9, 10, 2):
        small(tmp_path, step)
    for name in ("checkpoint-11", "checkpoint-12.partial", "checkpoint-x"):
        (tmp_path / name).mkdir()
    assert latest(tmp_path) == tmp_path / "checkpoint-10"


def test_a_state_from_before_a_choice_is_of_the_default() -> None:
    semantics = json.loads(json.dumps(asdict(Semantics(seq_len=32, batch_size=4, micro_batch=2))))
    older = {name: value for name, value in semantics.items() if name not in ("train", "base", "ranks", "sum_groups")}
    state = State(Path("checkpoint-3"), 3, {"semantics": older}, Shards([]))
    assert refuse_another(state, {"semantics": semantics}) is None
    with pytest.raises(CheckpointError, match="meaning of a step"):
        refuse_another(state, {"semantics": semantics | {"base": "nf4"}})


EARLIER = [("fused", ALL, True), ("eager", Train(lora=Lora()), True), ("eager", ALL, False)]


@pytest.mark.parametrize(("loss", "train", "is_told"), EARLIER)
def test_a_state_of_an_earlier_arithmetic_resumes_with_a_line(loss: str, train: Train, is_told: bool) -> None:
    """Plans before format 4 named the loss `fused` and had no field for the addition of adapters."""
    planned = "online" if loss == "fused" else "eager"
    semantics = json.loads(json.dumps(asdict(Semantics(seq_len=32, batch_size=4, micro_batch=2, loss=planned, train=train))))
    older = {name: value for name, value in semantics.items() if name != "lora_products"} | {"loss": loss}
    state = State(Path("checkpoint-3"), 3, {"semantics": older}, Shards([]))
    line = "checkpoint-3: written with an earlier arithmetic of loss or adapters: results are no longer bitwise identical"
    assert refuse_another(state, {"semantics": semantics}) == (line if is_told else None)
    with pytest.raises(CheckpointError, match=f"meaning of a step .*: loss was .{loss}"):
        refuse_another(state, {"semantics": semantics | {"loss": "eager" if loss == "fused" else "online"}})
    state.fields["semantics"] = semantics  # in the current format
    assert refuse_another(state, {"semantics": semantics}) is None


CONVERTED = {  # master, first and second moment
    "adamw:moments=bf16": (None, "bf16", "rounded to bf16"),
    "lion:moments=bf16,master=bf16": ("bf16", "bf16", "dropped"),
    "adamw:moments=int8,master=bf16": ("bf16", "int8", "rounded to int8"),
    "adamw:moments=int8,master=split24": ("split24", "int8", "rounded to int8"),
}


@pytest.mark.parametrize("target", CONVERTED)
def test_a_state_of_another_optimizer_is_refused_or_converted(target: str, tmp_path: Path) -> None:
    """Conversion is explicit and prints a message; the run then trains on, with a checkpoint as small as its state."""
    policy = Policy(accumulation_group=4)
    first, then = train(session_of(tmp_path, policy, every=2), 2), session_of(tmp_path, policy, **LEAN[target])
    state = load_state(latest(tmp_path))
    with pytest.raises(CheckpointError, match=r"adamw with fp32 masters, not of .*; convert it, with --resume-from ch"):
        refuse_another(state, then.inputs.identity)
    words = refuse_another(state, then.inputs.identity, converts=True)
    assert words is not None
    assert f"the state of adamw with fp32 masters becomes that of {LEAN[target]['optimizer']} with " in words
    master, first_moment, second_moment = CONVERTED[target]
    change = f"{master} masters rounded stochastically: its master is rounded to {master}" if master else ": its master is kept"
    assert words.endswith(f"{change}, its first moment is rounded to {first_moment}, its second moment is {second_moment}")
    changed = then.inputs.identity | {"optimizer": then.inputs.identity["optimizer"] | {"weight_decay": 0.5, "lr": 0.5}}
    with pytest.raises(CheckpointError, match=r"another optimizer or schedule: (lr|weight_decay) was"):
        refuse_another(state, changed, converts=True)
    put_back(state, then.store.host, then.inputs.data)
    for converted, source in zip(state_of(then.store)[:2], state_of(first.store), strict=False):
        assert all(torch.equal(converted[name], source[name].to(converted[name].dtype)) or "master" in target for name in converted)
    train(replace(then, first_step=2), 4)
    saved, semantics = load_state(tmp_path / "checkpoint-4"), then.plan.semantics
    n_bytes = sum(tensor.nbytes for tensor in saved.optimizer.values()) / then.plan.workload.n_trained
    assert n_bytes == pytest.approx(semantics.optimizer.state_bytes(semantics.saved_state["master"]), rel=0.05)
    if target.startswith("lion"):
        with pytest.raises(CheckpointError, match="Lion keeps no second moment, or start a new run"):
            refuse_another(saved, first.inputs.identity, converts=True)
    else:
        put_back(saved, first.store.host, first.inputs.data)
        for again, converted in zip(state_of(first.store), state_of(then.store), strict=True):
            assert all(torch.equal(again[name], converted[name].float()) for name in converted)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "optimizer-000.safetensors", "optimizer-001.safetensors"])
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


def test_a_damaged_state_is_refused_in_one_line(tmp_path: Path) -> None:
    """Damage with a valid checksum is found, too."""
    path = small(tmp_path) / "trainer_state.json"
    fields = json.loads(path.read_text())
    files = (None, {"../up": {"n_bytes": 3, "sha256": ""}}, {"config.json": {"n_bytes": "3", "sha256": ""}})
    changed = [fields | {"files": entry and fields["files"] | entry} for entry in files]
    for wrong in ([], fields | {"state": {"seed": 2}}, *(entry | {"sha256": sum_of(entry)} for entry in changed)):
        path.write_text(json.dumps(wrong))
        refused(lambda: load_state(path.parent))


def test_a_foreign_folder_is_refused_as_what_it_is(tmp_path: Path) -> None:
    state = small(tmp_path, 7) / "trainer_state.json"
    later = state.read_text().replace('"format_version": 2', '"format_version": 3')
    for content, message in {
        later: "format_version is not 2; resume with the version that wrote it",
        '{"global_step": 7, "log_history": []}': "written by another program; train from its weights with --model",
    }.items():
        state.write_text(content)
        assert message in refused(lambda: load_state(state.parent))
    state.unlink()
    assert "a model, not the state of a run (no trainer_state.json)" in refused(lambda: load_state(state.parent))
    assert "trainer_state.json: cannot be read" in refused(lambda: load_state(tmp_path / "nowhere"))


def read_all(folder: Path, *names: str) -> list[tuple[str, Tensor]]:
    return list(load_weights(folder, {"model_type": "llama"}, names, dict.fromkeys(names, (2, 3))))


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, target: object) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": target}}))
    assert "is no file name" in refused(lambda: read_all(inside, "a"))


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(16)}, path)
    content = path.read_bytes()
    for end in range(0, len(content), 5):
        path.write_bytes(content[:end])
        assert "model.safetensors" in refused(lambda: read_all(tmp_path, "a"))


def test_a_missing_tensor_or_another_shape_is_named(tmp_path: Path) -> None:
    assert "no model.safetensors" in refused(lambda: read_all(tmp_path, "a"))
    assert not has_weights(tmp_path)
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert "no tensor model.b" in refused(lambda: read_all(tmp_path, "a", "model.b"))
    assert "a is (2, 3)" in refused(lambda: list(load_weights(tmp_path, {"model_type": "llama"}, ["a"], {"a": (3, 2)})))


@pytest.mark.parametrize(
    ("present", "config", "named"),
    [
        ({"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1)}, {}, "(F8_E4M3)"),
        ({"a.qweight": torch.ones(2, dtype=torch.int32), "a.scales": torch.ones(1)}, {}, "belongs to quantised weights"),
        ({"a.weight": torch.ones(2, 2)}, {"quantization_config": {"quant_method": "fp8"}}, "a quantization_config (fp8)"),
    ],
    ids=["fp8", "gptq", "said so"],
)
def test_weights_that_need_scales_are_refused_by_name(tmp_path, present, config, named):
    save_file(present, tmp_path / "model.safetensors")
    words = refused(lambda: refuse_quantised(tmp_path, config, {"a.weight", "b.scale"}))
    assert named in words
    assert "bf16" in words


@pytest.mark.parametrize("piece", [None, torch.ones(2, 4)])
def test_experts_that_do_not_fit_together_are_named(tmp_path: Path, piece: Tensor | None) -> None:
    path = "model.layers.0.mlp.experts"
    tensors = {f"{path}.{e}.{part}_proj.weight": torch.ones(4, 2) for e in range(3) for part in ("gate", "up")}
    save_file(tensors, tmp_path / "model.safetensors")
    experts = f"{path}.gate_up_proj"
    assert len(list(load_weights(tmp_path, tiny_config("qwen3_moe"), [experts], {experts: (3, 8, 2)}))) == 1
    name = f"{path}.1.up_proj.weight"
    remaining = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(remaining if piece is None else remaining | {name: piece}, tmp_path / "model.safetensors")
    assert name in refused(lambda: list(load_weights(tmp_path, tiny_config("qwen3_moe"), [experts], {experts: (3, 8, 2)})))
