"""A model as blocks: sizes and work of one micro-batch.

The embedding with all that comes before the layers, the decoder layers, and the head: norm, output matrix and loss. What they
compute is read off outlines (`outline.py`) that were recorded of transformers' own modules. Of attention that is spelled out
`Attention.flop` is still the causal half: the model's work, not the square that is really computed.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NoReturn

from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.objective import CROSS_ENTROPY, SCORE
from penstock.runtime.plan.train import EXPERTS, TARGETS, Train
from penstock.runtime.plan.workload import (
    ITEM_BYTES,
    LOSS_SCRATCH_ELEMENTS,
    Attention,
    Block,
    BlockKind,
    Matmul,
    Model,
    Parameter,
    Saved,
    Workload,
    loss_lanes,
)

from .config import key_of, library_kernels, outlines, read_model, shipped_models, supported_attention
from .outline import RECORDED_ITEM_BYTES, Outline, Part, mlp_of, play
from .tape import FP32, FP64, INT64, Tape

__all__ = ["attentions", "build_workload", "can_tile_mlp", "fusible", "read_model", "shipped_models", "supported_attention"]

LOG_SOFTMAX_READS = 3
LOSS_SCRATCH_BYTES = 6 * FP32 + 1  # of a logit that `loss: online` widens on a CPU: two results, four in between, a mask
TEACHER_COPIES = 12  # fp32 values of each id that a teacher says most of, in the divergence's backward; measured


def build_workload(model: Model, semantics: Semantics) -> Workload:
    """The model's blocks, with FLOP and bytes of one micro-batch under these semantics, and of a smaller last one.

    WorkloadError for a model that cannot be cut into layers, or semantics that transformers does not let it run with.
    """
    named = model.config.get("architectures") or ()
    if semantics.objective.n_labels is None and any(str(name).endswith("ForSequenceClassification") for name in named):
        _fail(model, "a model that scores sequences, not a causal language model; plan it with --loss reward or classify")
    legal = supported_attention(model)
    if semantics.attention not in legal:
        _fail(model, f"attention {semantics.attention} is not possible for this model; use {' or '.join(legal)}")
    if semantics.mlp_tile_tokens is not None and not can_tile_mlp(model):
        _fail(model, "mlp_tile_tokens: layers with experts cannot be tiled; leave it out")
    if semantics.mlp_tile_tokens is not None and not semantics.train.all:
        _fail(model, "mlp_tile_tokens: an MLP by tiles is trained whole; leave it out, or --train")
    if semantics.base != "bf16" and semantics.train.lora is None:  # a checkpoint of the whole model would have to be unpacked
        _fail(model, f"--base {semantics.base}: weights are packed beside adapters only; add --train lora, or leave it out")
    lora = semantics.train.lora
    if lora is not None and EXPERTS in lora.targets and (lora.dropout or lora.rank % 8):
        _fail(model, "adapters of experts have no dropout, as PEFT's, and a rank that 8 divides, as a GPU's products; change that")
    if semantics.base == "mxfp4" and model.config.get("model_type") != "gpt_oss":
        _fail(model, "--base mxfp4: experts of gpt_oss alone are packed so; take nf4, int8 or fp8")
    for part in ("norm", "loss", "pointwise"):
        if getattr(semantics, part) != "eager" and part not in fusible(model):
            _fail(model, f"no fused kernel computes the {part} of this model; plan with --kernels eager, or name no kernels")
    if semantics.router_loss and not _modules(model)["has_experts"]:
        _fail(model, "--router-loss: no layer of this model has a router; leave it out")
    if missing := [name for name in semantics.library_kernels if name not in library_kernels(model)]:
        _fail(model, f"library_kernels: no layer of this model computes with {missing[0]}; leave it out")
    found = _built(key_of(model), semantics)
    _refuse_untrained(model, semantics.train, found)
    if (semantics.objective.n_top or 0) > (n := found.blocks[-1].parameters[-1].shape[0]):
        _fail(model, f"--loss distill: k is {semantics.objective.n_top}, and the model has {n} token ids; ask for at most as many")
    return found


@lru_cache(maxsize=128)
def _built(key: str, semantics: Semantics) -> Workload:
    model, n_left = Model(json.loads(key)), semantics.n_left
    return Workload(_blocks(model, semantics, semantics.micro_batch), _blocks(model, semantics, n_left) if n_left else ())


def _fail(model: Model, what: str) -> NoReturn:
    raise WorkloadError(f"{model.name or model.path or 'the model'}: {what}")


def _refuse_untrained(model: Model, train: Train, found: Workload) -> None:
    """WorkloadError where something is to be trained that the model has not."""
    missing: list[str] = []
    trained = [p.name for b in found.blocks for p in b.parameters if not p.frozen]
    if train.lora is not None and train.lora.targets != TARGETS:  # all: as many as there are
        missing = [t for t in train.lora.targets if not any(f".{t}.lora_A." in name for name in trained)]
    elif train.names:
        missing = [pattern for pattern in train.names if not any(fnmatchcase(name, pattern) for name in trained)]
    elif train.layers is not None and train.layers[1] >= found.n_layers:
        _fail(model, f"there is no layer {train.layers[1]} to train; the last one is {found.n_layers - 1}")
    if missing and train.lora is not None and _modules(model)["has_experts"]:
        but = "where they have adapters" if missing[0] == EXPERTS else "but experts, whose adapters are called experts"
        _fail(model, f"nothing is called {missing[0]} {but}; leave it out")
    if missing or not trained:
        _fail(model, f"nothing of this model is called {missing[0] if missing else train}; look at its weights' names")


def _modules(model: Model) -> dict[str, Any]:
    """Outlines of a small micro-batch, which say what modules there are."""
    return outlines(model, supported_attention(model)[0], 1, 16)


def fusible(model: Model) -> frozenset[str]:
    """Which of `norm`, `loss` and `pointwise` fused kernels compute as the model means them."""
    tree = _modules(model)
    kinds = {group[0] for kind in tree["kinds"] for group in kind["groups"]}
    can = {
        "norm": any(group[0] == "norm" for group in tree["norm"]["groups"]),
        "loss": tree["logits"][0] == 0 and "bias" not in tree["names"],
        "pointwise": "rotary" in kinds and ("gated" in kinds or tree["has_experts"]),
    }
    return frozenset(part for part, possible in can.items() if possible)


def can_tile_mlp(model: Model) -> bool:
    """Whether every layer's MLP runs by tiles: experts would see other shares of tokens."""
    return all(mlp_of(Outline.of(kind)) is not None for kind in _modules(model)["kinds"])


def attentions(model: Model, seq_len: int) -> list[Attention]:
    """Attention of each kind of layer that has it, of one sequence."""
    tree = outlines(model, supported_attention(model)[0], 1, seq_len)
    return [found for kind in tree["kinds"] if (found := _attention(kind["attention"], 1, seq_len)) is not None]


def _attention(said: list[Any] | None, n_sequences: int, seq_len: int) -> Attention | None:
    if said is None:
        return None
    n_heads, n_kv_heads, head_dim, window = said
    return Attention(n_sequences, n_heads, head_dim, seq_len, window, n_kv_heads)


def _blocks(model: Model, semantics: Semantics, n_sequences: int) -> tuple[Block, ...]:
    """All blocks, with FLOP and bytes of a micro-batch of `n_sequences`."""
    tree, left, whole = (
        outlines(model, semantics.attention, n, semantics.seq_len, semantics.library_kernels) if n else None
        for n in (n_sequences, semantics.n_left, semantics.micro_batch)
    )
    assert tree is not None
    item_bytes = ITEM_BYTES[semantics.compute_dtype]
    # What all layers of a micro-batch share lies there too (tables, masks), and that of a smaller last one beside it
    shared_bytes = sum(_bytes_of(of["shared"], item_bytes) for of in (whole, left) if of)
    layout = _Layout(tree, semantics, n_sequences, item_bytes)
    # Layers of one structure, of which the same is trained, differ in nothing but their names
    kinds: dict[tuple[int, frozenset[str]], Block] = {}
    layers = []
    for i, kind in enumerate(tree["layers"]):
        name = f"{tree['names']['layers']}.{i}"
        trained = frozenset(p for p in tree["kinds"][kind]["parameters"] if semantics.train.trains(f"{name}.{p}"))
        if (kind, trained) not in kinds:
            kinds[kind, trained] = layout.layer(Outline.of(tree["kinds"][kind]), trained, shared_bytes)
        layers.append(_renamed(kinds[kind, trained], name))
    return layout.embedding(), *layers, layout.head()


def _bytes_of(sizes: Iterable[tuple[int, int]], item_bytes: int) -> int:
    """Of tensors of so many elements of so many bytes as they were recorded."""
    return sum(n * (item_bytes if each == RECORDED_ITEM_BYTES else each) for n, each in sizes)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Blocks of a micro-batch of `n_sequences`, from the outlines of one."""

    tree: Mapping[str, Any]
    semantics: Semantics
    n_sequences: int
    item_bytes: int

    @property
    def n_tokens(self) -> int:
        return self.n_sequences * self.semantics.seq_len

    @property
    def boundary_bytes(self) -> int:
        return self.n_tokens * self.tree["width"] * self.item_bytes  # type: ignore[no-any-return]

    def layer(self, outline: Outline, trained: frozenset[str], shared_bytes: int) -> Block:
        """A decoder layer, named for renaming."""
        part, tape = Part(trained, self.semantics.train, self.tree["has_experts"]), Tape(self.item_bytes)
        play(outline, tape, self.semantics, part, self.n_tokens)
        block = Block(
            name="layer",
            kind=BlockKind.LAYER,
            parameters=tuple(_with_adapters(outline, part)),
            matmuls=tuple(tape.matmuls),
            attention=_attention(outline.attention, self.n_sequences, self.semantics.seq_len),
            **tape.work._asdict(),
            boundary_bytes=self.boundary_bytes,
            kept_bytes=tape.kept_bytes,
            transient_bytes=tape.backward_peak_bytes() + shared_bytes,
            tile_sum_bytes=tape.tile_sum_bytes,
            tiers=tape.tiers(shared_bytes),
        )
        return self._balanced(block, outline) if self.semantics.router_loss else block

    def _balanced(self, block: Block, outline: Outline) -> Block:
        """A layer with the loss of its router (`runtime/compute/balance.py`), if it has one: logits are kept, and their softmax is
        made in the forward, where choices are counted, as in the backward."""
        grouped = next((call for call in outline.calls if call.name == "_grouped_mm"), None)
        if grouped is None:
            return block
        (n_rows, _), (n_experts, *_) = grouped.shapes[:2]
        n_logits = self.n_tokens * n_experts
        moved_bytes, n_kernels = n_logits * (4 * self.item_bytes + 2 * FP32), 8
        beside_bytes = n_logits * (4 * self.item_bytes + FP32) + n_rows * (self.item_bytes + FP32 + INT64)

        kept_bytes = block.kept_bytes + n_logits * self.item_bytes

        def more(of: Any, again: bool = True) -> Any:
            of = replace(of, transient_bytes=of.transient_bytes + beside_bytes)
            computed = {"pointwise_bytes": of.pointwise_bytes + moved_bytes, "n_kernels": of.n_kernels + n_kernels}
            return replace(of, **computed) if again else of

        tiers = (replace(more(t, False), saved_bytes=kept_bytes) if t.saved is Saved.ALL else more(t) for t in block.tiers)
        return replace(more(block), kept_bytes=kept_bytes, tiers=tuple(tiers))  # type: ignore[no-any-return]

    def embedding(self) -> Block:
        """Rows of the table, one per token, and what is done to them; its backward makes a dense gradient of each table."""
        tree, outline = self.tree["embedding"], Outline.of(self.tree["embedding"])
        parameters = tuple(self._parameters(outline.parameters))
        tape, ids_bytes = Tape(self.item_bytes), self.n_tokens * INT64
        handed_bytes = side_bytes = peak_bytes = 0
        if outline.made:
            play(outline, tape, self.semantics, Part(frozenset(p.name for p in parameters if not p.frozen)), self.n_tokens)
            handed_bytes, peak_bytes = _bytes_of(tree.get("handed", ()), self.item_bytes), tape.backward_peak_bytes()
            needed = sum(p.n_elements for p in parameters if p.name in tree.get("needed", ()))
            side_bytes = handed_bytes + tape.kept_bytes + needed * self.item_bytes
        return Block(
            name=self.tree["names"]["embedding"],
            kind=BlockKind.EMBEDDING,
            parameters=parameters,
            matmuls=tuple(tape.matmuls),
            side_bytes=side_bytes,
            pointwise_bytes=sum(n * self.item_bytes + others for n, others in (call.moved for call in outline.calls)),
            n_kernels=len(outline.calls),
            boundary_bytes=self.boundary_bytes,
            kept_bytes=ids_bytes,
            # The recomputed output, the gradient before a scale, the tables' gradients; and of what is handed to layers that of one
            # layer's part, which is as large as all of it, and the sum of these
            transient_bytes=max(sum(p.n_elements for p in parameters if not p.frozen) * self.item_bytes, peak_bytes)
            + 2 * self.boundary_bytes
            + handed_bytes
            + ids_bytes,
        )

    def _parameters(self, shapes: Mapping[str, Sequence[int]], tied_to: str | None = None) -> Iterator[Parameter]:
        """Those of these names in the model; a tied weight is trained with the embedding."""
        trains = self.semantics.train.trains
        return (Parameter(name, tuple(shape), tied_to, not trains(tied_to or name)) for name, shape in shapes.items())

    def head(self) -> Block:
        """Final norm, output matrix and loss, by tiles of tokens with a backward each."""
        of, tree, tokens = self.semantics, self.tree, self.n_tokens
        width = tree["width"] - tree.get("carried", 0)
        names, vocab, tied_to, bias_name = tree["names"], tree["vocab"], tree["tied"], tree["names"].get("bias")
        name = names["head"]
        if of.objective.n_labels is not None:  # booked as if every token were scored
            name, vocab, tied_to, bias_name = SCORE.removesuffix(".weight"), of.objective.n_labels, None, None
        tape, norm = Tape(self.item_bytes), Outline.of(tree["norm"])
        of_norm = [*self._parameters({f"{names['norm']}.{n}": shape for n, shape in norm.parameters.items()})]
        trained = (n for n, p in zip(norm.parameters, of_norm, strict=True) if not p.frozen)
        play(norm, tape, of, Part(frozenset(trained)), tokens)
        bias, (weight,) = (
            [*self._parameters({bias_name: (vocab,)} if bias_name else {})],
            self._parameters({f"{name}.weight": (vocab, width)}, tied_to),
        )
        trains, tile = not weight.frozen, min(of.loss_tile_tokens, tokens)
        n_tiles, rest = divmod(tokens, tile)
        tiles = (Matmul(m, width, vocab, count, not trains) for m, count in ((tile, n_tiles), (rest, 1)) if m)
        logit_bytes, moved_bytes, softmax_bytes, n_calls = self._loss(vocab)
        if any(not p.frozen for p in bias):  # its gradient is a sum of the logits' over rows
            moved_bytes, n_calls = moved_bytes + tokens * vocab * self.item_bytes, n_calls + 2
        # The tile's weight gradient, its rows and their gradient; online the first is accumulated, and the others are in place
        scratch_bytes = (vocab * trains + 2 * tile) * width * self.item_bytes
        if of.loss == "online":
            scratch_bytes = self._online_scratch_bytes(tile, vocab, width)
        own_sum_bytes = vocab * width * FP32 if of.n_micro_batches > 1 and trains else 0
        pointwise_bytes, fused_bytes, norm_bytes, n_kernels = tape.work
        return Block(
            name=name,
            kind=BlockKind.HEAD,
            parameters=(*of_norm, *bias, weight),
            matmuls=tuple(tiles),
            pointwise_bytes=pointwise_bytes + moved_bytes,
            fused_bytes=fused_bytes + softmax_bytes,
            norm_bytes=norm_bytes,
            n_kernels=n_kernels + (n_tiles + bool(rest)) * n_calls,
            boundary_bytes=0,
            kept_bytes=0,
            own_sum_bytes=own_sum_bytes,
            transient_bytes=tile * vocab * logit_bytes
            + scratch_bytes
            + len(bias) * vocab * (self.item_bytes + FP32)
            # a later micro-batch sums its own tiles before they join the running sum
            + own_sum_bytes
            + self._bytes_of_tokens(tile)
            + tape.backward_peak_bytes()
            + 2 * self.boundary_bytes,  # normed rows and their gradient
        )

    def _loss(self, vocab: int) -> tuple[int, int, int, int]:
        """Of a loss: bytes that a logit takes at the peak; traffic of the forward, and what of it is fused; calls of a tile."""
        of, tokens, narrow, item = self.semantics, self.n_tokens, self.item_bytes < FP32, self.item_bytes
        if of.loss == "online":
            # Logits, which become the gradient. A third of what forward and backward move together (read twice, written once), and
            # of their calls: the product, the kernel, its sum and two products
            return item, tokens * vocab * item, tokens * vocab * item, 2
        n_after, n_kept = self.tree["logits"] if of.objective.n_labels is None else (0, 0)
        more, softmax_bytes = of.objective.wide - CROSS_ENTROPY.wide, log_softmax_bytes(tokens, vocab)
        # Live in the tile's backward: logits, what their cap keeps, log-probabilities, two gradients, and what another loss makes
        # besides; moved: what is done to logits, widening, and log-probabilities; calls besides: the product, those and their sum
        each_bytes = 2 * item * n_after + (item + FP32 if narrow else 0) + 2 * more * FP32
        logit_bytes = item * (1 + n_kept) + of.objective.wide * FP32
        return logit_bytes, tokens * vocab * each_bytes + softmax_bytes, softmax_bytes, n_after + narrow + 3 + more

    def _online_scratch_bytes(self, tile: int, vocab: int, width: int) -> int:
        """Scratch of `loss: online` where no kernel computes it, on a CPU: some logits in fp32; then, of narrow factors of the
        weight's gradient, all rows of the tile in fp32 beside some of its logits."""
        lanes = loss_lanes(vocab)
        wide_bytes = min(tile, max(1, LOSS_SCRATCH_ELEMENTS // lanes)) * lanes * LOSS_SCRATCH_BYTES
        is_narrow = self.item_bytes < FP32
        return max(wide_bytes, is_narrow * (tile * width + min(tile * vocab, max(tile, LOSS_SCRATCH_ELEMENTS))) * FP32)

    def _bytes_of_tokens(self, tile: int) -> int:
        """What lies beside logits of what a loss is given, or makes, of each token."""
        of, objective, tokens = self.semantics, self.semantics.objective, self.n_tokens
        if objective.has_first_pass:  # a log-probability, its slope in both widths, and what a step of the sums makes
            return tokens * (3 * FP32 + FP64)
        if (k := objective.n_top) is not None:  # of two steps, as files have them; and of a tile what a divergence makes
            return 2 * of.batch_size * of.seq_len * objective.teacher_bytes + tile * (k + 1) * TEACHER_COPIES * FP32
        n_extras = len(objective.extras) + (objective.per is not objective.of)
        return 2 * tokens * FP64 * n_extras  # as they come, and one after another


def _with_adapters(outline: Outline, of: Part) -> Iterator[Parameter]:
    """A layer's own weights, frozen or not; then the two factors beside each that has an adapter."""
    parameters = [Parameter(n, tuple(s)) for n, s in outline.parameters.items()]
    yield from (replace(p, frozen=p.name not in of.trained) for p in parameters)
    for call in outline.calls:
        if call.name == "_grouped_mm" and call.weights and (rank := of.rank(name := call.weights[0])):
            n_experts, n_in, n_out = call.shapes[1]
            at = name.rpartition(".")[0] + ("" if name.endswith(".down_proj") else ".base_layer")  # as PEFT nests them
            yield Parameter(f"{at}.lora_A.weight", (n_experts * rank, n_in))
            yield Parameter(f"{at}.lora_B.weight", (n_out, rank * n_experts))
    for p in parameters:
        name, _, last = p.name.rpartition(".")
        if last == "weight" and len(p.shape) == 2 and (rank := of.rank(name)):
            n_out, n_in = p.shape
            yield Parameter(f"{name}.lora_A.weight", (rank, n_in))
            yield Parameter(f"{name}.lora_B.weight", (n_out, rank))


def log_softmax_bytes(tokens: int, vocab: int) -> int:
    """Traffic of PyTorch's log-softmax in fp32: one kernel reads a row three times, for its largest, its sum and itself."""
    return tokens * vocab * (LOG_SOFTMAX_READS + 1) * FP32


def _renamed(block: Block, name: str) -> Block:
    """The same layer under another name, its weights' names starting with it."""
    return replace(block, name=name, parameters=_under(name, block.parameters))


@lru_cache(maxsize=4096)
def _under(name: str, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(replace(p, name=f"{name}.{p.name}") for p in parameters)
