"""Model types without special code: trained from published files, resumed bitwise, loaded by transformers."""

import json
import re
import shutil
from itertools import cycle, product

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from penstock.checkpoint.checkpoint import CheckpointWriter
from penstock.checkpoint.model_files import load_weights, refuse_quantised
from penstock.checkpoint.tensor_files import Shards
from penstock.runtime.layers.meta_models import meta_model
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.train import parse_train
from penstock.runtime.units import show_bytes
from tests.every_type import every_type, tiny, verdict
from tests.lanes import mostly_slow
from tests.real_layers import load_model
from tests.running import SIZES, UNSEARCHED, one_line, penstock, plan_in, succeeded, train, weights_sha
from tests.tour import ROOT

TYPES = ["deepseek_v3", "qwen3_next", "phi3", "llama4_text", "falcon_h1", "qwen2_5_vl", "gemma3", "gemma3n_text"]
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
SAYS = ("--tokenizer", "bytes", "--save-every", 2)


def published(home, model_type):
    """Save a model of the type by transformers: separate experts, and buffers in their own precision."""
    torch.manual_seed(0)
    config = tiny(model_type)
    model = loader(config).from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    for name, buffer in model.named_buffers():
        if "correction" in name:
            buffer.data = torch.randn(buffer.shape) * 0.1
    model.save_pretrained(home / model_type)
    return loader(config).from_pretrained(home / model_type).state_dict()


def loader(config):
    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM


@mostly_slow("model_type", TYPES)
def test_a_trained_model_of_any_type_is_loaded_by_transformers(home, model_type):
    initial = published(home, model_type)
    plan = home / "plan.json"
    succeeded(penstock("plan", home / model_type, *SIZES, *UNSEARCHED, "-o", plan))
    output = succeeded(train(home, plan, *SAYS, scratch=())).output
    last = home / "out" / "checkpoint-4"
    held = sum(tensor.nbytes for path in last.glob("*.safetensors") for tensor in load_file(path).values())
    assert f"{show_bytes(held)} each, " in output, "disk space of checkpoints with towers, checked before the first step"
    unbroken = weights_sha(last)
    shutil.rmtree(last)
    succeeded(train(home, plan, *SAYS, "--resume", scratch=()))
    assert weights_sha(last) == unbroken, "a resumed run is bitwise identical"
    final = load_model(last, loader(tiny(model_type))).state_dict()
    assert final.keys() == initial.keys()
    frozen = {name for name in initial if any(part in name for part in ("correction_bias", "visual", "vision", "multi_modal"))}
    assert all(torch.equal(final[name], initial[name]) for name in frozen), "buffers and towers are unchanged"
    changed = [name for name in initial if not torch.equal(final[name], initial[name])]
    assert len(changed) > 0.8 * len(initial.keys() - frozen)


ACCEPTED = " ".join(re.findall(r"(?:Accepted|unchanged): ([^.]+)\.", (ROOT / "docs" / "models.md").read_text()))
LAW = dict.fromkeys(["ernie4_5_moe", "afmoe", "deepseek_v3", "minimax_m2", *re.findall(r"[\w-]+", ACCEPTED)])
DTYPES = ("float32", "bfloat16")
# The first types, whose classes keep weights in fp32, in all pairs of dtypes; others in one pair, in turn
CASES = [*product(list(LAW)[:4], DTYPES, DTYPES)]
CASES += [(name, *pair) for name, pair in zip(list(LAW)[4:], cycle(product(DTYPES, DTYPES)))]


@mostly_slow(("model_type", "stored", "compute"), CASES, fast=(1, 2, 5, 9, 13))
def test_weights_are_those_that_transformers_loads_and_loads_again(tmp_path, no_fsync, model_type, stored, compute):
    """Names, shapes, dtypes and values after loading, and after saving. Weights without gradient are not trained."""
    config, dtype = tiny(model_type), getattr(torch, compute)
    kind, folder = loader(config), tmp_path / "model"
    torch.manual_seed(0)
    original = kind.from_config(AutoConfig.for_model(**config), dtype=getattr(torch, stored))
    with torch.no_grad():
        for tensor in original.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape).float() if tensor.is_floating_point() else tensor)
    original.save_pretrained(folder)
    config, reference = json.loads((folder / "config.json").read_text()), load_model(folder, kind, dtype=dtype)
    planned = Semantics(1, 1, 1, compute_dtype=NAMES[dtype], attention="eager", train=parse_train("lora"))
    model, expected = meta_model(config, planned), reference.state_dict()
    held, weights = model.state_dict(keep_vars=True), dict(model.named_parameters())
    assert not [name for name, p in original.named_parameters() if name in weights and not p.requires_grad]
    constants = {name: t for name, t in held.items() if not isinstance(t, torch.nn.Parameter)}
    shapes = {name: tuple(t.shape) for name, t in {**weights, **constants}.items()}
    refuse_quantised(folder, config, weights)
    stored = dict(load_weights(folder, config, shapes, shapes))
    loaded = {name: t.to(held[name].dtype) for name, t in stored.items()}
    assert [n for n, t in loaded.items() if t.dtype != expected[n].dtype or not torch.equal(t, expected[n])] == []
    (tmp_path / "saved").mkdir()
    files = CheckpointWriter(tmp_path / "saved")
    for number, part in enumerate(({n: loaded[n] for n in weights}, {n: stored[n] for n in constants})):
        part = dict(sorted(part.items(), key=lambda item: -item[1].itemsize))
        files.write_weights(f"model-{number}.safetensors", config, part, part.__getitem__)
    if "vision_config" in config:
        files.copy_towers(folder, config, with_projector=True)
    files.write_config(config, dtype)
    stored_names, saved_names = ({*Shards([*path.glob("*.safetensors")])} for path in (folder, tmp_path / "saved"))
    assert saved_names == stored_names, "names of published weights"
    again = load_model(tmp_path / "saved", kind, dtype=dtype).state_dict()
    assert again.keys() == expected.keys()
    assert [n for n, t in again.items() if t.dtype != expected[n].dtype or not torch.equal(t, expected[n])] == []


def test_bf16_does_not_round_trained_weights_that_transformers_keeps_in_fp32(home):
    """Their choice of experts would change. Adapters leave them in fp32, also in the choice."""
    published(home, "ernie4_5_moe")
    one_line(penstock("plan", home / "ernie4_5_moe", *SIZES), 2, "keeps 3 of the trained weights in fp32", "--compute fp32")
    plan = plan_in(home, "--train", "lora:r=4", model="ernie4_5_moe")
    succeeded(train(home, plan, "--tokenizer", "bytes", steps=1, scratch=()))
    published(home, "hunyuan_v1_moe")  # its router is a linear layer
    adapting = penstock("plan", home / "hunyuan_v1_moe", *SIZES, "--train", "lora:targets=all-linear")
    one_line(adapting, 2, "4 of the adapted weights in fp32", "lora:targets=... without them")


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_adapters_of_the_text_leave_towers_alone(home, model_type):
    """Projections of towers have the same names; PEFT finds only those of the decoder."""
    published(home, model_type)
    plan = plan_in(home, "--train", "lora:r=4,alpha=8", model=model_type)
    succeeded(train(home, plan, "--tokenizer", "bytes", steps=2, scratch=()))
    last, kind = home / "out" / "checkpoint-2", loader(tiny(model_type))
    assert not list(last.glob("model*")), "no weights, and no towers"
    base = kind.from_pretrained(home / model_type, dtype=torch.float32)
    in_peft, initial = PeftModel.from_pretrained(base, last), kind.from_pretrained(home / model_type).state_dict()
    actual = load_file(last / "adapter_model.safetensors")
    reference = {name.replace(".default.", "."): p for name, p in in_peft.named_parameters() if "lora_" in name}
    assert reference.keys() == actual.keys()
    assert all(torch.equal(reference[name], factor) for name, factor in actual.items())
    succeeded(penstock("merge", home / model_type, last, "--out", home / "merged"))
    final, by_peft = load_model(home / "merged", kind).state_dict(), in_peft.merge_and_unload().state_dict()
    changed = {f"base_model.model.{name}" for name in initial if not torch.equal(initial[name], final[name])}
    assert changed == {f"{name.rpartition('.lora_')[0]}.weight" for name in actual}
    assert all(torch.equal(final[name], weight.bfloat16()) for name, weight in by_peft.items())


def test_what_is_not_there_for_towers_is_refused_in_one_line(home):
    (home / "vl").mkdir()
    (home / "vl" / "config.json").write_text(json.dumps(tiny("qwen3_vl")))
    one_line(train(home, plan_in(home, model="vl")), 2, "--from-scratch: this model's vision tower has no random weights")


@mostly_slow(
    "model_type",
    [
        *("llama", "granite", "gpt2", "qwen3_5_text", "minimax_m2", "mamba2", "falcon", "nanochat", "qwen3_vl", "bloom"),
        *("gemma3n_text", "glm_moe_dsa", "deepseek_v4", "opt"),
    ],
)
def test_accepted_types_have_transformers_loss_and_gradients(model_type):
    assert model_type in every_type()
    assert verdict(model_type) == "accepted"


def test_a_type_that_is_not_read_as_it_is_saved_is_not_accepted():
    """Its step is bitwise identical to transformers, but it saves a weight under a name that is not read back."""
    assert "saved under a name that is not read as that weight" in verdict("shieldgemma2")
