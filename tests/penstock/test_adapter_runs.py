"""Runs that train adapters or some weights; PEFT and transformers load the files."""

import json
import shutil

import bitsandbytes.functional
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from penstock.runtime.plan.train import TARGETS
from tests.chats import CHATML_UNMARKED, write_talker
from tests.every_type import tiny
from tests.lanes import mostly_slow
from tests.penstock.checkpoint.test_dequantised import published
from tests.real_layers import hf_model, load_model
from tests.running import SIZES, lines_of, one_line, penstock, plan_in, succeeded, train, weights_in
from tests.tiny import tiny_config
from tests.training import NEEDS_FP8

LORA = ("--train", "lora:r=4,alpha=8")
BYTES = ["--tokenizer", "bytes"]


@pytest.fixture
def home(home):
    with_weights(home / "model", "qwen3")
    return home


def with_weights(folder, model_type, seed=3, **fields):
    torch.manual_seed(seed)
    config = tiny_config(model_type, **{"vocab_size": 272, "num_hidden_layers": 3} | fields)
    hf_model(config, dtype=torch.bfloat16).save_pretrained(folder)


def trained(home, plan, *extra, out="out", steps=4):
    succeeded(train(home, plan, *extra, out=out, steps=steps, scratch=BYTES))
    return home / out / f"checkpoint-{steps}"


def resumed_alike(home, plan):
    """Return a run's checkpoint, after asserting that a resumed run writes an identical one."""
    unbroken = trained(home, plan, "--save-every", 2)
    shutil.copytree(home / "out", home / "again")
    shutil.rmtree(home / "again" / "checkpoint-4")
    assert files(trained(home, plan, "--save-every", 2, "--resume", out="again")) == files(unbroken)
    return unbroken


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(1, 33).reshape(2, 16)).logits.float()


@pytest.mark.parametrize(("trains", "lr"), [(LORA, 1e-4), ((), 1e-5)])
def test_adapters_have_a_default_learning_rate_of_their_own(home, trains, lr):
    run = ("run", plan_in(home, *trains), "--data", home / "data", "--out", home / "out", "--steps", 1, *BYTES)
    assert f"learning rate: {lr:g}, constant" in succeeded(penstock(*run)).stderr
    assert "lr: null\n" in (home / "out" / "run.yaml").read_text(), "as it was said: another plan has another default"
    assert [line["lr"] for line in lines_of(home, "out")] == [lr]


@mostly_slow("base", [("bf16",), ("nf4",), pytest.param(("fp8-rows", "--compute", "fp8"), id="fp8", marks=NEEDS_FP8)], ids="-".join)
def test_an_adapter_resumes_to_the_same_bits_and_merges(home, base):
    unbroken = resumed_alike(home, plan_in(home, *LORA, "--base", *base))
    assert {path.name for path in unbroken.glob("adapter*")} == {"adapter_config.json", "adapter_model.safetensors"}
    assert not list(unbroken.glob("model*.safetensors"))
    initial = load_file(home / "model" / "model.safetensors")
    succeeded(penstock("merge", home / "model", unbroken, "--out", home / "merged"))
    merged = load_model(home / "merged", dtype="auto")
    changed = {name for name, weight in load_file(home / "merged" / "model.safetensors").items() if not weight.equal(initial[name])}
    assert {name.split(".")[-2] for name in changed} == {*TARGETS}
    unmerged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32), unbroken)
    torch.testing.assert_close(logits_of(merged.float()), logits_of(unmerged), atol=2e-2, rtol=2e-2)  # merged weights are bf16


def test_an_adapter_goes_on_where_another_run_left_it(home):
    plan = plan_in(home, *LORA)
    first = trained(home, plan, steps=3)
    second = trained(home, plan, "--adapter", first, out="second", steps=1)
    was, now = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    assert was.keys() == now.keys()
    assert all(0 < (was[name] - now[name]).abs().max() < 0.01 for name in was), "a step of 1e-3 from where the first run ended"


def test_an_evaluation_shows_the_model_without_its_adapter(home):
    shutil.copytree(home / "data", home / "held-out")
    plan = plan_in(home, *LORA)
    trained(home, plan, "--eval-data", home / "held-out", "--eval-base", "--prompt", "To be", "--lr", "1e-2")
    first, *_, last = (line for line in lines_of(home, "out") if "eval_loss" in line)
    assert first["eval_loss"] == first["base_eval_loss"] == last["base_eval_loss"]
    assert last["eval_loss"] < first["eval_loss"]
    assert {"text", "base_text"} <= lines_of(home, "out", "samples.jsonl")[0].keys()


@NEEDS_FP8
@mostly_slow("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts_in_fp8_resume_to_the_same_bits_and_are_evaluated_without_adapters(home, model_type):
    with_weights(home / "model", model_type)
    shutil.copytree(home / "data", home / "held-out")
    plan = plan_in(home, "--train", "lora:r=8,targets=q_proj+experts", "--base", "fp8-rows", "--compute", "fp8")
    resumed_alike(home, plan)
    trained(home, plan, "--eval-data", home / "held-out", "--eval-base", out="evaluated")
    first = next(line for line in lines_of(home, "evaluated") if "eval_loss" in line)
    assert first["eval_loss"] == first["base_eval_loss"]


@mostly_slow("compute", ["bf16", pytest.param("fp8", marks=NEEDS_FP8)])
def test_trained_layers_leave_the_bits_of_all_others(home, compute):
    unbroken = resumed_alike(home, plan_in(home, "--train", "layers:1-2", "--compute", compute))
    initial, final = (weights_in(folder) for folder in (home / "model", unbroken))
    assert initial.keys() == final.keys()
    changed = {name for name in initial if not initial[name].equal(final[name])}
    assert changed
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in changed)


def test_a_base_that_changed_is_not_resumed_on(home):
    plan = plan_in(home, *LORA)
    trained(home, plan, steps=2)
    with_weights(home / "model", "qwen3", seed=4)
    one_line(train(home, plan, "--resume", scratch=BYTES), 2, "weights that are not trained")


def test_an_adapter_of_another_kind_or_base_is_refused(home):
    first = trained(home, plan_in(home, *LORA), steps=1)
    wider, full_plan = plan_in(home, "--train", "lora:r=8", name="wider.json"), plan_in(home, name="whole.json")
    one_line(train(home, wider, "--adapter", first, out="a", scratch=BYTES), 2, "another adapter than the plan's", "lora:r=4")
    one_line(train(home, full_plan, "--adapter", first, out="b", scratch=BYTES), 2, "the plan trains none", "--train lora:r=4")
    with_weights(home / "deeper", "qwen3", num_hidden_layers=4)
    deeper = plan_in(home, *LORA, name="deeper.json", model="deeper")
    shutil.copytree(first, home / "bare", ignore=shutil.ignore_patterns("trainer_state.json"))
    one_line(train(home, deeper, "--adapter", home / "bare", out="c", scratch=BYTES), 2, "model.layers.3.")


def test_an_adapter_is_taken_on_its_own_base_and_as_it_was_saved(home):
    """The checkpoint records hashes of base weights and adapter; PEFT's two files alone record neither."""
    plan = plan_in(home, *LORA)
    first = trained(home, plan, steps=1)
    with_weights(home / "other", "qwen3", seed=4)
    shutil.copytree(first, home / "bare", ignore=shutil.ignore_patterns("trainer_state.json"))
    shutil.copytree(first, home / "changed")
    path = home / "changed" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")

    def outcomes(adapter, base):
        number = len(list(home.iterdir()))
        yield penstock("merge", home / base, adapter, "--out", home / f"merged-{number}")
        yield train(home, plan, "--model", home / base, "--adapter", adapter, out=f"on-{number}", steps=1, scratch=BYTES)

    for result in outcomes(first, "other"):
        one_line(result, 2, f"{first}: trained on another base model: its weights differ from these; give that one")
    for result in outcomes(home / "changed", "model"):
        one_line(result, 2, "changed/adapter_model.safetensors: its content has changed (SHA-256)")
    for result in (*outcomes(first, "model"), *outcomes(home / "bare", "other")):
        succeeded(result)


def test_packed_weights_that_were_cut_are_packed_again_or_named(home):
    plan = plan_in(home, *LORA, "--base", "fp8")
    first = trained(home, plan, "--packed", home / "kept", steps=2)
    (packed,) = (home / "kept").glob("base-*/packed.safetensors")
    content = packed.read_bytes()
    packed.write_bytes(content[: len(content) // 2])
    assert files(trained(home, plan, "--packed", home / "kept", out="again", steps=2)) == files(first)
    assert next((home / "kept").glob("base-*/packed.safetensors")).read_bytes() == content


def test_experts_are_refused_and_attention_is_not(home):
    with_weights(home / "experts", "qwen3_moe", mlp_only_layers=[])
    result = penstock("plan", home / "experts", "--machine", "cpu-2core", "--train", "lora:targets=gate_proj")
    assert (result.exit_code, "outside experts (target name: experts)" in result.stderr) == (2, True)
    leaves = load_file(trained(home, plan_in(home, *LORA, model="experts"), steps=2) / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in leaves} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_experts_that_are_not_in_an_mlp_have_adapters_too(home):
    hf_model(tiny("granitemoe") | {"vocab_size": 272}, dtype=torch.bfloat16).save_pretrained(home / "granite")
    plan = plan_in(home, "--train", "lora:r=8,targets=q_proj+experts,rslora", model="granite")
    adapter = trained(home, plan, steps=2)
    adapter_config = json.loads((adapter / "adapter_config.json").read_text())
    assert adapter_config["target_parameters"] == [f"block_sparse_moe.experts.{stack}" for stack in ("gate_up_proj", "down_proj")]
    assert adapter_config["use_rslora"]
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(home / "granite"), adapter)


def test_a_model_published_in_4_bits_is_trained_as_it_is(home):
    """Training on bitsandbytes projections is bitwise identical to packing the same weights at load time."""
    weights = load_file(home / "model" / "model.safetensors")
    shutil.copytree(home / "model", home / "packed")
    stored = dict(weights)
    for name in (name for name in weights if name.endswith("_proj.weight")):
        stored[name], state = bitsandbytes.functional.quantize_4bit(weights[name], quant_type="nf4")
        stored |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
    save_file(stored, home / "packed" / "model.safetensors")
    config = json.loads((home / "packed" / "config.json").read_text())
    how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (home / "packed" / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    plans = [plan_in(home, *LORA, "--base", "nf4", name=f"{model}.json", model=model) for model in ("packed", "model")]
    outputs = [files(trained(home, plan, out=str(i), steps=2)) for i, plan in enumerate(plans)]
    assert outputs[0] == outputs[1]
    planned = penstock("plan", home / "packed", "--machine", "cpu-2core", "--batch-size", "1", "--seq-len", "32", *LORA).stderr
    assert "train adapters on them with --train lora --base nf4" in planned


def test_gpt_oss_in_mxfp4_trains_as_a_bf16_copy_of_it(home):
    """Published MXFP4 experts are streamed with adapters; transformers loads the merged model."""
    published(home, "gpt_oss")
    outputs, merged = {}, {}
    for model, base in (("few", "mxfp4"), ("bf16", "bf16")):
        plan = plan_in(home, "--train", "lora:r=8,targets=q_proj+experts", "--base", base, name=f"{model}.json", model=model)
        assert ("dequantise" in plan.read_text()) == (model == "few")
        outputs[model] = resumed_alike(home, plan) if model == "few" else trained(home, plan, out="copy")
        succeeded(penstock("merge", home / model, outputs[model], "--out", home / f"merged-{model}"))
        merged[model] = weights_in(home / f"merged-{model}")
    name = "adapter_model.safetensors"
    assert files(outputs["few"])[name] == files(outputs["bf16"])[name]
    assert merged["few"].keys() == merged["bf16"].keys()
    assert all(weight.equal(merged["bf16"][name]) for name, weight in merged["few"].items())
    initial = weights_in(home / "bf16")
    changed = {name.split(".layers.")[1].split(".", 1)[1] for name in initial if not initial[name].equal(merged["few"][name])}
    assert changed == {"self_attn.q_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    load_model(home / "merged-few")


def test_what_comes_out_stops_at_the_learned_end_with_the_adapters_own_tokenizer(home, tmp_path):
    """The base ends on another token than its chats. A template that came with an adapter is trained on, saved and merged."""
    model, chat = home / "model", {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "it is."}]}
    with_weights(model, "qwen3", vocab_size=write_talker(model, "chatml"), eos_token_id=2, pad_token_id=0)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.6, "do_sample": True}))
    end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|im_end|>")
    shutil.rmtree(home / "data")
    (home / "data").mkdir()
    (home / "data" / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 8)
    plan = plan_in(home, *LORA)
    result = succeeded(train(home, plan, steps=1, scratch=()))
    assert "'<|im_end|>' ends learned answers, and is added to eos_token_id" in result.output
    first, generation = home / "out" / "checkpoint-1", {"eos_token_id": [2, end], "temperature": 0.6, "do_sample": True}
    assert json.loads((first / "generation_config.json").read_text()) == generation
    (first / "chat_template.jinja").write_text("own " + CHATML_UNMARKED)
    succeeded(train(home, plan, "--adapter", first, out="second", steps=1, scratch=()))
    second = home / "second" / "checkpoint-1"
    merged = succeeded(penstock("merge", model, second, "--out", home / "merged")).output
    assert f"eos_token_id of generation is [2, {end}], the base's [2]" in merged
    for folder in (second, home / "merged"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == "own " + CHATML_UNMARKED
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, end]


def test_dropout_off_is_the_config_without_it_and_checkpoints_keep_the_config(home):
    with_weights(home / "model", "qwen3", attention_dropout=0.1)
    one_line(penstock("plan", home / "model", *SIZES), 2, "a layer draws random numbers", "plan with --no-dropout")
    result = succeeded(train(home, plan_in(home, "--no-dropout"), steps=2, scratch=BYTES))
    assert "dropout is off, as planned with --no-dropout: attention_dropout" in result.output
    assert json.loads((home / "out" / "checkpoint-2" / "config.json").read_text())["attention_dropout"] == 0.1
    with_weights(home / "model", "qwen3", attention_dropout=0.0)
    assert files(trained(home, plan_in(home), out="edited", steps=2)) == files(home / "out" / "checkpoint-2")


@pytest.mark.parametrize(("trains", "name"), [((), "model.layers.1.mlp.up_proj.weight"), (LORA, "model.norm.weight")])
def test_nan_in_the_models_file_is_blamed_on_its_weight(home, trains, name):
    weights = load_file(home / "model" / "model.safetensors")
    weights[name][-1] = float("nan")
    save_file(weights, home / "model" / "model.safetensors", {"format": "pt"})
    result = train(home, plan_in(home, *trains), steps=1, scratch=BYTES)
    one_line(result, 2, f"because the weight {name} is not; it was read so: copy the model")
    assert "--lr" not in result.output
