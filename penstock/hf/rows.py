"""Rows of a script's data set: tokenised as TRL does, ordered like its rollouts."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import Any

import torch

from penstock.data.images import images_in
from penstock.runtime.batch import UNSUPERVISED
from penstock.runtime.errors import DataError, user_code
from penstock.runtime.executor import say
from penstock.runtime.units import on_one_line

from .arguments import Job

Row = dict[str, Any]
SFT_LENGTH = 1024  # default of SFTConfig, into which TRL converts TrainingArguments
MESSAGES = ("prompt", "completion", "chosen", "rejected", "messages", "conversations")


def row_errors(number: int, row: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Report an exception as a DataError of one line that names the row."""
    return user_code(f"row {number} of the data set, with columns {on_one_line(', '.join(map(str, row)), 80)},")


def is_stream(data: Any) -> bool:
    return not callable(getattr(data, "__len__", None))


def rows_of(data: Any, n_most: int | None) -> Iterator[Row]:
    """Yield the rows of a data set or list, or the first `n_most` of a stream. Arrays are lists. DataError for another object."""
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataError(f"the data set is a {type(data).__name__}; give a Dataset, an IterableDataset or a list of dicts")
    if is_stream(data) and n_most is None:
        raise DataError("the length of a streamed data set is unknown: set max_steps")
    for number, row in enumerate(islice(data, n_most) if is_stream(data) else data):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} of the data set is a {type(row).__name__}; each row is a dict of columns")
        if has_images(row):
            raise DataError(f"row {number} of the data set has images, which these trainers do not read; train with penstock.train")
        yield {name: value.tolist() if callable(getattr(value, "tolist", None)) else value for name, value in row.items()}


def has_images(row: Mapping[str, Any]) -> bool:
    """True if a row has images, in a column or in its messages."""
    messages = [m for name in MESSAGES if isinstance(row.get(name), list) for m in row[name] if isinstance(m, Mapping)]
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    parts = [part for content in contents for part in content if isinstance(part, Mapping)]
    is_column = any(row.get(name) is not None for name in ("pixel_values", "pixel_values_videos"))
    return bool(images_in(row)) or is_column or any(part.get("type") in ("image", "image_url", "video") for part in parts)


class Tokens:
    """Tokenised rows, `input_ids` and `labels`, of text, messages, or prompt and completion, like SFTTrainer of TRL."""

    def __init__(self, tokenizer: Any, arguments: Any, job: Job, formatting: Callable[[Row], str] | None = None) -> None:
        self.tokenizer, self.formatting, options = tokenizer, formatting, vars(arguments)
        self.text: str = options.get("dataset_text_field", "text")
        self.length: Any = options.get("max_length", SFT_LENGTH)
        self.only_completion, self.only_assistant = options.get("completion_only_loss"), bool(options.get("assistant_only_loss"))
        self.chunk = self.length if options.get("packing") and options.get("packing_strategy") == "wrapped" else None
        self.is_cut = self.length is not None and not options.get("packing")
        self.keeps_end = options.get("truncation_mode") == "keep_end"
        if self.only_assistant and "{% generation" not in (getattr(tokenizer, "chat_template", None) or "").replace("{%-", "{%"):
            job.refuse("assistant_only_loss", True, "the chat template has no {% generation %}; set one with it on the tokenizer")

    def __call__(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield tokenised rows with a learned token, and print the number of others. DataError names a row of unknown columns."""
        tokenised = (self._read(number, row) for number, row in enumerate(rows))
        return _learned(tokenised) if self.chunk is None else _in_chunks(tokenised, self.chunk)

    def _read(self, number: int, row: Row) -> Row:
        if self.formatting is not None:
            with user_code(f"formatting_func of row {number}"):
                row = {self.text: self.formatting(row)}
        with row_errors(number, row):
            tokens = self._row(number, row)
        span = slice(None) if not self.is_cut else slice(-self.length, None) if self.keeps_end else slice(self.length)
        return {name: ids[span] for name, ids in tokens.items()}

    def _row(self, number: int, row: Row) -> Row:
        if "input_ids" in row:
            ids, labels = row["input_ids"], row.get("labels")
            labels = self._labels(ids, row) if labels is None else labels
            if len(labels) != len(ids):
                raise DataError(f"row {number} of the data set: {len(ids)} input_ids and {len(labels)} labels; give each token one")
            return {"input_ids": ids, "labels": labels}
        row = _chatml(row)
        if not isinstance(row.get("messages", []), list):
            raise DataError(f"row {number} of the data set: messages is a {type(row['messages']).__name__}; give a list")
        try:
            if "prompt" in row:
                ids, masks = self._completed(row)
            else:
                text = row["messages"] if "messages" in row else self._ended(row[self.text])
                ids, masks = self._encoded(text, row, return_assistant_tokens_mask=self.only_assistant)
        except KeyError as error:
            columns = f"its columns are {', '.join(row)}"
            raise DataError(f"row {number} of the data set: no column {error}; {columns}; see dataset_text_field") from None
        return {"input_ids": ids, "labels": self._labels(ids, masks)}

    def _labels(self, ids: list[int], masks: Mapping[str, Any]) -> list[int]:
        shown = [masks["completion_mask"]] if self.only_completion is not False and "completion_mask" in masks else []
        shown += [masks["assistant_masks"]] if "assistant_masks" in masks else []
        return [token if all(bits) else UNSUPERVISED for token, *bits in zip(ids, *shown, strict=True)] if shown else [*ids]

    def _encoded(self, text: str | list[Any], row: Row, **options: Any) -> tuple[list[int], dict[str, Any]]:
        if isinstance(text, str):
            return self.tokenizer(text=text)["input_ids"], {}
        tools = json.loads(row["tools"]) if isinstance(row.get("tools"), str) else row.get("tools")
        options |= {"tools": tools, **(row.get("chat_template_kwargs") or {})}
        result = self.tokenizer.apply_chat_template(text, tokenize=True, return_dict=True, **options)
        return result["input_ids"], {name: result[name] for name in ("assistant_masks",) if name in result}

    def _completed(self, row: Row) -> tuple[list[int], dict[str, Any]]:
        prompt, completion = row["prompt"], row["completion"]
        is_chat = isinstance(prompt, list)
        first, _ = self._encoded(prompt, row, **({"add_generation_prompt": True} if is_chat else {}))
        conversation = prompt + (completion if is_chat else self._ended(completion))
        ids, masks = self._encoded(conversation, row, return_assistant_tokens_mask=self.only_assistant)
        n = next((i for i, (a, b) in enumerate(zip(first, ids, strict=False)) if a != b), min(len(first), len(ids)))
        return ids, {**masks, "completion_mask": [0] * n + [1] * (len(ids) - n)}

    def _ended(self, text: str) -> str:
        end = self.tokenizer.eos_token or ""
        return text if text.endswith(end) else text + end


def _learned(rows: Iterable[Row]) -> Iterator[Row]:
    n_rows = n_learned = 0
    for row in rows:
        n_rows += 1
        if any(label != UNSUPERVISED for label in row["labels"][1:]):
            n_learned += 1
            yield row
    if n_learned < n_rows:
        say(f"{n_rows - n_learned:,} of {n_rows:,} rows have no token to learn within max_length, and are left out")


def collated(rows: Iterable[Row], collator: Any) -> Iterator[Row]:
    """Yield tokenised rows with the labels that a collator of transformers gives them: the ids of a language model's collator
    without padding tokens, or those of the row."""
    for number, row in enumerate(rows):
        ids, labels = row.get("input_ids"), row.get("labels")
        if ids is None:
            raise DataError(f"row {number} of the data set: no input_ids; tokenise it before, or use SFTTrainer")
        if getattr(collator, "mlm", None) is False:
            labels = [UNSUPERVISED if token == collator.tokenizer.pad_token_id else token for token in ids]
        if labels is None:
            advice = "give data_collator=DataCollatorForLanguageModeling(mlm=False)"
            raise DataError(f"row {number} of the data set: no labels; {advice}")
        yield {"input_ids": ids, "labels": labels, "attention_mask": row.get("attention_mask")}


def _chatml(row: Row) -> Row:
    """Return a row with `role` and `content` instead of `from` and `value`, and `messages` instead of `conversations`."""
    names = {"from": "role", "value": "content"}
    for key in MESSAGES:
        if isinstance(row.get(key), list):
            row[key] = [
                {names.get(k, k): v for k, v in m.items() if v is not None} if isinstance(m, Mapping) else m for m in row[key]
            ]
    return {"messages" if key == "conversations" else key: value for key, value in row.items()}


def _in_chunks(rows: Iterable[Row], length: int) -> Iterator[Row]:
    """Concatenate rows and cut them into chunks of `length` tokens; the last one may be shorter."""
    tokens = chain.from_iterable(zip(row["input_ids"], row["labels"], strict=True) for row in rows)
    while chunk := [*islice(tokens, length)]:
        ids, labels = zip(*chunk, strict=True)
        yield {"input_ids": ids, "labels": labels}


def grouped_order(n: int, n_each: int, n_times: int, n_steps: int, seed: int | None) -> Iterator[list[int]]:
    """Yield the prompts of each step like RepeatSampler of TRL: `n_each` of `n` prompts, `n_times` in a row; an incomplete group of
    prompts at the end of an epoch is left out. `seed`: None for the order of the rows."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if n < n_each:
        raise DataError(f"the data set has {n} prompts, and a step takes {n_each}; give more, or a smaller batch")
    n_done = 0
    while True:
        order = [*range(n)] if generator is None else torch.randperm(n, generator=generator).tolist()
        for first in range(0, n - n_each + 1, n_each):
            for _ in range(n_times):
                if n_done == n_steps:
                    return
                n_done += 1
                yield order[first : first + n_each]
