"""Stateless templates of blocks: transformers' modules on the meta device, called with weights that are views of slots.

The model's forward runs with recorders in place of layers (`layers/layer_chain.py`), so no architecture is reimplemented.
"""

# B sequences, T tokens, D width
import copy
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from penstock.runtime.batch import Batch, Images
from penstock.runtime.errors import WorkloadError
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.layers.adapters import AdaptedExperts, AdaptedLinear, adapt, initial_factors, use_scaled_products
from penstock.runtime.layers.documents import embed_packed, isolated_documents
from penstock.runtime.layers.kernels import gates_of, use_kernels
from penstock.runtime.layers.layer_chain import OF_TOWERS, Call, trace
from penstock.runtime.layers.meta_models import meta_model
from penstock.runtime.layers.model_parts import ModelParts
from penstock.runtime.layers.pointwise import CALL_BY_CALL, fastest
from penstock.runtime.layers.tiles import TiledMlp
from penstock.runtime.layers.transformers_patches import types_argument
from penstock.runtime.layers.views import Weights
from penstock.runtime.plan import Policy, Semantics
from penstock.runtime.plan.packed import is_packed
from penstock.runtime.plan.train import is_adapter
from penstock.runtime.plan.workload import Workload
from penstock.runtime.scaled_products import refuse_device

from .balance import Balance
from .head import OutputHead, weights_within
from .losses import LossFunction


@dataclass(frozen=True, slots=True)
class TowerOutput:
    """Output of a vision tower with its projector. Addends to later layers are added by us."""

    pooler_output: torch.Tensor | tuple[torch.Tensor, ...]
    deepstack_features: list[torch.Tensor]


class Templates:
    """Stateless templates of all blocks of a model. Not thread-safe."""

    def __init__(
        self,
        config: dict[str, Any],
        workload: Workload,
        semantics: Semantics,
        policy: Policy | None = None,
        device: torch.device | None = None,
        loss: LossFunction | None = None,
    ) -> None:
        """Build the modules. WorkloadError if their parameters differ from the workload's. `policy`: checkpointing of MLP tiles;
        default: full. `device`: of computed buffers (frequencies); default: CPU. `loss`: a user's, if the objective is one."""
        self.workload, self.semantics, self.device = workload, semantics, device or torch.device("cpu")
        self.parts = ModelParts(meta_model(config, semantics))
        self.chain = trace(self.parts)
        self.model, self.layers = self.parts.model, self.parts.layers
        self.head = OutputHead(self.chain, semantics, {p.name for block in workload.blocks for p in block.trained}, loss)
        for block, layer in enumerate(self.layers, start=1):
            if semantics.train.lora is not None:
                shared_inputs = self.chain.results[block - 1].shared_inputs
                adapt(layer, self._prefix(block), self._adapters(block), semantics.train.lora, shared_inputs)
        if semantics.train.lora is not None and (name := self.parts.projector_name) is not None:
            adapt(self.model.get_submodule(name), f"{name}.", self._adapters(0), semantics.train.lora)
        self._check_parameters()
        if semantics.products == "fp8":
            refuse_device(self.device, any(m.grouped and m.scaled != "no" for b in workload.blocks for m in b.matmuls))
            for block, layer in enumerate(self.layers, start=1):
                scaled = (p.name for p in workload.blocks[block].parameters if is_packed(p.name, p.shape, "fp8-rows"))
                # Under adapters, autograd adds the gradients of layers without one
                shared_inputs = () if semantics.train.lora is not None else self.chain.results[block - 1].shared_inputs
                use_scaled_products(layer, (name.removeprefix(self._prefix(block)) for name in scaled), shared_inputs)
        pointwise = CALL_BY_CALL
        if semantics.pointwise == "fused":
            pointwise = fastest(self.device, DTYPE[semantics.compute_dtype], gates_of(self.layers))
        for layer in self.layers:
            use_kernels(layer, semantics, pointwise)
        n_micro_batches = semantics.n_micro_batches * semantics.ranks
        self.balance = Balance(self.model, self.layers, semantics.router_loss, n_micro_batches) if semantics.router_loss else None
        self._tiled: list[TiledMlp] = []  # by layer; empty without tiles, or if one holds all tokens
        if (n := semantics.mlp_tile_tokens) is not None and n < semantics.tokens_per_micro_batch:
            self._tiled = [TiledMlp(layer, n, policy or Policy(), block) for block, layer in enumerate(self.layers, start=1)]
        self.parts.make_buffers(self.device, of_layers=True)

    def _prefix(self, block: int) -> str:
        return f"{self.parts.layers_name}.{block - 1}."

    def _check_parameters(self) -> None:
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        planned = {p.name: p.shape for b in self.workload.blocks for p in b.parameters if p.tied_to is None}
        if odd := sorted(name for name in shapes.keys() | planned.keys() if shapes.get(name) != planned.get(name)):
            raise WorkloadError(f"transformers builds other parameters than the plan (first: {odd[0]}); make the plan again")

    def _adapters(self, block: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a block's adapters by name."""
        lora = self.semantics.train.lora
        trained = self.workload.blocks[block].trained
        return {p.name: p.shape for p in trained if is_adapter(p.name)} if lora is not None else {}

    def embed(self, weights: Weights, batch: Batch) -> tuple[torch.Tensor, list[Call]]:
        """First layer's input (B, T, D), with an autograd graph in grad mode, and the call of each layer."""
        return self.chain.embed(
            self._of_body(weights, batch), batch.input_ids, batch.padded_documents, **self._of_images(weights, batch)
        )

    def look_up(self, weights: Weights, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table (B, T, D), by the model's embedding module."""
        table = weights_within(f"{self.parts.embedding_name}.", weights)
        rows_BTD = functional_call(self.model.get_input_embeddings(), table, (tokens_BT,))
        return rows_BTD if self.chain.carried is None else self.chain.carried.padded(rows_BTD)

    def embed_packed(self, weights: Weights, packed: Batch, plain: Sequence[Call]) -> tuple[torch.Tensor, list[Call]]:
        """Like `embed`, for packed documents; `plain`: calls without packing. Data readers check document isolation."""
        assert packed.positions_BT is not None
        assert packed.document_tokens is not None
        options = self._of_images(weights, packed)
        arguments = packed.input_ids, options.pop("position_ids", packed.positions_BT), plain, packed.document_tokens
        return embed_packed(self.chain, self._of_body(weights, packed), *arguments, **options)

    def _of_body(self, weights: Weights, batch: Batch) -> Weights:
        """Weights before the layers, by names in the body, or with images in the model around it."""
        name = self.parts.whole_body_name if batch.has_images else self.parts.body_name
        return weights_within(f"{name}.", weights) if name else weights

    def _of_images(self, weights: Weights, batch: Batch) -> dict[str, Any]:
        """Arguments of the model in place of images: its tower's outputs, positions and token types."""
        images, device = batch.images, batch.input_ids.device
        if images is None or not batch.has_images:
            return {}
        features_ND = self._projected(weights, images, images.of_block(0, device))
        output = TowerOutput(pooler_output=(features_ND,) if images.is_listed else features_ND, deepstack_features=[])
        options: dict[str, Any] = {OF_TOWERS: {"image": output}}
        if images.positions is not None:
            options["position_ids"] = images.positions.to(device, non_blocking=True).movedim(1, 0)
        if images.token_types is not None and (name := types_argument(self.parts.whole_body)) is not None:
            options[name] = images.token_types.to(device, non_blocking=True)
        return options

    def _projected(self, weights: Weights, images: Images, rows: torch.Tensor) -> torch.Tensor:
        """Features (N, D) of the first layer's input, by the model's own projector if it is trained. `rows`: its input."""
        if (name := self.parts.projector_name) is None:
            return rows
        projector, arguments = self.model.get_submodule(name), [rows.reshape(-1, *images.shape)]
        arguments += [torch.cat(images.sizes)] if images.sizes else []
        out_ND: torch.Tensor = functional_call(projector, weights_within(f"{name}.", weights), (*arguments,)).flatten(0, -2)
        if not images.shifts:
            return out_ND
        return out_ND[(torch.arange(len(out_ND)) + torch.cat(images.shifts)).to(rows.device, non_blocking=True)]

    def layer(self, block: int, weights: Weights, hidden_BTD: torch.Tensor, inputs: Call, graph_only: bool = False) -> torch.Tensor:
        """Output (B, T, D) of layer `block` (from 1). `graph_only`, for a recompute: without the output of a tiled MLP."""
        layer_weights, layer = weights_within(self._prefix(block), weights), self.layers[block - 1]
        attention = self.workload.blocks[block].attention
        with isolated_documents(inputs, self.parts.attention, None if attention is None else attention.window):
            if self._tiled:
                self._tiled[block - 1].graph_only = graph_only
            return inputs.run(lambda *args, **kwargs: functional_call(layer, layer_weights, args, kwargs), hidden_BTD)

    def constants(self) -> Weights:
        """Buffers that are stored in files, by names in the model."""
        stored = self.model.state_dict(keep_vars=True)
        return {name: t for name, t in stored.items() if not isinstance(t, nn.Parameter)}

    def set_constant(self, name: str, value: torch.Tensor) -> None:
        """Set a buffer. Its dtype remains that of transformers."""
        parent, _, child = name.rpartition(".")
        dtype = self.model.get_buffer(name).dtype
        self.model.get_submodule(parent).register_buffer(child, value.to(self.device, dtype))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        if self.balance is not None:
            self.balance.position = None
        modules = nn.ModuleList([self.model, *self._tiled]).eval()
        try:
            yield
        finally:
            modules.train()

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        parts = [part for part in self.model.modules() if isinstance(part, AdaptedLinear | AdaptedExperts)]
        for part in parts:
            part.is_disabled = True
        try:
            yield
        finally:
            for part in parts:
                part.is_disabled = False

    def initial_weights(self, block: int, seed: int) -> Weights:
        """Random fp32 weights of a block as in transformers, and adapters as in PEFT. Deterministic for a seed."""
        chain = self.chain
        if block == 0:
            names = list(dict.fromkeys(name.rpartition(".")[0] for name in chain.prologue_parameters))
        elif block <= len(self.layers):
            names = [self._prefix(block)[:-1]]
        else:
            names = [*dict.fromkeys(name.rpartition(".")[0] for name in chain.epilogue_parameters), self.parts.head_name]
        torch.default_generator.manual_seed(op_seed(seed, 0, 0, block))
        weights: Weights = {}
        for prefix in names:
            real = copy.deepcopy(self.model.get_submodule(prefix)).float().to_empty(device="cpu")
            for part in real.modules():
                self.model._init_weights(part)
            weights |= {f"{prefix}.{name}": p.detach() for name, p in real.named_parameters()}
        weights |= self.initial_adapters(block, seed)
        return {p.name: weights[p.name] for p in self.workload.blocks[block].parameters if p.tied_to is None}

    def initial_adapters(self, block: int, seed: int) -> Weights:
        return initial_factors(self._adapters(block), op_seed(seed, 0, 1, block))


def op_seed(run_seed: int, step: int, micro_batch: int, block: int) -> int:
    """Seed of an op's generator: equal for its recompute, different for other ops."""
    digest = hashlib.blake2b(f"{run_seed} {step} {micro_batch} {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
