"""Batches from a user's program, validated before the model uses them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from penstock.runtime.batch import UNSUPERVISED, Batch
from penstock.runtime.errors import DataError, user_code
from penstock.runtime.plan.objective import CROSS_ENTROPY, Objective

from .dict_batches import DictBatches


class Batches(Protocol):
    """User batches by step number. A batch must depend on the step alone, so that a resumed run trains on the same batches.

    `batch` is called by one thread at a time, for consecutive steps. After a resume it is called from a later step on; the class
    name must be the same.
    """

    def batch(self, step: int) -> Batch | Sequence[torch.Tensor]:
        """Return the batch of `step`, counted from 0: a Batch, or input ids and targets, both (B, T) int64. `targets[b, t]` is the
        token after `input_ids[b, t]`, or -100 to ignore the position."""
        ...


@dataclass(frozen=True, slots=True)
class UserBatches:
    """Validated batches of a user's program."""

    program: Batches | DictBatches
    seq_len: int
    batch_size: int
    vocab_size: int
    no_documents: str | None = None  # why the model cannot isolate packed documents; None: it can
    objective: Objective = CROSS_ENTROPY
    n_steps: int | None = None  # of held-out data, which ends
    image_token: int | None = None  # of a vision-language model; batches have no images

    @property
    def fingerprint(self) -> str:
        program = self.program
        return f"batches of {program.name if isinstance(program, DictBatches) else type(program).__qualname__}"

    def batch(self, step: int) -> Batch:
        """Return a validated batch. DataError if it does not fit the plan."""
        with user_code(f"batch({step})"):
            result = self.program.batch(step)
        match result:
            case Batch() as batch:
                pass
            case [torch.Tensor() as input_ids, torch.Tensor() as targets]:
                batch = Batch(input_ids, targets)
            case other:
                raise DataError(f"batch({step}) gave a {type(other).__name__}; give a Batch, or input ids and targets")
        shape, last = (self.batch_size, self.seq_len), self.vocab_size - 1
        for name, ids, least in (("input ids", batch.input_ids, 0), ("targets", batch.targets, UNSUPERVISED)):
            if tuple(ids.shape) != shape or ids.dtype != torch.int64:
                problem = f"the {name} of step {step} are {tuple(ids.shape)} {ids.dtype}"
                raise DataError(f"{problem}; this plan takes {shape} torch.int64, sequences by tokens")
            if not ((ids == least) | (ids >= 0) & (ids <= last)).all():
                span = f"from {int(ids.min())} to {int(ids.max())}"
                raise DataError(f"the {name} of step {step} go {span}; the model has ids 0 to {last}")
        if self.image_token is not None and (batch.input_ids == self.image_token).any():
            raise DataError(f"batch({step}) has the token of images, and no image; give rows with images, as files or a Dataset")
        if not (batch.targets != UNSUPERVISED).any():
            place = f"batch({step})" if self.n_steps is None else f"eval_data: row {step * self.batch_size + 1}"
            raise DataError(f"{place} has nothing to learn: all its targets are {UNSUPERVISED}; give one with targets")
        for row in self.objective.inputs:
            # For most inputs of a built-in loss, one number per sequence would be mistaken for one per token.
            is_broadcast = row.by_sequence or self.objective.sha256 is not None
            size = row.sizes(*shape)
            accepted = [shape[:1], size] if is_broadcast and size != shape[:1] else [size]
            value = batch.extras.get(row.name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) not in accepted:
                problem = "none" if value is None else f"one of {tuple(getattr(value, 'shape', ()))}"
                wanted = " or ".join(map(str, accepted))
                raise DataError(f"the plan's loss requires extras[{row.name!r}] of {wanted}, and step {step} has {problem}")
        if batch.n_tokens is not None and (len(batch.n_tokens) != shape[0] or not all(0 <= n <= shape[1] for n in batch.n_tokens)):
            raise DataError(f"n_tokens of step {step} are not {shape[0]} lengths of at most {shape[1]}; leave them out")
        batch = replace(batch, n_answers=None, extras={name: batch.extras[name] for name in self.objective.extras})
        if batch.document_tokens is None:
            return batch
        if self.no_documents is not None:
            raise DataError(f"the documents of step {step}: {self.no_documents}; leave document_tokens out")
        sums = [sum(tokens) if all(n > 0 for n in tokens) else 0 for tokens in batch.document_tokens]
        if sums != [self.seq_len] * self.batch_size:
            problem = f"the documents of step {step} have {sums[:4]} tokens, sequence by sequence"
            raise DataError(f"{problem}; each of {self.batch_size} sequences has {self.seq_len}, padding included")
        return batch

    def position(self, step: int) -> dict[str, Any]:
        return {"step": step} | (self.program.position(step) if isinstance(self.program, DictBatches) else {})

    def resume(self, step: int, position: dict[str, Any]) -> bool:
        if isinstance(self.program, DictBatches):
            return position.get("step") == step and self.program.resume(step, position)
        return position == self.position(step)

    def words(self) -> dict[str, str]:
        return {"data": self.fingerprint}
