"""Model configurations (config.json) and their layer traces.

Traces of shipped models are files; for any other model they are recorded from the modules of transformers, which needs torch.
Nothing is downloaded, and remote code of a configuration (`auto_map`) is never executed.
"""

import difflib
import errno
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn, get_args

from penstock.runtime.errors import WorkloadError
from penstock.runtime.files import read_whole
from penstock.runtime.plan import LibraryKernel
from penstock.runtime.plan.packed import Base, is_readable, published_as
from penstock.runtime.plan.workload import Model, has_towers

from . import trace_cache
from .sizes import Kernels, at_size

MAX_CONFIG_FILE_BYTES = 16 * 2**20
MAX_DIMENSION = 2**31 - 1
MAX_LAYERS = 10_000  # beyond any model; limits the ops of a plan
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_RANDOM = re.compile(r"drop|jitter")  # keys of probabilities of random numbers in layers
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_IGNORED_KEYS = {
    *("transformers_version", "_name_or_path", "architectures", "torch_dtype", "dtype", "use_cache", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "return_dict", "auto_map", "quantization_config"),
}


@cache
def shipped_models() -> list[str]:
    return sorted(f.name.removesuffix(".json") for f in _models().iterdir() if f.name.endswith(".json"))


def read_model(model: str) -> Model:
    """Read a model from a folder with `config.json`, a configuration file, or a shipped name (an existing path takes precedence).

    `Model.path` is the folder if it holds weights or a tokenizer, else None. Old `*.bin` weights count, so that the runtime rejects
    them instead of training from random weights. Raise WorkloadError with the offending file and key.
    """
    try:
        if model and (path := Path(model)).is_dir():
            if not (path / "config.json").is_file():
                raise WorkloadError(f"{path}: no config.json in this folder; give a Hugging Face model folder or a shipped name")
            return _read_path(path / "config.json")
        if model and path.is_file():
            return _read_path(path)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise WorkloadError(f"{model[:120]}: cannot be read ({error.strerror}); check its permissions") from None
    names = shipped_models()
    if model not in names:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            folder = model.partition("/")[2]
            near = difflib.get_close_matches(folder.lower(), names, 1, 0.5)
            shipped = f", or give the shipped {near[0]}, which has no weights" if near else ""
            get = f"hf download {model[:120]} --local-dir {folder[:120]}"
            raise WorkloadError(f"{model[:120]!r}: no such folder, and nothing is downloaded here: {get}{shipped}")
        near = difflib.get_close_matches(model.lower(), names, 3, 0.5)
        families = sorted({name.partition("-")[0] for name in names})
        hint = f"similar: {', '.join(near)}" if near else f"shipped families: {', '.join(families)}"
        raise WorkloadError(f"{model[:120]!r}: no such folder, config.json or shipped model; {hint}")
    return shipped_model(model)


def shipped_model(name: str) -> Model:
    """Read a shipped model; a folder of the same name in the working directory is ignored."""
    return _checked(Model(_read_config((_models() / f"{name}.json").read_bytes(), name), None, name), name)


@cache
def hub_name(name: str | None) -> str | None:
    """Return the Hugging Face repository of a shipped configuration, or None."""
    names: dict[str | None, str] = json.loads((resources.files("penstock.planner") / "hub_names.json").read_text())
    return names.get(name)


def published(model: Model) -> Base | None:
    """Return the format of a model's published weights, or None if the format is not supported."""
    in_mxfp4 = model.config.get("model_type") == "gpt_oss" and model.name in shipped_models()
    return "mxfp4" if in_mxfp4 else published_as(model.config)


def note_on_weights(model: Model, base: Base = "bf16") -> str | None:
    """Return a note on published quantised weights; None if weights are bf16 or `base` keeps the published format."""
    form, subject = published(model), f"the weights of {model.name or 'this model'} are published"
    if form in ("bf16", base):
        return None
    if form is not None and is_readable(form, base):
        how = "them, and saves its own, in bf16" if base == "bf16" else "their values in bf16, and quantises these by row"
        return f"{subject} in {form.upper()}; `run` reads {how}"
    quantised = model.config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    also = " --compute fp8" if form == "fp8-rows" else ""
    alternative = f"train adapters on them with --train lora --base {form}{also}, or " if form else ""
    stored = str(form or method or "quantised")[:40]
    return f"{subject} as {stored}, which `run` does not read with --base {base}; {alternative}make a bf16 copy first"


def download(model: Model) -> str:
    """Return the download command of a shipped model, as the end of a sentence; an empty string for other models."""
    repo = hub_name(model.name)
    return "" if repo is None else f", after downloading it: hf download {repo} --local-dir {repo.partition('/')[2]}"


def dropouts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the positive probabilities of dropout and jitter in a configuration, nested like it."""
    inner = {key: dropouts(value) for key, value in config.items() if isinstance(value, dict)}
    numbers = {key: p for key, p in config.items() if _RANDOM.search(str(key)) and isinstance(p, float | int) and p > 0}
    return {key: value for key, value in {**inner, **numbers}.items() if value}


def without_dropout(model: Model) -> Model:
    """Return the model with dropout off, also where the configuration leaves it to the default of its class."""
    fields = model.config
    if _shipped_as(key_of(model)) is None:  # the recorder needs torch for it too
        from penstock.runtime.layers.meta_models import read_config

        fields = read_config(model.config).to_dict()

    def off(config: Mapping[str, Any], positive: Mapping[str, Any]) -> dict[str, Any]:
        return {**config, **{k: off(config.get(k, {}), v) if isinstance(v, dict) else type(v)(0) for k, v in positive.items()}}

    return replace(model, config=off(model.config, dropouts(fields)))


def _read_path(file: Path) -> Model:
    """Read a configuration file; `path` is its folder if weights or a tokenizer are next to it."""
    n_bytes, folder = file.stat().st_size, file.parent.resolve()
    if n_bytes > MAX_CONFIG_FILE_BYTES:
        raise WorkloadError(f"{file}: {n_bytes} bytes is larger than any configuration; give the model's config.json")
    config = _read_config(read_whole(file, MAX_CONFIG_FILE_BYTES), str(file))
    holds = any(True for pattern in (*WEIGHT_PATTERNS, *TOKENIZER_FILES) for _ in folder.glob(pattern))
    name = folder.name if file.name == "config.json" else file.stem
    return _checked(Model(config, str(folder) if holds else None, name or None), str(file))


def supported_attention(model: Model) -> tuple[str, ...]:
    """Return the attention implementations of transformers for this model, the preferred one first."""
    return tuple(_about(key_of(model))["attention"])


def library_kernels(model: Model) -> tuple[LibraryKernel, ...]:
    """Return the kernels of other packages that the model's layers can use, sorted."""
    return tuple(_about(key_of(model)).get("library_kernels", ()))


def _about(key: str) -> dict[str, Any]:
    return _known(key, "sdpa") or _known(key, "eager") or _recorder().about(key)


def outlines(
    model: Model, attention: str, n_sequences: int, seq_len: int, kernels: Collection[str] = get_args(LibraryKernel)
) -> dict[str, Any]:
    """Return the layer traces of a model for a micro-batch, or raise WorkloadError. Only applicable `kernels` are used."""
    key = key_of(model)
    how = Kernels(attention, tuple(kernel for kernel in library_kernels(model) if kernel in kernels))
    traces = _at_size(key, how, n_sequences, seq_len)
    return _recorder().outlines(key, how, n_sequences, seq_len) if traces is None else traces


def projector_trace(model: Model, n_tokens: int) -> tuple[str, dict[str, Any]]:
    """Return name and trace of a vision-language model's projector for a number of tokens of images. WorkloadError without one."""
    return _recorder().projector(key_of(model), n_tokens)  # type: ignore[no-any-return]


def refuse_another(model: Model, n_layers: int) -> None:
    """Raise WorkloadError unless the model has `n_layers` layers, because building another may need unbounded memory."""
    n_found = len(outlines(model, supported_attention(model)[0], 1, 16)["layers"])
    if n_found != n_layers:
        raise WorkloadError(f"{model.name or 'the model'} has {n_found} layers, and the plan {n_layers}; make the plan again")


@lru_cache(maxsize=256)
def _shipped_as(key: str) -> str | None:
    """Return the shipped model with the same computation as this configuration (JSON), under any name; else None."""
    essence = essence_of(json.loads(key))
    return next((name for name in shipped_models() if _shipped_essence(name) == essence), None)


@lru_cache(maxsize=256)
def _known(key: str, attention: str) -> dict[str, Any] | None:
    """Return shipped or cached traces of a configuration (JSON), or None."""
    name = _shipped_as(key)
    return trace_cache.read(key, attention) if name is None else _shipped_outlines(name)


@lru_cache(maxsize=256)
def _at_size(key: str, how: Kernels, n_sequences: int, seq_len: int) -> dict[str, Any] | None:
    known = _known(key, how.attention)
    return None if known is None else at_size(known, how, n_sequences, seq_len)


def essence_of(config: dict[str, Any]) -> dict[str, Any]:
    """Reduce a configuration to the keys that affect the computation; equal results mean equal models."""
    unused = () if config.get("use_sliding_window", False) else ("use_sliding_window", "max_window_layers", "sliding_window")
    ignored = _IGNORED_KEYS | {*(unused if "use_sliding_window" in config else ())}
    relevant = {key: value for key, value in config.items() if key not in ignored and (key, value) != ("rope_scaling", None)}
    sub = {key: part for key, part in relevant.items() if isinstance(part, dict)}
    return relevant | {key: {k: v for k, v in part.items() if k not in _IGNORED_KEYS} for key, part in sub.items()}


@cache
def _shipped_essence(name: str) -> dict[str, Any]:
    return essence_of(shipped_model(name).config)


@cache
def _shipped_outlines(name: str) -> dict[str, Any]:
    return json.loads((resources.files("penstock.planner") / "outlines" / f"{name}.json").read_text())  # type: ignore[no-any-return]


def _recorder() -> Any:
    """Import the trace recorder lazily, because it imports torch."""
    from . import layer_traces

    return layer_traces


def key_of(model: Model) -> str:
    """Serialise a configuration to JSON with sorted keys. Raise WorkloadError if its dimensions are absurd."""
    _refuse_endless(model.config, model.name or model.path or "the model's configuration")
    return json.dumps(model.config, sort_keys=True)


def _refuse_endless(config: dict[str, Any], where: str) -> None:
    for key, value in config.items():
        limit = MAX_LAYERS if key in LAYERS else MAX_DIMENSION
        if isinstance(value, int) and abs(value) > limit:
            raise WorkloadError(f"{where}: `{key}` is {value}; at most {limit}")
        if isinstance(value, dict):
            _refuse_endless(value, where)


def _models() -> Traversable:
    return resources.files("penstock.planner") / "models"


def _checked(model: Model, where: str) -> Model:
    """Return the model if it is a causal language model; else raise WorkloadError with the file name `where`."""
    if not isinstance(model.config.get("model_type"), str):
        raise WorkloadError(f"{where}: `model_type` is missing; give the config.json of a Hugging Face model")
    named = model.config.get("architectures")
    with_towers = ["ForConditionalGeneration"] if has_towers(model.config) else []
    heads = ("ForCausalLM", "LMHeadModel", "ForSequenceClassification", *with_towers)
    if named and not (isinstance(named, list) and any(str(n).endswith(heads) for n in named)):
        message = f"`architectures` is {str(named)[:60]}, not a causal language model; give a ...ForCausalLM configuration"
        raise WorkloadError(f"{where}: {message}")
    if model.config.get("use_bidirectional_attention"):
        raise WorkloadError(f"{where}: `use_bidirectional_attention` is set; only causal attention is trained here")
    _refuse_endless(model.config, where)
    return model


def _read_config(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object strictly: NaN and Infinity are rejected."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON number")

    try:
        config = json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:80]
        raise WorkloadError(f"{where}: not JSON ({reason}); give the model's config.json") from None
    if not isinstance(config, dict):
        raise WorkloadError(f"{where}: JSON, but not an object; give the model's config.json")
    return config
