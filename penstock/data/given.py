"""Batches that a program makes itself, checked before the model sees them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from penstock.runtime.batch import UNSUPERVISED, Batch
from penstock.runtime.errors import DataError
from penstock.runtime.plan.objective import CROSS_ENTROPY, TEACHER, LossUnit, Objective


class Batches(Protocol):
    """The batches of a run by the number of the step, which alone decides them: then a resumed run trains on the same batches.

    Called by one thread at a time, for consecutive steps; after a resume, for a later one. A resumed run compares the name of
    their class.
    """

    def batch(self, step: int) -> Batch | Sequence[torch.Tensor]:
        """Of step number `step`, counted from 0: a Batch, or input ids and targets, both (B, T) int64. `targets[b, t]` is the token
        after `input_ids[b, t]`, or -100 where there is nothing to learn."""
        ...


@dataclass(frozen=True, slots=True)
class Given:
    """A program's batches."""

    program: Batches
    seq_len: int
    batch_size: int
    vocab_size: int
    no_documents: str | None = None  # why documents packed into a sequence cannot be kept apart; None: they can
    objective: Objective = CROSS_ENTROPY
    n_steps: None = None

    @property
    def fingerprint(self) -> str:
        return f"batches of {type(self.program).__qualname__}"

    def batch(self, step: int) -> Batch:
        """DataError for what is no batch of this plan."""
        match self.program.batch(step):
            case Batch() as made:
                pass
            case [torch.Tensor() as input_ids, torch.Tensor() as targets]:
                made = Batch(input_ids, targets)
            case other:
                raise DataError(f"batch({step}) gave a {type(other).__name__}; give a Batch, or input ids and targets")
        shape, last = (self.batch_size, self.seq_len), self.vocab_size - 1
        for name, ids, least in (("input ids", made.input_ids, 0), ("targets", made.targets, UNSUPERVISED)):
            if tuple(ids.shape) != shape or ids.dtype != torch.int64:
                problem = f"the {name} of step {step} are {tuple(ids.shape)} {ids.dtype}"
                raise DataError(f"{problem}; this plan takes {shape} torch.int64, sequences by tokens")
            if not ((ids == least) | (ids >= 0) & (ids <= last)).all():
                span = f"from {int(ids.min())} to {int(ids.max())}"
                raise DataError(f"the {name} of step {step} go {span}; the model knows 0 to {last}")
        extras, shapes = made.extras, (shape[:1],) if self.objective.of is not LossUnit.TOKENS else (shape[:1], shape)
        # Of a loss that we have: a number for each sequence would be taken for that of each token
        of_tokens = () if self.objective.sha256 is not None else ("old", "reference")
        for name in self.objective.extras:
            taken: tuple[tuple[int, ...], ...] = shapes[-1:] if name in of_tokens else shapes
            if name == TEACHER and self.objective.n_top is not None:
                taken = ((*shape, 3 * self.objective.n_top + 1),)
            found = extras.get(name)
            if not isinstance(found, torch.Tensor) or tuple(found.shape) not in taken:
                problem = "none" if found is None else f"one of {tuple(getattr(found, 'shape', ()))}"
                wanted = " or ".join(map(str, taken))
                raise DataError(f"the plan's loss asks for extras[{name!r}] of {wanted}, and step {step} brings {problem}")
        made = replace(made, n_answers=None, extras={name: extras[name] for name in self.objective.extras})
        if made.document_tokens is None:
            return made
        if self.no_documents is not None:
            raise DataError(f"the documents of step {step}: {self.no_documents}; leave document_tokens out")
        sums = [sum(tokens) if all(n > 0 for n in tokens) else 0 for tokens in made.document_tokens]
        if sums != [self.seq_len] * self.batch_size:
            problem = f"the documents of step {step} have {sums[:4]} tokens, sequence by sequence"
            raise DataError(f"{problem}; each of {self.batch_size} sequences has {self.seq_len}, padding included")
        return made

    def position(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def resume(self, step: int, position: dict[str, Any]) -> bool:
        return position == self.position(step)

    def words(self) -> dict[str, str]:
        return {"data": self.fingerprint}
