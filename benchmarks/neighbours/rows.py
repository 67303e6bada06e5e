"""Neighbours of errors in data: saved data sets, tables and chat templates."""

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.feather
import pyarrow.parquet
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from transformers import AutoTokenizer

from tests.chats import CHATML

from .cases import ASKS, CHATS, SAYS, Case, Rows, lines, model, shown, templated, warned

# Tests that hold the kinds
SAVED = "test_a_saved_data_set_is_read_as_its_library_reads_it"
NO_ROWS = "test_json_without_rows_is_refused_and_never_read_as_text"
NO_TEXT = "test_files_that_are_no_text_are_named_and_skipped_on_request"
KEYS = "test_rows_of_tables_have_no_keys_of_other_rows"
SYSTEM = "test_a_row_is_understood_and_tells_its_format"
FLAGS = "test_flags_of_other_trainers_are_obeyed_or_refused_by_name"
CALLS = "test_arguments_of_tools_are_written_once"
PARTS = "test_parts_of_answers_that_a_template_drops_are_counted"
USER_TEMPLATE = "test_a_template_of_a_user_replaces_the_models"
BOS = "test_a_text_that_begins_gets_no_second_beginning"


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
        yield Case(
            name, shown(root / path, folder), templated(folder, [*expected]), "datasets' rows by transformers' template", SAVED
        )
    objects = {"LMFlow's `instances`": {"type": "text2text", "instances": CHATS}, "columns of lists": {"text": list(ASKS)}}
    files = {name: json.dumps(value).encode() for name, value in objects.items()}
    files |= {name: "l'été à la rivière €".encode(name) for name in ("cp1252", "utf-16-be", "utf-32")} | {
        "shift-jis": "川".encode("cp932")
    }
    with zipfile.ZipFile(root / "letter", "w") as archive:
        archive.writestr("word/document.xml", "<w:t>open</w:t>")
    files["a .docx named .txt"] = (root / "letter").read_bytes()
    for number, (name, content) in enumerate(files.items()):
        is_json = name in objects
        path = root / f"f{number}" / f"x.{'json' if is_json else 'txt'}"
        lines(path, []).write_bytes(content)
        source = "no row at its top level, by json" if is_json else f"bytes.decode('utf-8'): {_undecodable(content)}"
        yield Case(
            name, shown(path.parent, folder), f"refused, exit code 2, {path.name} named", source, NO_ROWS if is_json else NO_TEXT
        )


def _undecodable(content: bytes) -> str:
    try:
        return f"decodes, with {content.decode().count(chr(0))} zero bytes"
    except UnicodeDecodeError as error:
        return error.reason


def tables(root: Path) -> Iterator[Case]:
    """Rows in columnar files, some with tools, calls or names."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    extra: Rows = [
        {"tools": [{"name": "f", "parameters": {"properties": {"a": {"type": "number"}}}}]},
        {"tools": [{"name": "g", "parameters": {"required": ["b"]}}]},
    ]
    rows = [{**row, **(extra[n] if n < 2 else {})} for n, row in enumerate(CHATS)]
    rows[0] = {**rows[0], "messages": [*CHATS[0]["messages"], {"role": "user", "content": "f?", "name": "ann"}]}
    rows[1] = {**rows[1], "messages": [CHATS[1]["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    mark = "{% generation %}{{ m.content }}{% endgeneration %}"
    folder = model(
        root / "m", template=f"{{{{ tools | tojson }}}}{{% for m in messages %}}{{{{ m | tojson }}}}{mark}{{% endfor %}}"
    )
    right, table = templated(folder, rows), pyarrow.Table.from_pylist(rows)
    write = {
        "pyarrow, Parquet": lambda path: pyarrow.parquet.write_table(table, f"{path}/a.parquet"),
        "Parquet of one row a group": lambda path: pyarrow.parquet.write_table(table, f"{path}/a.parquet", row_group_size=1),
        "Feather": lambda path: pyarrow.feather.write_feather(table, f"{path}/a.feather"),
        "datasets, to_parquet": lambda path: Dataset.from_list(rows).to_parquet(f"{path}/a.parquet"),
        "datasets, JSON columns": lambda path: Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(f"{path}/a.parquet"),
        "datasets, save_to_disk": lambda path: Dataset.from_list(rows).save_to_disk(f"{path}/a"),
        "pandas, to_parquet": lambda path: pandas.DataFrame(rows).to_parquet(f"{path}/a.parquet"),
        "JSONL": lambda path: lines(Path(path, "a.jsonl"), rows),
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
        answer = {
            "role": "assistant",
            "content": "Fine.",
            part: "hidden" if part != "tool_calls" else _call({})["messages"][1][part],
        }
        row = {"messages": [CHATS[0]["messages"][0], answer]}
        words = warned(lines(root / "part.jsonl", [row]), folder)
        is_written = "hidden" in templated(folder, [row])[0][0] or "tool" in templated(folder, [row])[0][0]
        right = "silent" if is_written else f"warning: the model's chat template drops {part} (in 1 rows)"
        yield Case(f"`{part}` in an answer", words.partition(";")[0], right, "transformers' text lacks it", PARTS)
    (root / "own.jinja").write_text(template := CHATML.replace("<|im_end|>", "<|endoftext|>"))
    data, flags = lines(root / "own.jsonl", CHATS), ("--chat-template", root / "own.jinja")
    yield Case(
        "`--chat-template FILE`",
        shown(data, folder, *flags),
        templated(model(root / "own", template=template), CHATS),
        source,
        USER_TEMPLATE,
    )


def _call(arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": "", "tool_calls": calls}]}


def _beginnings(root: Path) -> Iterator[Case]:
    """Texts that a template has written, with BOS."""
    folder = model(root / "bos", style="llama 3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    write = tokenizer.apply_chat_template
    full = [write(row["messages"], tokenize=False) for row in CHATS]
    prompts = [write(row["messages"][:1], tokenize=False, add_generation_prompt=True) for row in CHATS]
    answers = [row["messages"][1]["content"] + tokenizer.eos_token for row in CHATS]
    both = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    sets: dict[str, tuple[Rows, list[str]]] = {
        "text": ([{"text": text} for text in full], full),
        "text without BOS": (
            [{"text": text} for text in SAYS],
            [f"{tokenizer.bos_token}{text}{tokenizer.eos_token}" for text in SAYS],
        ),
        "prompt, completion": ([{"prompt": p, "completion": a} for p, a in zip(prompts, answers, strict=True)], both),
        "prompt, chosen, rejected": (
            [{"prompt": p, "chosen": a, "rejected": f"no{tokenizer.eos_token}"} for p, a in zip(prompts, answers, strict=True)],
            [text for p, b in zip(prompts, both, strict=True) for text in (b, f"{p}no{tokenizer.eos_token}")],
        ),
    }
    for name, (rows, texts) in sets.items():
        documents = shown(lines(root / "b" / f"{name}.jsonl", rows), folder)
        value = [(text, "") for text, _ in documents] if isinstance(documents, list) else documents
        yield Case(f"rendered {name}", value, [(text, "") for text in texts], "transformers' text, one BOS", BOS)
