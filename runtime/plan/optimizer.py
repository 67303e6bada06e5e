"""Optimizers as data: what each keeps of a parameter, the bytes that an update moves, and its hyperparameters.

Arenas, costs, the checker and checkpoints ask here; `runtime/host` has a file with the arithmetic.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from .workload import FILE, ITEM_BYTES, Dtype

Above0 = Annotated[float, Field(gt=0, le=1e6)]
AtLeast0 = Annotated[float, Field(ge=0, le=1e6)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]  # no name of a file holds a NUL
STORED_BYTES = ITEM_BYTES | {"int16": 2}  # the remainder of a split master is int16
DEVICE_UPDATE_ELEMENTS = 2**24  # that a GPU updates at a time: fewer, and launching its kernels would take longer than they do


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer as a plan knows it. A master is fp32 or bf16."""

    moments: dict[str, Dtype]  # what it keeps of each trained parameter besides its master, by the names that checkpoints give it
    # A device updates to the host's bits what has a multiple of this number of elements: the host's kernel computes the rest, which
    # fills no vector register, in another sequence
    device_multiple: int = 1
    device_kernels: int = 20  # that a GPU launches for each DEVICE_UPDATE_ELEMENTS that it updates

    @property
    def moment_bytes(self) -> int:
        """Bytes per parameter of the moments."""
        return sum(ITEM_BYTES[dtype] for dtype in self.moments.values())

    def state_bytes(self, master: Dtype) -> int:
        """Bytes per parameter of master and moments."""
        return ITEM_BYTES[master] + self.moment_bytes

    def update_bytes(self, master: Dtype, gradient: Dtype) -> int:
        """Host memory traffic of an update per parameter: master and moments are read and written, the gradient is read. Of AdamW
        with an fp32 master and bf16 gradients 26 bytes: 2 x (4 + 8) + 2."""
        return 2 * self.state_bytes(master) + ITEM_BYTES[gradient]

    def device_update_bytes(self, compute: Dtype, master: Dtype, gradient: Dtype) -> int:
        """Traffic in a device's memory of an update there, per parameter: the gradient is widened and scaled, the master joined or
        widened; one kernel reads master, gradient and moments and makes all but the gradient anew, which is then put in place; the
        master is rounded and cut. Counted in full, though much of it stays in a cache."""
        fp32 = ITEM_BYTES["fp32"]
        widened = ITEM_BYTES[gradient] + fp32 + 2 * fp32
        stepped = fp32 + 4 * (fp32 + self.moment_bytes)
        if compute == "fp32":
            return widened + stepped
        joined = 2 * (2 + fp32) + 3 * fp32 if master == "fp32" else 2 + fp32
        # NaN looked for, the remainder taken, half a unit added, shifted, masked, stored
        cut = (fp32 + 1) + (fp32 + 2) + 2 * 2 * fp32 + (2 * fp32 + 1) + (fp32 + 2)
        return widened + stepped + joined + cut

    @property
    def device_scratch_bytes(self) -> int:
        """Device memory that an update takes while it runs: the gradient, the joined master and its bits, what the kernel makes and
        one more, in fp32; and a mask."""
        return ((5 + len(self.moments)) * ITEM_BYTES["fp32"] + 1) * DEVICE_UPDATE_ELEMENTS


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


def decays(name: str, shape: tuple[int, ...]) -> bool:
    """Whether weight decay applies: not to biases, norms and 1-D parameters, by name (biases of experts are 2-D)."""
    last_two = name.split(".")[-2:]
    return len(shape) > 1 and not any("norm" in part or "bias" in part for part in last_two) and last_two[-1] != "sinks"
