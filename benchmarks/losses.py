"""Runs that learn from pairs and from a teacher.

    python -m benchmarks.losses pairs > docs/benchmarks/preferences_cpu-2core_DATE.md
    python -m benchmarks.losses teacher > docs/benchmarks/teachers_cpu-2core_DATE.md

`pairs`: 24 steps of adapters on pairs of polite and rude answers. `teacher`: students of a fifth of their teacher's size, and a
model that scores answers. The losses are compared with their definitions in `tests/runtime/test_losses.py`. Two minutes of two
cores each.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import penstock_command as penstock
from benchmarks.common import provenance

BYTES = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "tie_word_embeddings": False,
}  # fmt: skip
N_PAIRS, N_HELD_OUT, N_BEFORE, EVERY = 100, 50, 120, 12
KIND = ("gladly", "sure", "friend", "happy", "kindly", "welcome", "yes", "thanks")
RUDE = ("never", "fool", "no", "go", "hate", "stop", "idiot", "bah")
END, N_STEPS = 256, 60  # end-of-text token of bytes; steps of a student
STUDENT = BYTES | {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
SIZES = ("--machine", "cpu-2core", "--compute", "fp32", "--seq-len", 64, "--batch-size", 8)
TOKENIZER = ("--tokenizer", "bytes")


def manners(n: int, begin: int) -> list[dict[str, str]]:
    requests = ("open the door", "pass the salt", "read page", "count to", "call room")
    rows = (
        (f"Please {requests[i % 5]} {i}. ", f"Gladly, {i} it is, my friend.", f"No. Do {i} yourself, fool.")
        for i in range(begin, begin + n)
    )
    return [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ranked(folder: Path) -> Iterator[str]:
    """Yield a row per evaluation of a run on pairs."""
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "eval_loss" in line:
            yield f"| {line.get('step', 0)} | {line['eval_loss']:.4f} | {line['eval_accuracy']:.0%} |"


def config(folder: Path, fields: dict[str, Any]) -> Path:
    """Write the configuration of a model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields | {"architectures": ["LlamaForCausalLM"]}))
    return folder


def texts_of(path: Path, pairs: list[dict[str, str]]) -> Path:
    """Write both answers of every pair as texts."""
    return write(path, [{"text": row["prompt"] + row[half]} for row in pairs for half in ("chosen", "rejected")])


def from_pairs(home: Path) -> Iterator[str]:
    """Train a model on both kinds of answers, then on pairs."""
    yield f"""# A run that learns from pairs

{provenance()}

{N_PAIRS} pairs of polite and rude answers, {N_HELD_OUT} others held out; a byte-level Llama of 0.8 M parameters that had learned
both manners, of all their prompts, for {N_BEFORE} steps; adapters of rank 8 by `dpo:beta=0.1`, 8 sequences a step, in fp32.

| steps | held-out loss | preferred rightly |
|---:|---:|---:|"""
    pairs, held_out = manners(N_PAIRS, 0), manners(N_HELD_OUT, N_PAIRS)
    both = texts_of(home / "both.jsonl", pairs + held_out)
    penstock("plan", config(home / "model", BYTES), *SIZES, "-o", home / "first.json")
    flags = (*TOKENIZER, "--from-scratch", "--out", home / "both")
    penstock("run", home / "first.json", "--data", both, "--steps", N_BEFORE, "--lr", "3e-3", *flags)
    model = home / "both" / f"checkpoint-{N_BEFORE}"
    penstock("plan", model, *SIZES, "--train", "lora:r=8", "--loss", "dpo:beta=0.1", "-o", home / "dpo.json")
    data = ("--data", write(home / "pairs.jsonl", pairs), "--eval-data", write(home / "held-out.jsonl", held_out))
    flags = ("--eval-every", EVERY, "--steps", 2 * EVERY, "--lr", "1e-3", *TOKENIZER, "--out", home / "out")
    penstock("run", home / "dpo.json", *data, *flags)
    yield from ranked(home / "out")


def answers(n: int, seed: int) -> list[dict[str, str]]:
    """Return pairs of four words in random order: two kind words in the chosen, two rude ones in the rejected answer."""
    draw, rows = random.Random(seed), list[dict[str, str]]()
    for i in range(n):
        both = [draw.choices(words, k=2) + draw.choices(("it", "then", "so", "well", "now"), k=2) for words in (KIND, RUDE)]
        for words in both:
            draw.shuffle(words)
        rows.append({"prompt": f"Pass {i}. ", "chosen": " ".join(both[0]), "rejected": " ".join(both[1])})
    return rows


def from_a_teacher(home: Path) -> Iterator[str]:
    """Train a teacher on both kinds of answers, students of a fifth of its size, and a model that scores answers."""
    yield f"""# Students of a teacher, and a model that scores answers

{provenance()}

{N_PAIRS} pairs of polite and rude answers, as texts; {N_HELD_OUT} others held out. The teacher: a byte-level Llama of 0.8 M
parameters that had learned both manners for {N_BEFORE} steps; students of 0.15 M, of random weights, {N_STEPS} steps of 8
sequences of 64 tokens. Then a model of the teacher's size, of random weights, with a head that scores answers: {N_PAIRS} pairs of
four words in any order, two of them kind or rude, and {N_HELD_OUT} others.
"""

    def run(plan: str, data: Path, steps: int, *flags: object) -> Path:
        out, rate = home / plan.partition(".")[0], "1e-3" if plan == "reward.json" else "3e-3"
        arguments = ("--data", data, "--steps", steps, "--lr", rate)
        penstock("run", home / plan, *arguments, *TOKENIZER, "--out", out, *flags)
        return out / f"checkpoint-{steps}"

    def divergence(folder: Path) -> float:
        """Return the mean KL(teacher || student) of whole logits over tokens of held-out texts, by transformers."""
        per_text = list[Tensor]()
        both = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (teacher, folder)]
        for row in held_out:
            for half in ("chosen", "rejected"):
                ids = torch.tensor([[*(row["prompt"] + row[half]).encode(), END]])
                with torch.no_grad():
                    p, q = (model(ids).logits[0, :-1].log_softmax(-1) for model in both)
                per_text.append((p.exp() * (p - q)).sum(-1))
        return float(torch.cat(per_text).mean())

    pairs, held_out = manners(N_PAIRS, 0), manners(N_HELD_OUT, N_PAIRS)
    texts, large, small = texts_of(home / "texts.jsonl", pairs), config(home / "large", BYTES), config(home / "small", STUDENT)
    penstock("plan", large, *SIZES, "-o", home / "teacher.json")
    teacher = run("teacher.json", texts, N_BEFORE, "--from-scratch")
    penstock("plan", teacher, *SIZES, "--loss", "distill:k=16", "-o", home / "writes.json")
    penstock("forward", home / "writes.json", "--data", texts, *TOKENIZER, "--out", home / "top.safetensors")
    n_bytes = (home / "top.safetensors").stat().st_size
    yield f"The teacher's file: {n_bytes:,} bytes."
    yield f"\n| student, {N_STEPS} steps | KL(teacher \\|\\| student), held-out, whole logits |\n|---|---:|"
    penstock("plan", small, *SIZES, "-o", home / "none.json")
    yield f"| random weights, 1 step by cross entropy | {divergence(run('none.json', texts, 1, '--from-scratch')):.3f} |"
    for name, loss, flags in (
        ("plain", "cross-entropy", ()),
        ("kl", "distill:k=16", ("--reference", home / "top.safetensors")),
        ("jsd", "distill:k=16,beta=0.5", ("--reference", home / "top.safetensors")),
    ):
        penstock("plan", small, *SIZES, "--loss", loss, "-o", home / f"{name}.json")
        yield f"| `{loss}` | {divergence(run(f'{name}.json', texts, N_STEPS, '--from-scratch', *flags)):.3f} |"
    penstock("plan", large, *SIZES, "--loss", "reward", "-o", home / "reward.json")
    flags = ("--eval-data", write(home / "held-out.jsonl", answers(N_HELD_OUT, 1)), "--eval-every", EVERY // 3, "--from-scratch")
    run("reward.json", write(home / "pairs.jsonl", answers(N_PAIRS, 0)), 2 * EVERY, *flags)
    yield "\n| steps of `reward`, 4 pairs each | held-out loss | ranked rightly |\n|---:|---:|---:|"
    yield from ranked(home / "reward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pairs", "teacher"))
    learn = from_pairs if parser.parse_args().what == "pairs" else from_a_teacher
    with tempfile.TemporaryDirectory() as home:
        for line in learn(Path(home)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
