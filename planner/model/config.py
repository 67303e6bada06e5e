"""Supported model configurations.

A configuration is taken only where we know what transformers makes of it: twelve types, and of their options those that are
held against the real modules. Nothing of a model is ever executed or downloaded: keys that name code (`auto_map`,
`trust_remote_code`) are not read.
"""

import difflib
import errno
import json
import re
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

from runtime.errors import WorkloadError
from runtime.files import read_whole
from runtime.plan.packed import Base, published_as
from runtime.plan.workload import Model

MAX_CONFIG_FILE_BYTES = 16 * 2**20
MAX_DIMENSION = 2**31 - 1
MAX_LAYERS = 10_000  # deeper than any model: a plan has several ops per layer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
HUB_NAMES = {
    **{f"gpt-oss-{size}": f"openai/gpt-oss-{size}" for size in ("20b", "120b")},
    **{f"gemma-{size}": f"google/gemma-{size}" for size in ("2b", "7b")},
    **{f"gemma2-{size}": f"google/gemma-2-{size}" for size in ("2b", "9b", "27b")},
    **{"mistral-7b": "mistralai/Mistral-7B-v0.3", "mistral-nemo-12b": "mistralai/Mistral-Nemo-Base-2407"},
    **{"mistral-small-24b": "mistralai/Mistral-Small-24B-Base-2501", "mistral-large-123b": "mistralai/Mistral-Large-Instruct-2407"},
    **{"mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1", "mixtral-8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1"},
    **{"ernie-4.5-0.3b": "baidu/ERNIE-4.5-0.3B-PT", "internlm3-8b": "internlm/internlm3-8b-instruct"},
    **{"smollm3-3b": "HuggingFaceTB/SmolLM3-3B", "llama-2-7b": "meta-llama/Llama-2-7b-hf", "qwen1.5-0.5b": "Qwen/Qwen1.5-0.5B"},
}
HUB_FAMILIES = {  # a family's configurations are alike but for their sizes
    **{"llama": "meta-llama/Llama-{}", "smollm2": "HuggingFaceTB/SmolLM2-{}"},
    **{"qwen2.5": "Qwen/Qwen2.5-{}-Instruct", "qwen3": "Qwen/Qwen3-{}"},
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What sets one model type apart from llama; defaults are those transformers takes for an absent key."""

    head_dim: int | None = None  # where the key is absent; None: hidden_size / num_attention_heads
    null_head_dim: bool = False  # whether null means hidden_size / num_attention_heads
    null_kv_heads: bool = False  # whether null means as many as num_attention_heads
    attention: tuple[str, ...] = ("sdpa", "eager")  # what transformers lets run, the first being the better
    qkv_bias: bool | None = None  # None: one of `bias_keys`; else fixed, and no bias on the output
    bias_keys: tuple[str, ...] = ("attention_bias",)
    mlp_bias_keys: tuple[str, ...] = ()  # none: no bias in the MLP
    default_bias: bool = False
    head_norms: bool = False  # norms of queries and keys, per head
    norm: str = "plain"
    sandwich: bool = False  # norms after attention and MLP too
    rotary: str = "full"
    some_unrotated: bool = False  # layers without rotary embedding, by `no_rope_layers`
    scaled_embedding: bool = False
    sinks: bool = False
    softcap: bool = False
    activation: tuple[str, ...] = ("hidden_act", "silu")  # the key, and what it may say
    # none | all layers (`every`) | all layers if used (`used`) | by `layer_types`: `tail`, `alternating`, `unrotated`
    window: str = "none"
    default_window: int | None = None
    router: str | None = None  # None: no experts
    expert_width: str = "intermediate_size"
    router_name: str = "gate"
    router_first: bool = True  # the router's weights come before those of the experts
    tied: bool = False
    even_heads: bool = False  # whether heads have to divide the width whatever their own is


ARCHITECTURES = {
    "llama": Architecture(null_head_dim=True, null_kv_heads=True, mlp_bias_keys=("mlp_bias",), even_heads=True),
    "mistral": Architecture(null_head_dim=True, qkv_bias=False, window="every", default_window=4096),
    "qwen2": Architecture(null_kv_heads=True, qkv_bias=True, window="tail", default_window=4096),
    "qwen3": Architecture(
        head_dim=128, null_kv_heads=True, head_norms=True, window="tail", default_window=4096,
    ),
    "gemma": Architecture(  # its first configurations say gelu, and mean the other
        head_dim=256, norm="centred", scaled_embedding=True, tied=True, activation=("hidden_act", "gelu_pytorch_tanh", "gelu"),
    ),
    "gemma2": Architecture(
        head_dim=256, attention=("eager",), norm="centred", scaled_embedding=True, sandwich=True, softcap=True, tied=True,
        window="alternating", default_window=4096, activation=("hidden_activation", "gelu_pytorch_tanh"), even_heads=True,
    ),
    "ernie4_5": Architecture(
        head_dim=128, null_head_dim=True, null_kv_heads=True, bias_keys=("use_bias",), mlp_bias_keys=("use_bias",),
        rotary="interleaved", tied=True,
    ),
    "smollm3": Architecture(
        null_kv_heads=True, mlp_bias_keys=("mlp_bias",), some_unrotated=True, window="unrotated", tied=True,
    ),
    "internlm3": Architecture(
        head_dim=128, null_head_dim=True, null_kv_heads=True, bias_keys=("qkv_bias", "attention_bias"),
        mlp_bias_keys=("bias", "mlp_bias"), even_heads=True,
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
# What other types compute outside of their modules, or draw, and what each key says where that is nothing
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("attention_dropout", "embedding_dropout", "residual_dropout", "router_jitter_noise"), (0, None)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "lm_head_multiplier"), (1, None)),
    **dict.fromkeys(("logits_scaling", "logit_scale"), (1, None)),
}
SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def shipped_models() -> list[str]:
    """Names of the configurations that come with Penstock, sorted."""
    return sorted(f.name.removesuffix(".json") for f in _models().iterdir() if f.name.endswith(".json"))


def read_model(model: str) -> Model:
    """The model a user names: a folder with `config.json`, such a file, or a shipped name (a path that exists wins).

    `path` is the folder if it holds weights or a tokenizer, else None. Weights
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
        if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            folder = model.partition("/")[2]
            near = difflib.get_close_matches(folder.lower(), names, 1, 0.5)
            shipped = f", or give the shipped {near[0]}, which has no weights" if near else ""
            get = f"hf download {model[:120]} --local-dir {folder[:120]}"
            raise WorkloadError(f"{model[:120]!r}: no such folder, and nothing is downloaded here: {get}{shipped}")
        near = difflib.get_close_matches(model.lower(), names, 3, 0.5)
        hint = f"near it: {', '.join(near)}" if near else f"shipped: {', '.join(names)}"
        raise WorkloadError(f"{model[:120]!r}: no such folder, config.json or shipped model; {hint}")
    return shipped_model(model)


def shipped_model(name: str) -> Model:
    """The model of that name that comes with Penstock, whatever lies in the folder at hand."""
    return _checked(Model(_read_config((_models() / f"{name}.json").read_bytes(), name), None, name), name)


def hub_name(name: str | None) -> str | None:
    """Under which name Hugging Face has the model that a shipped configuration is of."""
    if name not in shipped_models():
        return None
    family, _, size = name.partition("-")
    return HUB_NAMES.get(name) or HUB_FAMILIES[family].format(size.upper())


def unread_weights(model: Model, base: Base = "bf16") -> str | None:
    """Why the weights that are published of a model will be refused, and what to do; None where nothing says so, or frozen weights
    are to lie as they are published."""
    in_mxfp4 = model.config.get("model_type") == "gpt_oss" and model.name in shipped_models()
    published = None if in_mxfp4 else published_as(model.config)
    if published in ("bf16", base):
        return None
    quantised = model.config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    stored = "in MXFP4 only" if in_mxfp4 else f"as {str(method or 'quantised')[:40]}"
    beside = f"plan adapters beside them with --train lora --base {published}, or " if published is not None else ""
    return (
        f"the weights of {model.name or 'this model'} are published {stored}, which `run` does not read; {beside}make a bf16 copy "
        "first, for MXFP4 by transformers' Mxfp4Config(dequantize=True) and save_pretrained"
    )


def download(model: Model) -> str:
    """How to get the folder of a shipped model, in words that go on from naming it; nothing for any other."""
    there = hub_name(model.name)
    return f", once it is there: hf download {there} --local-dir {there.partition('/')[2]}" if there is not None else ""


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
        if self.hidden % self.n_heads and (derived or a.even_heads):
            self.fail(f"`hidden_size` ({self.hidden}) is no multiple of `num_attention_heads` ({self.n_heads})")
        if self.head_dim % 2:
            self.fail(f"`head_dim` is {self.head_dim}; rotary embeddings need an even one")
        self.inner = self.count("intermediate_size")
        self.tied = self.flag("tie_word_embeddings", a.tied)
        bias = self._either(a.bias_keys, a.default_bias) if a.qkv_bias is None else a.qkv_bias
        self.qkv_bias, self.out_bias = bias, bias and a.qkv_bias is None
        self.mlp_bias = bool(a.mlp_bias_keys) and self._either(a.mlp_bias_keys, False)
        if model_type == "internlm3" and self.mlp_bias != bias:
            self.fail("`qkv_bias` and `bias` differ; only equal ones are supported")
        self.softcap = a.softcap and values.get("attn_logit_softcapping", 50.0) is not None
        self.final_softcap = a.softcap and values.get("final_logit_softcapping", 30.0) is not None
        self._refuse_unproven()
        self._read_rotated()
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

    def _either(self, keys: tuple[str, ...], default: bool) -> bool:
        """A flag that has several names: the first that is there."""
        return self.flag(next((key for key in keys if key in self.values), keys[0]), default)

    def _refuse_unproven(self) -> None:
        """Options under which the model would compute, or keep, something other than what we hold against transformers."""
        key, *known = self.architecture.activation
        allowed: dict[str, tuple[object, ...]] = {**NEUTRAL, key: tuple(known)}
        if not self.architecture.softcap:
            allowed |= dict.fromkeys(SOFTCAPS, (None,))
        for key, values in allowed.items():
            if self.values.get(key, values[0]) not in values:
                self.fail(f"`{key}` is {str(self.values[key])[:40]}; only {values[0] or json.dumps(values[0])} is supported")
        if self.values.get("use_bidirectional_attention"):
            self.fail("`use_bidirectional_attention` is set; only causal attention is supported")

    def _read_rotated(self) -> None:
        """Whether each layer turns queries and keys by their positions."""
        self.rotated = [True] * self.n_layers
        if not self.architecture.some_unrotated:
            return
        said = self.values.get("no_rope_layers")
        if said is None:
            every = self.count("no_rope_layer_interval", 4)
            said = [int((i + 1) % every != 0) for i in range(self.n_layers)]
        if not isinstance(said, list) or len(said) < self.n_layers or any(one not in (0, 1) for one in said):
            self.fail(f"`no_rope_layers` must say of {self.n_layers} layers 1, or 0 for one without rotary embedding")
        self.rotated = [bool(one) for one in said[: self.n_layers]]

    def _read_windows(self) -> None:
        """The window of each layer, as transformers applies it (which depends on the type, not only on the keys)."""
        a, values = self.architecture, self.values
        used = a.window in ("every", "alternating") or (a.window != "none" and self.flag("use_sliding_window", False))
        size = values.get("sliding_window", a.default_window) if used else None
        width = None if size is None else self.count("sliding_window", a.default_window)
        if a.window not in ("tail", "alternating", "unrotated"):
            self.windows = [width] * self.n_layers
            return
        types = values.get("layer_types")
        if types is None:
            start = values.get("max_window_layers", 28)
            if isinstance(start, bool) or not isinstance(start, int) or start < 0:
                self.fail(f"`max_window_layers` is {str(start)[:40]}; it must be a whole number, zero or above")
            by_kind = {
                "tail": [width is not None and i >= start for i in range(self.n_layers)],
                "alternating": [i % 2 == 0 for i in range(self.n_layers)],
                "unrotated": [width is not None and not rotated for rotated in self.rotated],
            }
            slides = by_kind[a.window]
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
