"""Conversion between a model's weights and the tensors of its files, with transformers' table.

Published files may hold one tensor per expert while the module holds a stack, use other names, or split a fused projection. One
weight of a module is converted at a time.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from penstock.runtime.errors import CheckpointError
from penstock.runtime.layers.meta_models import meta_model
from penstock.runtime.layers.transformers_patches import Conv1D
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.train import Train


class Conversion:
    """Conversion of the weights of one model."""

    def __init__(self, config: dict[str, Any], model: Any = None) -> None:
        """`model`: on the meta device; by default the text decoder and its projector, which may be trained."""
        # fp32, because transformers sets the default dtype of the process to the model's meanwhile, and lanes may be running
        semantics = Semantics(1, 1, 1, compute_dtype="fp32", attention="eager", train=Train(projector=True))
        self._model: Any = model or meta_model(config, semantics)
        mapping = get_model_conversion_mapping(self._model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self.weights, self._prefix = self._model.state_dict(keep_vars=True), f"{self._model.base_model_prefix}."
        # Matrices (inputs, outputs) of linear layers, unlike torch's
        self.transposed = {f"{name}.weight" for name, part in self._model.named_modules() if isinstance(part, Conv1D)}
        # True: stacks of experts are (experts, inputs, outputs); False: (experts, outputs, inputs)
        self.is_transposed = any(getattr(part, "is_transposed", False) for part in self._model.modules())

    def head_names(self, stored: Iterable[str]) -> set[str]:
        """Return the names of file tensors outside the base model, which a sequence classifier replaces by its head."""
        outside = (sources for target, sources in self.sources(stored).items() if not target.startswith(self._prefix))
        return {name for sources in outside for name, _ in sources}

    def published(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Convert a module's weight to (name, tensor) pairs of files. Experts are in order."""
        tensors: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return sorted(tensors.items(), key=lambda item: dot_natural_key(item[0]))

    def sources(self, stored: Iterable[str]) -> dict[str, list[tuple[str, str | None]]]:
        """Map each module weight to its file tensors, each with the pattern that converts it, or None."""
        sources: dict[str, list[tuple[str, str | None]]] = {}
        for name in sorted(stored, key=dot_natural_key):
            rules = self._renamings, self._converters
            target, pattern = rename_source_key(name, *rules, self._model.base_model_prefix, self.weights)
            if target not in self.weights and name in self.weights:  # a tensor with the name of a module weight keeps it
                target, pattern = name, None
            sources.setdefault(target, []).append((name, pattern))
        return sources

    def read(self, target: str, sources: list[tuple[str, str | None]], get: Callable[[str], Tensor]) -> Tensor:
        """Build a module's weight from file tensors. `get` reads one."""
        by_pattern = {pattern: converter for converter in self._converters for pattern in converter.source_patterns}
        first, pattern = sources[0]
        conversion: Any = deepcopy(by_pattern[pattern]) if pattern is not None else WeightRenaming(first, target)
        for name, source_pattern in sources:
            conversion.add_tensor(target, name, source_pattern or name, get(name))
        try:
            converted: dict[str, Any] = conversion.convert(target, model=self._model, config=self._model.config)
        except RuntimeError as error:  # raised by torch for mismatched shapes
            raise CheckpointError(
                f"{target[:200]} cannot be made of its tensors ({str(error)[:120]}); copy the model again"
            ) from None
        if target not in converted:
            raise CheckpointError(f"transformers makes {', '.join(converted)[:200]} of {first[:200]}, not {target[:200]}")
        tensor: Tensor = converted[target][0] if isinstance(converted[target], list) else converted[target]
        return tensor


def conversion_of(config: Mapping[str, Any]) -> Conversion:
    """Return the cached conversion of a model's configuration."""
    return _conversion_of(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=2)
def _conversion_of(config: str) -> Conversion:
    return Conversion(json.loads(config))


def scoring_config(config: Mapping[str, Any], n_labels: int, pad_id: int | None) -> dict[str, Any]:
    """Return further config.json fields of a sequence classifier. It scores the last token that is not `pad_id`."""
    names, model_type = [f"LABEL_{i}" for i in range(n_labels)], str(config.get("model_type"))
    labels = {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {name: i for i, name in enumerate(names)}}
    padding = {} if pad_id is None else {"pad_token_id": pad_id}
    return {"architectures": [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[model_type]], **labels, **padding}
