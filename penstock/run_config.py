"""Settings of a run, read from a YAML or TOML file and from flags, with advice for unknown keys.

Flags override the file. Relative paths are relative to the working directory, also in the file. A run writes its validated settings
to RUN_FILE in its folder, next to its plan. `read_run` reads them back, even if the folder was moved.
"""

import difflib
import json
import os
import re
import reprlib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from penstock.runtime.errors import PenstockError
from penstock.runtime.executor import Stop
from penstock.runtime.files import read_whole
from penstock.runtime.plan import PlanFile, Policy
from penstock.runtime.units import on_one_line
from penstock.settings import RunSettings, read_table, settings_of

if TYPE_CHECKING:
    from penstock.data.user_batches import UserBatches

MAX_CONFIG_BYTES = 64 * 2**10  # far above any list of settings and prompts
MAX_ADVICE = 360  # characters of advice on unknown keys; beyond that, only their names are listed
RUN_FILE, PLAN_FILE = "run.yaml", "run-plan.json"
REMOVED = {"data": ("workers",), "evaluation": ("temperature", "top_p")}  # removed settings that older runs wrote
WRITTEN_BY_A_RUN = "# As a run of Penstock understood its settings.\n"

_RUN = TypeAdapter(RunSettings)

TABLES = read_table("other_trainers.toml")


def _by_alias(table: str) -> dict[str, str]:
    return {alias: setting for setting, names in TABLES[table].items() for alias in names}


ALSO_KNOWN_AS = _by_alias("settings")  # other trainer's name of a setting: our name
PLAN_FLAGS = _by_alias("plan_flags")
_PATHS = ("model", "adapter", "packed", "path", "data", "chat_template", "images", "tower")
PLAN_KEYS = PLAN_FLAGS | _by_alias("decided_by_plan")
_EXPECTED = {
    "tuple_type": "should be a list",
    "dataclass_type": "should hold keys of its own",
    "string_unicode": "should be UTF-8",
    "string_pattern_mismatch": "should hold no NUL",
}


class RunConfigError(PenstockError):
    """Invalid settings of a run."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A replaced plan of a run, with the predicted and measured step times of the change."""

    policy: Policy
    former_s: float  # predicted with the measured ratios
    step_s: float  # the same, of the new plan
    measured_s: float  # of the former plan


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run to assemble: its settings and plan, and arguments of a command or a program."""

    settings: RunSettings
    file: PlanFile
    where: str = "the plan"  # its place, for errors
    resume: bool = False
    resume_from: str | None = None
    time_scale: float | None = None  # slowdown of an emulated machine
    batches: "UserBatches | None" = None  # of a program, instead of the settings' data
    rows: Iterable[Any] | None = None  # of a program, streamed instead of the settings' data
    held_out: "UserBatches | None" = None  # of a program, instead of evaluation.data
    loss: Callable[..., Any] | None = None  # of a program, for a plan with a user loss
    stop: Stop = field(default_factory=Stop)
    report: Callable[[str], None] = lambda words: None  # receives progress messages
    replaced: Replaced | None = None  # the plan before this one, in this process
    replanned: Mapping[str, Any] | None = None  # JSON policies of the plan that began and of this one, for checkpoints

    @property
    def resumes(self) -> bool:
        return self.resume or self.resume_from is not None


def read_run(path: Path | None, flags: Mapping[str, Any]) -> RunSettings:
    """Read the settings of a file, if `path` is given, and of flags by dotted name (`optimizer.lr`), which override it."""
    values = {} if path is None else _with_expanded_data(_read(path))
    if path is not None and path.name == RUN_FILE and values.get("plan") == f"{values.get('out')}/{PLAN_FILE}":
        values |= {"out": str(path.parent), "plan": str(path.parent / PLAN_FILE)}  # the run's folder may have been moved
        for where, names in REMOVED.items():
            if isinstance(older := values.get(where), dict):
                values[where] = {key: value for key, value in older.items() if key not in names}
    where = "the command line" if path is None else str(path)
    for chosen, alternative in (("steps", "epochs"), ("epochs", "steps")):
        if chosen in flags and alternative not in flags:
            values.pop(alternative, None)  # alternatives
    for name, value in flags.items():
        *sections, key = name.split(".")
        section = values
        for part in sections:
            section[part] = section = {} if section.get(part) is None else section[part]
            if not isinstance(section, dict):
                break  # validation rejects it
        else:
            section[key] = str(value) if isinstance(value, Path) else value
    values = _without_nulls(values)
    data = values.get("data", {})
    if isinstance(data, dict) and not (data.get("path") or data.get("mix")):
        raise RunConfigError("no data to train on: give --data, or data.path in the file of --config")
    try:
        settings = _RUN.validate_python(values)
    except ValidationError as error:
        raise RunConfigError(_problem(error, where, flags)) from None
    if settings.steps is not None and settings.epochs is not None:
        raise RunConfigError(f"{where}: steps and epochs are both given; give one of them")
    if settings.data.path is not None and settings.data.mix:
        raise RunConfigError(f"{where}: data.path and data.mix are both given; put the path among those of data.mix")
    _refuse_idle(where, settings)
    return settings


def located(settings: RunSettings) -> RunSettings:
    """Return the settings with absolute paths. A name without a file or folder, such as a fingerprint, is unchanged."""

    def from_root(fields: dict[str, Any]) -> dict[str, Any]:
        keys = [key for key in _PATHS if isinstance(fields.get(key), str) and os.path.exists(fields[key])]
        return fields | {key: os.path.abspath(fields[key]) for key in keys}

    return _RUN.validate_python(json.loads(_RUN.dump_json(settings), object_hook=from_root))


def run_text(settings: RunSettings) -> str:
    """Return the settings as YAML for `read_run`."""
    import yaml

    return WRITTEN_BY_A_RUN + str(yaml.safe_dump(_RUN.dump_python(settings, mode="json"), sort_keys=False, width=120))


def part_of(text: str) -> dict[str, Any]:
    """Parse a data set of `--data`: `a.jsonl:0.7`, or a path alone, which may contain a colon."""
    path, _, weight = text.rpartition(":")
    if path and not os.path.exists(text):
        with suppress(ValueError):
            return {"path": path, "weight": float(weight)}
    return {"path": text}


def data_named(paths: Iterable[Any]) -> dict[str, Any]:
    """Return `path` for one data set without a weight, else `mix`."""
    parts = [part_of(path) if isinstance(path, str) else path for path in paths]
    is_one = len(parts) == 1 and isinstance(parts[0], dict) and parts[0].keys() == {"path"}
    return {"path": parts[0]["path"], "mix": ()} if is_one else {"path": None, "mix": parts}


def absent_advice(name: str) -> str | None:
    """Return the advice on another trainer's name that no setting has, or None."""
    return next((str(words) for names, words in TABLES["absent"].items() if re.fullmatch(names, name)), None)


def closest(name: str, names: Iterable[str], cutoff: float = 0.75) -> str | None:
    """Return the most similar name, or None."""
    return next(iter(difflib.get_close_matches(name, [*names], 1, cutoff)), None)


def advice(place: str) -> str:
    """Suggest a key for one that does not exist."""
    section, _, key = place.rpartition(".")
    if (absent := absent_advice(key)) is not None:
        return absent
    if key in PLAN_KEYS:
        return f"it belongs to the plan: give {PLAN_KEYS[key]} to `penstock plan`"
    names = [name for name, _ in settings_of()]
    siblings = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == section}
    anywhere = {name.rpartition(".")[2]: name for name in reversed(names)} | ALSO_KNOWN_AS
    full_names = {name: name for name in names}
    for text, candidates, cutoff in ((key, siblings, 0.75), (key, anywhere, 0.75), (place, full_names, 0.6), (key, siblings, 0.4)):
        if (near := closest(text, candidates, cutoff)) is not None:
            return f"did you mean {candidates[near]}?"
    return f"there are {', '.join(dict.fromkeys(name.partition('.')[0] for name in names))}"


def _read(path: Path) -> dict[str, Any]:
    """Return the keys and values of a file. RunConfigError names the line of a syntax error."""
    import yaml

    language = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML"}.get(path.suffix.lower())
    if language is None:
        raise RunConfigError(f"{path}: neither YAML nor TOML by its name; name it .yaml or .toml")
    try:
        text = read_whole(path, MAX_CONFIG_BYTES).decode("utf-8-sig")
        content = yaml.safe_load(text) if language == "YAML" else tomllib.loads(text)
    except OSError as error:
        raise RunConfigError(f"{path}: cannot be read ({error.strerror}); give the file of a run") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise RunConfigError(f"{path}{line}: not YAML ({error.problem}); correct it there") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise RunConfigError(f"{path}: not {language} ({' '.join(str(error).split())[:120]}); correct it there") from None
    if not isinstance(content, dict | None):
        raise RunConfigError(f"{path}: no keys and values; begin for example with `data:` and, indented, `path: FOLDER`")
    return content or {}


def _with_expanded_data(values: dict[str, Any]) -> dict[str, Any]:
    """Expand `data` or `data.path` if it is a path or a list of paths, with or without weights."""
    data = values.get("data")
    if isinstance(data, str | list):
        data = {"path": data}
    if isinstance(data, dict) and isinstance(data.get("path"), list):
        if "mix" in data:
            raise RunConfigError("data.path is a list, and data.mix is given too; name all sets in one of them")
        data = data | data_named(data["path"])
    return values | {"data": data} if "data" in values else values


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Drop keys that are null, for example a section with all keys commented out."""
    return {key: _without_nulls(v) if isinstance(v, dict) else v for key, v in values.items() if v is not None}


def _refuse_idle(where: str, settings: RunSettings) -> None:
    """Raise RunConfigError for a setting without effect, because it is a misunderstanding."""
    data, evaluation, saving, schedule = settings.data, settings.evaluation, settings.checkpoint, settings.optimizer.schedule
    has_data, decays = evaluation.data is not None, schedule.kind == "warmup-stable-decay"
    values = {name: reduce(getattr, name.split("."), settings) for name, _ in settings_of()}
    defaults = {name: field.default for name, field in settings_of()}
    resumes = (saving.every or saving.minutes) and not saving.weights_only
    for key, needs, is_there in (
        ("evaluation.every", "evaluation.data or prompts", has_data or evaluation.prompts),
        ("evaluation.split", "evaluation.data", has_data),
        ("evaluation.best", "evaluation.data", has_data),
        ("evaluation.patience", "evaluation.data and every", has_data and evaluation.every),
        ("evaluation.min_gain", "evaluation.patience", evaluation.patience is not None),
        ("data.bad_rows", "data that is read before training (leave out data.streaming)", not data.streaming),
        ("data.shuffle_buffer", "data.streaming", data.streaming),
        ("optimizer.schedule.decay_steps", "warmup-stable-decay", decays),
        ("optimizer.schedule.min_lr_fraction", "cosine", decays or schedule.kind == "cosine"),
        ("checkpoint.copy_bytes", "checkpoint.background", saving.background),
        ("replan", "checkpoints to go on from, with their state (checkpoint.every or minutes)", resumes),
    ):
        if values[key] != defaults[key] and not is_there:
            raise RunConfigError(f"{where}: {key} does nothing without {needs}; drop it, or add that")


def _problem(error: ValidationError, where: str, flags: Mapping[str, Any]) -> str:
    """Describe the unknown keys, or else the first wrong value, in one line."""
    errors = error.errors(include_url=False, include_context=False)
    unknown = {_place(e["loc"]): advice(_place(e["loc"])) for e in errors if e["type"] == "unexpected_keyword_argument"}
    if unknown:
        listing = "; ".join(f"{place}: no such key; {words}" for place, words in unknown.items())
        if len(unknown) > 1 and len(listing) > MAX_ADVICE:
            listing = on_one_line(f"{len(unknown)} keys that do not exist: {', '.join(unknown)}", MAX_ADVICE)
        return f"{where}: {listing}"
    first = errors[0]
    name = re.split(r"\.\d+", _place(first["loc"]))[0]
    flags_used = (field.metadata["flag"].name for key, field in settings_of() if key == name and name in flags and field.metadata)
    flag = next(flags_used, None)
    expected = _EXPECTED.get(first["type"]) or first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    subject = flag or f"{'the command line' if name in flags else where}: {_place(first['loc']) or 'the settings'}"
    return f"{subject}: {expected[:200]}, found {reprlib.repr(first['input'])}"


def _place(loc: tuple[int | str, ...]) -> str:
    return on_one_line(".".join(map(str, loc)), 120)
