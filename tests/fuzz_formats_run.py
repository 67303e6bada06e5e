"""Which files does a run read and leave behind, by which functions, and what is a good one of each?

Settings, data, tokenizers, templates and checkpoints; and the logs that a report is drawn from. The readers are those that the
commands call.
"""

import hashlib
import io
import json
import shutil
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import save as save_tensors
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from penstock.checkpoint.checkpoint import FORMAT_VERSION, load_state, sum_of
from penstock.checkpoint.model_files import load_weights, refuse_quantised
from penstock.cli.run_files import read_logged_run as read_logs
from penstock.data.chat import read_chat_format
from penstock.data.data import read_data
from penstock.data.encoders import read_encoder
from penstock.data.formats import Chat
from penstock.run_config import read_run, run_text, write_run
from penstock.settings import DataSettings, EvaluationSettings, RunSettings
from planner.show.report import report
from runtime.plan import PlanFile

from .fuzz_formats import N_SCRIPTS, Format, as_json, plan_files
from .fuzz_mutations import mutate_json, mutate_lines, mutate_tensors, mutate_text
from .fuzz_texts import MARKED, TEMPLATE, TOML, YAML, mutate_template, mutate_toml, mutate_yaml

WORDS = ["To be, or not to be, that is the question. " * 3, "née Ω 数 🙂", "a\n\nb\tc", "x " * 40]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
]
TENSORS = {"model.a.weight": torch.arange(12.0).reshape(3, 4), "model.b.weight": torch.ones(5, dtype=torch.bfloat16)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


# -- settings -----------------------------------------------------------------------------------------------------------


@cache
def _settings() -> RunSettings:
    evaluation = EvaluationSettings(prompts=("Hello", "two\nlines"))
    return RunSettings(DataSettings("data"), plan="plan.json", steps=100, evaluation=evaluation, monitors=("wandb",))


def _read_settings(name: str, folder: Path) -> None:
    """What was understood is written, and then read as the same."""
    settings = read_run(folder / name, {})
    write_run(folder / "again.yaml", settings)
    assert read_run(folder / "again.yaml", {}) == settings


# -- data ---------------------------------------------------------------------------------------------------------------


def _rows() -> list[list[dict[str, Any]]]:
    """Rows of each format."""
    turns = [{"from": {"system": "system", "user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in CHAT]
    return [
        [{"text": text} for text in WORDS],
        [{"messages": CHAT}, {"messages": CHAT[1:]}],
        [{"instruction": "Add.", "input": "2, 2", "output": "4", "history": [["a", "b"]]}, {"instruction": "x", "output": "y"}],
        [{"conversations": turns}, {"conversations": turns[1:], "system": "Be brief."}],
    ]


def _lines() -> list[bytes]:
    return ["".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows)).encode() for rows in _rows()]


@cache
def _tables() -> list[bytes]:
    made = []
    for rows in _rows():
        for compression in ("snappy", "none"):
            stream = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream, compression=compression)
            made.append(stream.getvalue())
    return made


def _read_set(name: str, folder: Path) -> None:
    """Tokens, sequences and the first and last step, from a cache and as they are needed."""
    for streaming in (False, True):
        settings = DataSettings(str(folder / name), streaming=streaming)
        try:
            data = read_data(settings, None, 300, 96, 2, 0, folder / "tokens", by_document=True)
            try:
                data.words()
                for step in (0, (data.n_steps or 3) - 1):
                    data.batch(step)
                data.resume(1, data.position(1))
            finally:
                data.close()
        finally:
            shutil.rmtree(folder / "tokens", ignore_errors=True)


# -- tokenizers ---------------------------------------------------------------------------------------------------------


@cache
def _tokenizers() -> list[bytes]:
    """One of each kind, small."""
    made = []
    special = ["<unk>", "<s>", "</s>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE(unk_token=None))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False))
    made.append(bpe)
    unigram = Tokenizer(models.Unigram([(text, -float(i)) for i, text in enumerate([*special, "▁", "a", "b", "to", "be"])], 0))
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    unigram.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    unigram.decoder = decoders.Metaspace()
    made.append(unigram)
    word = Tokenizer(
        models.WordPiece({text: i for i, text in enumerate([*special, "to", "##o", "be", ",", "not"])}, unk_token="<unk>")
    )
    word.normalizer, word.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    word.enable_truncation(5)
    word.enable_padding(length=9)
    made.append(word)
    split = Tokenizer.from_str(bpe.to_str())
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(_regex(), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    made.append(split)
    return [tokenizer.to_str().encode() for tokenizer in made]


def _regex() -> Any:
    from tokenizers import Regex

    return Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")


TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": TEMPLATE,
    "added_tokens_decoder": {"2": {"content": "</s>", "special": True}},
}


def _beside_a_tokenizer() -> dict[str, bytes]:
    return {
        "tokenizer.json": _tokenizers()[0],
        "tokenizer_config.json": as_json(TOKENIZER_CONFIG),
        "config.json": as_json({"model_type": "llama", "eos_token_id": 2}),
        "special_tokens_map.json": as_json({"pad_token": "<unk>"}),
    }


def _read_tokenizer(folder: Path) -> None:
    encoder = read_encoder(folder)
    for text in WORDS:
        ids = encoder.encode(text)
        spans = encoder.spans(text)
        assert len(spans[0]) == len(spans[1])
        encoder.decode(ids.tolist()[:50])
    read_chat_format(folder, encoder).close()


def _read_template(folder: Path) -> None:
    """The process that performs templates is a real one, so this takes a second or two."""
    source = folder / "chat_template.jinja"
    source.write_bytes(source.read_bytes().replace(b"@INSIDE@", bytes(folder)))
    encoder = read_encoder(folder)
    speech = read_chat_format(folder, encoder)
    try:
        speech.encode(Chat(tuple(CHAT)), "here")
        speech.prompt(CHAT[:2])
    finally:
        speech.close()


# -- checkpoints --------------------------------------------------------------------------------------------------------

INDEX = {"metadata": {"total_size": 58}, "weight_map": dict.fromkeys(TENSORS, "model-00001-of-00001.safetensors")}


def _weights() -> list[bytes]:
    return [save_tensors(TENSORS, {"format": "pt"}), save_tensors(TENSORS)]


def _read_weights(folder: Path) -> None:
    refuse_quantised(folder, {}, TENSORS)
    for name, tensor in load_weights(folder, TENSORS, SHAPES):
        assert tuple(tensor.shape) == SHAPES[name]
        tensor.double().sum()


def _state(files: dict[str, bytes]) -> dict[str, Any]:
    sums = {name: {"n_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()}
    position = {"epoch": 0, "sequence": 4}
    state = {"seed": 1, "n_updates": 2, "data_fingerprint": "0" * 64, "data_position": position, "semantics": {"seq_len": 8}}
    fields = {"format_version": FORMAT_VERSION, "step": 2, "state": state, "files": sums}
    return fields | {"sha256": sum_of(fields)}


@cache
def _optimizer_files() -> dict[str, bytes]:
    tensors = {f"{kind}.{name}": tensor.clone() for kind in ("master", "exp_avg") for name, tensor in TENSORS.items()}
    return {"optimizer-00000.safetensors": save_tensors(tensors), "config.json": b"{}"}


def _read_state(folder: Path) -> None:
    state = load_state(folder)
    assert all(isinstance(tensor, torch.Tensor) for tensor in state.optimizer.values())


def _read_optimizer(folder: Path) -> None:
    """As if the one who changed the file had known how to change the sums."""
    files = {name: (folder / name).read_bytes() for name in _optimizer_files()}
    (folder / "trainer_state.json").write_bytes(as_json(_state(files)))
    for tensor in load_state(folder).optimizer.values():
        tensor.double().sum()


# -- what a run left ----------------------------------------------------------------------------------------------------


def _metrics() -> list[bytes]:
    line = {"loss": 3.0, "grad_norm": 1.0, "lr": 1e-5, "tokens": 16, "supervised_tokens": 15, "step_s": 0.1, "tokens_per_s": 160.0}
    line |= {"skipped": False, "busy_s": {"gpu": 0.1}, "predicted_step_s": 0.1}
    evaluated = {"eval_loss": 3.0, "eval_perplexity": 20.1, "eval_tokens": 30, "eval_s": 0.1}
    lines = [{"step": step} | (evaluated if step % 4 == 0 else line) for step in range(1, 13)]
    return [b"".join(as_json(line) + b"\n" for line in lines)]


def _samples() -> list[bytes]:
    lines = [{"step": step, "prompt": prompt, "text": f"{prompt} <b>&amp;"} for step in (2, 4) for prompt in ("Hello", "</script>")]
    return [b"".join(as_json(line) + b"\n" for line in lines)]


@cache
def _timelines() -> list[bytes]:
    n_ops = len(json.loads(plan_files()[0])["ops"])
    spans = [
        {"op": op, "step": step, "start_s": step + op / n_ops, "end_s": step + (op + 1) / n_ops}
        for step in range(4)
        for op in range(n_ops)
    ]
    return [as_json({"spans": spans})]


def _beside_a_log() -> dict[str, bytes]:
    named = {"metrics.jsonl": _metrics, "samples.jsonl": _samples, "timeline.json": _timelines}
    return {name: make()[0] for name, make in named.items()} | {"plan.json": plan_files()[0]}


def _read_logs(folder: Path) -> None:
    file = PlanFile.read(folder / "plan.json")
    page = report(file, "plan.json", read_logs(folder, len(file.plan.ops)))
    assert page.count("</script>") == N_SCRIPTS, "what a file says has become a part of the page's program"


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            "run (YAML)",
            "run.yaml",
            lambda: [YAML, run_text(_settings()).encode(), as_json(asdict(_settings()))],
            mutate_yaml,
            partial(_read_settings, "run.yaml"),
        ),
        Format("run (TOML)", "run.toml", lambda: [TOML], mutate_toml, partial(_read_settings, "run.toml")),
        Format("JSONL", "data.jsonl", _lines, mutate_lines, partial(_read_set, "data.jsonl")),
        Format("Parquet", "data.parquet", _tables, mutate_text, partial(_read_set, "data.parquet")),
        Format("tokenizer.json", "tokenizer.json", _tokenizers, mutate_json, _read_tokenizer, _beside_a_tokenizer),
        Format(
            "tokenizer_config.json",
            "tokenizer_config.json",
            lambda: [as_json(TOKENIZER_CONFIG)],
            mutate_json,
            _read_tokenizer,
            _beside_a_tokenizer,
        ),
        Format(
            "chat template",
            "chat_template.jinja",
            lambda: [TEMPLATE.encode(), MARKED.encode()],
            mutate_template,
            _read_template,
            _beside_a_tokenizer,
        ),
        Format("safetensors", "model.safetensors", _weights, mutate_tensors, _read_weights),
        Format(
            "safetensors index",
            "model.safetensors.index.json",
            lambda: [as_json(INDEX)],
            mutate_json,
            _read_weights,
            lambda: {"model-00001-of-00001.safetensors": _weights()[0]},
        ),
        Format(
            "trainer state",
            "trainer_state.json",
            lambda: [as_json(_state(_optimizer_files()))],
            mutate_json,
            _read_state,
            _optimizer_files,
        ),
        Format(
            "optimizer state",
            "optimizer-00000.safetensors",
            lambda: [_optimizer_files()["optimizer-00000.safetensors"]],
            mutate_tensors,
            _read_optimizer,
            _optimizer_files,
        ),
        Format("metrics.jsonl", "metrics.jsonl", _metrics, mutate_lines, _read_logs, _beside_a_log),
        Format("samples.jsonl", "samples.jsonl", _samples, mutate_lines, _read_logs, _beside_a_log),
        Format("timeline.json", "timeline.json", _timelines, mutate_json, _read_logs, _beside_a_log),
    )
}
