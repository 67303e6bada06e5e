"""QLoRA, then DPO, then a merge of a tiny model, and the results of four other programs.

`python -m benchmarks.consumers FOLDER` runs the commands of docs/sft-then-dpo.md in an empty folder, and prints a table.
It needs ctranslate2, onnx, onnxscript and onnxruntime, which no package of the project depends on. Exit code 1 for a difference.
"""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import onnxruntime
import torch
from ctranslate2.converters import TransformersConverter
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import provenance
from tests.chats import write_talker
from tests.running import penstock
from tests.tiny import tiny_config

QUESTION, N_NEW = "What is two and two?", 12
END = "<|endoftext|>"  # like in Qwen: CTranslate2 needs names of all three
TEXT = "The river runs down to the sea. Hello, and how are you today? Thanks, fine!"
SIZES = (
    "--machine",
    "cpu-2core",
    "--compute",
    "fp32",
    "--train",
    "lora:r=8",
    "--base",
    "nf4",
    "--seq-len",
    "64",
    "--batch-size",
    "4",
)


def write_inputs(folder: Path) -> None:
    """Write a base in fp32, conversations and preferences."""
    model = folder / "my-32b"
    config = tiny_config(
        "qwen3",
        vocab_size=write_talker(model, "chatml", pad_token=END, unk_token=END),
        hidden_size=64,
        head_dim=16,
        intermediate_size=128,
    )
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():
        for weight in built.parameters():
            weight.copy_(1 + 0.1 * torch.randn(weight.shape) if weight.dim() == 1 else torch.randn(weight.shape) * 0.2)
    built.save_pretrained(model)
    answers = {QUESTION: "It is four.", "How does the river run?": "Down to the sea.", "How are you?": "Thanks, fine!"}
    chats = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in answers.items()] * 4
    pairs = [{"prompt": q, "chosen": a, "rejected": "assistant user"} for q, a in answers.items()] * 4
    for name, rows in {"chats": chats, "held-out": chats[:3], "pairs": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def command(*words: object) -> str:
    """Run a command, which must succeed; return its output."""
    result = penstock(*words)
    if result.exit_code:
        raise SystemExit(f"penstock {' '.join(map(str, words))}: exit code {result.exit_code}\n{result.output}")
    return str(result.output)


def train() -> list[str]:
    """Run the commands of the page in the current folder; return its lines about losses, reference and merge."""
    chats, pairs = (
        ("--data", "chats.jsonl", "--eval-data", "held-out.jsonl"),
        ("--data", "pairs.jsonl", "--eval-data", "pairs.jsonl"),
    )
    command("plan", "my-32b", *SIZES, "-o", "sft.json")
    printed = command("run", "sft.json", *chats, "--steps", 20, "--lr", "1e-2", "--out", "sft")
    command("plan", "my-32b", *SIZES, "--loss", "dpo", "-o", "dpo.json")
    options = ("--lr", "3e-3", "--save-every", 2, "--out", "dpo")
    printed += command("run", "dpo.json", *pairs, "--adapter", "sft/checkpoint-20", "--steps", 4, *options)
    printed += command("run", "dpo.json", *pairs, "--steps", 6, *options, "--resume")
    printed += command("merge", "my-32b", "dpo/checkpoint-6", "--out", "tuned")
    return [line for line in printed.splitlines() if line.startswith(("evaluation", "reference:", "tuned:"))]


def greedy(model: Any, ids: list[int]) -> list[int]:
    out = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=N_NEW, do_sample=False, pad_token_id=0)
    return [int(token) for token in out[0, len(ids) :]]


def logps_of(logits: Any) -> torch.Tensor:
    """Return log-probabilities (tokens, vocabulary) of logits (1, tokens, vocabulary)."""
    return torch.as_tensor(np.asarray(logits))[0].float().log_softmax(-1)


def by_onnx(folder: Path, model: Any, ids: list[int], prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Export by torch.onnx; return the log-probabilities of ids, and greedy tokens after prompt."""
    model.config.use_cache, path = False, folder / "tuned.onnx"
    length = torch.export.Dim("length", min=2, max=256)
    torch.onnx.export(Logits(model), (torch.tensor([ids]),), path, dynamo=True, dynamic_shapes=({1: length},), verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    logits = lambda tokens: session.run(None, {name: np.asarray([tokens], dtype=np.int64)})[0]  # noqa: E731
    tokens = list(prompt)
    while len(tokens) < len(prompt) + N_NEW and (len(tokens) == len(prompt) or tokens[-1] not in ends_of(model)):
        tokens.append(int(logits(tokens)[0, -1].argmax()))
    return logps_of(logits(ids)), tokens[len(prompt) :]


class Logits(torch.nn.Module):
    """The logits of a model as its only result."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits  # type: ignore[no-any-return]


def ends_of(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def by_ctranslate2(
    folder: Path, tokenizer: Any, ids: list[int], prompt: list[int], ends: list[int]
) -> tuple[torch.Tensor, list[int]]:
    """Convert by CTranslate2; return the same in float32."""
    TransformersConverter(str(folder / "tuned")).convert(str(folder / "ct2"), quantization="float32")
    generator = ctranslate2.Generator(str(folder / "ct2"), device="cpu", compute_type="float32")
    logits = generator.forward_batch([tokenizer.convert_ids_to_tokens(ids)])
    options: dict[str, Any] = {"max_length": N_NEW, "include_prompt_in_result": False, "end_token": ends, "return_end_token": True}
    (result,) = generator.generate_batch([tokenizer.convert_ids_to_tokens(prompt)], sampling_topk=1, **options)
    return logps_of(logits), list(result.sequences_ids[0])


def main() -> None:
    """Run everything and print the table."""
    folder, made_by = Path(sys.argv[1]).resolve(), provenance()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    write_inputs(folder)
    print("```", *train(), "```\n", sep="\n")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tuned")
    load = lambda name: AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()  # noqa: E731
    tuned, base = load("tuned"), load("my-32b")
    ids = tokenizer(TEXT)["input_ids"]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    with torch.no_grad():
        results = {"transformers": (logps_of(tuned(torch.tensor([ids])).logits), greedy(tuned, prompt))}
        moved = (logps_of(base(torch.tensor([ids])).logits) - results["transformers"][0]).abs().max().item()
        peft = PeftModel.from_pretrained(load("my-32b"), folder / "dpo" / "checkpoint-6").merge_and_unload()
        peft.generation_config = tuned.generation_config
        results["PEFT, base and adapter merged"] = (logps_of(peft(torch.tensor([ids])).logits), greedy(peft, prompt))
    results["CTranslate2"] = by_ctranslate2(folder, tokenizer, ids, prompt, ends_of(tuned))
    results["ONNX Runtime"] = by_onnx(folder, tuned, ids, prompt)
    logps, tokens = results["transformers"]
    print(f"The adapter moves a log-probability by up to {moved:.3f}.\n")
    print("| program | version | largest difference of a log-probability | greedy answer |\n|---|---|---:|---|")
    packages = ("transformers", "peft", "ctranslate2", "onnxruntime")
    differences = [(got - logps).abs().max().item() for got, _ in results.values()]
    for (name, (_, new)), package, difference in zip(results.items(), packages, differences, strict=True):
        answer = tokenizer.decode(new).replace("|", "\\|")
        print(f"| {name} | {version(package)} | {difference:.1e} | `{answer}` |")
    print(f"\n{made_by}")
    sys.exit(max(differences) > 1e-5 or any(new != tokens for _, new in results.values()))


if __name__ == "__main__":
    main()
