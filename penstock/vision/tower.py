"""Frozen vision tower and projector of a model, by transformers: the features of each image, computed one image at a time.

Features of an image depend on nothing that is trained, and on no other image. They are stored by `stored_outputs.py`.
"""

# N tokens of an image, D width of the decoder
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.conversion import Conversion
from penstock.checkpoint.model_files import digest_of, weight_files
from penstock.checkpoint.tensor_files import Shards
from penstock.runtime.errors import CheckpointError, WorkloadError
from penstock.runtime.layers import transformers_patches as hf
from penstock.runtime.layers.meta_models import PROJECTORS, read_config
from penstock.runtime.plan.train import IN_PROJECTOR


def tower_model(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Model of transformers on the meta device, without the text decoder and the head."""
    with torch.device("meta"):
        model: Any = hf.AutoModelForImageTextToText.from_config(read_config(config), dtype=dtype, trust_remote_code=False)
    hf.use_own_calls(model)
    removed = (model.get_decoder(), model.get_output_embeddings())
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if any(child is part for part in removed):
                setattr(parent, name, None)
    return model.eval().requires_grad_(False)


def tower_digest(folder: Path, config: dict[str, Any], with_projector: bool = True) -> str:
    """SHA-256 of the names, shapes and ends of the tower's tensors, and of its projector's; independent of the decoder."""
    stored, sources = _sources(folder, config, tower_model(config, torch.float32))
    of_weights = (of_weight for target, of_weight in sources.items() if with_projector or not IN_PROJECTOR.search(target))
    names = sorted(name for of_weight in of_weights for name, _ in of_weight)
    return digest_of((name, stored.outline(name), [stored[name]]) for name in names)


def _sources(folder: Path, config: dict[str, Any], model: Any) -> tuple[Shards, dict[str, list[tuple[str, str | None]]]]:
    """Tensors of a model's folder, and the names of the tensors for each weight of the tower."""
    stored, weights = Shards(weight_files(folder)), model.state_dict()
    sources = {name: entry for name, entry in Conversion(config, model).sources(stored).items() if name in weights}
    if missing := sorted(weights.keys() - sources.keys()):
        raise CheckpointError(f"{folder}: no tensor for {missing[0]} of its vision tower; copy the model again")
    return stored, sources


class Tower:
    """Vision tower and projector with the weights of a model's folder, on a device."""

    def __init__(
        self, folder: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device, projects: bool = True
    ) -> None:
        """CheckpointError for missing weights. `projects`: features are the projector's output, else its input."""
        model = tower_model(config, dtype)
        stored, sources = _sources(folder, config, model)
        conversion, names = Conversion(config, model), {name for name, _ in model.named_parameters()}
        self.model, self.device, self.dtype = model.to_empty(device=device), device, dtype
        _make_buffers(self.model)
        tensors = self.model.state_dict()
        for name, of_weight in sources.items():
            weight = conversion.read(name, of_weight, stored.__getitem__)
            if weight.shape != tensors[name].shape:
                raise CheckpointError(f"{folder}: {name} is {tuple(weight.shape)}, not {tuple(tensors[name].shape)}")
            tensors[name].copy_(weight)
        assert names <= sources.keys(), "every parameter is read"
        self._accepted = set(inspect.signature(inspect.unwrap(self.model.base_model.get_image_features)).parameters)
        self._projector_input: list[Tensor] | None = None if projects else []
        if not projects:
            name = PROJECTORS[config["model_type"]]
            self.model.base_model.get_submodule(name).register_forward_hook(self._intercept)
        self.is_listed = False
        self.n_added = self.width = 0
        self.shape: tuple[int, ...] = ()

    def _intercept(self, projector: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Record the projector's arguments. Return numbers of rows in place of its output, to see where the model places them."""
        self._projector_input, x = [*arguments], arguments[0]
        is_pooled = not any(isinstance(part, torch.nn.Linear) for part in projector.modules())  # Gemma 3's pools an image
        self.shape = tuple(x.shape[1:] if is_pooled else x.shape[-1:])
        rows = torch.arange(output[..., 0].numel(), device=output.device, dtype=torch.float64)
        return rows.view(*output.shape[:-1], 1).expand(output.shape)

    @torch.no_grad()
    def features(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Features of one image by kind, on the host. `inputs`: of the image alone, by the model's processor.

        `features`: (N, D * (1 + n_added)), or (N, width of the projector's input + D * n_added); with the latter also `shifts` (N),
        if the model reorders the projector's output: the row of each token, less its number; `sizes` (1, 2) if it reads them."""
        accepted = ((name, x) for name, x in inputs.items() if name in self._accepted)
        moved = {name: x.to(self.device, self.dtype if x.is_floating_point() else None) for name, x in accepted}
        out = self.model.base_model.get_image_features(**moved, return_dict=True)
        pooled, added = out.pooler_output, list(getattr(out, "deepstack_features", None) or ())
        self.is_listed, self.n_added = not isinstance(pooled, Tensor), len(added)
        first, tensors = _flat(pooled), dict[str, Tensor]()
        self.width = first.shape[1]
        if self._projector_input is not None:
            x, *sizes = self._projector_input
            n = len(first)
            shifts, first = first[:, 0].long() - torch.arange(n, device=first.device), x.reshape(n, -1)
            tensors |= {"shifts": shifts.cpu()} if shifts.any() else {}
            tensors |= {"sizes": torch.as_tensor(sizes[0]).cpu()} if sizes else {}
        return {"features": torch.cat([first, *map(_flat, added)], dim=1).to("cpu", self.dtype), **tensors}


def _flat(features: Any) -> Tensor:
    flat = features if isinstance(features, Tensor) else torch.cat([part.flatten(0, -2) for part in features])
    return flat.flatten(0, -2)


def _make_buffers(model: Any) -> None:
    """Compute the buffers that files do not hold: frequencies, positions. WorkloadError if the model's code leaves one out."""
    owners = {part: owner for owner in model.modules() if isinstance(owner, hf.PreTrainedModel) for part in owner.modules()}
    for name, part, key in _computed(model):
        buffer = part.get_buffer(key)
        buffer.fill_(torch.nan if buffer.is_floating_point() else -1)
        owners[part]._init_weights(part)
        if (buffer.isnan() if buffer.is_floating_point() else buffer == -1).any():
            raise WorkloadError(f"{type(model).__name__}: buffer {name}.{key} of its tower is computed only at its creation")


def _computed(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Name of module, module and name, of buffers that files do not hold."""
    for name, part in model.named_modules():
        held = part._non_persistent_buffers_set
        yield from ((name, part, key) for key, buffer in part._buffers.items() if buffer is not None and key in held)
