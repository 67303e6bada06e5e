"""Does each op find in its slots what it needs?

The ops of consecutive steps are performed one by one, in one legal order, on slots that hold names of values.
"""

from typing import NamedTuple, assert_never

from runtime.plan import Kind, Plan, Slot

from .shape import Shape, wrong


class _Held(NamedTuple):  # a plan has 10^5 of them, and a tuple is made three times as fast as a dataclass
    """What a slot holds. The step of host state is the one that reads it: the update of step n-1 makes version n."""

    what: str
    block: int
    micro_batch: int | None
    step: int

    def __str__(self) -> str:
        if self.what == "norm":
            return f"the norm over {self.block} gradients in step {self.step}"
        m = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"the {self.what} of block {self.block}{m}, step {self.step}"


class _Memory:
    """All slots, by what they hold, while the ops of consecutive steps are performed one by one."""

    def __init__(self, plan: Plan, shape: Shape) -> None:
        self.plan, self.shape = plan, shape
        self.op, self.i, self.step = plan.ops[0], 0, 0  # the op being performed
        self.held: dict[Slot, _Held] = {}
        self.normed: dict[int, int] = {}  # block: the step of the latest norm
        for b in range(shape.n_blocks):
            arena, (index,) = shape.state(b)
            self.held[Slot(arena, index)] = _Held("state", b, None, 0)
            if self.is_frozen(b):
                arena, (index,) = shape.source(b)
                self.held[Slot(arena, index)] = _Held("frozen weights", b, None, 0)

    def perform(self, i: int, step: int) -> None:
        """Do op number i of the plan in a step; PlanError when a slot does not hold what the op needs."""
        self.i, self.op, self.step = i, self.plan.ops[i], step
        op, b, m, last = self.op, self.op.block, self.op.micro_batch, self.shape.n_micro_batches - 1
        match op.kind:
            case Kind.LOAD | Kind.GATHER:
                self.need_source("state", b)
                if op.get("tied") is not None:
                    self.need_source("tied", 0)
                if op.kind is Kind.GATHER:
                    self.need("weights", "part of the weights", b)
                whole = "packed weights" if b in self.shape.packed else "weights"
                self.put("weights", whole if (op.kind is Kind.GATHER) is (self.shape.ranks > 1) else "part of the weights")
            case Kind.DEQUANTISE:
                self.need("packed", "packed weights", b)
                self.put("weights", "weights")
            case Kind.EXCHANGE:
                self.need("sum", "gradient", b)
                self.put("received", "others' sums")
                self.put("gradient", "gradient")
            case Kind.SHARE_NORM:
                self.need("norm", "norm", self.shape.n_normed)
                self.held[op["norm"]] = _Held("norm of all ranks", self.shape.n_normed, None, step)
            case Kind.FORWARD:
                self.need_weights()
                if b:
                    self.need("x", "output", b - 1, m)
                self.put("y", "output", m)
                if op.get("saved") is not None:
                    self.put("saved", "saved activations", m)
            case Kind.LOSS:
                self.need_weights()
                self.need("x", "output", b - 1, m)
                self.differentiate()
            case Kind.BACKWARD:
                if b:
                    self.need_weights()
                    self.need("x", self.come_back(b - 1), b - 1, m)
                self.need("y", "output gradient", b, m)
                if op.get("saved") is not None:
                    self.need("saved", "fetched saved activations", b, m)
                self.differentiate()
            case Kind.RECOMPUTE:
                self.need_weights()
                self.need("x", self.come_back(b - 1), b - 1, m)
                self.put("y", "recomputed output", m)
            case Kind.OFFLOAD_ACTIVATION:
                self.need("y", "output", b, m)
                self.put("spilled", "spilled output", m)
            case Kind.FETCH_ACTIVATION:
                self.need("spilled", "spilled output", b, m)
                self.put("y", "fetched output", m)
            case Kind.OFFLOAD_SAVED:
                self.need("saved", "saved activations", b, m)
                self.put("offloaded", "offloaded saved activations", m)
            case Kind.FETCH_SAVED:
                self.need("offloaded", "offloaded saved activations", b, m)
                self.put("saved", "fetched saved activations", m)
            case Kind.SQUARE:
                self.need("gradient", "gradient", b)
                self.put("squares", "squares")
            case Kind.OFFLOAD_GRADIENT:
                self.need("gradient", "gradient", b, m)
                self.put("arrived", "gradient", m)
                if op.get("squares") is not None:
                    self.need("squares", "squares", b)
                    self.put("norm", "squares")
            case Kind.OFFLOAD_SQUARES:
                self.need("squares", "squares", b)
                self.put("norm", "squares")
            case Kind.UPDATE_ON_DEVICE:
                self.need("gradient", "gradient", b)
                self.need_norm()
                self.update()
            case Kind.ACCUMULATE:
                self.need("staged", "gradient", b, m)
                self.add_up([op["arrived"], *op.every("into")], m or 0, is_whole=m == last)
            case Kind.NORM:
                self.norm()
            case Kind.UPDATE:
                self.need_gradient()
                self.need_norm()
                self.update()
            case Kind.SPECULATE:
                self.need_gradient()
                self.need_norm(of_all=False)
                self.need("state", "state", b)
                self.put("shadow", "shadow")
            case Kind.SETTLE:
                self.need_gradient()
                self.need_norm()
                self.need("shadow", "shadow", b)
                self.update()
                self.put("shadow", "spent shadow")
            case _:
                assert_never(op.kind)

    def come_back(self, block: int) -> str:
        """What the backward pass finds of the output of a block."""
        if block in self.shape.spilled:
            return "fetched output"
        return "recomputed output" if block in self.shape.shared else "output"

    def need(self, name: str, what: str, block: int, micro_batch: int | None = None) -> None:
        """PlanError unless the operand holds just that, of this step."""
        self.need_in(self.op[name], what, block, micro_batch)

    def need_in(self, slot: Slot, what: str, block: int, micro_batch: int | None = None) -> None:
        wanted, found = _Held(what, block, micro_batch, self.step), self.held.get(slot)
        if found != wanted:
            raise wrong(self.i, self.op, f"in step {self.step} {slot} holds {found or 'nothing'}, not {wanted}")

    def is_frozen(self, block: int) -> bool:
        """Whether what is loaded of the block is the same in every step."""
        return block in self.shape.apart or block not in self.shape.trained

    def need_source(self, name: str, block: int) -> None:
        """What a load takes: the state of this step, or what no step changes."""
        if not self.is_frozen(block):
            self.need(name, "state", block)
        elif (found := self.held.get(self.op[name])) != (wanted := _Held("frozen weights", block, None, 0)):
            raise wrong(self.i, self.op, f"in step {self.step} {self.op[name]} holds {found or 'nothing'}, not {wanted}")

    def need_weights(self) -> None:
        """Those of the op's block; and what of it is trained apart, as the update of the step before left it."""
        self.need("weights", "weights", self.op.block)
        if self.op.get("trained") is not None:
            self.need("trained", "state", self.op.block)

    def put(self, name: str, what: str, micro_batch: int | None = None) -> None:
        """The operand now holds what the op made for its block."""
        self.held[self.op[name]] = _Held(what, self.op.block, micro_batch, self.step)

    def differentiate(self) -> None:
        """The gradient of the weights joins its sum, and the gradient of the input takes the input's place."""
        op, shape = self.op, self.shape
        b, m = op.block, op.micro_batch or 0
        if b:
            self.held[op["x"]] = _Held("output gradient", b - 1, m, self.step)
        has_sum, has_gradient = op.get("sum") is not None, op.get("gradient") is not None
        if has_sum:  # which without a gradient is the gradient, in the end
            self.add_up([op["sum"], *op.every("into")], m, is_whole=m == shape.n_micro_batches - 1 and not has_gradient)
        if has_gradient:
            self.put("gradient", "gradient", None if shape.reduced else m)

    def add_up(self, slots: list[Slot], m: int, is_whole: bool) -> None:
        """A micro-batch's gradient joins the sum in the first slot, or begins it; the sum that of the next, and so on."""
        b, n_done = self.op.block, m  # the first micro-batch that is in what is added
        for slot, together in zip(slots, self.shape.summed_with(m), strict=True):
            if n_done > together.start:
                self.need_in(slot, _sum_of(range(together.start, n_done)), b, n_done - 1)
            n_done = together.start
            self.held[slot] = _Held(_sum_of(together), b, m, self.step)
        if is_whole:
            self.held[slots[-1]] = _Held("gradient", b, None, self.step)

    def norm(self) -> None:
        """What has arrived joins the sum of the step, or begins it; the first block that is trained brings what is squared."""
        op, b, n_more = self.op, self.op.block, 0
        if b not in self.shape.squared:
            self.need_gradient()
            n_more = 1
        for slot, of in zip(op.every("squares"), self.shape.squared if b == self.shape.first_trained else (), strict=True):
            self.need_in(slot, "squares", of)
            n_more += 1
        so_far = self.held.get(op["norm"])
        n_done = so_far.block if so_far and so_far.what == "norm" and so_far.step == self.step else 0
        self.held[op["norm"]] = _Held("norm", n_done + n_more, None, self.step)
        self.normed[b] = self.step

    def need_gradient(self) -> None:
        """The complete gradient on the host: the block's own, then the head's where its weight is tied to the block."""
        self.need("arrived", "gradient", self.op.block)
        if self.op.get("tied") is not None:
            self.need("tied", "gradient", self.shape.head)

    def need_norm(self, of_all: bool = True) -> None:
        """The norm of all gradients of the step; or that the norm of this one, at least, is done, or its squares are known."""
        if of_all and not self.shape.eager:
            self.need("norm", "norm" if self.shape.ranks == 1 else "norm of all ranks", self.shape.n_normed)
        elif self.op.block in self.shape.squared:
            if of_all:  # a speculation that is in vain does no harm
                self.need("norm", "squares", self.op.block)
        elif self.normed.get(self.op.block) != self.step:
            raise wrong(self.i, self.op, "updates a block before its norm")

    def update(self) -> None:
        """The optimizer turns the state of this step into that of the next; a shadow is then spent, whatever came of it."""
        self.need("state", "state", self.op.block)
        self.held[self.op["state"]] = _Held("state", self.op.block, None, self.step + 1)


def _sum_of(micro_batches: range) -> str:
    """What a slot holds of a gradient; the last micro-batch in it is said besides."""
    return f"gradient sum from micro-batch {micro_batches.start} on"


def check_data(plan: Plan, shape: Shape, order: list[int], n_steps: int) -> None:
    """Every op finds in its slots what it needs, in the first step and in one that follows another."""
    memory = _Memory(plan, shape)
    for step in range(n_steps):
        for i in order:
            memory.perform(i, step)
