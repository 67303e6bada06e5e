"""Training objectives: loss functions, their inputs and their device memory."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from penstock.runtime.errors import PlanError

from .workload import FILE


class LossUnit(StrEnum):
    """Unit of a loss. By default a step's sum is divided by the number of units."""

    TOKENS = "tokens"  # logits and targets of a tile of positions
    SEQUENCES = "sequences"  # log-probability of each sequence: a sum over its targets
    PAIRS = "pairs"  # log-probabilities of two adjacent sequences: chosen and rejected answer
    ANSWERS = "answers"  # log-probabilities of groups; each answer is followed by its prompt with another answer of the group


class Source(StrEnum):
    """Producer of a loss input."""

    TOKENS = "tokens"  # computed from the tokens of a batch
    ROW = "row"  # numbers of a data row
    FILE = "file"  # written by a forward pass of frozen weights
    PROGRAM = "program"  # batches of a user's program alone


@dataclass(frozen=True, slots=True)
class LossInput:
    """Tensor that a loss needs in addition to tokens and targets. `shape`: numbers, or letters for B sequences, T tokens of each,
    and K responses packed in a sequence (no dimension for unpacked ones)."""

    name: str
    shape: tuple[str | int, ...]
    dtype: str  # in torch
    source: Source
    by_sequence: bool = False  # user batches may hold (B,) in place of (B, T)

    def sizes(self, n_sequences: int, n_tokens: int, n_slots: int | None = None) -> tuple[int, ...]:
        """Shape in numbers. `n_slots`: responses packed in a sequence; None for unpacked ones."""
        lengths = {"B": n_sequences, "T": n_tokens, "K": n_slots}
        sizes = (lengths[size] if isinstance(size, str) else size for size in self.shape)
        return tuple(size for size in sizes if size is not None)


LAST = LossInput("last", ("B", "K"), "int64", Source.TOKENS)  # index of the last token
ANSWER = LossInput("answer", ("B", "K", 2), "int64", Source.TOKENS)  # spans of packed responses, see `response_sums.py`
LABEL = LossInput("label", ("B", "K"), "float32", Source.ROW)
ADVANTAGE = LossInput("advantage", ("B", "T"), "float32", Source.ROW, by_sequence=True)
OLD = LossInput("old", ("B", "T"), "float32", Source.ROW)  # log-probabilities of targets when they were sampled
REFERENCE = LossInput("reference", ("B", "K"), "float64", Source.FILE)  # log-probabilities of responses
TOKEN_REFERENCE = LossInput("reference", ("B", "T"), "float32", Source.FILE)
TEACHER = LossInput("teacher", ("B", "T", 0), "int16", Source.FILE)  # likeliest ids and log-probabilities; its length depends on k


@dataclass(frozen=True, slots=True)
class Known:
    """A named loss: its unit, its numbers with their defaults, and its inputs in addition to tokens."""

    of: LossUnit
    numbers: dict[str, float] = field(default_factory=dict)
    inputs: tuple[LossInput, ...] = ()
    wide: int = 3  # fp32 values per logit at the peak of a tile: log-probabilities and two gradients
    per: LossUnit | None = None  # unit to divide the step's sum by, if not `of`

    def inputs_of(self, numbers: Mapping[str, float]) -> tuple[LossInput, ...]:
        """Inputs with these numbers: no reference if its weight is 0."""
        return tuple(row for row in self.inputs if numbers.get("beta") != 0 or row.name != REFERENCE.name)

    def extras_of(self, numbers: Mapping[str, float]) -> tuple[str, ...]:
        return tuple(row.name for row in self.inputs_of(numbers))


SCORE = "score.weight"  # name of a scoring head, as in transformers
_CLIPPED, _ROLLOUTS = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0}, (ADVANTAGE, OLD, TOKEN_REFERENCE)
KNOWN = {
    "cross-entropy": Known(LossUnit.TOKENS),
    "label-smoothing": Known(LossUnit.TOKENS, {"epsilon": 0.1}),
    "z-loss": Known(LossUnit.TOKENS, {"weight": 1e-4}, wide=5),
    "dpo": Known(LossUnit.PAIRS, {"beta": 0.1, "label_smoothing": 0.0}, (REFERENCE,)),
    "ipo": Known(LossUnit.PAIRS, {"beta": 0.1}, (REFERENCE,)),
    "hinge": Known(LossUnit.PAIRS, {"beta": 0.1}, (REFERENCE,)),
    "robust": Known(LossUnit.PAIRS, {"beta": 0.1, "label_smoothing": 0.1}, (REFERENCE,)),
    "orpo": Known(LossUnit.PAIRS, {"beta": 0.1}),
    "grpo": Known(LossUnit.TOKENS, _CLIPPED, _ROLLOUTS, per=LossUnit.SEQUENCES),
    "dapo": Known(LossUnit.TOKENS, _CLIPPED, _ROLLOUTS),
    "dr-grpo": Known(LossUnit.TOKENS, _CLIPPED | {"max_completion_length": 256.0}, _ROLLOUTS, per=LossUnit.SEQUENCES),
    "kto": Known(
        LossUnit.ANSWERS, {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "group": 4.0}, (REFERENCE, LABEL)
    ),
    "simpo": Known(LossUnit.PAIRS, {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0}),
    "reward": Known(LossUnit.PAIRS, {"center": 0.0, "mean": 0.0}, (LAST,)),
    "classify": Known(LossUnit.SEQUENCES, {"labels": 2.0, "mean": 0.0}, (LAST, LABEL)),
    "distill": Known(LossUnit.TOKENS, {"k": 64.0, "beta": 0.0, "temperature": 1.0}, (TEACHER,)),
}
INT32, INT16, FP16 = 4, 2, 2  # bytes
_LEAST = {"label_smoothing": (0.0, 0.5), "epsilon": (0.0, 1.0), "epsilon_low": (0.0, 1.0), "max_completion_length": (1.0, 1e6)}
_LEAST |= {"labels": (2.0, 1025.0), "mean": (0.0, 1.5), "k": (1.0, 1e6), "temperature": (0.01, 100.0)}
# [minimum, upper limit) of numbers; default: [0, 10^6)
_USER_FUNCTION = re.compile(r"(?:[^\s:,=]{1,120}\.py|python):[A-Za-z_]\w{0,79}")
_EXTRA = re.compile(r"[a-z_][a-z0-9_]{0,39}")
MOST_WIDE = 64
MOST_GROUP = 64  # answers
_HOW = f"write one of {', '.join(KNOWN)}, with its numbers as dpo:beta=0.1,label_smoothing=0.1, or FILE.py:FUNCTION"


@dataclass(frozen=True, slots=True)
class Objective:
    """Minimised function: the mean over all tokens, sequences, pairs or answers of a step."""

    name: str = "cross-entropy"  # key of `KNOWN`, or location of a user function
    numbers: dict[str, float] = field(default_factory=dict)  # all numbers of the loss
    of: LossUnit = LossUnit.TOKENS
    extras: tuple[str, ...] = ()
    wide: Annotated[int, Field(ge=3)] = 3
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # source of the user function
    __pydantic_config__ = FILE

    def __post_init__(self) -> None:
        """Raise PlanError for fields that the named loss does not have."""
        if (known := KNOWN.get(self.name)) is None:
            if self.sha256 is None or self.numbers or self.of is LossUnit.ANSWERS or not _USER_FUNCTION.fullmatch(self.name):
                raise PlanError(f"--loss {self.name[:80]!r} is not known; {_HOW}")
            if odd := [extra for extra in self.extras if not _EXTRA.fullmatch(extra)]:
                raise PlanError(f"--loss {self.name}: asks for {odd[0][:60]!r}; write it in at most 40 small letters, digits and _")
            if self.wide > MOST_WIDE:
                raise PlanError(f"--loss {self.name}: {self.wide} fp32 values per logit are saved; save at most {MOST_WIDE}")
            return
        if (self.of, self.extras, self.wide, self.sha256) != (known.of, known.extras_of(self.numbers), known.wide, None):
            raise PlanError(f"--loss {self.name}: has fields that differ from that loss; give its numbers only")
        if self.numbers.keys() != known.numbers.keys():
            raise PlanError(f"--loss {self.name}: its numbers are {', '.join(known.numbers) or 'none'}; {_HOW}")
        for number, value in self.numbers.items():
            least, limit = _LEAST.get(number, (0.0, 1e6))
            if not least <= value < limit:
                raise PlanError(f"--loss {self.name}: {number} is {value:g}; it must be at least {least:g} and below {limit:g}")
        if (group := self.numbers.get("group", MOST_GROUP)) != int(group) or not 2 <= group <= MOST_GROUP:
            raise PlanError(f"--loss {self.name}: group is {group:g}; it is a whole number of answers, from 2 to {MOST_GROUP}")
        if self.name == "distill" and (self.numbers["beta"] > 1 or self.numbers["k"] % 1):
            raise PlanError(f"--loss {self.name}: beta must be 0 (forward KL) to 1 (reverse), and k a whole number of ids")
        if any(self.numbers.get(number, 0) % 1 for number in ("labels", "mean")):
            raise PlanError(f"--loss {self.name}: labels must be a whole number, and mean 0 (the last token) or 1")
        if self.numbers.get("beta") == 0 and known.numbers["beta"]:
            raise PlanError(f"--loss {self.name}: beta is 0, so that nothing is learned; choose a larger one")

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.numbers.items()), self.sha256, self.of, self.extras, self.wide))

    @property
    def is_default(self) -> bool:
        return self.name == "cross-entropy"

    @property
    def rows_each(self) -> int:
        """Sequences per unit: 2 for a pair."""
        return {LossUnit.PAIRS: 2, LossUnit.ANSWERS: 2 * int(self.numbers.get("group", 1))}.get(self.of, 1)

    @property
    def per(self) -> LossUnit:
        """Unit to divide the step's sum by."""
        return (self.name in KNOWN and KNOWN[self.name].per) or self.of

    @property
    def inputs(self) -> tuple[LossInput, ...]:
        """Table of the inputs in `extras`. A user function gets rollouts and a reference from files, all else from a program."""
        if (known := KNOWN.get(self.name)) is not None:
            teacher = replace(TEACHER, shape=("B", "T", self.teacher_bytes // INT16))
            return tuple(teacher if row is TEACHER else row for row in known.inputs_of(self.numbers))
        is_by_token = self.of is LossUnit.TOKENS
        provided = {REFERENCE.name: TOKEN_REFERENCE if is_by_token else REFERENCE}
        if is_by_token and {ADVANTAGE.name, OLD.name} <= {*self.extras}:
            provided |= {row.name: row for row in (ADVANTAGE, OLD)}
        shape = ("B", "T") if is_by_token else ("B",)
        return tuple(provided.get(name) or LossInput(name, shape, "float32", Source.PROGRAM) for name in self.extras)

    @property
    def has_file(self) -> bool:
        """True if a reference or teacher is read from a file."""
        return any(row.source is Source.FILE for row in self.inputs)

    @property
    def forward_output(self) -> LossInput:
        """Values that `penstock forward` writes: those that the loss reads, or else log-probabilities of responses."""
        return next((row for row in self.inputs if row.source is Source.FILE), REFERENCE)

    @property
    def n_top(self) -> int | None:
        """Teacher's likeliest ids per position; None without a teacher."""
        return int(self.numbers["k"]) if self.name == "distill" else None

    @property
    def teacher_bytes(self) -> int:
        """Bytes per position of a teacher's file: top-k ids, their log-probabilities, log-probability of all other ids."""
        return 0 if (k := self.n_top) is None else k * INT32 + (k + 1) * FP16

    @property
    def n_labels(self) -> int | None:
        """Rows of a separate head that scores sequences; None for the model's head, which predicts tokens."""
        return {"reward": 1, "classify": int(self.numbers.get("labels", 0))}.get(self.name)

    @property
    def has_first_pass(self) -> bool:
        """True if sums over sequences are computed first, with a second computation of the head's product."""
        return self.of is not LossUnit.TOKENS and self.n_labels is None

    @property
    def takes_eager(self) -> bool:
        """True if the loss needs logits or the last hidden state from the model's modules."""
        return self.n_labels is not None or (self.of is LossUnit.TOKENS and not self.is_default)

    def __str__(self) -> str:
        """Return text for `parse_objective`, except for user functions."""
        numbers = ",".join(f"{name}={value}" for name, value in self.numbers.items())
        return f"{self.name}:{numbers}" if numbers else self.name


CROSS_ENTROPY = Objective()


def parse_objective(text: str) -> Objective:
    """Parse a loss such as `dpo:beta=0.2`. Missing numbers have their defaults. Raise PlanError for other texts."""
    name, _, rest = text.strip().partition(":")
    if (known := KNOWN.get(name)) is None:
        raise PlanError(f"--loss {text[:80]!r} is not known; {_HOW}")
    parsed = dict[str, float]()
    for part in filter(None, rest.split(",")):
        number, is_named, value = part.rpartition("=")
        number = number if is_named else next(iter(known.numbers), "")  # the first one needs no name
        if number in parsed:
            raise PlanError(f"--loss {text[:80]!r}: {number[:40]} is given twice; give it once")
        try:
            parsed[number] = float(value)
        except ValueError:
            raise PlanError(f"--loss {text[:80]!r}: {part[:40]!r} is no number; {_HOW}") from None
    numbers = known.numbers | parsed
    return Objective(name, numbers, known.of, known.extras_of(numbers), known.wide)


def _from_file(value: object) -> object:
    if isinstance(value, dict) and isinstance(extras := value.get("extras"), list):
        return {**value, "extras": tuple(extras)}
    return parse_objective(value) if isinstance(value, str) else value


def _to_file(objective: Objective) -> object:
    return str(objective) if objective.sha256 is None else asdict(objective)


Loss = Annotated[Objective, BeforeValidator(_from_file), PlainSerializer(_to_file)]
