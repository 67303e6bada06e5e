"""Neighbours of errors in models: references, adapters, positions and weights."""

import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import _maybe_include_all_linear_layers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.planner.model.config import read_model, supported_attention
from penstock.planner.model.workload import build_workload
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import Model
from tests.every_type import tiny

from .cases import PAIRS, SAYS, Case, first_eval, lines, loss_alone, model, plan, texts_of, train

# Tests that hold the kinds
AT_START = "test_a_run_from_an_adapter_begins_at_its_reference"
RATIO = "test_a_run_of_rollouts_keeps_to_its_reference"
COUNTS = "test_adapter_sizes_of_shipped_models_equal_pefts"
ROPE = "test_positions_of_a_document_are_those_that_transformers_gives_it_alone"
LAW = "test_weights_are_those_that_transformers_loads_and_loads_again"


def references(root: Path) -> Iterator[Case]:
    """Losses that go on from an adapter."""
    folder = model(root / "m", style="llama 3", template="{{ messages[0].content }}")
    held = lines(root / "pairs.jsonl", PAIRS)
    texts = lines(root / "texts.jsonl", [{"text": text} for text in SAYS])
    adapter = train(plan(folder, "--train", "lora:r=4"), texts, out="sft", steps=8, lr=3e-2)[0] / "checkpoint-8"
    logps = {adapted: _logps(folder, adapter if adapted else None) for adapted in (True, False)}
    margins = torch.tensor([p - r for p, r in zip(*(_margins(logps[adapted]) for adapted in (True, False)), strict=True)])
    for name, trl in {"dpo": "sigmoid", "robust": "robust", "hinge": "hinge", "ipo": "ipo", "dpo:beta=0.5": "sigmoid"}.items():
        planned = plan(folder, "--train", "lora:r=4", "--loss", name)
        value = first_eval(planned, held, "--adapter", adapter, out=f"{name[:3]}-{len(name)}")
        beta = 0.5 if "beta" in name else 0.1
        yield Case(
            f"`{name}`, from an adapter", value, _trl_loss(folder, adapter, trl, beta), f"TRL's DPOTrainer, `{trl}`", AT_START
        )
    on_base = first_eval(
        plan(folder, "--train", "lora:r=4", "--loss", "dpo"), held, "--adapter", adapter, "--reference", "base", out="base"
    )
    right = torch.nn.functional.softplus(-0.1 * margins).mean().item()
    yield Case("`dpo --reference base`", on_base, right, "PEFT's log-probabilities with and without the adapter", AT_START)
    answers = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(PAIRS)]
    planned = plan(folder, "--train", "lora:r=4", "--loss", "kto:group=2", batch=4)
    value = first_eval(planned, lines(root / "kto.jsonl", answers), "--adapter", adapter, out="kto")
    yield Case("`kto`, from an adapter", value, 0.5, "1 - sigmoid(0)", AT_START)
    yield from _rollouts(root, folder, adapter)


def _ids(folder: Path, row: dict[str, Any], answer: str) -> tuple[list[int], int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(row["prompt"])["input_ids"]
    return [*tokenizer(row["prompt"] + row[answer])["input_ids"], tokenizer.eos_token_id], len(prompt)


def _logps(folder: Path, adapter: Path | None) -> dict[tuple[int, str], torch.Tensor]:
    """Return the log-probability of each token of each answer, by transformers and PEFT."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = loaded if adapter is None else PeftModel.from_pretrained(loaded, adapter)
    logps = {}
    for n, row in enumerate(PAIRS):
        for answer in ("chosen", "rejected"):
            ids, first = _ids(folder, row, answer)
            with torch.no_grad():
                logits = loaded(input_ids=torch.tensor([ids])).logits[0, first - 1 : -1]
            logps[n, answer] = -cross_entropy(logits, torch.tensor(ids[first:]), reduction="none")
    return logps


def _margins(logps: dict[tuple[int, str], torch.Tensor]) -> list[float]:
    return [(logps[n, "chosen"].sum() - logps[n, "rejected"].sum()).item() for n in range(len(PAIRS))]


def _trl_loss(folder: Path, adapter: Path, loss: str, beta: float) -> float:
    """Return the loss of TRL's first evaluation, with the adapter as policy."""
    from trl import DPOConfig, DPOTrainer

    policy = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter, is_trainable=True
    )
    smooth = {"label_smoothing": 0.1} if loss == "robust" else {}
    names: dict[str, Any] = {
        "output_dir": str(folder.parent / "trl"),
        "report_to": "none",
        "bf16": False,
        "per_device_eval_batch_size": 1,
    }
    settings = DPOConfig(
        **names, loss_type=[loss], beta=beta, disable_tqdm=True, use_cpu=True, gradient_checkpointing=False, **smooth
    )
    rows, tokenizer = Dataset.from_list(PAIRS), AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    with redirect_stdout(sys.stderr):
        trainer = DPOTrainer(policy, args=settings, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
        return float(trainer.evaluate()["eval_loss"])


def _rollouts(root: Path, folder: Path, adapter: Path) -> Iterator[Case]:
    """GRPO on answers with log-probabilities by PEFT and the adapter."""
    logps, groups = _logps(folder, adapter), []
    for n, row in enumerate(PAIRS):
        (chosen, first), (rejected, _) = (_ids(folder, row, answer) for answer in ("chosen", "rejected"))
        values = [logps[n, answer].tolist() for answer in ("chosen", "rejected")]
        group = {"prompt_ids": chosen[:first], "completion_ids": [chosen[first:], rejected[first:]], "rewards": [1, 0]}
        groups.append({**group, "logprobs": values})
    data = lines(root / "groups.jsonl", groups)
    planned = plan(folder, "--train", "lora:r=4", "--loss", "grpo:beta=0.1", batch=2 * len(PAIRS))
    _, metrics, words = train(planned, data, "--adapter", adapter, "--packing", "one", out="grpo")
    ratio = re.search(r"mean ratio ([\d.]+)", words)
    yield Case("`grpo:beta=0.1`: mean ratio", ratio and ratio[1], "1.0000", "the rollouts are PEFT's own", RATIO)
    yield Case("its first loss", metrics[0]["loss"] + 0.0, 0.0, "ratio 1, advantages of sum 0, divergence 0", RATIO)


def targets(root: Path) -> Iterator[Case]:
    """Adapters of every linear layer: parameters of rank 16."""
    names = ("phi-4-14b", "deepseek-v3-671b", "qwen3-next-80b-a3b", "glm-4-9b", "gemma3-1b", "granite-3.3-8b")
    types = ("gpt2", "falcon", "kimi_linear", "lfm2", "granitemoehybrid", "gpt_neox")
    for name, read in [*((n, read_model(n)) for n in names), *((f"tiny {t}", Model(tiny(t))) for t in types)]:
        attention: Any = supported_attention(read)[0]
        n_trained = build_workload(read, Semantics(64, 1, 1, attention=attention, train=Train(lora=Lora()))).n_trained
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**read.config), dtype=torch.bfloat16)
        settings = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
        listed = _maybe_include_all_linear_layers(settings, built).target_modules
        n = 16 * sum(sum(built.get_submodule(layer).weight.shape) for layer in listed)
        yield Case(name, n_trained, n, "PEFT's list of `all-linear`, on the meta device", COUNTS)


def positions(root: Path) -> Iterator[Case]:
    """Documents with fewer and more tokens than 8, where the frequencies of the model change: loss of a packed evaluation."""
    from tests.runtime.test_documents import STRETCHED, stretched

    texts = ("a", "to the sea", "What is two and two? It is four.", "Hello, and how are you today? Thanks, fine!")
    data = lines(root / "texts.jsonl", [{"text": text} for text in texts])
    for model_type, rope_type in [*STRETCHED, ("qwen3", "yarn")]:
        config = stretched(model_type, "longrope" if rope_type == "yarn" else rope_type)
        config.pop("rope_type", None)
        if rope_type == "yarn":
            config["rope_parameters"] = {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 8,
            }
        config.pop("model_type")
        folder = model(root / f"{model_type}-{rope_type}", model_type, **config)
        right, planned = loss_alone(folder, texts_of(folder, texts)), plan(folder)
        for packing in ("documents", "one") if model_type in ("phi3", "internlm3") else ("documents",):
            value = first_eval(planned, data, "--packing", packing, out=f"{model_type}-{rope_type}-{packing}")
            yield Case(f"{model_type}, {rope_type}, `--packing {packing}`", value, right, "transformers, each document alone", ROPE)
        if model_type == "phi3":
            row = [i for ids in texts_of(folder, texts) for i in ids][:64]
            value = first_eval(plan(folder, seq_len=len(row), batch=1), data, "--packing", "joined", out="joined")
            source = "transformers, the joined documents as one"
            yield Case("phi3, longrope, `--packing joined`", value, loss_alone(folder, [row]), source, ROPE)


def weights(root: Path) -> Iterator[Case]:
    """Loss of the loaded weights, and bits of the saved ones, after a step with a rate of 1e-30."""
    texts = lines(root / "texts.jsonl", [{"text": text} for text in SAYS])
    types = ("ernie4_5_moe", "hunyuan_v1_moe", "deepseek_v3", "minimax_m2", "glm4_moe", "gemma3_text", "granitemoeshared")
    for model_type in types:
        yield from _same_weights(model(root / model_type, model_type), texts, model_type)
    yield from _same_weights(model(root / "tied", tie_word_embeddings=True), texts, "qwen3, tied")
    both = model(root / "both")
    AutoModelForCausalLM.from_pretrained(both).save_pretrained(root / "shards", max_shard_size="20KB")
    (negated := AutoModelForCausalLM.from_pretrained(both)).model.embed_tokens.weight.data.neg_()
    for file in (root / "shards").glob("model*"):
        file.rename(both / file.name)
    negated.save_pretrained(root / "one")
    (root / "one" / "model.safetensors").rename(both / "model.safetensors")
    yield from _same_weights(both, texts, "qwen3, one file and shards of other weights")
    half = model(root / "half")
    AutoModelForCausalLM.from_pretrained(half, dtype=torch.bfloat16).save_pretrained(half)
    yield from _same_weights(half, texts, "qwen3, a folder in bf16")


def _same_weights(folder: Path, texts: Path, name: str) -> Iterator[Case]:
    value = first_eval(planned := plan(folder), texts, "--packing", "documents", out=f"out-{folder.name}")
    yield Case(f"{name}: loss", value, loss_alone(folder, texts_of(folder, SAYS)), "transformers' from_pretrained in fp32", LAW)
    saved = planned.parent / f"out-{folder.name}" / "checkpoint-1"
    states = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict() for path in (saved, folder)]
    equal = [n for n in states[1] if n in states[0] and torch.equal(states[0][n], states[1][n])]
    yield Case(
        f"{name}: tensors saved", f"{len(equal)} equal", f"{len(states[1])} equal", "transformers' state_dict, to the bit", LAW
    )
