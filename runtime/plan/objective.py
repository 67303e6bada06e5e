"""The objective: the loss that a step minimises, its inputs, and the device memory that it takes."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from penstock.runtime.errors import PlanError

from .workload import FILE


class Of(StrEnum):
    """What a loss is a function of, which is what the step's sum is divided by, if nothing else is said."""

    TOKENS = "tokens"  # logits and targets of a tile of positions
    SEQUENCES = "sequences"  # the log-probability of each sequence's targets, summed over them
    PAIRS = "pairs"  # the same of two sequences that follow each other: a chosen answer and a rejected one
    ANSWERS = "answers"  # the same of groups of answers, each followed by its prompt with the answer of another of the group


@dataclass(frozen=True, slots=True)
class Known:
    """A loss that has a name: what it is of, its numbers with their defaults, and the extras that it asks of a batch."""

    of: Of
    numbers: dict[str, float] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    wide: int = 3  # fp32 values alive per logit at the peak of a tile: log-probabilities and two gradients
    per: Of | None = None  # what the step's sum is divided by, if not what it is of

    def asks(self, numbers: Mapping[str, float]) -> tuple[str, ...]:
        """Extras with these numbers: no reference if its weight is 0."""
        return tuple(name for name in self.extras if numbers.get("beta") != 0 or name != REFERENCE)


REFERENCE, TEACHER = "reference", "teacher"  # extras that a file has: log-probabilities; and those of likely ids of each position
_REFERENCE = (REFERENCE,)
LAST, SCORE = "last", "score.weight"  # an extra, where each sequence ends; and a head of one's own, as transformers calls it
ANSWER = "answer"  # an extra (B, K, 2): spans of responses that share a sequence (`runtime/compute/response_sums.py`)
_CLIPPED, _ROLLOUTS = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0}, ("advantage", "old", *_REFERENCE)
KNOWN = {
    "cross-entropy": Known(Of.TOKENS),
    "label-smoothing": Known(Of.TOKENS, {"epsilon": 0.1}),
    "z-loss": Known(Of.TOKENS, {"weight": 1e-4}, wide=5),
    "dpo": Known(Of.PAIRS, {"beta": 0.1, "label_smoothing": 0.0}, _REFERENCE),
    "ipo": Known(Of.PAIRS, {"beta": 0.1}, _REFERENCE),
    "hinge": Known(Of.PAIRS, {"beta": 0.1}, _REFERENCE),
    "robust": Known(Of.PAIRS, {"beta": 0.1, "label_smoothing": 0.1}, _REFERENCE),
    "orpo": Known(Of.PAIRS, {"beta": 0.1}),
    "grpo": Known(Of.TOKENS, _CLIPPED, _ROLLOUTS, per=Of.SEQUENCES),
    "dapo": Known(Of.TOKENS, _CLIPPED, _ROLLOUTS),
    "dr-grpo": Known(Of.TOKENS, _CLIPPED | {"max_completion_length": 256.0}, _ROLLOUTS, per=Of.SEQUENCES),
    "kto": Known(
        Of.ANSWERS, {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0, "group": 4.0}, (*_REFERENCE, "label")
    ),
    "simpo": Known(Of.PAIRS, {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0}),
    "reward": Known(Of.PAIRS, {"center": 0.0, "mean": 0.0}, (LAST,)),
    "classify": Known(Of.SEQUENCES, {"labels": 2.0, "mean": 0.0}, (LAST, "label")),
    "distill": Known(Of.TOKENS, {"k": 64.0, "beta": 0.0, "temperature": 1.0}, (TEACHER,)),
}
INT32, FP16 = 4, 2
_LEAST = {"label_smoothing": (0.0, 0.5), "epsilon": (0.0, 1.0), "epsilon_low": (0.0, 1.0), "max_completion_length": (1.0, 1e6)}
_LEAST |= {"labels": (2.0, 1025.0), "mean": (0.0, 1.5), "k": (1.0, 1e6), "temperature": (0.01, 100.0)}
# least, and what it stays below; others: 0 to 10^6
_OWN = re.compile(r"(?:[^\s:,=]{1,120}\.py|python):[A-Za-z_]\w{0,79}")
_EXTRA = re.compile(r"[a-z_][a-z0-9_]{0,39}")
MOST_WIDE = 64
MOST_GROUP = 64  # answers
_HOW = f"write one of {', '.join(KNOWN)}, with its numbers as dpo:beta=0.1,label_smoothing=0.1, or FILE.py:FUNCTION"


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised: the mean over all tokens, sequences, pairs or answers of a step."""

    name: str = "cross-entropy"  # of `KNOWN`, or where a function of the user's own is
    numbers: dict[str, float] = field(default_factory=dict)  # all that the loss has
    of: Of = Of.TOKENS
    extras: tuple[str, ...] = ()
    wide: Annotated[int, Field(ge=3)] = 3
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # of the function's text, if it is the user's own
    __pydantic_config__ = FILE

    def __post_init__(self) -> None:
        """PlanError for what a loss of that name is not."""
        if (known := KNOWN.get(self.name)) is None:
            if self.sha256 is None or self.numbers or self.of is Of.ANSWERS or not _OWN.fullmatch(self.name):
                raise PlanError(f"--loss {self.name[:80]!r} is not known; {_HOW}")
            if odd := [extra for extra in self.extras if not _EXTRA.fullmatch(extra)]:
                raise PlanError(f"--loss {self.name}: asks for {odd[0][:60]!r}; write it in at most 40 small letters, digits and _")
            if self.wide > MOST_WIDE:
                raise PlanError(f"--loss {self.name}: {self.wide} fp32 values a logit are kept; keep at most {MOST_WIDE}")
            return
        if (self.of, self.extras, self.wide, self.sha256) != (known.of, known.asks(self.numbers), known.wide, None):
            raise PlanError(f"--loss {self.name}: not what that loss is; leave all but its numbers out")
        if self.numbers.keys() != known.numbers.keys():
            raise PlanError(f"--loss {self.name}: its numbers are {', '.join(known.numbers) or 'none'}; {_HOW}")
        for number, value in self.numbers.items():
            least, below = _LEAST.get(number, (0.0, 1e6))
            if not least <= value < below:
                raise PlanError(f"--loss {self.name}: {number} is {value:g}; it lies from {least:g} to below {below:g}")
        if (group := self.numbers.get("group", MOST_GROUP)) != int(group) or not 2 <= group <= MOST_GROUP:
            raise PlanError(f"--loss {self.name}: group is {group:g}; it is a whole number of answers, from 2 to {MOST_GROUP}")
        if self.name == "distill" and (self.numbers["beta"] > 1 or self.numbers["k"] % 1):
            raise PlanError(f"--loss {self.name}: beta lies from 0 (forward KL) to 1 (reverse), and k is a whole number of ids")
        if any(self.numbers.get(whole, 0) % 1 for whole in ("labels", "mean")):
            raise PlanError(f"--loss {self.name}: labels are a whole number of them, and mean is 0 (the last token) or 1")
        if self.numbers.get("beta") == 0 and known.numbers["beta"]:
            raise PlanError(f"--loss {self.name}: beta is 0, so that nothing is learned; choose one above it")

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.numbers.items()), self.sha256, self.of, self.extras, self.wide))

    @property
    def is_default(self) -> bool:
        return self.name == "cross-entropy"

    @property
    def rows_each(self) -> int:
        """Sequences of one unit: 2 for a pair."""
        return {Of.PAIRS: 2, Of.ANSWERS: 2 * int(self.numbers.get("group", 1))}.get(self.of, 1)

    @property
    def per(self) -> Of:
        """What the step's sum is divided by the number of."""
        return (self.name in KNOWN and KNOWN[self.name].per) or self.of

    @property
    def has_token_reference(self) -> bool:
        """Whether a reference is a log-probability of each token, not of sequences."""
        return self.of is Of.TOKENS and REFERENCE in self.extras

    @property
    def n_top(self) -> int | None:
        """Ids of each position that a teacher says most of; None: there is none."""
        return int(self.numbers["k"]) if TEACHER in self.extras and self.sha256 is None else None

    @property
    def teacher_bytes(self) -> int:
        """Of a position in a teacher's file: its likeliest ids, their log-probabilities, and that of all others."""
        return 0 if (k := self.n_top) is None else k * INT32 + (k + 1) * FP16

    @property
    def n_labels(self) -> int | None:
        """Rows of a head of one's own, which scores sequences; None: the model's, which predicts tokens."""
        return {"reward": 1, "classify": int(self.numbers.get("labels", 0))}.get(self.name)

    @property
    def has_first_pass(self) -> bool:
        """Whether sums over sequences come first, for which the head's product is computed a second time."""
        return self.of is not Of.TOKENS and self.n_labels is None

    @property
    def takes_eager(self) -> bool:
        """Whether only what the model's own modules make will do: logits, or the last hidden state."""
        return self.n_labels is not None or (self.of is Of.TOKENS and not self.is_default)

    def __str__(self) -> str:
        """As `parse_objective` reads it, but for a function."""
        numbers = ",".join(f"{name}={value}" for name, value in self.numbers.items())
        return f"{self.name}:{numbers}" if numbers else self.name


CROSS_ENTROPY = Objective()


def parse_objective(text: str) -> Objective:
    """A loss by its name, and numbers if they are not the usual ones; PlanError for anything else."""
    name, _, rest = text.strip().partition(":")
    if (known := KNOWN.get(name)) is None:
        raise PlanError(f"--loss {text[:80]!r} is not known; {_HOW}")
    said = dict[str, float]()
    for part in filter(None, rest.split(",")):
        number, is_named, value = part.rpartition("=")
        number = number if is_named else next(iter(known.numbers), "")  # the first one needs no name
        if number in said:
            raise PlanError(f"--loss {text[:80]!r}: {number[:40]} is said twice; say it once")
        try:
            said[number] = float(value)
        except ValueError:
            raise PlanError(f"--loss {text[:80]!r}: {part[:40]!r} is no number; {_HOW}") from None
    numbers = known.numbers | said
    return Objective(name, numbers, known.of, known.asks(numbers), known.wide)


def _from_file(said: object) -> object:
    if isinstance(said, dict) and isinstance(extras := said.get("extras"), list):
        return {**said, "extras": tuple(extras)}
    return parse_objective(said) if isinstance(said, str) else said


def _to_file(of: Objective) -> object:
    return str(of) if of.sha256 is None else asdict(of)


Loss = Annotated[Objective, BeforeValidator(_from_file), PlainSerializer(_to_file)]
