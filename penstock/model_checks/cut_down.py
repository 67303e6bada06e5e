"""Cut-down copies of model configurations: few layers of each kind, small widths, all switches unchanged."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from penstock.runtime.layers.meta_models import read_config
from penstock.runtime.plan.workload import text_of

# Keys of sizes divided by the same number, so that products of them remain products: head widths are unchanged
_HEADS = re.compile(r"(?<!d_)heads?$|n_groups$")
_SHARED_HEADS = re.compile(r"(kv|key_value|kv_n)_heads$")  # at least one remains
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
_SHARING = "num_kv_shared_layers"
WIDTH, VOCAB = 512, 384  # upper limits of the copy, the width's approximate; others by pattern of their keys
_LIMITS = {r"intermediate|inner|ffn|ff_dim": 96, r"^vocab_size": VOCAB}
_WINDOWS, WINDOW = re.compile(r"window(_size)?$|attention_chunk_size"), 8
_PLACES = re.compile(r"position|seq_len|sequence_length|n_ctx|floor_scale")  # lengths, which may equal the width
MOST_LAYERS = 2**31


def cut_down(config: dict[str, Any], kinds: Sequence[object] | None = None, seq_len: int | None = None) -> dict[str, Any]:
    """Return a smaller configuration, also of a vision-language decoder; WorkloadError if transformers rejects the original.
    `kinds`: a key per layer; the copy ends with the first layer of the last new kind, or has all layers if None. `seq_len`:
    attention windows of at least this length are unchanged; None: all are reduced."""
    full = read_config(config)
    fields: dict[str, Any] = json.loads(json.dumps(full.to_dict() | {"model_type": config["model_type"]}, default=str))
    text, width, n_layers, n_kept = text_of(fields), getattr(full.get_text_config(), "hidden_size", None) or 1, 0, MOST_LAYERS
    if kinds is not None:
        n_layers = len(kinds)
        per_layer = [v for v in text.values() if isinstance(v, list) and len(v) == n_layers]
        layer_keys = [str((kind, [v[i] for v in per_layer])) for i, kind in enumerate(kinds)]
        n_kept = max(min(2, n_layers), *(layer_keys.index(kind) + 1 for kind in set(layer_keys)))
    counts = [v for k, v in _numbers(text) if _HEADS.search(k) and not _SHARED_HEADS.search(k) and v > 1]
    divisors = [d for d in range(1, width + 1) if math.gcd(width, *counts) % d == 0 and width // d >= min(64, width)]
    divisor = next((d for d in divisors if width // d <= WIDTH), divisors[-1])

    def small(key: str, value: Any, within: dict[str, Any]) -> Any:
        if isinstance(value, dict):  # keys may be layer numbers
            return {k: small(k, v, value) for k, v in value.items() if not (k.isdecimal() and int(k) >= n_kept)}
        if isinstance(value, list):
            return [small(key, v, within) for v in (value[:n_kept] if len(value) == n_layers else value)]
        if type(value) is not int:
            return value
        if key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            return min(value, VOCAB - 1)
        if key in _EXPERTS:
            return min(value, _n_experts(within))
        if _WINDOWS.search(key):
            return min(value, WINDOW) if seq_len is None or value < seq_len else value
        if limit := next((limit for pattern, limit in _LIMITS.items() if re.search(pattern, key)), None):
            return min(value, limit)
        if key in _DEPTHS:
            return min(value, n_kept)
        if key == _SHARING:  # counted from the last layer
            return max(0, value - max(0, n_layers - n_kept))
        is_divided = _HEADS.search(key) or (value == width and not _PLACES.search(key))
        return (value // divisor if value % divisor == 0 else 1) if is_divided else value

    text = small("", text, {})
    towers = {k: v | {d: 1 for d in _DEPTHS if d in v} for k, v in fields.items() if isinstance(v, dict) and k.endswith("_config")}
    cut = {k: small(k, v, {}) for k, v in fields.items()} | towers | {"text_config": text} if "text_config" in fields else text
    untied = {"tie_word_embeddings": False} if cut.get("tie_word_embeddings") is None else {}
    return cut | untied


def _numbers(fields: dict[str, Any]) -> list[tuple[str, int]]:
    """Keys and integers, including those in nested objects."""
    inner = [pair for v in fields.values() if isinstance(v, dict) for pair in _numbers(v)]
    return [(k, v) for k, v in fields.items() if type(v) is int] + inner


def _n_experts(fields: dict[str, Any]) -> int:
    """Number of experts, at least twice the number that routing selects, also in each group."""
    chosen = max((v for k, v in _numbers(fields) if re.search(r"per_tok|top_?k|moe_k$", k)), default=1)
    groups = fields.get("n_group") or fields.get("num_expert_group") or 1
    n_chosen_groups = (fields.get("topk_group") or 1) if groups > 1 else 1
    return groups * max(2, math.ceil(chosen / n_chosen_groups), math.ceil(2 * chosen / groups))
