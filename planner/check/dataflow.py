"""Data flow of a plan: each op finds the values that it needs in its slots.

The ops of consecutive steps run symbolically, in one legal order, on slots that hold names of values.
"""

from typing import NamedTuple

from penstock.runtime.plan import Kind, Plan, Slot

from .contract import source_slot, state_slot
from .shape import Shape, wrong


class _Content(NamedTuple):  # a plan has 10^5 of them, and creating a tuple takes a third of the time of a dataclass
    """Symbolic content of a slot. Host state has the step that reads it: the update of step n-1 writes version n."""

    value: str
    block: int
    micro_batch: int | None
    step: int

    def __str__(self) -> str:
        m = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"the {self.value} of block {self.block}{m}, step {self.step}"


PART = "part of the weights"  # the shard of a rank, and all frozen weights
_WEIGHTS = {"weights": "weights", "trained": "state"}  # `trained`: weights trained separately, read from the state
# For each kind of op: values that its operands must hold, of its block and micro-batch; and values that it writes.
_MOVES: dict[Kind, tuple[dict[str, str], dict[str, str]]] = {
    Kind.READ: ({}, {"frozen": "read weights"}),
    Kind.LOAD: ({"frozen": "read weights"}, {}),
    Kind.DEQUANTISE: ({"packed": "packed weights"}, {}),
    Kind.FORWARD: (_WEIGHTS, {"y": "output", "saved": "saved activations"}),
    Kind.RECOMPUTE: (_WEIGHTS, {"y": "recomputed output"}),
    Kind.LOSS: (_WEIGHTS, {}),
    Kind.BACKWARD: (_WEIGHTS | {"y": "output gradient", "saved": "fetched saved activations"}, {}),
    Kind.OFFLOAD_ACTIVATION: ({"y": "output"}, {"spilled": "spilled output"}),
    Kind.FETCH_ACTIVATION: ({"spilled": "spilled output"}, {"y": "fetched output"}),
    Kind.OFFLOAD_SAVED: ({"saved": "saved activations"}, {"offloaded": "offloaded saved activations"}),
    Kind.FETCH_SAVED: ({"offloaded": "offloaded saved activations"}, {"saved": "fetched saved activations"}),
    Kind.EXCHANGE: ({"sum": "gradient"}, {"received": "others' sums", "gradient": "gradient"}),
    Kind.SQUARE: ({"gradient": "gradient"}, {"squares": "squares"}),
    Kind.OFFLOAD_GRADIENT: ({"gradient": "gradient", "squares": "squares"}, {"arrived": "gradient", "norm": "squares"}),
    Kind.OFFLOAD_SQUARES: ({"squares": "squares"}, {"norm": "squares"}),
    Kind.ACCUMULATE: ({"staged": "gradient"}, {}),
    Kind.NORM: ({"arrived": "gradient"}, {"norm": "squares"}),
    Kind.SPECULATE: ({"arrived": "gradient", "state": "state"}, {"shadow": "shadow"}),
    Kind.UPDATE: ({"arrived": "gradient", "norm": "squares", "state": "state"}, {"state": "state"}),
    Kind.SETTLE: ({"arrived": "gradient", "shadow": "shadow", "state": "state"}, {"state": "state", "shadow": "spent shadow"}),
    Kind.UPDATE_ON_DEVICE: ({"gradient": "gradient", "state": "state"}, {"state": "state"}),
}


class _Memory:
    """Content of all slots during a symbolic execution of consecutive steps."""

    def __init__(self, plan: Plan, shape: Shape) -> None:
        self.plan, self.shape = plan, shape
        self.op, self.i, self.step = plan.ops[0], 0, 0  # the current op
        self.held: dict[Slot, _Content] = {}
        for b in range(shape.n_blocks):
            places = [("state", state_slot(shape, b)), *([("frozen weights", source_slot(shape, b))] if self.is_frozen(b) else [])]
            for value, (arena, (index,)) in places:
                self.held[Slot(arena, index)] = _Content(value, b, None, 0)

    def perform(self, i: int, step: int) -> None:
        """Execute op i of the plan symbolically. PlanError if a slot does not hold the value that the op needs."""
        self.i, self.op, self.step = i, self.plan.ops[i], step
        op, needs, leaves = self.op, *_MOVES.get(self.op.kind, ({}, {}))
        b, m, last = op.block, op.micro_batch, self.shape.n_micro_batches - 1
        for name, value in needs.items():
            if (slot := op.get(name)) is not None:
                is_state = name == "weights" and b in self.shape.in_place
                self.need(slot, "state" if is_state else value, b, None if name in _WEIGHTS else m)
        if op.kind in (Kind.LOAD, Kind.DEQUANTISE, Kind.GATHER):
            self.load()
        elif (tied := op.get("tied")) is not None:  # the head's part of the gradient
            is_whole = op.kind is not Kind.BACKWARD or self.shape.head in self.shape.summed_in_place
            part = ("gradient", None) if is_whole else (_sum_of(range(last + 1)), last)
            self.need(tied, part[0], self.shape.head, part[1])
        if (x := op.get("x")) is not None:
            is_up = op.kind in (Kind.FORWARD, Kind.LOSS)
            came_back = "fetched " * (b - 1 in self.shape.offloaded) or "recomputed " * (b - 1 in self.shape.shared)
            self.need(x, f"{'' if is_up else came_back}output", b - 1, m)
        if (clip := op.get("clip")) is not None and op.kind is not Kind.CLIP:
            self.need(clip, "norm of all gradients", 0)
        match op.kind:
            case Kind.LOSS | Kind.BACKWARD:  # the input gradient overwrites the input; the weight gradient is added to its sum
                if b:
                    self.held[op["x"]] = _Content("output gradient", b - 1, m, step)
                gradient, total = op.get("gradient"), op.get("sum")
                if total is not None:  # without a gradient operand, the final sum is the gradient
                    self.add_up([total, *op.every("into")], m or 0, is_whole=m == last and gradient is None)
                if gradient is not None:
                    self.held[gradient] = _Content("gradient", b, None if b in self.shape.summed_there else m, step)
            case Kind.ACCUMULATE:
                self.add_up([op["arrived"], *op.every("into")], m or 0, is_whole=m == last)
            case Kind.CLIP:
                for slot, owner in zip(op.every("norm"), sorted(self.shape.trained), strict=True):
                    self.need(slot, "squares", owner)
                self.held[op["clip"]] = _Content("norm of all gradients", 0, None, step)
        for name, value in leaves.items():
            if (slot := op.get(name)) is not None:
                self.held[slot] = _Content(value, b, m, step + (value == "state"))  # the next step reads the state

    def need(self, slot: Slot, value: str, block: int, micro_batch: int | None = None) -> None:
        """Raise PlanError unless the slot holds this value of the current step. Frozen weights have no step."""
        step = 0 if value == "frozen weights" else self.step
        wanted, content = _Content(value, block, micro_batch, step), self.held.get(slot)
        if content != wanted:
            raise wrong(self.i, self.op, f"in step {self.step} {slot} holds {content or 'nothing'}, not {wanted}")

    def is_frozen(self, block: int) -> bool:
        """True if the weights that are loaded for the block are equal in every step."""
        return block in self.shape.separate or block not in self.shape.trained

    def load(self) -> None:
        """Load weights from this step's state. With several ranks, load the shard first, then gather the whole."""
        op, b = self.op, self.op.block
        is_part = op.kind is not Kind.GATHER and self.shape.ranks > 1 and b in self.shape.trained
        for name, owner in (("state", b), ("tied", 0)):
            if (slot := op.get(name)) is not None:
                self.need(slot, "frozen weights" if self.is_frozen(owner) else "state", owner)
        if op.kind is Kind.GATHER:
            self.need(op["weights"], PART, b)
        loaded = "packed weights" if op.kind is Kind.LOAD and b in self.shape.packed else PART if is_part else "weights"
        self.held[op["weights"]] = _Content(loaded, b, None, self.step)

    def add_up(self, slots: list[Slot], m: int, is_whole: bool) -> None:
        """Add a micro-batch's gradient to the sum in the first slot, or start it; then add each completed sum to the next slot."""
        b, n_done = self.op.block, m  # n_done: first micro-batch in the addend
        for slot, together in zip(slots, self.shape.summed_with(m), strict=True):
            if n_done > together.start:
                self.need(slot, _sum_of(range(together.start, n_done)), b, n_done - 1)
            n_done = together.start
            self.held[slot] = _Content(_sum_of(together), b, m, self.step)
        if is_whole:
            self.held[slots[-1]] = _Content("gradient", b, None, self.step)


def _sum_of(micro_batches: range) -> str:
    """Name of a partial gradient sum in a slot. The last micro-batch in it is stored separately."""
    return f"gradient sum from micro-batch {micro_batches.start} on"


def check_data(plan: Plan, shape: Shape, order: list[int], n_steps: int) -> None:
    """Check that every op finds the values that it needs, in the first step and in a later one."""
    memory = _Memory(plan, shape)
    for step in range(n_steps):
        for i in order:
            memory.perform(i, step)
