"""Names in the Python interface: advice on unknown arguments, and messages with keywords in place of the flags of commands."""

import re
import reprlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import lru_cache, wraps
from inspect import Parameter, isgeneratorfunction, signature
from types import NoneType
from typing import Any, ParamSpec, TypeVar, cast, get_args

from penstock.run_config import ALSO_KNOWN_AS, PLAN_KEYS, absent_advice, closest
from penstock.runtime.errors import PenstockError, PlanError
from penstock.runtime.executor import phrasing
from penstock.runtime.units import parse_bytes
from penstock.settings import settings_of

from .options import SETTINGS, StepOptions, TrainOptions

P = ParamSpec("P")
R = TypeVar("R")
# Keywords that differ from the name of their flag. `*`: in bytes
_RENAMED = {"--host-memory": "host_memory_bytes*", "--device-memory": "device_memory_bytes*", "--link": "link_bytes_per_s*"}
_RENAMED |= {
    "--host-bandwidth": "host_bandwidth_bytes_per_s*",
    "--disk-read": "disk_read_bytes_per_s*",
    "--compute": "compute_dtype",
}
_RENAMED |= {"--master": "master_dtype", "--clipped-steps": "clipped_fraction", "--data": "data", "--eval-data": "eval_data"}
_SAME = "seq-len batch-size clip-norm policy host-cores kernels deterministic gpus hosts network-gbit loss measured no-dropout"
_SAME += " resume resume-from search machine"
_SWITCHES = {"deterministic", "no_dropout", "resume", "search", "from_scratch"}
_WORDS = "none|nf4|int8|fp8-rows|fp8|mxfp4|bf16|fp32|lora|all|dpo|kto|reward|classify|distill|eager|fused|lion|adamw|bytes|cpu|cuda"
_WORDS += "|emulated"
_VALUE = r"'[^']*'|[A-Z]{2,}(?:\.py:[A-Z]+)?|\d\w*(?:\.\d+)?%?|[\w.*/+-]+[:=](?:[^\s,;`()']|,(?=\S))+(?<!:)|~?\.{0,2}/[^\s,;`]+"
_VALUE += rf"|checkpoint-\d+|(?:{_WORDS}|\w+(?=: ))(?:,projector)?\b"
_FLAG = re.compile(rf"(?<![\w-])(--[a-z]+(?:-[a-z]+)*)(?![\w-])(?:[ =]({_VALUE}))?")
_COMMAND = re.compile(r"`penstock (plan|run|forward|check)(?: ([^`]*))?`")
_FUNCTIONS = {"plan": "plan", "run": "train", "forward": "forward", "check": "check"}


@lru_cache
def _keywords() -> dict[str, tuple[str, bool]]:
    """Return the keyword of each flag, or the dotted name of a setting without one, and True if it is a switch."""
    keywords = {f"--{name}": name.replace("-", "_") for name in _SAME.split()} | _RENAMED
    keywords |= {f"--{name.replace('_', '-')}": name for name in StepOptions.__annotations__ if name not in keywords.values()}
    table = {flag: (name, name in _SWITCHES) for flag, name in keywords.items()}
    arguments = {setting: name for name, setting in SETTINGS.items()}
    for setting, field in settings_of():
        if field.metadata and (flag := field.metadata["flag"].name) not in table:
            table[flag] = arguments.get(setting, setting), field.default is False
    return table


def in_python(text: str) -> str:
    """Return a message with keyword arguments in place of flags, and functions in place of commands. Example: `plan with
    --train lora` becomes `plan with train="lora"`."""
    text = _FLAG.sub(_keyword, text)
    text = re.sub(r'(=(?:"[^"]*"|[\w.]+)) (?=\w+=["\w])', r"\1, ", text)
    text = _COMMAND.sub(lambda match: f"`penstock.{_FUNCTIONS[match[1]]}{_call(match[2])}`", text)
    return text.replace("the command line: ", "settings: ").replace("in the file of --config", "in settings")


def _keyword(match: re.Match[str]) -> str:
    """Return the keyword argument of a flag. A name that is not Penstock's flag is unchanged."""
    if match[1] not in _keywords():
        return match[0]
    (name, is_switch), value = _keywords()[match[1]], match[2] or ""
    if name.endswith("*"):
        with suppress(ValueError):
            value = f"{parse_bytes(value):_}" if value else ""
    elif value.endswith("%"):
        value = f"{float(value[:-1]) / 100:g}"
    elif value == "none":
        value = "None"
    elif name == "data.columns" and "=" in value:
        value = '{{"{}": "{}"}}'.format(*value.split("=", 1))
    elif value and not is_switch and not re.fullmatch(r"'.*'|[A-Z]{2,}|\d[\d.]*", value):
        value = f'["{value}"]' if name == "monitors" else f'"{value}"'
    is_of_plan = match.string[: match.start()].endswith(("plan with ", "plan again with "))
    if is_switch:  # a following word is not its value
        return _named(name, "True", is_of_plan) + f" {value}" * bool(value)
    return _named(name.rstrip("*"), value, is_of_plan)


def _named(name: str, value: str, is_of_plan: bool = False) -> str:
    """Return `steps=100`, or `settings={"data.packing": "one"}`, with `...` for a value that the message does not state."""
    is_setting = name not in SETTINGS and name in {setting for setting, _ in settings_of()} and name != "loss"
    return f'settings={{"{name}": {value or "..."}}}' if is_setting and not is_of_plan else f"{name}={value}"


def _call(words: str | None) -> str:
    if not words:
        return ""
    first, _, rest = words.partition(" ")
    return f"(..., {words})" if "=" in first else f"({first}{', ' * bool(rest)}{rest})"


@contextmanager
def python_words() -> Iterator[None]:
    """Change messages, and the message and notes of an error, to the words of Python."""
    token = phrasing.set(in_python)
    try:
        yield
    except PenstockError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        if notes := getattr(error, "__notes__", None):
            notes[:] = map(in_python, notes)
        raise
    finally:
        phrasing.reset(token)


def named_arguments(*options: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator of a public function. An unknown keyword argument becomes a PlanError with advice, and errors have the
    words of Python. `options`: types of its `**options`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = [p for p in signature(function).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        types = {p.name: p.annotation for p in parameters} | {k: v for kind in options for k, v in kind.__annotations__.items()}
        names = [p.name for p in parameters] + [name for kind in options for name in kind.__annotations__]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if unknown := [name for name in kwargs if name not in names]:
                raise PlanError("; ".join(_unknown(function.__name__, name, names) for name in unknown[:4]))
            _refuse_types(function.__name__, signature(function).bind_partial(*args, **kwargs).arguments, types)
            if isgeneratorfunction(function):
                return cast(R, _iterated(cast(Generator[Any, None, None], function(*args, **kwargs))))
            with python_words():
                return function(*args, **kwargs)

        added = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in names[len(parameters) :]]
        call.__signature__ = signature(function).replace(parameters=[*parameters, *added])  # type: ignore[attr-defined]
        return call

    return decorate


def _refuse_types(function: str, values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """PlanError for a value that is no number, text or bool although its argument is. Settings of a run are validated later."""
    for name, value in (values | values.get("options", {}) | values.get("semantics", {})).items():
        kinds = get_args(types.get(name)) or (types.get(name),)
        if name in SETTINGS or not {*kinds} <= {int, float, bool, str, NoneType}:
            continue
        accepted = (*kinds, int) if float in kinds else kinds
        if type(value) not in accepted and (isinstance(value, bool) or not isinstance(value, accepted)):
            wanted = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
            raise PlanError(f"{function}: {name}={reprlib.repr(value)}: give {wanted}")


def _iterated(values: Generator[Any, None, None]) -> Iterator[Any]:
    """Yield the values of a generator. The code between two of them keeps its words."""
    with closing(values):
        while True:
            with python_words():
                try:
                    value = next(values)
                except StopIteration:
                    return
            yield value


def _unknown(function: str, name: str, names: list[str]) -> str:
    """Return one line on an argument that does not exist, with the argument, setting or plan that it means."""
    return f"{function}: no argument {name[:60]!r}; {in_python(_meaning(function, name, names))}"


def _meaning(function: str, name: str, names: list[str]) -> str:
    trains, plans = (
        {*TrainOptions.__annotations__, "data"},
        {keyword.rstrip("*") for keyword, _ in _keywords().values()} - {*SETTINGS},
    )
    if function in ("plan", "train", "stream", "forward"):
        if (advice := absent_advice(name)) is not None:
            return advice
        if (flag := PLAN_KEYS.get(name)) is not None:
            keyword = _keywords()[flag][0]
            return f"did you mean {keyword}?" if keyword in names else f"the plan sets it: give {flag} to `penstock plan`"
        settings = {setting.rpartition(".")[2]: setting for setting, _ in reversed([*settings_of()])} | ALSO_KNOWN_AS
        if (setting := settings.get(name)) is not None:
            keyword = next((key for key, dotted in SETTINGS.items() if dotted == setting), "data" if setting == "data.path" else "")
            if keyword in names:
                return f"did you mean {keyword}?"
            return f"it is {f'{keyword}=' if keyword else _named(setting, '')} of `penstock run`"
        if name in trains and function == "plan":
            return f"it is {name}= of `penstock run`"
        if name in plans and function != "plan":
            return f"the plan sets it: give {name}= to `penstock plan`"
    near = closest(name, names)
    return f"did you mean {near}?" if near else f"it takes {', '.join(names)}"
