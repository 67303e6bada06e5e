"""Models of transformers on the meta device, built from a configuration; vision-language models without their towers."""

import re
import sys
from copy import deepcopy
from typing import Any

import torch

from penstock.runtime.errors import WorkloadError
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.workload import has_towers

from . import transformers_patches as hf
from .kernels import adds_sinks

# Fields of files that a plan overrides
OVERRIDDEN = ("torch_dtype", "dtype", "model_type", "auto_map", "quantization_config")
# Fields that change neither modules nor results: files, token ids, initialisation, outputs, sources of `layer_types`
_IRRELEVANT = {
    *("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache", "initializer_range", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "return_dict", "output_hidden_states", "output_attentions"),
    *("id2label", "label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("output_router_logits", "router_aux_loss_coef", "use_sliding_window", "max_window_layers"),
}
# Module within the body that maps features of the tower, row by row of the decoder's tokens, to its width: by model type
PROJECTORS = dict.fromkeys(("gemma3", "internvl", "llava", "mistral3"), "multi_modal_projector")
PROJECTORS |= dict.fromkeys(("idefics3", "smolvlm"), "connector.modality_projection")
PROJECTORS |= dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
    "visual.merger",
)
_ANY_LENGTH = ("default", "linear", "llama3")  # rotary embeddings that do not depend on `max_position_embeddings`


def read_config(config: dict[str, Any]) -> Any:
    """Configuration completed by transformers; WorkloadError if it rejects the fields."""
    if has_towers(config):  # transformers changes nested objects; other models keep the changes, as in earlier runs
        config = deepcopy(config)
    try:
        fields = {k: v for k, v in config.items() if k not in OVERRIDDEN}
        fields = hf.PreTrainedConfig._decode_special_floats(fields)  # e.g. infinity
        return hf.AutoConfig.for_model(config["model_type"], **fields)
    except Exception as error:  # any failure with an unexpected value
        raise _workload_error(error) from None


def difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """First field that gives two configurations different modules or results, e.g. `rms_norm_eps is 1e-06, not 1e-05`; else None.
    Missing fields have defaults; keys unknown to the class are ignored."""
    if first["model_type"] != second["model_type"]:
        return f"model_type is {first['model_type']}, not {second['model_type']}"
    configs = read_config(first), read_config(second)
    a, b = ({key: _relevant(value) for key, value in config.to_dict().items()} for config in configs)
    for key in sorted(type(configs[0])().to_dict().keys() - _IRRELEVANT):
        if a[key] != b[key] and not (key == "max_position_embeddings" and _any_length(a) and _any_length(b)):
            return _described(key, a[key], b[key])
    return None


def _relevant(value: Any) -> Any:
    return {k: _relevant(v) for k, v in value.items() if k not in _IRRELEVANT} if isinstance(value, dict) else value


def _described(key: str, a: Any, b: Any) -> str:
    if isinstance(a, dict) and isinstance(b, dict):
        field = min(k for k in {*a, *b} if (k in a, a.get(k)) != (k in b, b.get(k)))
        return _described(f"{key}.{field}", a.get(field), b.get(field))
    return f"{key} is {str(a)[:80]}, not {str(b)[:80]}"


def _any_length(config: dict[str, Any]) -> bool:
    return (config.get("rope_parameters") or {}).get("rope_type") in _ANY_LENGTH


def meta_model(config: dict[str, Any], semantics: Semantics) -> hf.PreTrainedModel:
    """Model of transformers on the meta device; WorkloadError if transformers rejects the configuration."""
    complete = read_config(config)
    try:
        with torch.device("meta"):
            model = model_of(complete, semantics, DTYPE[semantics.compute_dtype])
            return model if semantics.objective.n_labels is None else _scoring(model, semantics.objective.n_labels)
    except Exception as error:
        raise _workload_error(error) from None


def model_of(config: Any, semantics: Semantics, dtype: torch.dtype) -> hf.PreTrainedModel:
    """Model of transformers with random weights on the current device. It uses PyTorch calls, not other packages' kernels."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": semantics.attention, "trust_remote_code": False}
    sees = sees_images(config)
    mapping: Any = hf.auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if sees else hf.auto.MODEL_FOR_CAUSAL_LM_MAPPING
    kind = mapping.get(type(config), None)
    if kind is not None and semantics.attention == "sdpa" and uses_sinks(kind):
        options["attn_implementation"] = hf.WITH_SINKS
    if kind is not None and kind._can_set_experts_implementation():
        options["experts_implementation"] = semantics.experts
    factory: Any = hf.AutoModelForImageTextToText if sees else hf.AutoModelForCausalLM
    model: hf.PreTrainedModel = factory.from_config(config, **options)
    hf.use_own_calls(model)
    _hold_constants(model, dtype, semantics)
    for part in model.modules():
        if isinstance(kinds := getattr(part, "unique_layer_types", None), set):  # Gemma 4 makes its rotary tables in this order
            part.unique_layer_types = sorted(kinds)  # type: ignore[assignment]
    if not sees:
        return model
    decoder, body = model.get_decoder(), model.base_model
    towers = [name for name, part in body.named_children() if all(module is not decoder for module in part.modules())]
    owner, _, projector = PROJECTORS.get(config.model_type, "").rpartition(".") if semantics.train.projector else ("", "", "")
    for name in {*towers, *body._parameters} - {owner or projector}:
        setattr(body, name, None)
    for name in [name for name, _ in body.get_submodule(owner).named_children() if owner and name != projector]:
        setattr(body.get_submodule(owner), name, None)
    return model


def uses_sinks(kind: Any) -> bool:
    """True for a class of models without SDPA and with sinks in its eager attention, which `kernels.with_sinks` computes."""
    eager = vars(sys.modules[kind.__module__]).get(hf.EAGER_ATTENTION)
    return not kind._supports_sdpa and eager is not None and adds_sinks(eager)


def wide_weights(model: hf.PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Names of parameters and buffers that transformers loads in fp32 for a model of another dtype."""
    plan = {pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)}
    held = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, t in held if (t.is_floating_point() and t.dtype != dtype) or any(re.search(p, name) for p in plan)]


def _hold_constants(model: hf.PreTrainedModel, dtype: torch.dtype, semantics: Semantics) -> None:
    """Make buffers of parameters without gradient, and of those in fp32 that are frozen: they are not in slots of one dtype."""
    wide = {*wide_weights(model, dtype)}
    for prefix, part in list(model.named_modules()):
        names = {key: f"{prefix}.{key}" for key in (*part._parameters, *part._buffers)}
        for key, p in list(part._parameters.items()):
            if p is not None and not (p.requires_grad and (names[key] not in wide or semantics.train.trains(names[key]))):
                del part._parameters[key]
                part.register_buffer(key, p.detach())
        for key, buffer in part._buffers.items():
            if buffer is not None and names[key] in wide and key not in part._non_persistent_buffers_set:
                part._buffers[key] = buffer.float()


def _scoring(model: hf.PreTrainedModel, n_labels: int) -> hf.PreTrainedModel:
    head: Any = model.get_output_embeddings()
    if type(model.config) not in hf.auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or has_towers(model.config.to_dict()):
        raise WorkloadError(f"transformers has no sequence classification model of type {model.config.model_type}")
    parent, _, child = next(name for name, part in model.named_modules() if part is head).rpartition(".")
    setattr(model.get_submodule(parent), child, None)
    model.score = torch.nn.Linear(head.in_features, n_labels, bias=False, dtype=head.weight.dtype)
    return model


def sees_images(config: Any) -> bool:
    """True for a vision-language model's configuration; then the text decoder is trained."""
    return getattr(config, "vision_config", None) is not None and type(config) in hf.auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _workload_error(error: Exception) -> WorkloadError:
    words = " ".join((str(error) or type(error).__name__).split())
    return WorkloadError(f"transformers cannot build this model: {words[:160]}")
