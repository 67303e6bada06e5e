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
    chunk: int | None = None  # None: of all that the block has

    def __str__(self) -> str:
        if self.what == "norm":
            return f"the norm over {self.block} gradients in step {self.step}"
        c = "" if self.chunk is None else f", chunk {self.chunk}"
        m = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"the {self.what} of block {self.block}{c}{m}, step {self.step}"


class _Memory:
    """All slots, by what they hold, while the ops of consecutive steps are performed one by one."""

    def __init__(self, plan: Plan, shape: Shape) -> None:
        self.plan, self.shape = plan, shape
        self.op, self.i, self.step = plan.ops[0], 0, 0  # the op being performed
        self.held: dict[Slot, _Held] = {}
        self.normed: dict[tuple[int, int | None], int] = {}  # block and chunk: the step of the latest norm
        for arena in {*shape.state, shape.upload}:
            for i, (b, c) in enumerate(shape.parts):
                self.held[Slot(arena, i)] = _Held(arena, b, None, 0, c if len(shape.chunks[b]) > 1 else None)

    def perform(self, i: int, step: int) -> None:
        """Do op number i of the plan in a step; PlanError when a slot does not hold what the op needs."""
        self.i, self.op, self.step = i, self.plan.ops[i], step
        op, shape = self.op, self.shape
        b, m, last = op.block, op.micro_batch, shape.n_micro_batches - 1
        c = op.chunk
        match op.kind:
            case Kind.LOAD:
                for slot, owner in zip(op.reads, (b, 0), strict=False):  # a tied head: its own, then those of block 0
                    self.need(slot, shape.upload, owner, None, c)
                if c:
                    self.need(op.writes[0], "weights so far", b, None, c - 1)
                if c is None or c == len(shape.chunks[b]) - 1:
                    self.put(op.writes[0], "weights")
                else:
                    self.put(op.writes[0], "weights so far", None, c)
            case Kind.FORWARD:
                self.need(op.reads[0], "weights", b)
                if b:
                    self.need(op.reads[1], "output", b - 1, m)
                self.put(op.writes[0], "output", m)
            case Kind.LOSS:
                self.need(op.reads[0], "weights", b)
                self.need(op.reads[1], "output", b - 1, m)
                self.differentiate()
            case Kind.BACKWARD:
                if b:
                    self.need(op.reads[0], "weights", b)
                    self.need(op.reads[2], self.come_back(b - 1), b - 1, m)
                self.need(op.reads[1 if b else 0], "output gradient", b, m)
                self.differentiate()
            case Kind.RECOMPUTE:
                self.need(op.reads[0], "weights", b)
                self.need(op.reads[1], self.come_back(b - 1), b - 1, m)
                self.put(op.writes[0], "recomputed output", m)
            case Kind.SPILL:
                self.need(op.reads[0], "output", b, m)
                self.put(op.writes[0], "spilled output", m)
            case Kind.FETCH:
                self.need(op.reads[0], "spilled output", b, m)
                self.put(op.writes[0], "fetched output", m)
            case Kind.SQUARE:
                self.need(op.reads[0], "gradient", b)
                self.put(op.writes[0], "squares")
            case Kind.OFFLOAD:
                self.need(op.reads[0], "gradient", b, m)
                self.put(op.writes[0], "gradient", m, c)
                for slot, to in zip(op.reads[1:], op.writes[1:], strict=True):
                    self.need(slot, "squares", b)
                    self.put(to, "squares")
            case Kind.ACCUMULATE:
                self.need(op.reads[0], "gradient", b, m)
                if m:
                    self.need(op.reads[1], "gradient sum", b, m - 1)
                self.put(op.writes[0], "gradient" if m == last else "gradient sum", None if m == last else m)
            case Kind.NORM:
                self.need_gradients()
                so_far = self.held.get(op.writes[0])
                n_done = so_far.block if so_far and so_far.step == step else 0
                n_more = self.need_squares(list(shape.squared) if b == 0 else []) + (b not in shape.squared)
                self.held[op.writes[0]] = _Held("norm", n_done + n_more, None, step)
                self.normed[b, c] = step
            case Kind.UPDATE:
                self.need_gradients()
                self.need_norm()
                self.update()
            case Kind.SPECULATE:
                self.need_gradients()
                self.need_norm(of_all=False)
                self.need_state()
                self.put(op.writes[0], "shadow", None, c)
            case Kind.SETTLE:
                self.need_gradients()
                self.need_norm()
                self.need(op.reads[-1], "shadow", b, None, c)
                self.update()
            case _:
                assert_never(op.kind)

    def come_back(self, block: int) -> str:
        """What the backward pass finds of the output of a block."""
        if block in self.shape.spilled:
            return "fetched output"
        return "recomputed output" if block in self.shape.shared else "output"

    def need(self, slot: Slot, what: str, block: int, micro_batch: int | None = None, chunk: int | None = None) -> None:
        """PlanError unless the slot holds just that, of this step."""
        wanted, found = _Held(what, block, micro_batch, self.step, chunk), self.held.get(slot)
        if found != wanted:
            raise wrong(self.i, self.op, f"in step {self.step} {slot} holds {found or 'nothing'}, not {wanted}")

    def put(self, slot: Slot, what: str, micro_batch: int | None = None, chunk: int | None = None) -> None:
        """The slot now holds what the op made for its block."""
        self.held[slot] = _Held(what, self.op.block, micro_batch, self.step, chunk)

    def differentiate(self) -> None:
        """The gradient of the weights joins its sum, and the gradient of the input takes the input's place."""
        op, shape = self.op, self.shape
        b, m = op.block, op.micro_batch or 0
        for slot in op.reads:
            if slot.arena in ("sums", "vocab_sums", "vocab_gradients"):
                self.need(slot, "gradient sum", b, m - 1)
        for slot in op.writes:
            if slot.arena == "boundaries":
                self.held[slot] = _Held("output gradient", b - 1, m, self.step)
            elif not shape.reduced:
                self.put(slot, "gradient", m)
            elif slot.arena in ("sums", "vocab_sums") or m < shape.n_micro_batches - 1:
                self.put(slot, "gradient sum", m)
            else:
                self.put(slot, "gradient")

    def need_gradients(self) -> None:
        """The complete gradient on the host: the block's own, then the head's where its weight is tied to the block."""
        gradients = [slot for slot in self.op.reads if slot.arena == "host_gradients"]
        for slot, block in zip(gradients, (self.op.block, self.shape.head), strict=False):
            self.need(slot, "gradient", block, None, self.op.chunk)  # only layers are cut, and only vocabulary blocks tied

    def need_squares(self, blocks: list[int]) -> int:
        """The sums of these blocks' squares on the host, in this order, and nobody else's; how many they are."""
        slots = [slot for slot in self.op.reads if slot.arena == "host_squares"]
        for slot, block in zip(slots, blocks, strict=True):
            self.need(slot, "squares", block)
        return len(slots)

    def need_norm(self, of_all: bool = True) -> None:
        """The norm of all gradients of the step; or that the norm of this one, at least, is done, or its squares are known."""
        if of_all and not self.shape.eager:
            self.need(Slot("norm", 0), "norm", self.shape.n_normed)
        elif self.op.block in self.shape.squared:
            self.need_squares([self.op.block] if of_all else [])  # a speculation that is in vain does no harm
        elif self.normed.get((self.op.block, self.op.chunk)) != self.step:
            raise wrong(self.i, self.op, "updates a block before its norm")

    def need_state(self) -> None:
        """What the block has learned, as of this step."""
        part = self.shape.first_part[self.op.block] + (self.op.chunk or 0)
        for arena in self.shape.state:
            self.need(Slot(arena, part), arena, self.op.block, None, self.op.chunk)

    def update(self) -> None:
        """The optimizer turns the state of this step into that of the next; a shadow is then spent, whatever came of it."""
        self.need_state()
        for slot in self.op.writes:
            if slot.arena == "shadows":
                self.put(slot, "spent shadow", None, self.op.chunk)
            else:
                self.held[slot] = _Held(slot.arena, self.op.block, None, self.step + 1, self.op.chunk)


def check_data(plan: Plan, shape: Shape, order: list[int], n_steps: int) -> None:
    """Every op finds in its slots what it needs, in the first step and in one that follows another."""
    memory = _Memory(plan, shape)
    for step in range(n_steps):
        for i in order:
            memory.perform(i, step)
