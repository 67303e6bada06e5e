"""What do a run's file and flags say, and is it understood?

The file is YAML or TOML and is read as plain data: no alias, no tag, no key twice, nothing that runs code or names code to be run.
What the command line says goes before what the file says. Relative paths are relative to the working directory, as on the command
line, wherever the file lies. The settings as they were understood are written beside the run, and read back as they were.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from penstock.settings import DataSettings, EvaluationSettings, RunSettings
from runtime.errors import PenstockError
from runtime.files import read_whole, write_whole
from runtime.units import on_one_line

if TYPE_CHECKING:
    from yaml.nodes import Node

MAX_CONFIG_BYTES = 64 * 2**10  # far above any list of settings and prompts
MAX_ADVICE = 360  # characters about keys that do not exist; of many, only their names are said
MAX_DOTS = 256  # on a line of TOML: the standard library's reader needs memory with the square of the parts of one key
RUN_FILE = "run.yaml"
WRITTEN_BY_A_RUN = "# As a run of Penstock understood its settings.\n"

_RUN = TypeAdapter(RunSettings)

# What other trainers call a setting, and ours.
ALSO_KNOWN_AS = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optimizer.lr"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), "optimizer.schedule.kind"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps", "lr_warmup_steps"), "optimizer.schedule.warmup_steps"),
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    **dict.fromkeys(("num_train_epochs", "num_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "training_steps"), "steps"),
    **dict.fromkeys(("output_dir", "save_dir"), "out"),
    **dict.fromkeys(("model_name_or_path", "model_path"), "model"),
    **dict.fromkeys(("dataset", "train_file", "dataset_path", "data_path"), "data.path"),
    **dict.fromkeys(("eval_dataset", "validation_file"), "evaluation.data"),
    **dict.fromkeys(("save_steps", "save_every"), "checkpoint.every"),
    **dict.fromkeys(("save_total_limit", "keep_latest_k"), "checkpoint.keep"),
    **dict.fromkeys(("eval_steps", "eval_every"), "evaluation.every"),
    **dict.fromkeys(("dataloader_num_workers", "preprocessing_num_workers"), "data.workers"),
    **dict.fromkeys(("report_to", "monitor", "loggers"), "monitors"),
    **dict.fromkeys(("sample_packing", "pack_sequences"), "data.packing"),
    **dict.fromkeys(("datasets", "interleave_probs", "dataset_mixer"), "data.mix"),
    **dict.fromkeys(("dataset_split", "train_split", "dataset_train_split"), "data.split"),
    **dict.fromkeys(("eval_split", "dataset_test_split"), "evaluation.split"),
}
# What other trainers have and this one has not.
_ABSENT = {
    "q?lora.*|(use_)?peft.*|adapter_.*": "the plan says it: `penstock plan --train lora:r=16,alpha=32,targets=q_proj+v_proj`",
    "(use_)?(dora|rslora).*": "it does not exist here: adapters are LoRA as PEFT has it by default",
    "load_in_.*|quantiz.*|bnb_.*": "the plan says it: weights that are not trained are packed by `penstock plan --base nf4`",
    "freez.*|unfrozen.*|finetuning_type": "the plan says what is trained: `penstock plan --train layers:20-31`, or names:*norm*",
    "deepspeed.*|fsdp.*|ddp_.*|tensor_parallel.*": "how several GPUs share a step is the plan's: `penstock plan --gpus`",
    "rl|dpo.*|pref_.*|ref_model.*|reward_.*": "training on preferences or rewards does not exist here",
    "optim|optim_args": "AdamW is the only optimizer; its settings are those of `optimizer`",
    "gradient_checkpointing.*|activation_.*|offload.*": "the plan chooses what is recomputed and what is offloaded",
    "neftune.*|label_smoothing.*": "it does not exist here: the loss is cross-entropy alone",
    "push_to_hub.*|hub_.*": "nothing is sent to a network here",
    "val_set_size|val_size|test_size": "held-out data is given as files of its own: evaluation.data",
    "load_best_model.*|early_stopping.*|metric_for_best.*": "it does not exist here; checkpoint.keep says what stays",
}
_OF_THE_PLAN = {
    **dict.fromkeys(("clip_norm", "max_grad_norm", "gradient_clipping"), "--clip-norm"),
    **dict.fromkeys(("seq_len", "max_seq_length", "cutoff_len", "max_length"), "--seq-len"),
    **dict.fromkeys(
        ("batch_size", "per_device_train_batch_size", "global_batch_size", "gradient_accumulation_steps"), "--batch-size"
    ),
    **dict.fromkeys(("micro_batch", "micro_batch_size"), "--micro-batch"),
    **dict.fromkeys(("bf16", "fp16", "dtype", "torch_dtype"), "--compute"),
    **dict.fromkeys(("attn_implementation", "flash_attn", "attention"), "--attention"),
}
_EXPECTED = {
    "tuple_type": "should be a list",
    "json_invalid": "should be UTF-8, names of files too",  # half a surrogate pair, or a name that is no text
    "string_pattern_mismatch": "should hold no NUL",
}


class RunConfigError(PenstockError):
    """A run's file, or its flags, that cannot be right."""


def read_run(path: Path | None, flags: Mapping[str, Any]) -> RunSettings:
    """The settings of a file, if there is one, and of `flags` (by dotted names, as `optimizer.lr`), which go before it."""
    given = _with_data_in_full(_read(path)) if path is not None else {}
    where = str(path) if path is not None else "the command line"
    _refuse_unknown(where, given, RunSettings, "")
    given = _without_empty_sections(given, RunSettings)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in flags and other not in flags:
            given.pop(other, None)  # the two say the same thing
    for name, value in flags.items():
        *sections, key = name.split(".")
        section = given
        for part in sections:
            section = section.setdefault(part, {})
        section[key] = value
    if given.get("data", {}).get("path") is None and not given.get("data", {}).get("mix"):
        raise RunConfigError("no data to train on: give --data, or data.path in the file of --config")
    try:
        settings = _RUN.validate_json(json.dumps(given, default=str))
    except ValidationError as error:
        raise RunConfigError(_words(error, where, flags)) from None
    if settings.steps is not None and settings.epochs is not None:
        raise RunConfigError(f"{where}: steps and epochs are both given; give one of them")
    if settings.data.path is not None and settings.data.mix:
        raise RunConfigError(f"{where}: data.path and data.mix are both given; put the path among those of data.mix")
    _refuse_idle(where, settings)
    return settings


def _with_data_in_full(given: dict[str, Any]) -> dict[str, Any]:
    """The same, where `data` or `data.path` is a path or a list of them, each with a weight or without."""
    data = given.get("data")
    if isinstance(data, str | list):
        data = {"path": data}
    if isinstance(data, dict) and isinstance(data.get("path"), list):
        if "mix" in data:
            raise RunConfigError("data.path is a list, and data.mix is there too; name all sets in one of them")
        parts = [part_of(part) if isinstance(part, str) else part for part in data["path"]]
        data = {key: value for key, value in data.items() if key != "path"} | {"mix": parts}
    return given | {"data": data} if "data" in given else given


def part_of(said: str) -> dict[str, Any]:
    """`a.jsonl:0.7`, or a path alone; a file may be called so."""
    path, _, weight = said.rpartition(":")
    if path and not os.path.exists(said):
        with suppress(ValueError):
            return {"path": path, "weight": float(weight)}
    return {"path": said}


def _refuse_idle(where: str, settings: RunSettings) -> None:
    """A setting that would do nothing is a misunderstanding."""
    data, looks, saving = settings.data, settings.evaluation, settings.checkpoint
    idle = {
        "evaluation.every": (looks.every is not None and looks.data is None and not looks.prompts, "evaluation.data or prompts"),
        "evaluation.split": (looks.split is not None and looks.data is None, "evaluation.data"),
        "evaluation.top_p": (looks.top_p != EvaluationSettings().top_p and looks.temperature == 0, "a temperature above 0"),
        "data.shuffle_buffer": (
            data.shuffle_buffer != DataSettings(data.path).shuffle_buffer and not data.streaming,
            "data.streaming",
        ),
        "checkpoint.copy_bytes": (saving.copy_bytes is not None and not saving.background, "checkpoint.background"),
    }
    for key, (is_idle, needs) in idle.items():
        if is_idle:
            raise RunConfigError(f"{where}: {key} does nothing without {needs}; drop it, or add that")


def _without_empty_sections(given: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The same; of a section whose keys are all commented out, YAML says that it is null."""
    kinds: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    kept = {key: value for key, value in given.items() if value is not None or not is_dataclass(kinds[key])}
    return {
        key: _without_empty_sections(v, kinds[key]) if isinstance(v, dict) and is_dataclass(kinds[key]) else v
        for key, v in kept.items()
    }


def write_run(path: Path, settings: RunSettings) -> None:
    """Write the settings whole, so that `read_run` reads the same; OSError where that is impossible."""
    write_whole(path, run_text(settings))


def run_text(settings: RunSettings) -> str:
    """The settings as YAML, every one of them."""
    import yaml

    class Writer(yaml.SafeDumper):  # type: ignore[misc]
        """Quotes whatever any reader of YAML might take for something other than text, or for the end of a line."""

        def represent_str(self, data: str) -> Any:
            return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if set(data) & set(_LINE_ENDS) else None)

    Writer.add_representer(str, Writer.represent_str)
    Writer.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return WRITTEN_BY_A_RUN + str(
        yaml.dump(_plain(asdict(settings)), Dumper=Writer, sort_keys=False, allow_unicode=True, width=120)
    )


def _plain(value: Any) -> Any:
    """Lists for tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _read(path: Path) -> dict[str, Any]:
    """The keys and values of a file; RunConfigError says where it is wrong."""
    readers = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml}
    if path.suffix.lower() not in readers:
        raise RunConfigError(f"{path}: neither YAML nor TOML by its name; name it .yaml or .toml")
    try:
        text = read_whole(path, MAX_CONFIG_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise RunConfigError(f"{path}: cannot be read ({error.strerror}); give the file of a run") from None
    except UnicodeDecodeError as error:
        raise RunConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    try:
        found = readers[path.suffix.lower()](path, text)
    except RecursionError:
        raise RunConfigError(f"{path}: nested far deeper than any settings; write it plainly") from None
    if not isinstance(found, dict):
        raise RunConfigError(f"{path}: no keys and values; begin for example with `data:` and, indented, `path: FOLDER`")
    return found


def _read_toml(path: Path, text: str) -> Any:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > MAX_DOTS:
            raise RunConfigError(f"{path}:{number}: more than {MAX_DOTS} dots on one line; break the line")
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise RunConfigError(f"{path}: not TOML ({str(error)[:120]}); mend it there") from None


# -- YAML -----------------------------------------------------------------------------------------------------------------

# The scalars of YAML 1.2's core schema, with 10_000 for long numbers. YAML 1.1, which PyYAML reads, takes `1e-5` for text, `no`
# for false and `12:30` for 750.
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_LINE_ENDS = "\n\r\x85\u2028\u2029"  # as YAML has them: but for in double quotes it reads them as spaces
_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$")


def _read_yaml(path: Path, text: str) -> Any:
    import yaml

    class Composer(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses to repeat what was named before: a few such names can stand for more than any memory holds."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent):
                raise yaml.composer.ComposerError(None, None, "an alias; write out what it stands for", event.start_mark)
            if event.tag is not None:
                raise yaml.composer.ComposerError(None, None, f"the tag {event.tag[:60]}; write a plain value", event.start_mark)
            return super().compose_node(parent, index)

    try:
        root = yaml.compose(text, Loader=Composer)
        return {} if root is None else _value(path, root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise RunConfigError(
            f"{path}{line}: not YAML as it is read here ({error.problem or error.context}); mend it there"
        ) from None
    except yaml.YAMLError as error:
        raise RunConfigError(f"{path}: not YAML ({' '.join(str(error).split())[:120]}); mend it there") from None


def _value(path: Path, node: "Node") -> Any:
    """What a node of YAML's tree says: text, numbers, lists and keys with values, and nothing else."""
    from yaml.nodes import ScalarNode, SequenceNode

    if isinstance(node, ScalarNode):
        return node.value if node.style else _scalar(path, node)
    if isinstance(node, SequenceNode):
        return [_value(path, item) for item in node.value]
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, ScalarNode):
            raise RunConfigError(f"{place}: a key is a list or has keys of its own; write a name")
        if key_node.value in found:
            raise RunConfigError(f"{place}: {key_node.value[:40]!r} stands twice; keep the one that is meant")
        found[key_node.value] = _value(path, value_node)
    return found


def _scalar(path: Path, node: "Node") -> Any:
    """The value of a word without quotes."""
    text: str = node.value
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text.lower() == "true"
    try:
        return int(text) if _INT.match(text) else float(text) if _FLOAT.match(text) else text
    except ValueError:  # too many digits
        raise RunConfigError(f"{path}:{node.start_mark.line + 1}: {text[:40]!r} is no number; mend it there") from None


# -- words ----------------------------------------------------------------------------------------------------------------


def _refuse_unknown(where: str, given: Mapping[str, Any], kind: type, prefix: str) -> None:
    """RunConfigError for all keys that are no settings."""
    if wrong := dict(_unknown(given, kind, prefix)):
        each = "; ".join(f"{place}: {words}" for place, words in wrong.items())
        if len(wrong) > 1 and len(each) > MAX_ADVICE:
            each = on_one_line(f"{len(wrong)} keys that do not exist: {', '.join(wrong)}", MAX_ADVICE)
        raise RunConfigError(f"{where}: {each}")


def _unknown(given: Mapping[str, Any], kind: type, prefix: str) -> Iterator[tuple[str, str]]:
    """Each key that is no setting, or no section, and what is wrong with it."""
    known: dict[str, Any] = {field.name: field.type for field in fields(kind)}
    for key, value in given.items():
        place = prefix + str(key)
        if key not in known:
            yield place, f"no such key; {advice(place)}"
        elif is_dataclass(known[key]) and isinstance(value, dict):
            yield from _unknown(value, known[key], place + ".")
        elif is_dataclass(known[key]) and value is not None:
            names = ", ".join(field.name for field in fields(known[key]))
            yield place, f"should hold keys of its own ({names}), found {_shown(value)}"


def names(kind: type = RunSettings, prefix: str = "") -> Iterator[str]:
    """The dotted name of every setting, section by section."""
    for field in fields(kind):
        if is_dataclass(field.type):
            yield from names(field.type, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + field.name


def advice(place: str) -> str:
    """What may have been meant by a key that is not there."""
    section, _, key = place.rpartition(".")
    if key == "trust_remote_code":
        return "code that comes with a model or with data is never run, and nothing turns that on"
    if absent := next((words for names, words in _ABSENT.items() if re.fullmatch(names, key)), None):
        return absent
    if key in _OF_THE_PLAN:
        return f"it is the plan's: say {_OF_THE_PLAN[key]} to `penstock plan`"
    valid = list(names())
    here = {name.rpartition(".")[2]: name for name in valid if name.rpartition(".")[0] == section}
    anywhere = {name.rpartition(".")[2]: name for name in reversed(valid)} | ALSO_KNOWN_AS
    whole = {name: name for name in valid}
    for asked, among, cutoff in ((key, here, 0.75), (key, anywhere, 0.75), (place, whole, 0.6), (key, here, 0.4)):
        if found := difflib.get_close_matches(asked, among, 1, cutoff):
            return f"did you mean {among[found[0]]}?"
    return f"there are {', '.join(field.name for field in fields(RunSettings))}"


def _words(error: ValidationError, where: str, flags: Mapping[str, Any]) -> str:
    """The first thing that is wrong, in one line."""
    first = error.errors()[0]
    place = on_one_line(".".join(str(part) for part in first["loc"]), 120)
    expected = _EXPECTED.get(first["type"]) or first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    said_where = "the command line" if re.split(r"\.\d+", place)[0] in flags else where
    return f"{said_where}: {place or 'the settings'}: {expected[:200]}, found {_shown(first['input'])}"


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict) else "keys"
    return text if len(text) <= 60 else text[:57] + "..."
