"""Hyperparameters of AdamW."""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from .workload import FILE

Above0 = Annotated[float, Field(gt=0, le=1e6)]
AtLeast0 = Annotated[float, Field(ge=0, le=1e6)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]  # no name of a file holds a NUL


@dataclass(frozen=True, slots=True)
class AdamW:
    """Hyperparameters: of a step, or of a run before its rate is scheduled. Biases, norms and other vectors never decay;
    `no_decay` names more, by parts of their names."""

    lr: Above0 = 1e-5
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    weight_decay: AtLeast0 = 0.0
    no_decay: tuple[Text, ...] = ()
    __pydantic_config__ = FILE

    def of(self, name: str, shape: tuple[int, ...]) -> "AdamW":
        """The settings for one parameter: without decay where none applies."""
        spared = not decays(name, shape) or any(part in name for part in self.no_decay)
        return replace(self, weight_decay=0.0) if spared else self


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies: not to biases, norms and 1-D parameters, by name (biases of experts are 2-D)."""
    last_two = name.split(".")[-2:]
    return len(shape) > 1 and not any("norm" in part or "bias" in part for part in last_two) and last_two[-1] != "sinks"
