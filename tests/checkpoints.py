"""Checkpoints of a few tensors, written by the writer of a run."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.checkpoint.checkpoint import CheckpointWriter
from penstock.checkpoint.disk import new_folder
from penstock.checkpoint.model_files import kept_files
from penstock.runtime.errors import CheckpointError


def save(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimizer: Iterable[tuple[str, Mapping[str, Tensor]]] = (),
    config: Mapping[str, Any] = {"model_type": "llama"},
    state: Mapping[str, Any] = {},
    tokenizer_from: Path | None = None,
) -> Path:
    """Write `folder/checkpoint-<step>` with the weights in one file, and optimizer files from (suffix, tensors)."""
    with new_folder(folder / f"checkpoint-{step}") as partial:
        files = CheckpointWriter(partial)
        files.write_weights("model.safetensors", config, weights, weights.__getitem__)
        files.write_config(config, next(iter(weights.values())).dtype)
        if tokenizer_from is not None:
            files.copy_files(kept_files(tokenizer_from), {})
        for suffix, tensors in optimizer:
            files.write_tensors(f"optimizer-{suffix}.safetensors", tensors, tensors.values())
        files.finish(step, state)
    return folder / f"checkpoint-{step}"


def small(folder: Path, step: int = 3, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "weights": {"model.a": torch.arange(6.0).reshape(2, 3), "model.b": torch.ones(4)},
        "optimizer": [("000", {"m": torch.arange(5.0), "v": torch.zeros(3)}), ("001", {"n": torch.ones(2)})],
        "state": {"seed": 1, "semantics": {"seq_len": 8}},
    }
    return save(folder, step, **(arguments | changes))


def refused(work: Callable[[], object]) -> str:
    """Return the error of `work`: one line with a remedy."""
    with pytest.raises(CheckpointError) as caught:
        work()
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 500
    assert "; " in message, "the message has no remedy"
    return message
