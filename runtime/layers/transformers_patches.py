"""Names of transformers on which layers rely, and all patches of its functions.

Other files of this folder import transformers from here. A test looks up each name in the installed version.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as version
from transformers.activations import ACT2FN
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto as auto
from transformers.pytorch_utils import Conv1D

from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan.policy import LibraryKernel

__all__ = ["ACT2FN", "ALL_ATTENTION_FUNCTIONS", "AutoConfig", "AutoModelForCausalLM", "AutoModelForImageTextToText"]
__all__ += ["BaseModelOutputWithPast", "Conv1D", "PreTrainedConfig", "PreTrainedModel", "auto", "version"]

# Attributes by class or module
ATTRIBUTES: Mapping[Any, tuple[str, ...]] = {
    PreTrainedModel: (
        *("_can_set_experts_implementation", "_init_weights", "_no_split_modules", "base_model", "base_model_prefix"),
        *("_get_dtype_plan", "_supports_sdpa", "get_decoder", "get_input_embeddings", "get_output_embeddings"),
    ),
    PreTrainedConfig: ("_attn_implementation", "_decode_special_floats", "get_text_config", "to_dict", "to_json_string"),
    auto: tuple(f"MODEL_FOR_{kind}_MAPPING" for kind in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQUENCE_CLASSIFICATION")),
}
# Global names in functions of model files
EAGER_ATTENTION, ROTARY = "eager_attention_forward", "apply_rotary_pos_emb"
WITH_SINKS = "penstock_with_sinks"  # our fused attention for layers with sinks, in the registry of attention functions
LIBRARY_KERNELS: Mapping[str, LibraryKernel] = {
    "causal_conv1d_fn": "causal_conv1d.causal_conv1d_fn",
    "torch_chunk_gated_delta_rule": "fla.chunk_gated_delta_rule",
}
_GROUPED_PRODUCT = "_grouped_linear"  # in `grouped_mm_experts_forward`
_OPTIONAL = "torch_function"  # free variable of functions that transformers replaces if other packages are installed
# Children and attributes of modules
MLP, PLAIN_MLP = "mlp", {"gate_proj", "up_proj", "down_proj", "act_fn"}  # row-wise, down(act(gate(x)) * up(x))
NORM_AFTER_MLP, NORM_EPS = "post_feedforward_layernorm", "variance_epsilon"
IS_TRANSPOSED = "is_transposed"  # of stacked experts: (experts, inputs, outputs)
FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "norm_f", "final_layer_norm", "embedding_norm")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")  # keys of ACT2FN with a fused kernel


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Temporarily replace the `forward` of these modules, and no other attribute."""
    originals = {part: vars(part).get("forward") for part in forwards}
    for part, forward in forwards.items():
        vars(part)["forward"] = forward
    try:
        yield
    finally:
        for part, original in originals.items():
            vars(part).pop("forward") if original is None else vars(part).update(forward=original)


def length_dependent(module: nn.Module) -> list[nn.Module]:
    """Return the rotary embeddings in a module with length-dependent frequencies."""
    return [part for part in module.modules() if any("dynamic" in kind or kind == "longrope" for kind in _kinds(part).values())]


def tables_by_document(parts: Sequence[nn.Module], documents: Sequence[Sequence[int]]) -> AbstractContextManager[None]:
    """Patch rotary embeddings to compute tables per document. `documents`: lengths by sequence, e.g. ((5, 11), (16,)). The tables
    have one row per sequence, or one row in total for equal sequences."""
    return replaced_forwards({part: partial(_by_document, part, documents) for part in parts})


def _kinds(part: nn.Module) -> dict[Any, str]:
    """Return the kind of a rotary embedding for each layer type; {} for other modules."""
    kinds = getattr(part, "rope_type", None)
    return kinds if isinstance(kinds, dict) else {None: kinds} if isinstance(kinds, str) else {}


def _by_document(part: Any, documents: Sequence[Sequence[int]], x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
    # Documents below every limit have equal frequencies and share a table
    parameters = getattr(part.config, "rope_parameters", None) or {}
    limits = [(parameters if key is None else parameters[key]).get("original_max_position_embeddings") for key in _kinds(part)]
    least = min(n for n in (part.original_max_seq_len, *limits) if n is not None)
    lengths = {n for row in documents for n in row}
    shared = max((n for n in lengths if n <= least), default=0)

    def table(n: int) -> Any:
        """Compute the tables of one document with a copy of the module, because its forward changes its buffers."""
        fresh = copy.deepcopy(part, {id(kept): kept for kept in (part.config, vars(part)["forward"])})
        del vars(fresh)["forward"]
        positions = torch.arange(n, device=position_ids.device).expand(*position_ids.shape[:-2], 1, n)
        return fresh(x, positions, *args, **options)

    tables = {n: table(n) for n in {shared if n <= least else n for n in lengths}}
    rows = documents if any([*row] != [*documents[0]] for row in documents) else documents[:1]

    def joined(*of_lengths: Tensor) -> Tensor:
        by_length = dict(zip(tables, of_lengths, strict=True))
        cut = [[by_length[shared if n <= least else n].narrow(-2, 0, n) for n in row] for row in rows]
        return torch.cat([torch.cat(row, -2) for row in cut], -3)

    return tree_map(joined, *tables.values())


def types_argument(body: nn.Module) -> str | None:
    """Argument of a vision-language model with token types, if its attention has both directions within an image; else None."""
    parameters, text = inspect.signature(inspect.unwrap(type(body).forward)).parameters, body.config.get_text_config()  # type: ignore[operator,union-attr]
    if "token_type_ids" in parameters:
        return "token_type_ids"
    return "mm_token_type_ids" if getattr(text, "use_bidirectional_attention", None) == "vision" else None


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Register an attention function. It gets the masks of `sdpa`: none if the causal mask hides enough."""
    ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def replaced_attention(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Temporarily replace a registered attention function, or the eager attention of all modules."""
    ALL_ATTENTION_FUNCTIONS[name] = function
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


def replace_globals(part: nn.Module, replacements: Mapping[str, Any]) -> None:
    """Replace global names in this module's forward, without effect on other modules."""
    if replacements:
        forward: Any = inspect.unwrap(part.forward)
        part.forward = MethodType(_with_globals(getattr(forward, "__func__", forward), replacements), part)


def replace_grouped_products(experts: nn.Module, product: Callable[..., Any]) -> None:
    """Replace the products of a module with stacked experts. WorkloadError if transformers computes these elsewhere."""
    if _GROUPED_PRODUCT not in grouped_mm_experts_forward.__code__.co_names:  # else they would be ignored silently
        raise WorkloadError("adapters of experts do not support this version of transformers, nor does --compute fp8; omit them")
    experts.forward = MethodType(_with_globals(grouped_mm_experts_forward, {_GROUPED_PRODUCT: product}), experts)


def _with_globals(f: Any, replacements: Mapping[str, Any]) -> FunctionType:
    copied = FunctionType(f.__code__, f.__globals__ | replacements, f.__name__, f.__defaults__, f.__closure__)
    copied.__kwdefaults__ = f.__kwdefaults__
    return copied


def optional_functions(part: nn.Module) -> dict[str, Any]:
    """Functions in a module's forward, by name, that transformers replaces if other packages are installed."""
    forward: Any = inspect.unwrap(type(part).forward)
    functions = {name: forward.__globals__[name] for name in forward.__code__.co_names if name in forward.__globals__}
    free = {name: getattr(getattr(_plain(f), "__code__", None), "co_freevars", ()) for name, f in functions.items()}
    return {name: f for name, f in functions.items() if _OPTIONAL in free[name]}


def use_own_calls(model: nn.Module) -> None:
    """Make a model use PyTorch calls even if other packages with kernels for it are installed."""
    for part in model.modules():
        replace_globals(part, {name: inspect.unwrap(_plain(f)) for name, f in optional_functions(part).items()})


def _plain(function: Any) -> Any:
    """Unwrap a function that the package `kernels` has replaced by a module."""
    return inspect.getclosurevars(function.forward).nonlocals.get("func") if isinstance(function, nn.Module) else function
