"""Outlines of a model: what its own modules compute, call by call, with sizes as polynomials of sequences and their length.

They are recorded once (`traced.py`, with torch) and played on a `Tape` for every micro-batch, kernel, adapter and frozen weight,
without torch. Elements of 2 bytes are those of the compute dtype, whatever it is: outlines are recorded in bf16.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from penstock.runtime.plan import Semantics
from penstock.runtime.plan.train import ALL, EXPERTS, STACK, Train
from penstock.runtime.plan.workload import Matmul

from . import fused
from .tape import Call, Tape, Tensor

RECORDED_ITEM_BYTES = 2
NORM_AFTER = "post_feedforward_layernorm"  # of an MLP, some types have one: it is part of the tile (`runtime/layers/tiles.py`)
FUSED_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # stands for whichever kernel runs
OWN_FUNCTION, OWN_SCRATCH = "function", 4  # the last call of one with a backward of its own, which is taken to make so many tensors
# Library calls that one is: that widens a mask of what is visible to a bias of scores; that only finds room
_CALLS = {"bias_of_mask": 3, "empty_like": 0, "new_empty": 0, "empty": 0}
# Calls whose saved operands serve the gradient of the other operand alone
_MULTIPLY = {"mul", "div", "mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor, by its storage. `ours`: the layer makes it."""

    n_elements: int
    item_bytes: int
    ours: bool
    floating: bool


@dataclass(slots=True)
class Called:
    """A library call: tensors by their numbers, weights by their names. `shapes`: of its operands, where it is a product; `moved`:
    elements of the compute dtype that it reads and writes, and bytes of others."""

    name: str
    reads: list[int]
    weights: list[str]
    makes: list[int]
    saves: list[int]
    held: list[int]  # what dies next, though neither read nor saved
    shapes: list[list[int]]
    moved: list[int]


@dataclass(frozen=True, slots=True)
class Group:
    """Calls from `first` to before `end` that are one module or function: a norm, a linear map, an MLP, attention, a rotation."""

    kind: str
    name: str
    first: int
    end: int
    operands: list[int]
    results: list[int]


@dataclass(frozen=True, slots=True)
class Outline:
    """A forward pass, from its input, tensor 0, to its output."""

    parameters: dict[str, list[int]]
    made: list[Made]
    calls: list[Called]
    groups: list[Group]
    attention: list[int | None] | None = None  # heads, those of keys and values, width, window
    sides: Sequence[int] = ()  # what a layer is given besides the hidden state that gets a gradient

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> "Outline":
        """The outline of a tree that has no polynomials."""
        made, calls = [Made(*each) for each in tree["made"]], [Called(*each) for each in tree["calls"]]
        groups, sides = [Group(*each) for each in tree["groups"]], tree.get("sides", ())
        return cls(tree["parameters"], made, calls, groups, tree["attention"], sides)


def mlp_of(outline: "Outline") -> Group | None:
    """The MLP of a layer, down(act(gate(x)) * up(x)), if it runs by tiles: nothing comes after it but its norm and sums."""
    mlp = next((group for group in outline.groups if group.kind in ("mlp", "gated") and group.name == "mlp"), None)
    if mlp is None:
        return None
    of_norm = {"_to_copy", "pow", "mean", "rsqrt", "mul"} if f"{NORM_AFTER}.weight" in outline.parameters else set()
    return mlp if {call.name for call in outline.calls[mlp.end :]} <= {"add"} | of_norm else None


@dataclass(frozen=True, slots=True)
class Part:
    """A block's weights: which of them are trained, by their names within it, and where adapters are."""

    trained: frozenset[str]
    train: Train = ALL
    has_experts: bool = False  # other layers of the model have: then PEFT takes the names of an MLP for those of experts, here too

    def rank(self, name: str) -> int:
        """Of the adapter beside the product of that name; 0: it has none."""
        if STACK.search(name):
            return self.train.rank(EXPERTS)
        stands = ".experts." not in name and not (self.has_experts and name.startswith("mlp."))
        return self.train.rank(name.rpartition(".")[2]) if stands else 0

    @property
    def drops_out(self) -> bool:
        return self.train.lora is not None and self.train.lora.dropout > 0


def play(outline: Outline, tape: Tape, semantics: Semantics, part: Part, n_rows: int) -> None:
    """Record an outline's calls as a tape's steps, with the kernels of the semantics, and the MLP by tiles of rows, of `n_rows` in
    all, where it has such."""
    player, tile, end = _Player(outline, tape, semantics, part), semantics.mlp_tile_tokens, len(outline.calls)
    mlp = mlp_of(outline)
    if tile is None or tile >= semantics.tokens_per_micro_batch or mlp is None:
        player.play(0, end)
        return
    player.play(0, mlp.first)
    # What the MLP and all after it, each row for itself, read of what is there by then
    inputs = dict.fromkeys(
        i for call in outline.calls[mlp.first :] for i in call.reads if i in player.there and outline.made[i].floating
    )

    def of_tile(tape: Tape, cut: Sequence[Tensor], rows: int) -> None:
        other = _Player(outline, tape, semantics, part, (rows, n_rows))
        other.there |= dict(zip(inputs, cut, strict=True))
        other.play(mlp.first, end)

    tape.tile([player.there[i] for i in inputs], n_rows, min(tile, n_rows), of_tile)


class _Player:
    """`share`: of how many rows a tensor has a part, of how many in the outline."""

    def __init__(self, outline: Outline, tape: Tape, semantics: Semantics, part: Part, share: tuple[int, int] = (1, 1)) -> None:
        self.outline, self.tape, self.semantics, self.part, self.share = outline, tape, semantics, part, share
        self.as_weight: dict[int, str] = {}  # weights that are tensors of their own in other precisions
        self.there = {
            i: self._tensor(made, i == 0 or i in outline.sides) for i, made in enumerate(outline.made) if not made.ours
        }  # fmt: skip
        self.groups = {group.first: group for group in outline.groups if self._at_once(group)}
        self.overwritten = {call.reads[0] for call in outline.calls if not call.makes and call.reads}
        self.spelled = {n for g in outline.groups if g.kind == "attention" for n in range(g.first, g.end)}

    def _tensor(self, made: Made, differentiable: bool = False) -> Tensor:
        return Tensor(made.n_elements, self._item_bytes(made), made.ours, differentiable)

    def _item_bytes(self, made: Made) -> int:
        return self.tape.item_bytes if made.item_bytes == RECORDED_ITEM_BYTES else made.item_bytes

    def _at_once(self, group: Group) -> bool:
        """Whether something else is performed in the place of the group's calls."""
        match group.kind:
            case "norm":
                return self.semantics.norm == "fused"
            case "rotary" | "gated":
                return self.semantics.pointwise == "fused"
            case "linear":
                return self.outline.made[group.results[0]].item_bytes == RECORDED_ITEM_BYTES
        return False

    def play(self, first: int, end: int) -> None:
        n = first
        while n < end:
            if (group := self.groups.get(n)) is not None and group.end <= end:
                self.there |= zip(group.results, self._play_group(group), strict=True)
                n = group.end
            else:
                self._play_call(n, self.outline.calls[n])
                n += 1

    def _play_group(self, group: Group) -> list[Tensor]:
        operands, tape, name = [self._at(i) for i in group.operands], self.tape, group.name
        x = operands[0]
        match group.kind:
            case "norm":
                weight = f"{name}.weight".removeprefix(".")
                return [fused.norm(tape, x, self._elements([weight]), weight in self.part.trained)]
            case "rotary":
                return [fused.rotation(tape, each, operands[-1]) for each in operands[:2]]
            case "gated":
                gate, up = self._project(x, f"{name}.gate_proj", f"{name}.up_proj")
                return self._project(fused.gate(tape, gate, up), f"{name}.down_proj")
        if group.results[0] not in self.there:  # else computed with another projection
            alike = [other for other in self.groups.values() if other is group or self._are_partners(group, other)]
            made = self._project(x, *(other.name for other in alike))
            self.there |= {other.results[0]: y for other, y in zip(alike, made, strict=True)}
        return [self.there[group.results[0]]]

    def _are_partners(self, *groups: Group) -> bool:
        """True if linear maps of one module have one input, and adapters without dropout: these are computed together."""
        inputs = {(group.kind, group.operands[0], group.name.rpartition(".")[0]) for group in groups}
        return len(inputs) == 1 and not self.part.drops_out and all(self.part.rank(group.name) for group in groups)

    def _project(self, x: Tensor, *names: str) -> list[Tensor]:
        """Linear maps of one input: together where all have adapters without dropout, else one after the other."""
        shapes = [self.outline.parameters[f"{name}.weight"] for name in names]
        widths, k, rank, drops_out = [n for n, _ in shapes], shapes[0][1], self.part.rank(names[0]), self.part.drops_out
        if len(names) > 1 and (drops_out or not all(map(self.part.rank, names))):
            return [y for name in names for y in self._project(x, name)]
        if rank:
            return self.tape.adapted(x, x.n_elements // k, k, widths, rank, drops_out)
        learns = [of for of in (f"{names[0]}.weight", f"{names[0]}.bias") if of in self.part.trained]
        frozen = f"{names[0]}.weight" not in learns
        return [self.tape.linear(x, x.n_elements // k, k, widths[0], self._elements(learns), frozen)]

    def _play_call(self, n: int, call: Called) -> None:
        """One call as it is."""
        if call.name == "_to_copy" and self._is_idle(call):
            self._play_cast(call)
            return
        reads = [self._at(i) for i in call.reads]
        weights = [*call.weights, *(self.as_weight[i] for i in call.reads if i in self.as_weight)]
        learns = [weight for weight in weights if weight in self.part.trained]
        self.tape.held = tuple(self.there[i] for i in call.held if i in self.there)
        if call.name in fused.LIBRARY:
            n_weights, n_trained = map(self._elements, (weights, learns))
            made = [fused.LIBRARY[call.name](self.tape, reads, call.shapes, n_weights, n_trained)]
        elif call.name == FUSED_ATTENTION:
            made = [fused.attention(self.tape, reads, call.shapes[0], self.semantics.attention_kernel)]
            made += self.tape.steps[-1].made[1:]
        else:
            made = self._step(n, call, reads, weights, learns)
        self.tape.held = ()
        self.there |= zip(call.makes, made, strict=False)

    def _play_cast(self, call: Called) -> None:
        """A cast to the precision that there is: of a tensor, or of a weight."""
        i = call.makes[0]
        if call.reads:
            self.there[i] = self._at(call.reads[0])
        else:
            self.there[i] = Tensor(self.outline.made[i].n_elements, self.tape.item_bytes, ours=False)
            self.as_weight[i] = call.weights[0]

    def _step(self, n: int, call: Called, reads: list[Tensor], weights: list[str], learns: list[str]) -> list[Tensor]:
        """A product, or a pointwise call: what it makes."""
        made, (rows, all_rows), frozen = [self.outline.made[i] for i in call.makes], self.share, not learns
        requires = bool(learns) or any(map(self._requires, call.reads))
        kept = [i for i in dict.fromkeys(call.saves) if i not in call.makes and requires and self._is_needed(call, i, learns)]
        out = made[0] if made else Made(0, RECORDED_ITEM_BYTES, True, False)
        how: dict[str, Any] = {"saves": [self._at(i) for i in kept], "beside": [self._tensor(each) for each in made[1:]]}
        how |= {"n_trained": self._elements(learns), "moved": 0, "scratch": 0}
        if call.name in _PRODUCTS and n in self.spelled:
            how |= {"call": Call.ATTENTION, "scratch": None}
        elif call.name in _PRODUCTS:
            how |= {"call": Call.PRODUCT if call.weights else Call.POINTWISE, "matmuls": _matmuls(call, frozen)}
        elif call.name == "_grouped_mm":
            how |= {"call": Call.OVERWRITTEN if call.makes[0] in self.overwritten else Call.GROUPED}
            how |= {"matmuls": _grouped(call.shapes, frozen)}
            if rank := self.part.rank(weights[0]) if weights else 0:
                how |= self._adapted(call, rank, reads[0], how)
        else:
            n_weights, (n_moved, others_bytes) = self._elements(weights), call.moved
            n_moved = (n_moved - n_weights) * rows // all_rows + n_weights if rows < all_rows else n_moved
            how |= {"moved": n_moved * self.tape.item_bytes + others_bytes * rows // all_rows}
            how |= {"scratch": self._scratch_bytes(call.name, reads, out.n_elements * rows // all_rows)}
            how |= {"n_calls": _CALLS.get(call.name, 1)}
        step = self.tape.step(
            reads, out.n_elements * rows // all_rows, item_bytes=self._item_bytes(out), differentiable=requires and out.floating,
            saves_out=requires and bool(made) and call.makes[0] in call.saves, **how,
        )  # fmt: skip
        return [step, *how["beside"]]

    def _adapted(self, call: Called, rank: int, x: Tensor, how: dict[str, Any]) -> dict[str, Any]:
        """Of products of experts with adapters beside them (`runtime/layers/adapters.py`), what is otherwise."""
        (n_rows, k), (n_experts, *_, n_out) = call.shapes[:2]
        item = self.tape.item_bytes
        down, up = (_grouped([[n_rows, a], [n_experts, a, b]], False) for a, b in ((k, rank), (rank, n_out)))
        return {
            "n_trained": how["n_trained"] + n_experts * rank * (k + n_out), "n_calls": 5,
            "matmuls": how["matmuls"] + down + up,
            "beside": [Tensor(n_rows * rank, item)], "saves": [x, *how["saves"]],
            # Experts of B put outermost; and the second product added to what the experts made
            "moved": (2 * n_experts * rank * n_out + 3 * n_rows * n_out) * item,
            "scratch": (n_rows * (rank + max(k, n_out)) + 2 * n_experts * rank * n_out) * item,
        }  # fmt: skip

    @staticmethod
    def _scratch_bytes(name: str, reads: Sequence[Tensor], n_elements: int) -> int | None:
        """Temporaries of a pointwise call's backward; None: as of most."""
        wide = {tensor.item_bytes for tensor in reads if tensor.differentiable}
        if name == OWN_FUNCTION:
            return OWN_SCRATCH * max(t.n_bytes for t in reads)
        if name == "mul" and len(wide) > 1:  # one of the factors is also made in the wider precision
            return 2 * n_elements * max(wide)
        return 0 if name == "add" else None

    def _elements(self, names: Iterable[str]) -> int:
        return sum(prod(self.outline.parameters[name]) for name in names)

    def _at(self, i: int) -> Tensor:
        """A tensor by its number; what only calls made in whose place there is another one is there, too."""
        return self.there.setdefault(i, self._tensor(self.outline.made[i]))

    def _requires(self, i: int) -> bool:
        """Whether a tensor gets a gradient."""
        return self.as_weight[i] in self.part.trained if i in self.as_weight else self._at(i).differentiable

    def _is_idle(self, call: Called) -> bool:
        """Whether a cast is to the precision that there is."""
        made = self.outline.made[call.makes[0]]
        before = self.there[call.reads[0]].item_bytes if call.reads else self.tape.item_bytes
        return made.floating and self._item_bytes(made) == before

    def _is_needed(self, call: Called, i: int, learns: Sequence[str]) -> bool:
        """Whether a saved operand has another beside it that gets a gradient."""
        if call.name not in _MULTIPLY or not self.outline.made[i].floating or call.reads.count(i) != 1:
            return True
        return bool(learns) or any(self._requires(j) for j in call.reads if j != i)


def _matmuls(call: Called, frozen: bool) -> list[Matmul]:
    (*batch, m, k), n = call.shapes[-2], call.shapes[-1][-1]
    return [Matmul(m, k, n, prod(batch), frozen and bool(call.weights))]


def _grouped(shapes: Sequence[Sequence[int]], frozen: bool) -> list[Matmul]:
    """Rows spread over experts as evenly as whole rows allow; an expert without rows computes nothing."""
    (n_rows, k), (n_experts, *_, n) = shapes[:2]
    rows, left = divmod(n_rows, n_experts)
    return [Matmul(m, k, n, count, frozen) for m, count in ((rows, n_experts - left), (rows + 1, left)) if m and count]
