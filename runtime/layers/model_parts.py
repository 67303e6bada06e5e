"""Parts of a model: prologue, list of layers, epilogue and head, with their names in the model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call

from penstock.runtime.errors import WorkloadError

from .meta_models import PROJECTORS, sees_images
from .transformers_patches import FINAL_NORMS, BaseModelOutputWithPast, PreTrainedModel, replaced_forwards


class _Output(BaseModelOutputWithPast):
    """Output of a body: its last hidden state; other attributes are None."""

    def __getattr__(self, name: str) -> None:
        return None


class ModelParts:
    """Parts of a model with layers on the meta device. The body is the model without its head; the owner has the layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        """WorkloadError for a model without a list of layers, or with a weight in two layers."""
        self.model = model
        layers = self._layer_list()
        names = {id(module): name for name, module in model.named_modules()}
        self.layers, self.layers_name = list(layers), names[id(layers)]
        self.owner = model.get_submodule(self.layers_name.rpartition(".")[0])
        self.owner_name = names[id(self.owner)]
        self.whole_body = self.owner if model.base_model is model else model.base_model  # Llama 4's prefix names a larger model
        self.whole_body_name = names[id(self.whole_body)]
        self.attention: str = model.config.get_text_config()._attn_implementation  # in the registry of transformers
        has_towers = sees_images(model.config) and self.whole_body is not self.owner
        self.body: nn.Module = model.get_decoder() if has_towers else self.whole_body
        self.body_name = names[id(self.body)]
        self.embedding_name = names[id(model.get_input_embeddings())]
        path = f"{self.whole_body_name}.{PROJECTORS.get(model.config.model_type)}"
        self.projector_name = path if path in names.values() else None  # None: frozen, so that the model does not have it
        self.head: Any = getattr(model, "score", None) or model.get_output_embeddings()
        self.head_name = names[id(self.head)] if self.head is not None else self.fail("it has no output matrix")
        self._check_shared_weights()
        norms = [name for name, part in self.owner.named_children() if "norm" in type(part).__name__.lower()]
        norms = norms if len(norms) == 1 else [name for name in norms if name in FINAL_NORMS]
        self.norm: nn.Module | None = getattr(self.owner, norms[0]) if len(norms) == 1 else None
        self.norm_name = names[id(self.norm)] if self.norm is not None else self.owner_name
        # Buffers missing from checkpoint files and from a model on the meta device
        self._computed = {(part, n) for part in model.modules() for n, b in part.named_buffers(recurse=False) if b.is_meta}

    def fail(self, why: str) -> NoReturn:
        raise WorkloadError(f"{type(self.model).__name__} cannot be trained by layers: {why}")

    def _layer_list(self) -> nn.ModuleList:
        """Return the largest list of modules of the classes in `_no_split_modules`, which FSDP wraps."""
        classes = set(self.model._no_split_modules or ())
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m)]
        named = [m for m in lists if {type(layer).__name__ for layer in m} <= classes] or lists
        return max(named, key=lambda m: sum(p.numel() for p in m.parameters())) if named else self.fail("it has no list of layers")

    def _check_shared_weights(self) -> None:
        owners: dict[int, int] = {}
        for i, layer in enumerate(self.layers):
            for p in layer.parameters():
                if owners.setdefault(id(p), i) != i:
                    self.fail(f"layers {owners[id(p)]} and {i} share a weight")
        if any(id(p) in owners for m in self.outside() for p in m.parameters(recurse=False)):
            self.fail("a layer's weight is used outside of it")

    def outside(self) -> list[nn.Module]:
        """Modules outside the layers."""
        inside = {id(m) for layer in self.layers for m in layer.modules()}
        return [m for m in self.model.modules() if id(m) not in inside]

    def logits(self, weights: Mapping[str, torch.Tensor] | None, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Logits of the model's own head, given the body's output; weights by names in the model."""
        batch = {"input_ids": torch.zeros(hidden_BTD.shape[:2], dtype=torch.long, device=hidden_BTD.device), "use_cache": False}
        parts = [self.whole_body, *self.whole_body.children()]  # heads may call a child
        with replaced_forwards({part: lambda *_, **__: _Output(last_hidden_state=hidden_BTD) for part in parts}):
            out = self.model(**batch) if weights is None else functional_call(self.model, dict(weights), (), batch, strict=False)
        return out.logits  # type: ignore[no-any-return]

    @contextmanager
    def zero_parameters(self, epilogue: nn.Module | None = None, device: torch.device | str = "cpu") -> Iterator[None]:
        """Temporarily replace parameters outside the layers and the epilogue by expanded zero scalars, which take no memory."""
        unchanged = set() if epilogue is None else set(epilogue.modules())
        originals = [(part, dict(part._parameters)) for part in self.outside() if part not in unchanged]
        for part, parameters in originals:
            for name, p in parameters.items():
                if p is not None:
                    part._parameters[name] = nn.Parameter(torch.zeros(1, dtype=p.dtype, device=device).expand(p.shape))
        try:
            yield
        finally:
            for part, parameters in originals:
                part._parameters.update(parameters)

    def make_buffers(self, device: torch.device | str, of_layers: bool = False) -> None:
        """Compute buffers missing from checkpoint files (frequencies, scales), outside of the layers or in the whole model."""
        unfilled = list[tuple[nn.Module, str]]()
        models = [m for m in self.model.modules() if isinstance(m, PreTrainedModel)]
        owner = {part: model for model in models for part in model.modules()}  # the innermost: `modules` yields it last
        for part in list(self.model.modules()) if of_layers else self.outside():
            buffers = {n: b for n, b in part.named_buffers(recurse=False) if (part, n) in self._computed}
            for name, buffer in buffers.items():
                initial = torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device=device)  # until filled
                part.register_buffer(name, initial, name not in part._non_persistent_buffers_set)
            if buffers:
                owner[part]._init_weights(part)
            unfilled += [(part, n) for n in buffers.keys() & part._non_persistent_buffers_set if part.get_buffer(n).isnan().any()]
        if unfilled:
            self.model._init_weights(self.body)  # Falcon H1 fills buffers of its layers there
        for part, name in unfilled:
            if part.get_buffer(name).isnan().any():
                self.fail(f"buffer {name} is computed only when its module is created")
