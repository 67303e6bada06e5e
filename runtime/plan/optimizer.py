"""Optimizers as data: what each keeps of a parameter, the bytes that an update moves, and its hyperparameters.

Arenas, costs, the checker and checkpoints ask here; `runtime/host` has a file with the arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from .workload import FILE, ITEM_BYTES, Dtype

Above0 = Annotated[float, Field(gt=0, le=1e6)]
AtLeast0 = Annotated[float, Field(ge=0, le=1e6)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]  # no name of a file holds a NUL
STORED_BYTES = ITEM_BYTES | {"int16": 2}  # the remainder of a split master is int16


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer as a plan knows it. A master is fp32 or bf16."""

    moments: dict[str, Dtype]  # what it keeps of each trained parameter besides its master, by the names that checkpoints give it
    # A device updates to the host's bits what has a multiple of this number of elements: the host's kernel computes the rest, which
    # fills no vector register, in another sequence
    device_multiple: int = 1

    @property
    def moment_bytes(self) -> int:
        """Bytes per parameter of the moments."""
        return sum(ITEM_BYTES[dtype] for dtype in self.moments.values())

    def state_bytes(self, master: Dtype) -> int:
        """Bytes per parameter of master and moments."""
        return ITEM_BYTES[master] + self.moment_bytes

    def update_bytes(self, master: Dtype, gradient: Dtype) -> int:
        """Memory traffic of an update per parameter, on host or device: master and moments are read and written, the gradient is
        read. Of AdamW with an fp32 master and bf16 gradients 26 bytes: 2 x (4 + 8) + 2."""
        return 2 * self.state_bytes(master) + ITEM_BYTES[gradient]


ADAMW = Optimizer({"exp_avg": "fp32", "exp_avg_sq": "fp32"}, device_multiple=8)


@dataclass(frozen=True, slots=True)
class AdamW:
    """Hyperparameters of AdamW: of a step, or of a run before its rate is scheduled. Biases, norms and other vectors never decay;
    `no_decay` names more, by parts of their names."""

    lr: Above0 = 1e-5
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    weight_decay: AtLeast0 = 0.0
    no_decay: tuple[Text, ...] = ()
    __pydantic_config__ = FILE

    @property
    def numbers(self) -> list[float]:
        """Of one parameter, in the order in which kernels take them."""
        return [self.lr, self.beta1, self.beta2, self.weight_decay, self.eps]

    def of(self, name: str, shape: tuple[int, ...]) -> "AdamW":
        """The hyperparameters for one parameter: without decay where none applies."""
        spared = not decays(name, shape) or any(part in name for part in self.no_decay)
        return replace(self, weight_decay=0.0) if spared else self


Hyperparameters = AdamW  # of any optimizer
Schedule = Callable[[int], Hyperparameters]  # those of each step


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies: not to biases, norms and 1-D parameters, by name (biases of experts are 2-D)."""
    last_two = name.split(".")[-2:]
    return len(shape) > 1 and not any("norm" in part or "bias" in part for part in last_two) and last_two[-1] != "sinks"
