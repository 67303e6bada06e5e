"""Neighbours of ten kinds of silent errors: each is run here and compared with another library, or with arithmetic.

`python -m benchmarks.neighbours [KIND ...] > PAGE` prints a page of Markdown with a table for each kind. Expected values are computed
by transformers, PEFT, TRL and datasets on the same files, never by Penstock. Exit code 1 if a result is wrong.
"""

import json
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import torch
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.common import provenance
from penstock.planner.model.config import read_model, supported_attention
from penstock.planner.model.workload import build_workload
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import Model
from tests.chats import CHATML, LLAMA3, write_talker
from tests.every_type import tiny
from tests.running import UNSEARCHED, penstock

Rows = list[dict[str, Any]]
ASKS = ("How does the river run?", "two and two?", "Hello, and how are you today?", "What is add?", "Are you fine?", "20 €?")
SAYS = ("Down to the sea.", "It is four.", "Thanks, fine!", "def add(a, b):\n    return a + b", "I am.", "Übergrößen kosten 20 €.")
CHATS: Rows = [
    {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]} for ask, say in zip(ASKS, SAYS, strict=True)
]
PAIRS: Rows = [{"prompt": a, "chosen": f" {s}", "rejected": f" no, {n}"} for n, (a, s) in enumerate(zip(ASKS, SAYS, strict=True))]

# Tests that hold the kinds
SAVED = "test_a_saved_data_set_is_read_as_its_library_reads_it"
NO_ROWS = "test_json_without_rows_is_refused_and_never_read_as_text"
NO_TEXT = "test_files_that_are_no_text_are_named_and_skipped_on_request"
AT_START = "test_a_run_from_an_adapter_begins_at_its_reference"
RATIO = "test_a_run_of_rollouts_keeps_to_its_reference"
COUNTS = "test_adapter_sizes_of_shipped_models_equal_pefts"
ROPE = "test_positions_of_a_document_are_those_that_transformers_gives_it_alone"
KEYS = "test_rows_of_tables_have_no_keys_of_other_rows"
SYSTEM = "test_a_row_is_understood_and_tells_its_format"
FLAGS = "test_flags_of_other_trainers_are_obeyed_or_refused_by_name"
CALLS = "test_arguments_of_tools_are_written_once"
PARTS = "test_parts_of_answers_that_a_template_drops_are_counted"
OWN = "test_a_template_of_a_user_replaces_the_models"
BOS = "test_a_text_that_begins_gets_no_second_beginning"
KEPT = "test_every_file_that_a_tokenizer_of_transformers_reads_is_kept"
LAW = "test_weights_are_those_that_transformers_loads_and_loads_again"
STOPS = "test_what_comes_out_stops_at_the_learned_end_with_the_adapters_own_tokenizer"
EPOCHS = "test_epochs_are_rounded_up_to_steps_once"
SET_RATE = "test_a_loop_of_ones_own_trains_the_bytes_of_train"
HELD = "test_a_part_of_held_out_data_is_a_sample_of_the_whole"


class Case(NamedTuple):
    """A neighbour: what was tried, Penstock's result, the right value, how that was found, and the test that holds it."""

    tried: str
    result: Any
    right: Any
    source: str
    test: str

    @property
    def is_right(self) -> bool:
        if isinstance(self.right, float):
            return abs(self.result - self.right) <= 2e-6 * max(1.0, abs(self.right))
        return bool(self.result == self.right)


# -- models, data and commands -------------------------------------------------------------------------------------------


def lines(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def model(folder: Path, model_type: str = "qwen3", style: str = "chatml", template: str | None = None, **config: Any) -> Path:
    """Write a tiny model with random weights in fp32, and a tokenizer with a chat template."""
    size = write_talker(folder, style, template)
    torch.manual_seed(0)
    names = AutoConfig.for_model(**{**tiny(model_type), "vocab_size": size, "pad_token_id": None, **config})
    built = AutoModelForCausalLM.from_config(names, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in built.state_dict().items():
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.copy_(0.7 + 0.3 * torch.randn(tensor.shape) if tensor.dim() == 1 else torch.randn(tensor.shape) * 0.2)
    built.save_pretrained(folder)
    return folder


def command(*words: object) -> str:
    """Run a `penstock` command; return its output."""
    result = penstock(*words)
    if result.exit_code:
        raise SystemExit(f"penstock {' '.join(map(str, words))}: {result.output}")
    return str(result.output)


def plan(folder: Path, *flags: object, seq_len: int = 64, batch: int = 2) -> Path:
    path = folder.parent / "plan.json"
    sizes = ("--seq-len", seq_len, "--batch-size", batch, "--micro-batch", batch, "--compute", "fp32")
    command("plan", folder, "--machine", "cpu-2core", *sizes, *UNSEARCHED, *flags, "-o", path)
    return path


def train(planned: Path, data: Path, *flags: object, out: str, steps: int | None = 1, lr: float = 1e-30) -> tuple[Path, Rows, str]:
    """Run a plan; return the run's folder, its metrics and its output."""
    folder = planned.parent / out
    count = () if steps is None else ("--steps", steps)
    words = command("run", planned, "--data", data, "--out", folder, "--lr", lr, *count, *flags)
    return folder, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], words


def first_eval(planned: Path, data: Path, *flags: object, out: str) -> float:
    """Return the loss of the evaluation before the first step."""
    _, metrics, _ = train(planned, data, "--eval-data", data, *flags, out=out)
    return float(next(line["eval_loss"] for line in metrics if "eval_loss" in line))


def shown(data: Path, folder: Path, *flags: object) -> list[tuple[str, str]] | str:
    """Return (text, learned text) of each document by `penstock data`, or `refused` with the named file."""
    result = penstock("data", data, "--model", folder, "--samples", 99, "--json", "--seq-len", 2048, *flags)
    if result.exit_code:
        named = re.search(r"[\w ]+\.(?:json|txt|pdf|docx|md)\b", result.stderr)
        return f"refused, exit code {result.exit_code}" + (f", {named[0].strip()} named" if named else "")
    samples = json.loads(result.stdout)["samples"]
    return [tuple("".join(t for t, is_learned in s["parts"] if is_learned >= least) for least in (0, 1)) for s in samples]  # type: ignore[misc]


def warned(data: Path, folder: Path, *flags: object) -> str:
    about = json.loads(command("data", data, "--model", folder, "--json", "--seq-len", 2048, *flags).splitlines()[-1])["about"]
    return next((f"warning: {words}" for name, words in about.items() if name.startswith("warning")), "silent")


def brief(documents: Any) -> str:
    """Shorten documents to counts and a digest."""
    if isinstance(documents, str):
        return documents
    digest = sha256(json.dumps(documents).encode()).hexdigest()[:8]
    return f"{len(documents)} documents, {sum(len(text) for text, _ in documents)} characters, SHA-256 {digest}"


def templated(folder: Path, rows: Rows) -> list[tuple[str, str]]:
    """Return the documents that transformers writes and masks of these rows."""
    tokenizer, documents = AutoTokenizer.from_pretrained(folder), []
    for row in rows:
        how = {"tools": row.get("tools"), "return_dict": True, "return_assistant_tokens_mask": True}
        made = tokenizer.apply_chat_template(row["messages"], **how)
        learned = [i for i, is_learned in zip(made["input_ids"], made["assistant_masks"], strict=True) if is_learned]
        documents.append((tokenizer.decode(made["input_ids"]), tokenizer.decode(learned)))
    return documents


def loss_alone(folder: Path, documents: list[list[int]], first: int = 0, dtype: torch.dtype = torch.float32) -> float:
    """Return the mean loss by transformers over all tokens from `first` on, each document in a forward of its own."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    total, n = 0.0, 0
    for ids in documents:
        with torch.no_grad():
            logits = loaded(torch.tensor([ids]), use_cache=False).logits[0].float()
        total += cross_entropy(logits[first:-1], torch.tensor(ids[first + 1 :]), reduction="sum").item()
        n += len(ids) - 1 - first
    return total / n


def texts_of(folder: Path, texts: tuple[str, ...]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]


# -- the kinds -----------------------------------------------------------------------------------------------------------


def data_sets(root: Path) -> Iterator[Case]:
    """Folders and files that are, or are not, sets of rows."""
    folder, rows = model(root / "m"), Dataset.from_list(CHATS)
    rows.save_to_disk(root / "three", num_shards=3)
    rows.shuffle(seed=3).select(range(4)).save_to_disk(root / "shuffled")
    rows.filter(lambda row: len(row["messages"][0]["content"]) > 13).save_to_disk(root / "above" / "filtered")
    DatasetDict({"train": rows.select(range(4)), "test": rows.select([4, 5])}).save_to_disk(root / "dict")
    DatasetDict({"train": rows.select([0]), "validation": rows.select([1])}).save_to_disk(root / "validated")
    cached = load_dataset("json", data_files=str(lines(root / "c.jsonl", CHATS)), cache_dir=str(root / "cache"), split="train")
    loaded = {
        "three shards": ("three", load_from_disk(root / "three")),
        "shuffled and selected, then saved": ("shuffled", load_from_disk(root / "shuffled")),
        "filtered, one folder further down": ("above", load_from_disk(root / "above" / "filtered")),
        "a DatasetDict of train and test": ("dict", load_from_disk(root / "dict")["train"]),
        "its part `test` alone": ("dict/test", load_from_disk(root / "dict")["test"]),
        "a DatasetDict of train and validation": ("validated", load_from_disk(root / "validated")["train"]),
        "the Arrow file of load_dataset's cache": (cached.cache_files[0]["filename"], cached),
    }
    for name, (path, expected) in loaded.items():
        yield Case(name, shown(root / path, folder), templated(folder, [*expected]), "datasets' rows by transformers' template", SAVED)
    objects = {"LMFlow's `instances`": {"type": "text2text", "instances": CHATS}, "columns of lists": {"text": list(ASKS)}}
    files = {name: json.dumps(value).encode() for name, value in objects.items()}
    files |= {name: "l'été à la rivière €".encode(name) for name in ("cp1252", "utf-16-be", "utf-32")} | {"shift-jis": "川".encode("cp932")}
    with zipfile.ZipFile(root / "letter", "w") as archive:
        archive.writestr("word/document.xml", "<w:t>open</w:t>")
    files["a .docx named .txt"] = (root / "letter").read_bytes()
    for number, (name, content) in enumerate(files.items()):
        is_json = name in objects
        path = root / f"f{number}" / f"x.{'json' if is_json else 'txt'}"
        lines(path, []).write_bytes(content)
        source = "no row at its top level, by json" if is_json else f"bytes.decode('utf-8'): {_undecodable(content)}"
        yield Case(name, shown(path.parent, folder), f"refused, exit code 2, {path.name} named", source, NO_ROWS if is_json else NO_TEXT)


def _undecodable(content: bytes) -> str:
    try:
        return f"decodes, with {content.decode().count(chr(0))} zero bytes"
    except UnicodeDecodeError as error:
        return error.reason


def references(root: Path) -> Iterator[Case]:
    """Losses that go on from an adapter."""
    folder = model(root / "m", style="llama 3", template="{{ messages[0].content }}")
    held = lines(root / "pairs.jsonl", PAIRS)
    texts = lines(root / "texts.jsonl", [{"text": text} for text in SAYS])
    adapter = train(plan(folder, "--train", "lora:r=4"), texts, out="sft", steps=8, lr=3e-2)[0] / "checkpoint-8"
    logps = {on: _logps(folder, adapter if on else None) for on in (True, False)}
    margins = torch.tensor([p - r for p, r in zip(*(_margins(logps[on]) for on in (True, False)), strict=True)])
    for name, trl in {"dpo": "sigmoid", "robust": "robust", "hinge": "hinge", "ipo": "ipo", "dpo:beta=0.5": "sigmoid"}.items():
        planned = plan(folder, "--train", "lora:r=4", "--loss", name)
        value = first_eval(planned, held, "--adapter", adapter, out=f"{name[:3]}-{len(name)}")
        beta = 0.5 if "beta" in name else 0.1
        yield Case(f"`{name}`, from an adapter", value, _trl_loss(folder, adapter, trl, beta), f"TRL's DPOTrainer, `{trl}`", AT_START)
    on_base = first_eval(plan(folder, "--train", "lora:r=4", "--loss", "dpo"), held, "--adapter", adapter, "--reference", "base", out="base")
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

    policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter, is_trainable=True)
    smooth = {"label_smoothing": 0.1} if loss == "robust" else {}
    names: dict[str, Any] = {"output_dir": str(folder.parent / "trl"), "report_to": "none", "bf16": False, "per_device_eval_batch_size": 1}
    settings = DPOConfig(**names, loss_type=[loss], beta=beta, disable_tqdm=True, use_cpu=True, gradient_checkpointing=False, **smooth)
    rows, tokenizer = Dataset.from_list(PAIRS), AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    with redirect_stdout(sys.stderr):
        trainer = DPOTrainer(policy, args=settings, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
        return float(trainer.evaluate()["eval_loss"])


def _rollouts(root: Path, folder: Path, adapter: Path) -> Iterator[Case]:
    """GRPO on answers whose log-probabilities PEFT computed with the adapter."""
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
    """Adapters beside every linear layer: parameters of rank 16."""
    names = ("phi-4-14b", "deepseek-v3-671b", "qwen3-next-80b-a3b", "glm-4-9b", "gemma3-1b", "granite-3.3-8b")
    types = ("gpt2", "falcon", "kimi_linear", "lfm2", "granitemoehybrid", "gpt_neox")
    for name, read in [*((n, read_model(n)) for n in names), *((f"tiny {t}", Model(tiny(t))) for t in types)]:
        attention: Any = supported_attention(read)[0]
        n_trained = build_workload(read, Semantics(64, 1, 1, attention=attention, train=Train(lora=Lora()))).n_trained
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**read.config), dtype=torch.bfloat16)
        adapted = get_peft_model(built, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), low_cpu_mem_usage=True)
        n = sum(p.numel() for p_name, p in adapted.named_parameters() if p.requires_grad and ".experts." not in p_name)
        yield Case(name, n_trained, n, "PEFT's `all-linear`, on the meta device", COUNTS)


def positions(root: Path) -> Iterator[Case]:
    """Documents of 6 to 60 tokens in models whose frequencies change at 8: loss of a packed evaluation."""
    from tests.runtime.test_documents import STRETCHED, stretched

    texts = ("a", "to the sea", "What is two and two? It is four.", "Hello, and how are you today? Thanks, fine!")
    data = lines(root / "texts.jsonl", [{"text": text} for text in texts])
    for model_type, rope_type in [*STRETCHED, ("qwen3", "yarn")]:
        config = stretched(model_type, "longrope" if rope_type == "yarn" else rope_type)
        config.pop("rope_type", None)
        if rope_type == "yarn":
            config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}
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


def tables(root: Path) -> Iterator[Case]:
    """Rows of which only some have tools, calls, names or parts, in columnar files."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    extra: Rows = [
        {"tools": [{"name": "f", "parameters": {"properties": {"a": {"type": "number"}}}}]},
        {"tools": [{"name": "g", "parameters": {"required": ["b"]}}]},
    ]
    rows = [{**row, **(extra[n] if n < 2 else {})} for n, row in enumerate(CHATS)]
    rows[0] = {**rows[0], "messages": [*CHATS[0]["messages"], {"role": "user", "content": "f?", "name": "ann"}]}
    rows[1] = {**rows[1], "messages": [CHATS[1]["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    mark = "{% generation %}{{ m.content }}{% endgeneration %}"
    folder = model(root / "m", template=f"{{{{ tools | tojson }}}}{{% for m in messages %}}{{{{ m | tojson }}}}{mark}{{% endfor %}}")
    right, table = templated(folder, rows), pyarrow.Table.from_pylist(rows)
    write = {
        "pyarrow, Parquet": lambda at: pyarrow.parquet.write_table(table, f"{at}/a.parquet"),
        "Parquet of one row a group": lambda at: pyarrow.parquet.write_table(table, f"{at}/a.parquet", row_group_size=1),
        "Feather": lambda at: pyarrow.feather.write_feather(table, f"{at}/a.feather"),
        "datasets, to_parquet": lambda at: Dataset.from_list(rows).to_parquet(f"{at}/a.parquet"),
        "datasets, JSON columns": lambda at: Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(f"{at}/a.parquet"),
        "datasets, save_to_disk": lambda at: Dataset.from_list(rows).save_to_disk(f"{at}/a"),
        "pandas, to_parquet": lambda at: pandas.DataFrame(rows).to_parquet(f"{at}/a.parquet"),
        "JSONL": lambda at: lines(Path(at, "a.jsonl"), rows),
    }
    for n, (name, save) in enumerate(write.items()):
        (root / f"d{n}").mkdir()
        save(root / f"d{n}")
        yield Case(name, shown(root / f"d{n}", folder), right, "transformers' template on the rows themselves", KEYS)


def templates(root: Path) -> Iterator[Case]:
    """Rendered texts, system columns, dropped parts, arguments in strings, and turns that are not learned."""
    yield from _beginnings(root)
    folder, source = model(root / "m"), "transformers' template and mask"
    system = [{"messages": [{"role": "system", "content": "Be brief."}, *row["messages"]]} for row in CHATS]
    for name, flags in {"system": (), "system_prompt": ("--columns", "system=system_prompt")}.items():
        data = lines(root / f"{name}.jsonl", [{name: "Be brief.", **row} for row in CHATS])
        yield Case(f"a column `{name}` beside messages", shown(data, folder, *flags), templated(folder, system), source, SYSTEM)
    long = [{"messages": [*a["messages"], *b["messages"]]} for a, b in zip(CHATS[::2], CHATS[1::2], strict=True)]
    masked = [(text, learned[len(a["messages"][1]["content"] + "<|im_end|>") :]) for a, (text, learned) in
              zip(CHATS[::2], templated(folder, long), strict=True)]  # fmt: skip
    for key, value in {"loss": False, "train": 0, "training": False, "trainable": False, "loss_mask": 0, "weight": 0}.items():
        marked = [{"messages": [row["messages"][0], {**row["messages"][1], key: value}, *row["messages"][2:]]} for row in long]
        data = lines(root / f"{key}.jsonl", marked)
        yield Case(f"`{key}: {json.dumps(value)}` of a turn", shown(data, folder), masked, f"{source} without that turn", FLAGS)
    tools = CHATML.replace("message.content", "(message.content or message.tool_calls[0].function.arguments | tojson)")
    calls = {name: [_call(arguments)] * 2 for name, arguments in {"string": '{"a": 2}', "object": {"a": 2}}.items()}
    caller = model(root / "caller", template=tools)
    for name, rows in calls.items():
        value = shown(lines(root / f"{name}.jsonl", rows), caller)
        yield Case(f"arguments of a call as {name}", value, templated(caller, calls["object"]), f"{source}, of the object", CALLS)
    for part in ("reasoning_content", "thinking", "tool_calls"):
        answer = {"role": "assistant", "content": "Fine.", part: "hidden" if part != "tool_calls" else _call({})["messages"][1][part]}
        row = {"messages": [CHATS[0]["messages"][0], answer]}
        words = warned(lines(root / "part.jsonl", [row]), folder)
        is_written = "hidden" in templated(folder, [row])[0][0] or "tool" in templated(folder, [row])[0][0]
        right = "silent" if is_written else f"warning: the model's chat template drops {part} (in 1 rows)"
        yield Case(f"`{part}` in an answer", words.partition(";")[0], right, "transformers' text lacks it", PARTS)
    (root / "own.jinja").write_text(own := CHATML.replace("<|im_end|>", "<|endoftext|>"))
    data, flags = lines(root / "own.jsonl", CHATS), ("--chat-template", root / "own.jinja")
    yield Case("`--chat-template FILE`", shown(data, folder, *flags), templated(model(root / "own", template=own), CHATS), source, OWN)


def _call(arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": "", "tool_calls": calls}]}


def _beginnings(root: Path) -> Iterator[Case]:
    """Texts that a template has written, with BOS."""
    folder = model(root / "bos", style="llama 3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    write = tokenizer.apply_chat_template
    whole = [write(row["messages"], tokenize=False) for row in CHATS]
    asked = [write(row["messages"][:1], tokenize=False, add_generation_prompt=True) for row in CHATS]
    answers = [row["messages"][1]["content"] + tokenizer.eos_token for row in CHATS]
    both = [prompt + answer for prompt, answer in zip(asked, answers, strict=True)]
    sets: dict[str, tuple[Rows, list[str]]] = {
        "text": ([{"text": text} for text in whole], whole),
        "text without BOS": ([{"text": text} for text in SAYS], [f"{tokenizer.bos_token}{text}{tokenizer.eos_token}" for text in SAYS]),
        "prompt, completion": ([{"prompt": p, "completion": a} for p, a in zip(asked, answers, strict=True)], both),
        "prompt, chosen, rejected": (
            [{"prompt": p, "chosen": a, "rejected": f"no{tokenizer.eos_token}"} for p, a in zip(asked, answers, strict=True)],
            [text for p, b in zip(asked, both, strict=True) for text in (b, f"{p}no{tokenizer.eos_token}")],
        ),
    }
    for name, (rows, texts) in sets.items():
        found = shown(lines(root / "b" / f"{name}.jsonl", rows), folder)
        value = [(text, "") for text, _ in found] if isinstance(found, list) else found
        yield Case(f"rendered {name}", value, [(text, "") for text in texts], "transformers' text, one BOS", BOS)


def folders(root: Path) -> Iterator[Case]:
    """Tokenizer, templates and settings of generation after a run, a resumed run and a merge."""
    folder, chats = model(root / "m", style="llama 3"), lines(root / "chats.jsonl", CHATS)
    (folder / "additional_chat_templates").mkdir()
    (folder / "chat_template.jinja").write_text(LLAMA3)
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag {{ messages[0].content }}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<|pad|>", "additional_special_tokens": ["<|tool|>"]})
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
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
        for what, of in _READ.items():
            yield Case(f"{what} of {name}", brief_json(of(place)), brief_json(of(folder)), "transformers, of the base", KEPT)


_READ: dict[str, Any] = {
    "ids and special tokens": lambda at: [
        AutoTokenizer.from_pretrained(at)(" ".join((*ASKS, "<|tool|> <|pad|>")))["input_ids"],
        AutoTokenizer.from_pretrained(at).special_tokens_map,
    ],
    "templates": lambda at: AutoTokenizer.from_pretrained(at).chat_template,
    "settings of generation": lambda at: GenerationConfig.from_pretrained(at).to_diff_dict(),
    "settings of images": lambda at: (Path(at) / "preprocessor_config.json").read_text(),
}


def brief_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return text if len(text) < 60 else f"{len(text)} characters, SHA-256 {sha256(text.encode()).hexdigest()[:8]}"


def weights(root: Path) -> Iterator[Case]:
    """Loss of the loaded weights, and bits of the saved ones, after a step with a rate of 1e-30."""
    texts = lines(root / "texts.jsonl", [{"text": text} for text in SAYS])
    types = ("ernie4_5_moe", "hunyuan_v1_moe", "deepseek_v3", "minimax_m2", "glm4_moe", "gemma3_text", "granitemoeshared")
    for model_type in types:
        yield from _same_weights(model(root / model_type, model_type), texts, model_type)
    yield from _same_weights(model(root / "tied", tie_word_embeddings=True), texts, "qwen3, tied")
    both = model(root / "both")
    AutoModelForCausalLM.from_pretrained(both).save_pretrained(root / "shards", max_shard_size="20KB")
    (other := AutoModelForCausalLM.from_pretrained(both)).model.embed_tokens.weight.data.neg_()
    for file in (root / "shards").glob("model*"):
        file.rename(both / file.name)
    other.save_pretrained(root / "one")
    (root / "one" / "model.safetensors").rename(both / "model.safetensors")
    yield from _same_weights(both, texts, "qwen3, one file and shards of other weights")
    half = model(root / "half")
    AutoModelForCausalLM.from_pretrained(half, dtype=torch.bfloat16).save_pretrained(half)
    yield from _same_weights(half, texts, "qwen3, a folder in bf16")


def _same_weights(folder: Path, texts: Path, name: str) -> Iterator[Case]:
    value = first_eval(planned := plan(folder), texts, "--packing", "documents", out=f"out-{folder.name}")
    yield Case(f"{name}: loss", value, loss_alone(folder, texts_of(folder, SAYS)), "transformers' from_pretrained in fp32", LAW)
    saved = planned.parent / f"out-{folder.name}" / "checkpoint-1"
    states = [AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32).state_dict() for at in (saved, folder)]
    equal = [n for n in states[1] if n in states[0] and torch.equal(states[0][n], states[1][n])]
    yield Case(f"{name}: tensors saved", f"{len(equal)} equal", f"{len(states[1])} equal", "transformers' state_dict, to the bit", LAW)


def ends(root: Path) -> Iterator[Case]:
    """Tokens that transformers generates with the settings of a model trained on one answer."""
    row: Rows = [{"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "It is four."}]}] * 8
    chats = lines(root / "chats.jsonl", row)
    bases: dict[str, dict[str, Any]] = {
        "chatml": {"eos_token_id": 2},
        "chatml, unmarked": {"eos_token_id": [2]},
        "llama 3": {"eos_token_id": 0},
        "mistral": {"eos_token_id": 0},
        "gpt-oss": {"eos_token_id": 3},
    }
    for style, eos in bases.items():
        folder = model(root / style.replace(" ", "-"), style=style)
        GenerationConfig(**eos).save_pretrained(folder)
        for trained in ("all", "lora:r=8"):
            out, rate = f"out-{folder.name}-{trained[:3]}", 5e-3 if trained == "all" else 3e-2
            at = train(plan(folder, "--train", trained, batch=4), chats, "--packing", "one", out=out, steps=50, lr=rate)[0] / "checkpoint-50"
            if trained != "all":
                command("merge", folder, at, "--out", root / f"merged-{folder.name}")
                at = root / f"merged-{folder.name}"
            tokenizer, tuned = AutoTokenizer.from_pretrained(at), AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)
            asked = tokenizer.apply_chat_template(row[0]["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
            n_prompt = asked["input_ids"].shape[1]
            new = tuned.generate(**asked, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, n_prompt:]
            whole = tokenizer.apply_chat_template(row[0]["messages"], return_dict=True)["input_ids"][n_prompt:]
            end = max(i for i, token in enumerate(whole) if token in tokenizer.all_special_ids)
            source = f"transformers' template, to its last special token; the base ends on {eos['eos_token_id']}"
            yield Case(f"{style}, `--train {trained}`", tokenizer.decode(new), tokenizer.decode(whole[: end + 1]), source, STOPS)


def counts(root: Path) -> Iterator[Case]:
    """Steps of epochs, rates that a loop has set, and parts of held-out data."""
    import penstock as api

    folder = model(root / "m")
    for epochs, n_rows, size in ((3, 17, 16), (1, 17, 16), (2.5, 17, 16), (0.1, 40, 4), (2, 3, 16), (1.1, 10, 2)):
        data = lines(root / f"{epochs}-{n_rows}.jsonl", [{"text": "a" * (1 + n)} for n in range(n_rows)])
        out = f"epochs-{epochs}-{n_rows}"
        _, metrics, _ = train(plan(folder, batch=size), data, "--packing", "one", "--epochs", epochs, out=out, steps=None)
        right = -(-(round(epochs * 10) * n_rows) // (10 * size))
        yield Case(f"steps of `--epochs {epochs}`, {n_rows} rows by {size}", len(metrics), right, "ceil(epochs x rows / size)", EPOCHS)
    texts = lines(root / "texts.jsonl", [{"text": text} for text in SAYS])
    planned = api.plan(str(folder), "cpu-2core", seq_len=64, batch_size=2, compute_dtype="fp32")
    for stop, rate in ((4, 1e-4), (5, 2e-3)):
        runs = []
        for out, stops in ((f"whole{stop}", [None]), (f"cut{stop}", [stop, None])):
            seen: dict[int, float] = {}
            for n, last in enumerate(stops):
                how: dict[str, Any] = {"out": root / out, "steps": 8, "lr": 1e-3, "resume": n > 0}
                for turn in api.stream(planned, str(texts), every=1, **how):
                    seen |= {m.step: m.lr for m in turn.metrics}
                    if turn.step == 3:
                        turn.lr = rate
                    if turn.step == last:
                        turn.stop()
            runs.append(seen)
        right = [1e-3] * 3 + [rate] * 5
        yield Case(f"rates, {rate} after step 3, resumed after {stop}", [*runs[1].values()], right, "the rates set", SET_RATE)
    for limit in (6, 4):
        (root / "few.yaml").write_text(f"evaluation: {{max_sequences: {limit}}}\ndata: {{packing: one}}\n")
        _, metrics, words = train(plan(folder), texts, "--eval-data", texts, "--config", root / "few.yaml", out=f"held-{limit}")
        said = re.search(r"\d of 6 sequences", words)
        right = None if limit == 6 else "4 of 6 sequences"
        yield Case(f"part of 6 held-out rows named, limit {limit}", said and said[0], right, "rows counted", HELD)
        if limit == 6:
            value = next(line["eval_loss"] for line in metrics if "eval_loss" in line)
            yield Case("their loss", value, loss_alone(folder, texts_of(folder, SAYS)), "transformers, all six", HELD)


KINDS = {
    "Folders that are data sets": data_sets,
    "Adapters that continue": references,
    "LoRA beside every projection": targets,
    "Positions belong to the document": positions,
    "Rows from Parquet and Arrow": tables,
    "Templates": templates,
    "What a folder has survives": folders,
    "The weights of transformers": weights,
    "What comes out stops": ends,
    "Arithmetic of runs": counts,
}


def cell(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        value = brief(value)
    text = f"{value:.7g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    """Print the page, or the tables of the kinds whose numbers are given."""
    os.environ["PENSTOCK_CACHE"] = tempfile.mkdtemp(prefix="neighbours-cache-")
    numbers, n_wrong = [int(word) for word in sys.argv[1:]] or range(1, len(KINDS) + 1), 0
    for number in numbers:
        title, kind = [*KINDS.items()][number - 1]
        print(f"\n## {number}. {title}\n\n{' '.join((kind.__doc__ or '').split())}\n")
        print("| tried | Penstock | right value | found by | test |\n|---|---|---|---|---|")
        with tempfile.TemporaryDirectory() as root:
            for case in kind(Path(root).resolve()):
                n_wrong += not case.is_right
                mark = "" if case.is_right else "**wrong:** "
                print(f"| {case.tried} | {mark}{cell(case.result)} | {cell(case.right)} | {case.source} | `{case.test}` |", flush=True)
    print(f"\n{provenance()}")
    sys.exit(n_wrong > 0)


if __name__ == "__main__":
    main()
