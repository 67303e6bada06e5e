"""Neighbours of errors in runs: files of a folder, ends of answers, and numbers of steps."""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.chats import LLAMA3

from .cases import ASKS, CHATS, SAYS, Case, Rows, command, lines, loss_alone, model, plan, texts_of, train

# Tests that hold the kinds
KEPT_FILES = "test_every_file_that_a_tokenizer_of_transformers_reads_is_kept"
STOPS = "test_what_comes_out_stops_at_the_learned_end_with_the_adapters_own_tokenizer"
EPOCHS = "test_epochs_are_rounded_up_to_steps_once"
SET_RATE = "test_a_loop_of_ones_own_trains_the_bytes_of_train"
HELD = "test_a_part_of_held_out_data_is_a_sample_of_the_whole"


def folders(root: Path) -> Iterator[Case]:
    """Tokenizer, templates and settings of generation after a run, a resumed run and a merge."""
    folder, chats = model(root / "m", style="llama 3"), lines(root / "chats.jsonl", CHATS)
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").write_text(LLAMA3)
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag {{ messages[0].content }}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>", "additional_special_tokens": ["<|tool|>"]})
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "temperature": 0.6, "top_k": 20, "do_sample": True}
    GenerationConfig(**generation).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "CLIPImageProcessor", "size": 8}')
    planned, adapters = plan(folder), plan(folder, "--train", "lora:r=4")
    first, _, _ = train(plan(folder), chats, out="run")
    train(planned, chats, "--resume", out="run", steps=2)
    tuned, _, _ = train(plan(folder, "--train", "lora:r=4"), chats, out="lora")
    command("merge", folder, tuned / "checkpoint-1", "--out", root / "merged")
    assert adapters == planned
    places = {"a checkpoint": first / "checkpoint-1", "a resumed one": first / "checkpoint-2", "an adapter": tuned / "checkpoint-1"}
    for name, place in {**places, "a merged model": root / "merged"}.items():
        for part, read in _READ.items():
            yield Case(
                f"{part} of {name}", brief_json(read(place)), brief_json(read(folder)), "transformers, of the base", KEPT_FILES
            )


_READ: dict[str, Any] = {
    "ids and special tokens": lambda path: [
        AutoTokenizer.from_pretrained(path)(" ".join((*ASKS, "<|tool|> <|pad|>")))["input_ids"],
        AutoTokenizer.from_pretrained(path).special_tokens_map,
    ],
    "templates": lambda path: AutoTokenizer.from_pretrained(path).chat_template,
    "settings of generation": lambda path: GenerationConfig.from_pretrained(path).to_diff_dict(),
    "settings of images": lambda path: (Path(path) / "preprocessor_config.json").read_text(),
}


def brief_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) < 60 else f"{len(text)} characters, SHA-256 {sha256(text.encode()).hexdigest()[:8]}"


def ends(root: Path) -> Iterator[Case]:
    """Tokens that transformers generates with the settings of a model trained on one answer."""
    row: Rows = [{"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "It is four."}]}] * 8
    chats = lines(root / "chats.jsonl", row)
    lora = "lora:r=8"
    bases = (
        ("chatml", "all", 2),
        ("chatml", lora, 2),
        ("chatml, unmarked", "all", [2]),
        ("llama 3", lora, 0),
        ("mistral", "all", 0),
    )
    for style, trained, end in (*bases, ("gpt-oss", lora, 3)):
        folder = model(root / f"{style}-{trained[:3]}".replace(", ", "-"), style=style)
        GenerationConfig(eos_token_id=end).save_pretrained(folder)
        planned, rate = plan(folder, "--train", trained, batch=2), 1e-2 if trained == "all" else 3e-2
        result = train(planned, chats, "--packing", "one", out=f"out-{folder.name}", steps=25, lr=rate)[0] / "checkpoint-25"
        if trained == lora:
            command("merge", folder, result, "--out", root / f"merged-{folder.name}")
            result = root / f"merged-{folder.name}"
        tokenizer, tuned = AutoTokenizer.from_pretrained(result), AutoModelForCausalLM.from_pretrained(result, dtype=torch.float32)
        prompt = tokenizer.apply_chat_template(
            row[0]["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        n_prompt = prompt["input_ids"].shape[1]
        new = tuned.generate(**prompt, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, n_prompt:]
        full = tokenizer.apply_chat_template(row[0]["messages"], return_dict=True)["input_ids"][n_prompt:]
        last = max(i for i, token in enumerate(full) if token in tokenizer.all_special_ids)
        source = f"transformers' template to its last special token; the base ends on {end}"
        yield Case(f"{style}, `--train {trained}`", tokenizer.decode(new), tokenizer.decode(full[: last + 1]), source, STOPS)


def counts(root: Path) -> Iterator[Case]:
    """Steps of epochs, rates that a loop has set, and parts of held-out data."""
    import penstock as api

    folder = model(root / "m")
    for epochs, n_rows, size in ((3, 17, 16), (1, 17, 16), (2.5, 17, 16), (0.1, 40, 4), (2, 3, 16), (1.1, 10, 2)):
        data = lines(root / f"{epochs}-{n_rows}.jsonl", [{"text": "a" * (1 + n)} for n in range(n_rows)])
        out = f"epochs-{epochs}-{n_rows}"
        _, metrics, _ = train(plan(folder, batch=size), data, "--packing", "one", "--epochs", epochs, out=out, steps=None)
        right = -(-(round(epochs * 10) * n_rows) // (10 * size))
        yield Case(
            f"steps of `--epochs {epochs}`, {n_rows} rows by {size}", len(metrics), right, "ceil(epochs x rows / size)", EPOCHS
        )
    texts = lines(root / "texts.jsonl", [{"text": text} for text in SAYS])
    planned = api.plan(str(folder), "cpu-2core", seq_len=64, batch_size=2, compute_dtype="fp32")
    for stop, rate in ((4, 1e-4), (5, 2e-3)):
        runs = []
        for out, stops in ((f"whole{stop}", [None]), (f"cut{stop}", [stop, None])):
            rates: dict[int, float] = {}
            for n, last in enumerate(stops):
                how: dict[str, Any] = {"out": root / out, "steps": 8, "lr": 1e-3, "resume": n > 0}
                for turn in api.stream(planned, str(texts), every=1, **how):
                    rates |= {m.step: m.lr for m in turn.metrics}
                    if turn.step == 3:
                        turn.lr = rate
                    if turn.step == last:
                        turn.stop()
            runs.append(rates)
        right = [1e-3] * 3 + [rate] * 5
        yield Case(f"rates, {rate} after step 3, resumed after {stop}", [*runs[1].values()], right, "the rates set", SET_RATE)
    for limit in (6, 4):
        (root / "few.yaml").write_text(f"evaluation: {{max_sequences: {limit}}}\ndata: {{packing: one}}\n")
        _, metrics, words = train(plan(folder), texts, "--eval-data", texts, "--config", root / "few.yaml", out=f"held-{limit}")
        printed = re.search(r"\d of 6 sequences", words)
        right = None if limit == 6 else "4 of 6 sequences"
        yield Case(f"part of 6 held-out rows named, limit {limit}", printed and printed[0], right, "rows counted", HELD)
        if limit == 6:
            value = next(line["eval_loss"] for line in metrics if "eval_loss" in line)
            yield Case("their loss", value, loss_alone(folder, texts_of(folder, SAYS)), "transformers, all six", HELD)
