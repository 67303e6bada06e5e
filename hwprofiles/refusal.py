"""What is wrong with a profile, in one line?"""

import difflib
from collections.abc import Sequence
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

POINTS, LAW = "points", "law"  # the two forms of a rate over size, which are no keys of a file


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """One line: the key, what is wrong with it, and what to do. A misspelled key is worth more than the one it leaves missing."""
    errors = error.errors(include_url=False)
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    keys = [part for part in first["loc"] if part not in (POINTS, LAW)]
    key = keys[-1] if keys else ""
    place = plain(".".join(map(str, keys)))
    match first["type"]:
        case "extra_forbidden":
            fields = _fields_at(root, first["loc"][:-1])
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.4)
            return f"{place}: unknown key; write {(near or [' or '.join(fields)])[0]}"
        case "missing":
            return f"{place}: missing; add it, with its unit as named, or make the profile again with `penstock probe`"
        case "value_error":
            problem = plain(first["msg"].removeprefix("Value error, "))
            return f"{place}: {problem}" if first["loc"] else problem
        case _:
            return f"{place}: {plain(first['msg'])}; correct it, in the unit of its name"


def _fields_at(root: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Names of the keys that belong at a place below the root."""
    here: Any = root
    for key in place:
        if key in (POINTS, LAW):
            forms = [get_args(form) for form in get_args(get_args(here)[0])]
            here = next(form for form, tag in forms if tag.tag == key)
        elif isinstance(here, type) and issubclass(here, BaseModel):
            here = here.model_fields[str(key)].annotation
        else:
            here = get_args(here)[0] if get_origin(here) is tuple else get_args(here)[-1]
        if get_origin(here) is UnionType:
            here = get_args(here)[0]
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []


def plain(text: str) -> str:
    """Text that fits on a line of a terminal, whatever a file holds."""
    return "".join(c if c.isprintable() else " " for c in text)[:200]
