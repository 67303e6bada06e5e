"""Record the layer traces of a model: embedding (all before the layers), each kind of layer, final norm, and head.

Traces of a few micro-batch sizes are fitted by polynomials (`sizes.py`); if no polynomial fits (loops over chunks of a sequence),
the requested size is recorded itself.
"""

import copy
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import nn

from penstock.runtime.errors import PenstockError, WorkloadError
from penstock.runtime.layers.layer_chain import Call, Epilogue, LayerChain, kind_of, trace
from penstock.runtime.layers.meta_models import PROJECTORS, meta_model, wide_weights
from penstock.runtime.layers.model_parts import ModelParts
from penstock.runtime.layers.transformers_patches import LIBRARY_KERNELS, WITH_SINKS
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.train import Train

from . import trace_cache
from .record import functions, record, storage_of
from .sizes import Kernels, at_size, evaluated, fit_sizes, polynomial, window_of

MOST_RECORDED = 2  # sequences; larger micro-batches are extrapolated
MOST_RECORDED_TOKENS = 2**25  # a recording allocates the tokens and their positions
LONGEST_RECORDED = 256  # tokens; longer sequences are extrapolated if possible


@cache
def about(config: str) -> dict[str, list[str]]:
    """Return the implementations that a configuration (JSON) supports: `attention`, the preferred one first, and, if any, the
    sorted `library_kernels` of other packages."""
    try:
        attention, (split, _) = ["sdpa", "eager"], split_of(config, "sdpa")
        if split.parts.attention == WITH_SINKS:  # its layers may attend to other tokens in longer sequences
            recorded(config, Kernels("sdpa"), 1, LONGEST_RECORDED)
    except WorkloadError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        attention, (split, _) = ["eager"], split_of(config, "eager")
    kinds = {place[3] for layer in split.parts.layers for place in functions(layer, [*LIBRARY_KERNELS.values()]).values()}
    kernels = sorted(kinds & {*LIBRARY_KERNELS.values()})
    return {"attention": attention, **({"library_kernels": kernels} if kernels else {})}


@lru_cache(maxsize=8)
def split_of(config: str, attention: str) -> tuple[LayerChain, dict[str, Any]]:
    """Build a configuration's model on the meta device; return its layer chain and the model-level fields of its trace."""
    semantics = Semantics(1, 1, 1, attention=attention)  # type: ignore[arg-type]
    with _watched(config):
        parts = ModelParts(meta_model(json.loads(config), semantics))
        embedding: Any = parts.model.get_submodule(parts.embedding_name)
        head = parts.head
        names = {"layers": parts.layers_name, "head": parts.head_name, "embedding": parts.embedding_name}
        names |= {} if getattr(head, "bias", None) is None else {"bias": f"{parts.head_name}.bias"}
        about = {
            "names": names,
            "tied": f"{parts.embedding_name}.weight" if head.weight is embedding.weight else None,
            "vocab": head.weight.shape[0],
            "logits": _logit_calls(parts, head.weight.shape[1]),
        }
        parameters = dict(parts.model.named_parameters())
        about |= {"wide": wide} if (wide := [n for n in wide_weights(parts.model, torch.bfloat16) if n in parameters]) else {}
        split = trace(parts)
        names["norm"] = split.norm_name
        parts.make_buffers("cpu", of_layers=True)  # raises for a model that cannot be run
        for layer in parts.layers:
            layer.to("meta")
    return split, about


@contextmanager
def _watched(config: str) -> Iterator[None]:
    """Suppress logs and warnings of model code on meta tensors, and convert its exceptions to WorkloadError."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except PenstockError:
        raise
    except Exception as error:  # model code may raise anything on meta tensors
        words = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise WorkloadError(f"{json.loads(config)['model_type']} models cannot be recorded by layers ({words})") from error
    finally:
        logging.disable(level)


def outlines(config: str, how: Kernels, n_sequences: int, seq_len: int) -> dict[str, Any]:
    """Return the traces of a configuration (JSON) for a micro-batch, extrapolated from smaller recordings if possible."""
    of_size, traces = partial(recorded, config, how), None
    if seq_len > LONGEST_RECORDED and [*how.library_kernels] == about(config).get("library_kernels", []):
        traces = at_size(polynomials(config, how.attention), how, n_sequences, seq_len)
    if traces is None and n_sequences > MOST_RECORDED:
        with suppress(ValueError):
            fewer = (MOST_RECORDED, MOST_RECORDED + 1)  # not 1: a single sequence may be computed differently
            traces = evaluated(polynomial(of_size, fewer, (seq_len,), [(MOST_RECORDED + 2, seq_len)]), n_sequences, seq_len)
    return of_size(n_sequences, seq_len) if traces is None else traces


@lru_cache(maxsize=64)
def polynomials(config: str, attention: str) -> dict[str, Any]:
    """Return the traces with polynomial sizes, recorded with all library kernels that the layers support; cache them on disk."""
    support = about(config)
    of_size = partial(recorded, config, Kernels(attention, tuple(support.get("library_kernels", ()))))
    entries = [support | {"attention": attention} | entry for entry in fit_sizes(of_size, window_of(json.loads(config)))]
    trace_cache.write(config, attention, support | {"outlines": entries})
    return support | {"outlines": entries}


@lru_cache(maxsize=256)
def recorded(config: str, how: Kernels, n_sequences: int, seq_len: int) -> dict[str, Any]:
    if n_sequences * seq_len > MOST_RECORDED_TOKENS:
        raise WorkloadError(f"layers of this model are recorded with up to {MOST_RECORDED_TOKENS:,} tokens; lower --seq-len")
    split, about = split_of(config, how.attention)
    tokens_BT = torch.zeros(n_sequences, seq_len, dtype=torch.long)
    with _watched(config), split.parts.zero_parameters(split.norm if isinstance(split.norm, Epilogue) else None):
        embedding, first_BTD, calls = _trace_embedding(split, tokens_BT)
        hidden = first_BTD.detach().to("meta")
        kinds: dict[object, int] = {}
        trees, layers = list[dict[str, Any]](), list[int]()
        for layer, call in zip(split.parts.layers, calls, strict=True):
            if (key := kind_of(layer, call)) not in kinds:
                kinds[key] = len(trees)
                trees.append(_trace_layer(layer, call, hidden, seq_len, how))
            layers.append(kinds[key])
        norm = _trace_norm(split, hidden)
    optional = {} if split.carried is None else {"carried": hidden.shape[-1] - split.parts.head.weight.shape[1]}
    return about | optional | {
        "layers": layers, "kinds": trees, "embedding": embedding, "norm": norm, "shared": _shared(calls), "width": hidden.shape[-1],
        "has_experts": any(call[0] == "_grouped_mm" for tree in trees for call in tree["calls"]),
    }  # fmt: skip


@lru_cache(maxsize=64)
def projector(config: str, n_tokens: int) -> tuple[str, dict[str, Any]]:
    """Return the name of a vision-language model's projector in the model, and its trace for `n_tokens` tokens of images.
    WorkloadError for a type without support."""
    fields = json.loads(config)
    if (model_type := str(fields.get("model_type"))[:40]) not in PROJECTORS:
        supported = ", ".join(sorted(PROJECTORS))
        raise WorkloadError(f"--train projector: not supported for {model_type} models; supported: {supported}")
    with _watched(config):
        parts = ModelParts(meta_model(fields, Semantics(1, 1, 1, attention="eager", train=Train(projector=True))))
        assert parts.projector_name is not None
        module: Any = parts.model.get_submodule(parts.projector_name)
        width, shape, arguments = next(module.parameters()).shape[-1], tuple[int, ...](), list[torch.Tensor]()
        linear = next((part for part in module.modules() if isinstance(part, nn.Linear)), None)
        if linear is None:  # Gemma 3, which pools the patches of an image
            n_images = -(-n_tokens // module.tokens_per_side**2)
            shape = n_images, module.patches_per_image**2, module.mm_soft_emb_norm.weight.numel()
        else:
            shape = n_tokens * linear.in_features // width, width
        if model_type == "mistral3":  # sizes in pixels
            edge = module.patch_merger.patch_size * module.patch_merger.spatial_merge_size
            arguments = [torch.tensor([[edge, edge * n_tokens]])]
        x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return parts.projector_name, record(module, lambda: module(x, *arguments), x, [])


def _trace_embedding(split: LayerChain, tokens_BT: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor, list[Call]]:
    """Trace the model up to the first layer, restricted to calls with a backward. Also return the layers' inputs.

    `handed`: elements and bytes of layer arguments that require grad, and of each of their gradients; `needed`: weights that the
    backward uses. Without both, `made` is empty."""
    results = list[tuple[torch.Tensor, list[Call]]]()

    def prologue() -> torch.Tensor:
        results.append(split.embed(None, tokens_BT))
        return results[0][0]

    tree = record(split.parts.model, prologue, None, [tokens_BT])
    first_BTD, layer_calls = results[0]
    learns = set[int]()
    for call in tree["calls"]:
        if call[2] or learns & {*call[1]}:
            learns |= {*call[3]}
    calls = [call for call in tree["calls"] if learns & {*call[3]}]
    sides = [t for call in layer_calls for t in call.leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    tensors = tree["made"] if sides or "needed" in tree else []
    optional = {"handed": [*_sizes(sides), *([t.numel(), t.element_size()] for t in sides)]} if sides else {}
    parameters = {name: list(p.shape) for name, p in split.prologue_parameters.items()}
    return tree | {"parameters": parameters, "calls": calls, "groups": [], "made": tensors} | optional, first_BTD, layer_calls


def _trace_layer(layer: nn.Module, call: Call, hidden: torch.Tensor, seq_len: int, how: Kernels) -> dict[str, Any]:
    leaves = tuple(t.detach().to("meta").requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in call.leaves)
    meta, x = replace(call, leaves=leaves), hidden.detach().requires_grad_()
    tree = record(
        layer,
        lambda: meta.run(layer, x),
        x,
        [t for t in (*leaves, *layer.buffers()) if isinstance(t, torch.Tensor)],
        how.library_kernels,
    )
    if tree["attention"] is not None:
        tree["attention"][3:] = [call.window(seq_len), *tree["attention"][3:]]
    return tree


def _trace_norm(split: LayerChain, hidden: torch.Tensor) -> dict[str, Any]:
    x = hidden.detach().requires_grad_()
    norm = split.norm if isinstance(split.norm, Epilogue) else copy.deepcopy(split.norm).to("meta")
    return record(norm, lambda: norm(split.norm_input(x)), x, list(norm.buffers()))


def _logit_calls(parts: ModelParts, width: int) -> list[int]:
    """Return the head's calls in addition to its matrix product, and the number of later outputs that autograd saves."""
    rows = torch.empty(1, 8, width, device="meta", dtype=parts.model.dtype, requires_grad=True)
    tree = record(parts.model, lambda: parts.logits(None, rows), rows, [])
    products = [n for n, call in enumerate(tree["calls"]) if call[0] in ("mm", "addmm")]
    if len(products) != 1:
        raise WorkloadError("the head is no single product")
    later_calls = tree["calls"][products[0] + 1 :]
    makes = {i for call in later_calls for i in call[3]}
    float_calls = [call for call in tree["calls"] if any(tree["made"][i][3] for i in call[3])]  # only calls with floating outputs
    return [len(float_calls) - 1, len(makes & {i for call in later_calls for i in call[4]})]


def _shared(calls: Sequence[Call]) -> list[list[int]]:
    """Elements and element bytes of the tables and masks that layers get in addition to the hidden state."""
    leaves = (t for call in calls for t in call.leaves if isinstance(t, torch.Tensor))
    return _sizes([t for t in leaves if t.dtype is not torch.int64 and not t.requires_grad])


def _sizes(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Elements and element bytes of each distinct storage."""
    return [
        [t.untyped_storage().nbytes() // t.element_size(), t.element_size()] for t in {storage_of(t): t for t in tensors}.values()
    ]
