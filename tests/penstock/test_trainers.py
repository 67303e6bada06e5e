"""Trainers with the constructors of transformers and TRL, compared with the originals in fp32 on the CPU."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import accelerate.data_loader
import datasets
import pytest
import transformers
import trl
from peft import LoraConfig, PromptTuningConfig
from trl.trainer.utils import RepeatSampler

from penstock import hf
from penstock.checkpoint.checkpoint import complete_checkpoints
from penstock.data.formats import learned_tokens
from penstock.data.sampling import trainer_order
from penstock.hf.arguments import FIELDS, Job, adapter_of, read_arguments, schedule_of
from penstock.hf.rows import grouped_order, rows_of
from penstock.hf.start import router_loss_of, start_of
from penstock.runtime.errors import DataError, PenstockError, PlanError
from penstock.runtime.plan.train import parse_train
from tests.tour import ROOT

CONFIGS = (transformers.TrainingArguments, trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, trl.GRPOConfig, trl.RewardConfig)
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "epoch")
IN_A_STEP = {"on_substep_end", "on_prediction_step", "on_pre_optimizer_step", "on_optimizer_step"}
TINY = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1, "report_to": "none"}
TINY |= {"use_cpu": True}


@pytest.fixture(scope="module")
def home(trainers_home: Path) -> Path:
    return trainers_home


def rows_in(path: Path) -> datasets.Dataset:
    return datasets.Dataset.from_list([json.loads(line) for line in path.read_text().splitlines()])


def config_of(kind: str, out: Path, **fields):
    """Return a tiny configuration of TRL in fp32."""
    groups = {"num_generations": 4} if kind == "GRPO" else {}
    return getattr(trl, f"{kind}Config")(str(out), **{"bf16": False} | TINY | groups | fields)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


class Events(transformers.TrainerCallback):
    """Record events with the step and the flags. `stops_at`: step after which the training stops."""

    def __init__(self, stops_at: int | None = None) -> None:
        self.seen, self.stops_at = [], stops_at

    def __getattribute__(self, name: str):
        if not name.startswith("on_") or name in IN_A_STEP:
            return object.__getattribute__(self, name)

        def event(args, state, control, **kwargs):
            logs = sorted({*LOGGED} & {*(kwargs.get("logs") or {})})
            self.seen.append((name, state.global_step, round(state.epoch or 0, 6), state.max_steps, control.should_save, logs))
            if name == "on_step_end" and state.global_step == self.stops_at:
                control.should_training_stop = True

        return event


# -- arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_of_a_configuration_has_one_entry(config: type) -> None:
    for field in dataclasses.fields(config):
        entries = [kind for kind, table in FIELDS.items() for names in table if re.fullmatch(names, field.name)]
        assert len(entries) == 1, f"{field.name}: {entries}"
    assert read_arguments(config("out", bf16=False), 1).problems == []  # no default is refused


def test_all_refused_fields_are_named_at_once_and_unknown_ones_too(home: Path) -> None:
    @dataclasses.dataclass
    class Newer(trl.SFTConfig):
        sharper: int = 0

    args = Newer("out", bf16=False, sharper=2, gradient_checkpointing=False, optim="paged_adamw_8bit", neftune_noise_alpha=5.0)
    with pytest.raises(PlanError) as caught:
        hf.SFTTrainer(str(home / "model"), args, train_dataset=[], compute_metrics=print)
    lines = str(caught.value).splitlines()
    for name, advice in (
        ("sharper=2", "does not know the field"),
        ("gradient_checkpointing=False", "the plan chooses recomputation"),
        ("optim='paged_adamw_8bit'", "penstock.plan"),
        ("neftune_noise_alpha=5.0", "no noise"),
        ("compute_metrics=<built-in function print>", "evaluate a checkpoint"),
    ):
        assert [line for line in lines if line.startswith(f"{name}: ") and advice in line], (name, lines)


FALLING = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}


@pytest.mark.parametrize(
    ("fields", "setting", "value"),
    [
        ({"warmup_steps": 0.15}, "optimizer.schedule.warmup_steps", 3),
        (FALLING, "optimizer.schedule.min_lr_fraction", 0.1),
        ({"data_seed": 7}, "data.seed", 7),
        ({"train_sampling_strategy": "sequential"}, "data.shuffle", False),
        ({"report_to": ["tensorboard"]}, "monitors", ("tensorboard",)),
    ],
)
def test_a_field_becomes_a_setting(fields: dict, setting: str, value: object) -> None:
    args, job = transformers.TrainingArguments("out", **fields), Job()
    assert (read_arguments(args, 1).settings | schedule_of(args, 20, job))[setting] == value
    assert job.problems == []


def test_an_adapter_is_that_of_its_configuration() -> None:
    config = LoraConfig(r=4, lora_alpha=12, lora_dropout=0.1, target_modules=["v_proj", "q_proj"], use_rslora=True)
    job = Job()
    assert adapter_of(config, "qwen3", job) == "lora:r=4,alpha=12,dropout=0.1,rslora,targets=q_proj+v_proj"
    assert parse_train(adapter_of(LoraConfig(target_modules=r".*\.q_proj"), "qwen3", job)).lora.targets == (r"/.*\.q_proj/",)
    assert parse_train(adapter_of(LoraConfig(), "llama", job)).lora.targets == ("q_proj", "v_proj")
    assert job.problems == []
    adapter_of(LoraConfig(use_dora=True, bias="all"), "no-such-type", job)
    names = [line.partition("=")[0].removeprefix("peft_config.") for line in job.problems]
    assert names == ["bias", "use_dora", "target_modules"]


# -- rows and order ---------------------------------------------------------------------------------------------------------


def test_orders_are_those_of_the_originals() -> None:
    sampler = accelerate.data_loader.SeedableRandomSampler(range(23), data_seed=5)
    assert [[*sampler] for _ in range(3)] == [trainer_order(23, 5, epoch) for epoch in range(3)]
    sampler = RepeatSampler(range(7), mini_repeat_count=1, batch_size=2, repeat_count=3, seed=5)
    order = [i for _ in range(2) for i in sampler]
    assert [i for step in grouped_order(7, 2, 3, 18, 5) for i in step] == order


@pytest.mark.parametrize(
    ("row", "result"),
    [
        ({"input_ids": [5, 6, 7]}, ([5, 6, 7], [(0, 3)])),
        ({"input_ids": [5, 6, 7, 0], "labels": [-100, 6, -100, -100], "attention_mask": [1, 1, 1, 0]}, ([5, 6, 7], [(1, 2)])),
        ({"input_ids": [5, 6], "labels": [5, 7]}, '"labels" 7 and "input_ids" 6 at 1'),
        ({"input_ids": [5, 6], "labels": [7, 6]}, '"labels" 7 and "input_ids" 5 at 0'),
        ({"input_ids": [5, 99]}, "a token 99; the model has ids 0 to 9"),
        ({"input_ids": [5, 6], "attention_mask": [0, 1]}, "pad on the right"),
        ({"input_ids": [5, 6], "labels": [5]}, "of different lengths"),
    ],
)
def test_a_tokenised_row_is_learned_where_it_has_labels(row: dict, result: object) -> None:
    if isinstance(result, tuple):
        assert learned_tokens(row, 10, "a.jsonl:1") == result
        return
    with pytest.raises(DataError, match=re.escape(str(result))):
        learned_tokens(row, 10, "a.jsonl:1")


PART = {"type": "image"}


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": [{"role": "user", "content": "What?"}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [PART, {"type": "text", "text": "What?"}]}], "chosen": [], "rejected": []},
        {"input_ids": [1, 2], "labels": [1, 2], "pixel_values": [[0.0]]},
    ],
)
def test_a_row_with_images_is_refused(columns: dict) -> None:
    with pytest.raises(DataError, match="row 1 of the data set has images, which these trainers do not read"):
        list(rows_of([{"messages": [{"role": "user", "content": "What?"}], "images": None}, columns], None))


# -- runs -------------------------------------------------------------------------------------------------------------------


def sft(home: Path, module, out: Path, rows: str = "chats", **fields):
    args = config_of("SFT", out, max_length=64, learning_rate=1e-2, weight_decay=0.1, warmup_steps=3, **fields)
    return module.SFTTrainer(str(home / "model"), args, train_dataset=rows_in(home / f"{rows}.jsonl"))


PACKED = {"packing": True, "packing_strategy": "wrapped"}


@pytest.mark.parametrize(("rows", "fields"), [("chats", {"assistant_only_loss": True}), ("texts", PACKED)])
def test_sft_has_the_losses_rates_and_files_of_trl(home: Path, tmp_path: Path, rows: str, fields: dict) -> None:
    histories = []
    for module in (trl, hf):
        trainer = sft(home, module, tmp_path / module.__name__, rows, max_steps=20, save_strategy="no", **fields)
        output = trainer.train()
        trainer.save_model(tmp_path / module.__name__ / "final")
        histories.append(trainer.state.log_history)
        assert output.global_step == 20
    expected, actual = histories
    for a, b in zip(expected, actual, strict=True):
        assert a["step"] == b["step"]
        assert b["epoch"] == pytest.approx(a["epoch"], rel=1e-12)
        for name in {"loss", "train_loss", "learning_rate"} & a.keys():
            assert b[name] == pytest.approx(a[name], rel=1e-12 if name == "learning_rate" else 1e-5)
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / module.__name__ / "final") for module in (trl, hf)]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert (a - b).abs().max() < 1e-4


@pytest.mark.parametrize("stops_at", [None, 7])
def test_callbacks_are_called_at_the_moments_of_transformers(home: Path, tmp_path: Path, stops_at: int | None) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "model")
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"input_ids": (ids := tokenizer(row["text"])["input_ids"]), "labels": ids} for row in rows_in(home / "texts.jsonl")]
    recorded, states = [], []
    options = {"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True, "save_steps": 4, "save_total_limit": 2}
    options |= {"logging_steps": 3}
    for name, module in (("theirs", transformers), ("ours", hf)):
        args = transformers.TrainingArguments(str(tmp_path / name), num_train_epochs=2, learning_rate=1e-3, **TINY | options)
        model = transformers.AutoModelForCausalLM.from_pretrained(home / "model")
        events, collator = Events(stops_at), transformers.DataCollatorForSeq2Seq(tokenizer)
        data = datasets.Dataset.from_list(rows)
        trainer = module.Trainer(model, args, collator, data, data.select(range(6)), processing_class=tokenizer, callbacks=[events])
        trainer.train()
        recorded.append(events.seen)
        states.append(trainer.state)
        losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert losses[-1] < losses[0]
    assert recorded[1] == recorded[0]
    steps = [step for step, _ in complete_checkpoints(tmp_path / "ours")]
    assert steps == ([8, 12] if stops_at is None else [4, 7])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[-1], rel=1e-6) or stops_at is not None
    assert (states[1].num_train_epochs, states[1].max_steps) == (states[0].num_train_epochs, states[0].max_steps)


def test_a_stopped_run_goes_on_to_the_same_bytes(home: Path, tmp_path: Path) -> None:
    unbroken = sft(home, hf, tmp_path / "whole", max_steps=8, save_steps=4)
    unbroken.train()
    stopped = sft(home, hf, tmp_path / "stopped", max_steps=8, save_steps=4)
    stopped.add_callback(Events(stops_at=5))
    stopped.train()
    with pytest.raises(PenstockError, match="holds checkpoint-5 of an earlier run"):
        sft(home, hf, tmp_path / "stopped", max_steps=8).train()
    again = sft(home, hf, tmp_path / "stopped", max_steps=8, save_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-5"))
    assert contents(tmp_path / "whole" / "checkpoint-8") == contents(tmp_path / "stopped" / "checkpoint-8") != {}
    losses = [[e["loss"] for e in trainer.state.log_history if "loss" in e] for trainer in (unbroken, again)]
    assert losses[0] == losses[1]


def test_the_best_checkpoint_stays_and_early_stopping_ends_the_run(home: Path, tmp_path: Path) -> None:
    best_of = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    args = config_of("SFT", tmp_path, max_steps=12, max_length=64, learning_rate=0.5, **best_of)
    rows = rows_in(home / "texts.jsonl")
    trainer = hf.SFTTrainer(str(home / "model"), args, train_dataset=rows, eval_dataset=rows.select(range(5)))
    trainer.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    best = min(losses, key=losses.__getitem__)
    assert (trainer.state.best_global_step, max(losses)) == (best, best + 2)
    assert [step for step, _ in complete_checkpoints(tmp_path)] == [best, best + 2]
    assert trainer.evaluate()["eval_loss"] == losses[best]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Qwen/Qwen3-0.6B-no-such", "hf download Qwen/Qwen3-0.6B-no-such --local-dir"),
        (17, "model is a int; give a folder, a name, or a model"),
        ("no-such-model", "no such folder, config.json or shipped model"),
    ],
)
def test_an_unknown_model_is_refused_with_the_command(model: object, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    with pytest.raises(PenstockError, match=re.escape(message)):
        start_of(model)


def test_a_plan_of_other_arguments_is_refused(home: Path, tmp_path: Path) -> None:
    first = sft(home, hf, tmp_path / "a", max_steps=2)
    args = config_of("SFT", tmp_path / "b", bf16=True, max_length=64, max_grad_norm=0.5)
    with pytest.raises(PlanError) as caught:
        hf.SFTTrainer(str(home / "model"), args, train_dataset=rows_in(home / "chats.jsonl"), penstock_plan=first.plan)
    assert [line.partition(";")[0] for line in str(caught.value).splitlines()] == [
        "penstock_plan: clip_norm='1.0': args ask for 0.5",
        "penstock_plan: compute_dtype='fp32': args ask for bf16",
    ]


def told(message: str, make) -> None:
    with pytest.raises(PenstockError, match=re.escape(message)) as caught:
        make()
    assert "\n" not in str(caught.value)


PAIR, GROUP = {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt_ids": [5], "completion_ids": [[6]] * 4}
TEXTS = [{"text": "the river runs"}]


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("SFT", None, "train_dataset: no rows with a token to learn"),
        ("SFT", {"input_ids": [5, 6], "labels": [-100, -100]}, "train_dataset: no rows with a token to learn"),
        ("SFT", {"input_ids": [5, 6], "labels": [5]}, "row 0 of the data set: 2 input_ids and 1 labels; give each token one"),
        ("SFT", {"text": None}, "row 0 of the data set, with columns text, raised AttributeError"),
        ("SFT", {"messages": [{"content": "a"}]}, "row 0 of the data set, with columns messages, raised UndefinedError"),
        ("SFT", {"messages": "a"}, "row 0 of the data set: messages is a str; give a list"),
        ("SFT", {"txt": "a"}, "row 0 of the data set: no column 'text'; its columns are txt; see dataset_text_field"),
        ("SFT", TEXTS[0] | {"images": ["a.png"]}, "row 0 of the data set has images, which these trainers"),
        ("SFT", {"input_ids": [5, 9999]}, "a token 9999; the model has ids 0 to 369; give the model's own processing_class"),
        ("DPO", {"text": "a"}, "row 0 of the data set: no chosen, rejected; its columns are text"),
        ("DPO", PAIR | {"chosen": 3}, "row 0 of the data set, with columns prompt, chosen, rejected, raised TypeError"),
        ("KTO", {"text": "a"}, "row 0 of the data set: no prompt, completion, label; its columns are text"),
        ("Reward", PAIR | {"margin": 0.5}, "a column margin, which no loss of Penstock reads"),
        ("GRPO", GROUP | {"logprobs": [[-1.0]] * 4}, "row 0 of the data set: no rewards; give rollouts"),
        ("GRPO", GROUP | {"logprobs": [[-1.0]] * 4, "rewards": "ab"}, "raised TypeError"),
    ],
)
def test_rows_that_cannot_be_read_are_named_in_one_line(home: Path, tmp_path: Path, kind: str, row: dict, message: str) -> None:
    args = config_of(kind, tmp_path, **{"scale_rewards": "none"} if kind == "GRPO" else {})
    trainer, model = getattr(hf, f"{kind}Trainer"), home / ("scorer" if kind == "Reward" else "model")
    told(message, lambda: trainer(str(model), args=args, train_dataset=[] if row is None else [row]))


@pytest.mark.parametrize(
    ("kind", "fields", "options", "message"),
    [
        ("SFT", {"eval_packing": True}, {}, "eval_packing=True: "),
        ("SFT", {"packing": True, "packing_strategy": "best"}, {}, "packing_strategy='best': write bfd or"),
        ("SFT", {"packing": True, "max_length": None}, {}, "max_length=None: packing needs a length"),
        ("SFT", {}, {"peft_config": PromptTuningConfig(num_virtual_tokens=2)}, "peft_config='PromptTuningConfig': "),
        ("SFT", {}, {"callbacks": 3}, "callbacks=3: give a list"),
        ("SFT", {}, {"penstock_plan": 3}, "penstock_plan='int': give what"),
        ("SFT", {}, {"processing_class": "model"}, "processing_class is a str; give a tokenizer"),
        ("GRPO", {}, {"data_collator": len}, "data_collator='builtin_function_or_method': leave it out"),
        ("DPO", {"label_smoothing_factor": 0.1}, {}, "label_smoothing_factor=0.1: "),
        ("GRPO", {"loss_type": "bnpo"}, {}, "loss_type='bnpo': write dapo"),
        ("GRPO", {"beta": 0.1}, {}, "use_bias_correction_kl=True: write False"),
        ("GRPO", {}, {"reward_funcs": len}, "reward_funcs=[<built-in function len>]: give functions with rollout_func"),
        ("GRPO", {}, {"reward_funcs": "a/b", "rollout_func": len}, "reward_funcs=['a/b']: give functions"),
    ],
)
def test_what_would_be_ignored_is_refused(home: Path, tmp_path: Path, kind: str, fields: dict, options: dict, message: str) -> None:
    args = config_of(kind, tmp_path, **fields)
    told(message, lambda: getattr(hf, f"{kind}Trainer")(str(home / "model"), args=args, train_dataset=TEXTS, **options))


def test_a_configuration_of_another_trainer_is_refused(home: Path, tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), **TINY)
    for kind in ("DPO", "KTO", "Reward", "GRPO"):
        told(f"args is a TrainingArguments; give a {kind}Config", lambda: getattr(hf, f"{kind}Trainer")(str(home), args=args))  # noqa: B023
    told("args is a str; give a TrainingArguments", lambda: hf.Trainer(str(home / "model"), "out"))
    assert read_arguments(transformers.TrainingArguments("out", average_tokens_across_devices=False), 2).problems


def test_adapters_and_routers_are_those_of_trl(home: Path) -> None:
    lora, job = LoraConfig(lora_dropout=0.1, target_modules=["q_proj"]), read_arguments(trl.DPOConfig("out", bf16=False), 1)
    assert "dropout=0," in adapter_of(lora, "qwen3", job)  # disable_dropout
    assert router_loss_of(transformers.MixtralConfig(router_aux_loss_coef=0.25).to_dict()) == 0.25
    assert router_loss_of(transformers.Qwen3Config().to_dict()) is None


def test_a_completion_without_a_reward_is_refused(home: Path, tmp_path: Path) -> None:
    """TRL leaves it out of the mean of its group; as 0 it would count."""
    args = config_of("GRPO", tmp_path)
    options = {
        "rollout_func": lambda prompts, trainer: {"prompt_ids": [[5]] * 4, "completion_ids": [[6]] * 4, "logprobs": [[-1.0]] * 4},
        "reward_funcs": lambda completions, **_: [1.0, None, 0.0, 2.0],
    }
    trainer = partial(hf.GRPOTrainer, str(home / "model"), args=args, train_dataset=[{"prompt": "the river"}] * 4)
    told(": completion 1 has no reward of any function", lambda: trainer(**options))


def test_rows_without_a_learned_token_are_counted(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = config_of("SFT", tmp_path)
    rows = [*TEXTS, {"input_ids": [5, 6], "labels": [-100, -100]}]
    trainer = hf.SFTTrainer(str(home / "model"), args, train_dataset=rows)
    assert "1 of 2 rows have no token to learn" in capsys.readouterr().err
    with pytest.raises(PenstockError, match="resume_from_checkpoint is a int"):
        trainer.train(3)


def test_a_short_run_draws_from_all_rows(home: Path, tmp_path: Path) -> None:
    trainer = sft(home, hf, tmp_path, "texts", max_steps=4)
    assert len((tmp_path / "rows" / "train.jsonl").read_text().splitlines()) == 23
    assert trainer.train().metrics["epoch"] == pytest.approx(8 / 12)


def test_pairs_are_read_with_the_template_of_the_processing_class(home: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "model")
    turns = [{"role": "user", "content": "the river"}, {"role": "assistant", "content": "runs"}]
    rows = [{"prompt": turns[:1], "chosen": turns[1:], "rejected": [turns[1] | {"content": "to a sea"}]}] * 4
    trainer = partial(hf.DPOTrainer, str(home / "model"), args=config_of("DPO", tmp_path, max_steps=1), train_dataset=rows)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    assert trainer(processing_class=tokenizer).train().global_step == 1
    assert (tmp_path / "checkpoint-1" / "chat_template.jinja").read_text() == tokenizer.chat_template
    tokenizer.add_tokens(["<more>"])
    told(": rows are read with the model's tokenizer", lambda: trainer(processing_class=tokenizer))


def test_rollouts_are_made_for_the_prompts_of_the_steps(home: Path, tmp_path: Path) -> None:
    asked, seen = [], []

    def rollout(prompts: list, trainer: hf.GRPOTrainer) -> dict:
        asked.append(prompts[0])
        return {"prompt_ids": [[5, 6]] * 4, "completion_ids": [[7], [8], [9], [5]], "logprobs": [[-1.0]] * 4}

    def reward(completions: list, **columns: object) -> list:
        seen.extend(completions)
        return [1.0, 2.0, None, 0.0]

    rows = [{"prompt": [{"role": "user", "content": str(i)}]} for i in range(9)]
    args = config_of("GRPO", tmp_path, max_steps=2)
    functions = [reward, lambda completions, **columns: [0.0, 0.0, 3.0, 0.0]]
    hf.GRPOTrainer(str(home / "model"), functions, args, train_dataset=rows, rollout_func=rollout)
    assert len(asked) == 2
    assert seen[0][0]["role"] == "assistant"
    written = [json.loads(line) for line in (tmp_path / "rows" / "train.jsonl").read_text().splitlines()]
    assert [row["rewards"] for row in written] == [[1.0, 2.0, 3.0, 0.0]] * 2


SCRIPT = """
import json, os, signal, sys
import datasets, transformers, trl
from penstock.hf import SFTTrainer

class Kill(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        if state.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

rows = datasets.Dataset.from_list([json.loads(line) for line in open("texts.jsonl")])
args = trl.SFTConfig(sys.argv[1], bf16=False, max_steps=6, max_length=64, per_device_train_batch_size=2, save_steps=2,
                     learning_rate=1e-2, report_to="none", use_cpu=True)
trainer = SFTTrainer("model", args, train_dataset=rows, callbacks=[Kill()])
trainer.train(resume_from_checkpoint="resume" in sys.argv)
"""


@pytest.mark.slow
def test_two_ranks_of_torchrun_killed_and_resumed_train_the_same_bytes(home: Path) -> None:
    (home / "ranks.py").write_text(SCRIPT)

    def torchrun(*arguments: object) -> int:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "ranks.py", *map(str, arguments)]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, cwd=home, env=env, capture_output=True, check=False, timeout=300).returncode

    assert torchrun("whole", 99) == 0
    assert torchrun("killed", 5) != 0
    assert [step for step, _ in complete_checkpoints(home / "killed")] == [2, 4]
    assert torchrun("killed", 99, "resume") == 0
    assert contents(home / "whole" / "checkpoint-6") == contents(home / "killed" / "checkpoint-6") != {}
