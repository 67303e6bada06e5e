"""Which models can we read?

A configuration is taken only where we know what transformers makes of it: eight types, and of their options those that are
held against the real modules. Nothing of a model is ever executed or downloaded: keys that name code (`auto_map`,
`trust_remote_code`) are not read.
"""

import difflib
import errno
import json
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

from runtime.errors import WorkloadError
from runtime.files import read_whole
from runtime.plan.workload import Model

MAX_CONFIG_FILE_BYTES = 16 * 2**20
MAX_DIMENSION = 2**31 - 1
MAX_LAYERS = 10_000  # deeper than any model: a plan has several ops per layer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What sets one model type apart from llama; defaults are those transformers takes for an absent key."""

    head_dim: int | None = None  # where the key is absent; None: hidden_size / num_attention_heads
    null_head_dim: bool = False  # whether null means hidden_size / num_attention_heads
    null_kv_heads: bool = False  # whether null means as many as num_attention_heads
    attention: tuple[str, ...] = ("sdpa", "eager")  # what transformers lets run, the first being the better
    qkv_bias: bool | None = None  # None: the key `attention_bias`; else fixed, and no bias on the output
    default_bias: bool = False
    head_norms: bool = False  # norms of queries and keys, per head
    norm: str = "plain"
    sandwich: bool = False  # norms after attention and MLP too
    rotary: str = "full"
    sinks: bool = False
    softcap: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    window: str = "none"  # none | all layers (`every`) | all layers if used (`used`) | by `layer_types`: `tail`, `alternating`
    default_window: int | None = None
    router: str | None = None  # None: no experts
    expert_width: str = "intermediate_size"
    router_name: str = "gate"
    router_first: bool = True  # the router's weights come before those of the experts
    tied: bool = False


ARCHITECTURES = {
    "llama": Architecture(null_head_dim=True, null_kv_heads=True),
    "mistral": Architecture(null_head_dim=True, qkv_bias=False, window="every", default_window=4096),
    "qwen2": Architecture(null_kv_heads=True, qkv_bias=True, window="tail", default_window=4096),
    "qwen3": Architecture(
        head_dim=128, null_kv_heads=True, head_norms=True, window="tail", default_window=4096,
    ),
    "gemma2": Architecture(
        head_dim=256, attention=("eager",), norm="centred", sandwich=True, softcap=True, tied=True, window="alternating",
        default_window=4096, activation=("hidden_activation", "gelu_pytorch_tanh"),
    ),
    "mixtral": Architecture(null_head_dim=True, qkv_bias=False, window="every", router="fp32"),
    "qwen3_moe": Architecture(
        head_norms=True, window="used", default_window=4096, router="cast", expert_width="moe_intermediate_size",
        router_first=False,
    ),
    "gpt_oss": Architecture(
        head_dim=64, attention=("eager",), default_bias=True, norm="late", rotary="halves", sinks=True,
        window="alternating", default_window=128, router="chosen", router_name="router",
    ),
}  # fmt: skip


def shipped_models() -> list[str]:
    """Names of the configurations that come with Penstock, sorted."""
    return sorted(f.name.removesuffix(".json") for f in _models().iterdir() if f.name.endswith(".json"))


def read_model(model: str) -> Model:
    """The model a user names: a folder with `config.json`, such a file, or a shipped name (a path that exists wins).

    `path` is the folder if it holds weights or a tokenizer, else None: then weights start from seeded random values. Weights
    in an old `*.bin` form count as well, so that the runtime can refuse them rather than train from random ones. WorkloadError
    names the file and the key that is wrong.
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
        near = difflib.get_close_matches(model.lower(), names, 3, 0.5)
        hint = f"near it: {', '.join(near)}" if near else f"shipped: {', '.join(names)}"
        raise WorkloadError(f"{model[:120]!r}: no such folder, config.json or shipped model; {hint}")
    return shipped_model(model)


def shipped_model(name: str) -> Model:
    """The model of that name that comes with Penstock, whatever lies in the folder at hand."""
    return _checked(Model(_read_config((_models() / f"{name}.json").read_bytes(), name), None, name), name)


def _read_path(file: Path) -> Model:
    """The model of a configuration file, and its folder where that holds more than the configuration."""
    n_bytes, folder = file.stat().st_size, file.parent.resolve()
    if n_bytes > MAX_CONFIG_FILE_BYTES:
        raise WorkloadError(f"{file}: {n_bytes} bytes is larger than any configuration; give the model's config.json")
    config = _read_config(read_whole(file, MAX_CONFIG_FILE_BYTES), str(file))
    holds = any(True for pattern in (*WEIGHT_PATTERNS, *TOKENIZER_FILES) for _ in folder.glob(pattern))
    name = folder.name if file.name == "config.json" else file.stem
    return _checked(Model(config, str(folder) if holds else None, name or None), str(file))


def supported_attention(model: Model) -> tuple[str, ...]:
    """Attention implementations transformers lets this model run with, the better one first. WorkloadError as in `config_of`."""
    return config_of(model).architecture.attention


def config_of(model: Model) -> "Config":
    """The model's configuration, read and checked; WorkloadError carries the model's name."""
    return Config(model.config, model.name or model.path or "the model's configuration")


def refuse_another(model: Model, n_layers: int) -> None:
    """WorkloadError unless the model is one that is read, of `n_layers`: what is built from another may have no end."""
    config = config_of(model)
    if config.n_layers != n_layers:
        config.fail(f"`num_hidden_layers` is {config.n_layers}, and the plan has {n_layers} layers; make the plan again")


class Config:
    """Typed reading of a configuration: every WorkloadError names the file and the key. Widths are in elements."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where
        model_type = values.get("model_type")
        if not isinstance(model_type, str):
            self.fail("`model_type` is missing; give the config.json of a Hugging Face model")
        if model_type not in ARCHITECTURES:
            self.fail(f"model type {model_type[:60]!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")
        self.model_type, self.architecture = model_type, ARCHITECTURES[model_type]
        a = self.architecture
        named = values.get("architectures")
        if named and not (isinstance(named, list) and any(str(n).endswith("ForCausalLM") for n in named)):
            self.fail(f"`architectures` is {str(named)[:60]}, not a causal language model; give a ...ForCausalLM configuration")
        self.hidden, self.vocab = self.count("hidden_size"), self.count("vocab_size")
        self.n_layers, self.n_heads = self.count("num_hidden_layers"), self.count("num_attention_heads")
        if self.n_layers > MAX_LAYERS:
            self.fail(f"`num_hidden_layers` is {self.n_layers}; at most {MAX_LAYERS}")
        absent, null = self.n_heads if model_type == "llama" else None, self.n_heads if a.null_kv_heads else None
        self.n_kv_heads = self.count("num_key_value_heads", absent, null)
        if self.n_heads % self.n_kv_heads:
            self.fail(f"`num_attention_heads` ({self.n_heads}) is no multiple of `num_key_value_heads` ({self.n_kv_heads})")
        even = max(self.hidden // self.n_heads, 1)
        self.head_dim = self.count("head_dim", a.head_dim or even, even if a.null_head_dim else None)
        derived = values.get("head_dim") is None and a.head_dim is None
        if self.hidden % self.n_heads and (derived or model_type in ("llama", "gemma2")):
            self.fail(f"`hidden_size` ({self.hidden}) is no multiple of `num_attention_heads` ({self.n_heads})")
        if self.head_dim % 2:
            self.fail(f"`head_dim` is {self.head_dim}; rotary embeddings need an even one")
        self.inner = self.count("intermediate_size")
        self.tied = self.flag("tie_word_embeddings", a.tied)
        bias = self.flag("attention_bias", a.default_bias) if a.qkv_bias is None else a.qkv_bias
        self.qkv_bias, self.out_bias = bias, bias and a.qkv_bias is None
        self.mlp_bias = self.model_type == "llama" and self.flag("mlp_bias", False)
        self.softcap = a.softcap and values.get("attn_logit_softcapping", 50.0) is not None
        self.final_softcap = a.softcap and values.get("final_logit_softcapping", 30.0) is not None
        self._refuse_unproven()
        self._read_windows()
        if a.router is not None:
            self._read_experts(a)

    def fail(self, what: str) -> NoReturn:
        """Raise a WorkloadError that names the file, in one line."""
        raise WorkloadError(" ".join(f"{self.where}: {what}".split()))

    def count(self, key: str, absent: int | None = None, null: int | None = None) -> int:
        """A whole number above zero; `absent` and `null` are what transformers takes where the key is that."""
        value = self.values.get(key)
        if value is None and (default := null if key in self.values else absent) is not None:
            return default
        if key not in self.values:
            self.fail(f"`{key}` is missing; give the model's own config.json")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_DIMENSION:
            self.fail(f"`{key}` is {str(value)[:40]}; it must be a whole number above zero")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` is what transformers takes where the key is absent."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.fail(f"`{key}` is {str(value)[:40]}; it must be true or false")
        return value

    def _refuse_unproven(self) -> None:
        """Options under which the model would compute, or keep, something other than what we hold against transformers."""
        key, only = self.architecture.activation
        if self.values.get(key, only) != only:
            self.fail(f"`{key}` is {str(self.values[key])[:40]}; only {only} is supported")
        for key in ("attention_dropout", "router_jitter_noise"):
            if self.values.get(key) not in (None, 0, 0.0):
                self.fail(f"`{key}` is {str(self.values[key])[:40]}; only 0 is supported")
        if self.values.get("use_bidirectional_attention"):
            self.fail("`use_bidirectional_attention` is set; only causal attention is supported")

    def _read_windows(self) -> None:
        """The window of each layer, as transformers applies it (which depends on the type, not only on the keys)."""
        a, values = self.architecture, self.values
        used = a.window in ("every", "alternating") or (a.window != "none" and self.flag("use_sliding_window", False))
        size = values.get("sliding_window", a.default_window) if used else None
        width = None if size is None else self.count("sliding_window", a.default_window)
        if a.window not in ("tail", "alternating"):
            self.windows = [width] * self.n_layers
            return
        types = values.get("layer_types")
        if types is None:
            start = values.get("max_window_layers", 28)
            if isinstance(start, bool) or not isinstance(start, int) or start < 0:
                self.fail(f"`max_window_layers` is {str(start)[:40]}; it must be a whole number, zero or above")
            tail = [width is not None and i >= start for i in range(self.n_layers)]
            slides = tail if a.window == "tail" else [i % 2 == 0 for i in range(self.n_layers)]
        else:
            known = ("sliding_attention", "full_attention")
            if not isinstance(types, list) or len(types) != self.n_layers or any(t not in known for t in types):
                self.fail(f"`layer_types` must list {self.n_layers} layers, each {' or '.join(known)}")
            slides = [t == "sliding_attention" for t in types]
        if width is None and any(slides):
            self.fail("`layer_types` has sliding layers but no `sliding_window` is in use; set it, or make all layers full")
        self.windows = [width if slide else None for slide in slides]

    def _read_experts(self, a: Architecture) -> None:
        """Number, width and routing of the experts, under the keys of this type."""
        alias = "num_local_experts" if "num_local_experts" in self.values else "num_experts"
        self.n_experts, self.top_k = self.count(alias), self.count("num_experts_per_tok")
        if self.top_k > self.n_experts:
            self.fail(f"`num_experts_per_tok` ({self.top_k}) is more than `{alias}` ({self.n_experts})")
        self.expert_inner = self.count(a.expert_width)
        self.normalised = a.router == "fp32" or (a.router == "cast" and self.flag("norm_topk_prob", False))
        self.sparse_step = self.count("decoder_sparse_step", 1) if a.router == "cast" else 1
        dense = self.values.get("mlp_only_layers") if a.router == "cast" else None
        if dense is not None and (not isinstance(dense, list) or any(type(i) is not int or i < 0 for i in dense)):
            self.fail("`mlp_only_layers` must be a list of layer numbers")
        self.dense_layers = frozenset(dense or ())

    def window(self, layer: int) -> int | None:
        """Tokens each token of this layer sees, or None for all before it."""
        return self.windows[layer]

    def sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return self.architecture.router is not None and layer not in self.dense_layers and (layer + 1) % self.sparse_step == 0


def _models() -> Traversable:
    return resources.files("planner") / "models"


def _checked(model: Model, where: str) -> Model:
    """The model, once its configuration has been read through: a wrong one fails here, under the file's own name."""
    Config(model.config, where)
    return model


def _read_config(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object in a file, with none of the numbers JSON does not have."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number JSON has")

    try:
        config = json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:80]
        raise WorkloadError(f"{where}: not JSON ({reason}); give the model's config.json") from None
    if not isinstance(config, dict):
        raise WorkloadError(f"{where}: JSON, but not an object; give the model's config.json")
    return config
