"""Data as Python objects. Rows are written to a file in the cache, named by content; streams and batches are read in order."""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from penstock.caches import ROWS_FOLDER, cache_folder
from penstock.data.dict_batches import MOST_HELD_OUT, DictBatches
from penstock.data.files import table_rows, without_nulls
from penstock.data.formats import COLUMNS, not_understood
from penstock.data.images import image_token_of, image_url
from penstock.data.user_batches import Batches, UserBatches
from penstock.model_checks.document_isolation import supports_documents
from penstock.runtime.errors import DataError, user_code
from penstock.runtime.plan import Plan
from penstock.settings import DataPart

ROWS_AT_ONCE = 1000  # from a Dataset
ACCEPTED = "a path, a list of paths or rows, a datasets.Dataset, an iterable of dict batches, or an object with batch(step)"
_PART = {part.name for part in fields(DataPart)}


@dataclass(frozen=True, slots=True)
class GivenData:
    """Data of a program: settings by dotted name; and batches, or rows to stream, if no file holds them."""

    settings: dict[str, Any] = field(default_factory=dict)
    batches: UserBatches | None = None
    rows: Iterable[Any] | None = None


def training_data(data: Any, plan: Plan, columns: Collection[str] = ()) -> GivenData:
    """Return the training data of a program. `columns`: further ones to read. DataError for an object that is no data."""
    if isinstance(data, IterableDataset):
        _refuse_packed("the IterableDataset", data.column_names or ())
        name, rows = f"an {type(data).__name__}", data.with_format(None)
        return GivenData({"data.path": name, "data.streaming": True}, rows=rows)
    if (settings := _in_files(data, columns, "data")) is not None:
        return GivenData(settings)
    n_rows = plan.semantics.all_ranks.batch_size
    program = data if _has_batches(data) else _dicts(data, plan, n_rows, "data")
    batches = user_batches(program, plan, n_rows)
    return GivenData({"data.path": batches.fingerprint}, batches)


def held_out_data(data: Any, plan: Plan, columns: Collection[str] = ()) -> GivenData:
    """Return held-out data of a program, like `training_data`. Rows and batches that come one by one are read whole."""
    if isinstance(data, IterableDataset):
        _refuse_packed("the IterableDataset", data.column_names or ())
        data = _at_most(data.with_format(None), f"the {type(data).__name__}")
    elif _has_batches(data):
        raise DataError(f"eval_data: a {type(data).__name__} has batch(step) without an end; give rows, or a list of dict batches")
    if (settings := _in_files(data, columns, "eval_data")) is not None:
        if "data.mix" in settings:
            raise DataError("eval_data: several data sets; give one, or the rows of all in one")
        return GivenData({"evaluation.data": settings["data.path"]})
    n_rows = plan.semantics.objective.rows_each
    is_iterable = isinstance(data, Iterable) and not isinstance(data, Mapping)
    batches = _dicts(_at_most(data, f"the {type(data).__name__}") if is_iterable else data, plan, n_rows, "eval_data")
    n = batches.count_rows() // n_rows
    if not n:
        raise DataError(f"eval_data: a {type(data).__name__} with fewer than {n_rows} rows; give more")
    settings = {"evaluation.data": f"batches of {type(data).__qualname__}"}
    return GivenData(settings, user_batches(batches, plan, n_rows, n))


def user_batches(program: Batches | DictBatches, plan: Plan, n_rows: int, n_steps: int | None = None) -> UserBatches:
    """Return batches of `n_rows` rows that are validated for the plan."""
    token, no_documents = image_token_of(plan.model.config), supports_documents(plan.model.config, plan.semantics)
    semantics, vocab_size = plan.semantics, plan.workload.blocks[0].parameters[0].shape[0]
    return UserBatches(program, semantics.seq_len, n_rows, vocab_size, no_documents, semantics.objective, n_steps, token)


def _has_batches(data: Any) -> bool:
    return callable(getattr(data, "batch", None)) and not isinstance(data, Dataset | IterableDataset)


def _dicts(data: Any, plan: Plan, n_rows: int, argument: str) -> DictBatches:
    if not isinstance(data, Iterable) or isinstance(data, Mapping):
        advice = "one of its splits, as data['train']" if isinstance(data, DatasetDict | IterableDatasetDict) else ACCEPTED
        has_items = callable(getattr(data, "__getitem__", None)) and not isinstance(data, Mapping)
        how = ", or put it into a DataLoader" * has_items
        raise DataError(f"{argument}: a {type(data).__qualname__} is not read; give {advice}{how}")
    return DictBatches(data, plan.semantics.seq_len, n_rows, plan.semantics.objective.inputs)


def _in_files(data: Any, columns: Collection[str], argument: str) -> dict[str, Any] | None:
    """Return the settings that name the given files, or one that is written here; None if no file can hold the data."""
    if isinstance(data, list | tuple | Dataset) and not len(data):
        raise DataError(f"{argument}: the {type(data).__name__} is empty; give rows")
    match data:
        case str() | Path():
            return {"data.path": str(data)}
        case Dataset():
            return {"data.path": str(write_rows(_dataset_rows(data, columns), columns))}
        case list() | tuple() if data and all(isinstance(item, Mapping) and "input_ids" in item for item in data):
            return None
        case list() | tuple():
            return _of_list(data, columns, argument)
    return None


def _of_list(items: list[Any] | tuple[Any, ...], columns: Collection[str], argument: str) -> dict[str, Any]:
    """Return the settings of a list of paths and entries of `data.mix`, or of rows. DataError if it can be both."""
    is_path = [isinstance(item, str | Path) or (isinstance(item, Mapping) and "path" in item) for item in items]
    for i, (item, is_named) in enumerate(zip(items, is_path, strict=True)):
        if not isinstance(item, str | Path | Mapping):
            raise DataError(f"{argument}: item {i} of the list is a {type(item).__qualname__}; give {ACCEPTED}")
        if is_named is not is_path[0]:
            kinds = ("a path", "a row") if is_named else ("a row", "a path")
            raise DataError("{}: item {} of the list is {}, and item 0 {}; give a list of one kind".format(argument, i, *kinds))
        if isinstance(item, Mapping) and is_named and (unknown := [str(name) for name in item if name not in _PART]):
            problem = f"{argument}: item {i} of the list has path, as an entry of data.mix, and {', '.join(unknown)[:80]}, as a row"
            raise DataError(f"{problem}; call the column path otherwise, or leave the others out")
    if not is_path[0]:
        return {"data.path": str(write_rows(items, columns))}
    return {"data.mix": [dict(part) if isinstance(part, Mapping) else {"path": str(part)} for part in items]}


def _dataset_rows(data: Dataset, columns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Dataset as those of its Arrow file. DataError for one with no column that is read, or a transform."""
    _refuse_packed("the Dataset", data.column_names)
    if not any(name in COLUMNS or name in columns for name in data.column_names):
        raise not_understood("the Dataset", data.column_names)
    if data.format["type"] == "custom":
        raise DataError("the Dataset has a transform, which is not read; apply it to its rows with map")
    for table in data.with_format("arrow", columns=data.format["columns"]).iter(ROWS_AT_ONCE):
        for batch in table.to_batches():
            yield from table_rows(batch)


def _refuse_packed(place: str, names: Collection[str]) -> None:
    """Raise DataError for a data set of packed tokens, because each of its rows would be read as one document."""
    if {"input_ids", "position_ids"} <= {*names}:
        how = "DataLoader(dataset, batch_size=None), or a row for each document"
        raise DataError(f"{place} holds packed tokens, with position_ids; give {how}")


def _at_most(data: Iterable[Any], name: str) -> list[Any]:
    """Return the items of finite data, rows without nulls in structs. DataError for more than can be held."""
    with user_code(name):
        items = [without_nulls(item) if isinstance(data, IterableDataset) else item for item in islice(data, MOST_HELD_OUT + 1)]
    if len(items) > MOST_HELD_OUT:
        raise DataError(f"eval_data: {name} has more than {MOST_HELD_OUT:,} items; give fewer, as take(1000) does")
    return items


def write_rows(rows: Iterable[Mapping[str, Any]], columns: Collection[str] = (), path: Path | None = None) -> Path:
    """Write rows as a JSONL, to `path` or in the cache under a name by its content. Return its path. Images become `data:` URLs.
    Unread columns without JSON are left out. DataError for a row that is no JSON, or a file that cannot be written."""
    partial, digest = None, hashlib.sha256()
    try:
        folder = cache_folder() / ROWS_FOLDER if path is None else path.parent
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as file:
            partial = Path(file.name)
            for n, row in enumerate(rows, start=1):
                line = _json(row, columns, n)
                file.write(line)
                digest.update(line)
        path = path or folder / f"{digest.hexdigest()[:32]}.jsonl"
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        reason, place = getattr(error, "strerror", None) or str(error)[:80], "in the cache" if path is None else f"as {path}"
        how = "make room, or name " + ("a folder in PENSTOCK_CACHE" if path is None else "another output_dir")
        raise DataError(f"rows cannot be kept {place} ({reason}); {how}") from None
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return path


def _json(row: Mapping[str, Any], columns: Collection[str], n: int) -> bytes:
    for names in (row, [name for name in row if name in COLUMNS or name in columns]):
        try:
            return json.dumps({name: row[name] for name in names}, default=image_url).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            problem = str(error)[:80]
    raise DataError(f"row {n}: no JSON ({problem}); give text, numbers, lists and dicts")
