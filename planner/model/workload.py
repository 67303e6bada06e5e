"""Build a workload: the blocks of a model with sizes and work of one micro-batch.

Blocks are the embedding (all before the layers), the decoder layers, and the head (final norm, output matrix, loss). Their work is
derived from layer traces of transformers' modules (`trace.py`). `Attention.flop` counts the causal half even for eager attention,
which computes the full square.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NoReturn

from penstock.runtime.errors import WorkloadError
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.legality import refuse_products
from penstock.runtime.plan.objective import CROSS_ENTROPY, SCORE
from penstock.runtime.plan.optimizer import Optimizer
from penstock.runtime.plan.train import (
    ALL_LINEAR,
    EXPERTS,
    IN_EXPERTS,
    IN_PROJECTOR,
    STACK,
    TARGETS,
    Lora,
    Train,
    in_order,
    is_adapter,
    is_selected,
    last_part,
)
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
    text_of,
)

from .config import key_of, library_kernels, outlines, projector_trace, read_model, shipped_models, supported_attention
from .memory_replay import FP32, FP64, INT64, Tape
from .trace import RECORDED_ITEM_BYTES, LayerTrace, Part, mlp_of, replay, scaled_weights

__all__ = ["attention_kernels", "attentions", "build_workload", "can_tile_mlp", "fusible", "read_model"]
__all__ += ["shipped_models", "supported_attention"]

LOG_SOFTMAX_READS = 3
LOSS_SCRATCH_BYTES = 6 * FP32 + 1  # per logit that `loss: online` converts to fp32 on a CPU: 2 results, 4 intermediates, a mask
TEACHER_COPIES = 12  # fp32 values per top-k teacher token in the divergence's backward; measured


def build_workload(model: Model, semantics: Semantics) -> Workload:
    """Return the model's blocks with FLOP and bytes of one micro-batch under these semantics, and of a smaller last one.

    Raise WorkloadError if the model cannot be split into layers or does not support the semantics.
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
        _fail(model, "mlp_tile_tokens: a tiled MLP needs full training; leave out this setting or --train")
    refuse_products(semantics)
    if semantics.base != "bf16" and semantics.train.lora is None:  # full checkpoints hold no packed weights
        _fail(model, f"--base {semantics.base}: packed weights need adapters; add --train lora, or leave out --base")
    lora = semantics.train.lora
    if lora is not None and EXPERTS in lora.targets and (lora.dropout or lora.rank % 8):
        _fail(model, "adapters of experts need dropout 0 (PEFT has none) and a rank divisible by 8 (for GPU kernels); change them")
    if semantics.base == "mxfp4" and model.config.get("model_type") != "gpt_oss":
        _fail(model, "--base mxfp4: only experts of gpt_oss have this format; use nf4, int8 or fp8")
    for part in ("norm", "loss", "pointwise"):
        if getattr(semantics, part) != "eager" and part not in fusible(model):
            _fail(model, f"no fused kernel computes the {part} of this model; plan with --kernels eager, or leave out --kernels")
    if semantics.router_loss and not _modules(model)["has_experts"]:
        _fail(model, "--router-loss: no layer of this model has a router; leave it out")
    if missing := [name for name in semantics.library_kernels if name not in library_kernels(model)]:
        _fail(model, f"library_kernels: no layer of this model can use {missing[0]}; leave it out")
    if semantics.products == "fp8":
        _refuse_scaled(model, semantics)
    # Blocks do not depend on these
    plain: dict[str, Any] = {"optimizer": Optimizer.ADAMW, "master_dtype": "fp32", "weight_rounding": "half_up"}
    workload = _built(key_of(model), replace(semantics, **plain))
    _refuse_untrained(model, semantics.train, workload)
    wide = _wide(_modules(model), semantics)
    trained = {
        f"{p.name.partition('.lora_')[0]}.weight" if is_adapter(p.name) else p.name for b in workload.blocks for p in b.trained
    }
    if rounded := sorted(trained & wide):
        kind, flag = ("trained", "lora") if semantics.train.lora is None else ("adapted", "lora:targets=... without them")
        problem = f"transformers keeps {len(rounded)} of the {kind} weights in fp32 (first: {rounded[0]})"
        _fail(model, f"{problem}, and --compute bf16 would round them; plan with --compute fp32, or with --train {flag}")
    if (semantics.objective.n_top or 0) > (n := workload.blocks[-1].parameters[-1].shape[0]):
        _fail(model, f"--loss distill: k is {semantics.objective.n_top}, but the model has {n} token ids; choose k <= {n}")
    return workload


def _refuse_scaled(model: Model, semantics: Semantics) -> None:
    """Raise WorkloadError unless each weight of an FP8 product belongs to a plain linear layer or a grouped product, and there is
    one."""
    kinds = [LayerTrace.from_json(kind) for kind in _modules(model)["kinds"]]
    named = [(kind.plain_linear | {*kind.grouped}, name.removesuffix(".weight")) for kind in kinds for name in scaled_weights(kind)]
    instead = "leave out --compute fp8" if semantics.base == "bf16" else "use --base int8 without --compute fp8"
    if odd := [name for supported, name in named if name not in supported]:
        kind = "grouped product" if ".experts." in odd[0] else "plain linear layer"
        _fail(model, f"--compute fp8: {odd[0]} is no {kind}; {instead}")
    if not named:
        _fail(model, f"--compute fp8: no linear layer *_proj has sides that are multiples of 16; {instead}")


@lru_cache(maxsize=128)
def _built(key: str, semantics: Semantics) -> Workload:
    model, n_left = Model(json.loads(key)), semantics.n_left
    return Workload(_blocks(model, semantics, semantics.micro_batch), _blocks(model, semantics, n_left) if n_left else ())


def _fail(model: Model, message: str) -> NoReturn:
    raise WorkloadError(f"{model.name or model.path or 'the model'}: {message}")


def spelled_out(model: Model, semantics: Semantics) -> Semantics:
    """Replace the target `all-linear` by the names of the model's linear layers, so that a plan keeps its meaning."""
    lora, has_experts = semantics.train.lora, _modules(model)["has_experts"]
    if lora is None or not (ALL_LINEAR in lora.targets or (lora.targets == TARGETS and has_experts)):
        return semantics
    names = {name for kind in _modules(model)["kinds"] for name in _adaptable(model, LayerTrace.from_json(kind))}
    targets = in_order({*lora.targets, *map(last_part, names)} - {ALL_LINEAR}) or lora.targets
    if targets == TARGETS and has_experts:  # which means attention alone (`_is_older`)
        targets = in_order(".".join(name.split(".")[-2:]) for name in names)
    return replace(semantics, train=replace(semantics.train, lora=replace(lora, targets=targets)))


def _adaptable(model: Model, trace: LayerTrace) -> list[str]:
    """Linear layers that may have adapters. PEFT refuses `out_proj` in some types, whose kernels take that weight themselves."""
    is_refused = text_of(model.config).get("model_type") in ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
    return [name for name in trace.linear if not (is_refused and last_part(name) == "out_proj")]


def _is_older(lora: Lora, has_experts: bool) -> bool:
    """True for the default of earlier plans in a model with experts: it had no adapters of dense layers and shared experts."""
    return lora.targets == TARGETS and has_experts


def without_adapters(workload: Workload) -> list[str]:
    """Return the places of a layer with a weight matrix or a stack of experts, but without an adapter, such as `mlp.gate`, and
    projections outside of layers."""
    places = dict[str, None]()
    for block in workload.blocks:
        adapted = {p.name.rpartition(".lora_")[0].removesuffix(".base_layer") for p in block.trained}
        for p in block.parameters:
            name = module if (module := p.name.removesuffix(".weight")) != p.name and len(p.shape) == 2 else ""
            name = p.name.rpartition(".")[0] if STACK.search(p.name) else name
            if name and not is_adapter(p.name) and name not in adapted and (block.kind is BlockKind.LAYER or "proj" in name):
                places[name.removeprefix(f"{block.name}.")] = None
    return [*places]


def _refuse_untrained(model: Model, train: Train, workload: Workload) -> None:
    """Raise WorkloadError if `train` selects parameters that the model does not have."""
    missing: list[str] = []
    trained = [p.name for b in workload.blocks for p in b.parameters if not p.frozen]
    if train.lora is not None:
        modules = [name.removesuffix(".lora_A.weight") for name in trained if name.endswith(".lora_A.weight")]
        ends = {module.rpartition(".")[2] for module in modules}
        if train.projector and not any(map(IN_PROJECTOR.search, modules)):
            _fail(model, "--train: its projector has no linear layer for adapters; leave out projector, or train it whole")
        if train.lora.dropout and (renamed := ends & {*IN_EXPERTS}) and _modules(model)["has_experts"]:
            subject = f"adapters of {min(renamed)} in a model with experts need dropout 0"
            _fail(model, f"{subject}, because PEFT takes such names for experts; set it to 0 or name other targets")
        if train.lora.targets != TARGETS:  # of plans from before there were others: missing ones are allowed
            missing = [t for t in train.lora.targets if t not in ends and not any(is_selected(module, t) for module in modules)]
    elif train.names:
        missing = [pattern for pattern in train.names if not any(fnmatchcase(name, pattern) for name in trained)]
    elif train.layers is not None and train.layers[1] >= workload.n_layers:
        _fail(model, f"no layer {train.layers[1]} to train; the last layer is {workload.n_layers - 1}")
    if missing and train.lora is not None:
        kinds = [LayerTrace.from_json(kind) for kind in _modules(model)["kinds"]]
        names = in_order({last_part(name) for kind in kinds for name in _adaptable(model, kind)})
        where = " outside experts (target name: experts)" if any(kind.stacks for kind in kinds) else ""
        subject = "experts that support adapters" if missing[0] == EXPERTS else f"linear layer {missing[0][:80]}{where}"
        _fail(model, f"--train: the model has no {subject} that PEFT adapts; it has {', '.join(names) or 'none'}")
    if missing or not trained:
        _fail(model, f"--train: no parameter matches {missing[0] if missing else train}; check the names of the model's weights")


def _wide(tree: Mapping[str, Any], semantics: Semantics) -> frozenset[str]:
    """Weights that transformers keeps in fp32 although the model computes in bf16. Frozen ones are constants, not in slots."""
    return frozenset(tree.get("wide", ()) if semantics.compute_dtype != "fp32" else ())


def _modules(model: Model) -> dict[str, Any]:
    """Traces of a small micro-batch, to inspect which modules a model has."""
    return outlines(model, supported_attention(model)[0], 1, 16)


def fusible(model: Model) -> frozenset[str]:
    """Return those of `norm`, `loss` and `pointwise` for which a fused kernel computes the model's definition."""
    tree = _modules(model)
    kinds = {group[0] for kind in tree["kinds"] for group in kind["groups"]}
    can = {
        "norm": any(group[0] == "norm" for group in tree["norm"]["groups"]),
        "loss": tree["logits"][0] == 0 and "bias" not in tree["names"],
        "pointwise": "rotary" in kinds and ("gated" in kinds or tree["has_experts"]),
    }
    return frozenset(part for part, possible in can.items() if possible)


def can_tile_mlp(model: Model) -> bool:
    """True if the MLP of every layer can be tiled; experts cannot, because tiles would change their token counts."""
    return all(mlp_of(LayerTrace.from_json(kind)) is not None for kind in _modules(model)["kinds"])


def attentions(model: Model, seq_len: int) -> list[Attention]:
    """Return the attention of each kind of layer, for one sequence; kinds without attention are skipped."""
    tree = outlines(model, supported_attention(model)[0], 1, seq_len)
    return [a for kind in tree["kinds"] if (a := _attention(kind["attention"], 1, seq_len)) is not None]


def attention_kernels(model: Model, semantics: Semantics) -> dict[str, tuple[int, int]]:
    """Return the number of layers with each attention kernel, and the memory traffic that fused attention does not have: bytes of
    one forward of these layers on a micro-batch. Example: `{"eager": (26, 70_000_000_000)}`."""
    tree = outlines(model, semantics.attention, semantics.micro_batch, semantics.seq_len, semantics.library_kernels)
    kernels, item_bytes = dict[str, tuple[int, int]](), ITEM_BYTES[semantics.compute_dtype]
    for kind, trace in enumerate(map(LayerTrace.from_json, tree["kinds"])):
        n_layers = tree["layers"].count(kind)
        n_bytes = n_layers * sum(n * item_bytes + rest for n, rest in (call.moved for call in trace.unfused_attention))
        if trace.attention is not None:
            name = _attention_kernel(trace, semantics.attention)
            n_others, others_bytes = kernels.get(name, (0, 0))
            kernels[name] = n_others + n_layers, others_bytes + n_bytes
    return kernels


def _attention_kernel(trace: LayerTrace, attention: str) -> str:
    window, *sinks = (trace.attention or [None] * 4)[3:]
    if trace.unfused_attention:
        return "eager" if attention == "eager" else "planned as unfused (values have another width than keys)"
    of_window = "" if window is None else f"window of {window:,} tokens"
    if sinks:
        return " and ".join(["fused with sinks", *[f"a {of_window}"] * bool(of_window)])
    return f"fused with a dense mask ({of_window})" if of_window else "fused"


def _attention(fields: list[Any] | None, n_sequences: int, seq_len: int) -> Attention | None:
    if fields is None:
        return None
    n_heads, n_kv_heads, head_dim, window, *sinks = fields
    return Attention(n_sequences, n_heads, head_dim, seq_len, window, n_kv_heads, bool(sinks))


def _blocks(model: Model, semantics: Semantics, n_sequences: int) -> tuple[Block, ...]:
    """Return all blocks with FLOP and bytes of a micro-batch of `n_sequences`."""
    item_bytes, sizes = ITEM_BYTES[semantics.compute_dtype], [n for n in (semantics.micro_batch, semantics.n_left) if n]
    traces = {n: outlines(model, semantics.attention, n, semantics.seq_len, semantics.library_kernels) for n in sizes}
    tree = traces[n_sequences]
    # Tables and masks that all layers share are also in memory, of full and of smaller micro-batches
    shared_bytes = sum(_bytes_of(traces[n]["shared"], item_bytes) for n in sizes)
    layout = _Layout(tree, semantics, n_sequences, item_bytes)
    # Layers with the same structure, trainable parameters and adapters differ only in their names
    kinds: dict[tuple[int, Part], Block] = {}
    layers, lora, traces_of = [], semantics.train.lora, [LayerTrace.from_json(kind) for kind in tree["kinds"]]
    for i, kind in enumerate(tree["layers"]):
        name, trace = f"{tree['names']['layers']}.{i}", traces_of[kind]
        trained = frozenset(p for p in trace.parameters if semantics.train.trains(f"{name}.{p}"))
        constants = frozenset(n.removeprefix(f"{name}.") for n in _wide(tree, semantics)) - trained
        adapted = [] if lora is None else [m for m in _adaptable(model, trace) if lora.adapts(f"{name}.{m}")]
        if lora is not None and _is_older(lora, tree["has_experts"]):
            adapted = [module for module in adapted if not module.startswith("mlp.")]
        adapted += trace.stacks if lora is not None and EXPERTS in lora.targets else []
        if (key := (kind, Part(trained, frozenset(adapted), lora))) not in kinds:
            kinds[key] = layout.layer(trace, key[1], constants, shared_bytes)
        block = kinds[key]
        layers.append(replace(block, name=name, parameters=_under(name, block.parameters)))
    embedding = layout.embedding()
    if semantics.train.projector:
        embedding = layout.with_projector(embedding, *projector_trace(model, layout.n_tokens))
    return embedding, *layers, layout.head()


def _bytes_of(sizes: Iterable[tuple[int, int]], item_bytes: int) -> int:
    """Sum the bytes of tensors, recorded as (elements, element bytes), with elements of the compute dtype."""
    return sum(n * (item_bytes if n_bytes == RECORDED_ITEM_BYTES else n_bytes) for n, n_bytes in sizes)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Builds the blocks of a micro-batch of `n_sequences` from its layer traces."""

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

    def layer(self, trace: LayerTrace, part: Part, constants: frozenset[str], shared_bytes: int) -> Block:
        """Build a decoder layer with a placeholder name."""
        tape = Tape(self.item_bytes)
        replay(trace, tape, self.semantics, part, self.n_tokens)
        block = Block(
            name="layer",
            kind=BlockKind.LAYER,
            parameters=tuple(p for p in _with_adapters(trace, part) if p.name not in constants),
            matmuls=tuple(tape.matmuls),
            attention=_attention(trace.attention, self.n_sequences, self.semantics.seq_len),
            **tape.work._asdict(),
            boundary_bytes=self.boundary_bytes,
            kept_bytes=tape.kept_bytes,
            transient_bytes=tape.backward_peak_bytes() + shared_bytes,
            tile_sum_bytes=tape.tile_sum_bytes,
            tiers=tape.tiers(shared_bytes),
        )
        return self._balanced(block, trace) if self.semantics.router_loss else block

    def _balanced(self, block: Block, trace: LayerTrace) -> Block:
        """Add the router loss of an expert layer (`runtime/compute/balance.py`): logits are saved, and their softmax is computed in
        forward (to count expert choices) and again in backward."""
        grouped = next((call for call in trace.calls if call.name == "_grouped_mm"), None)
        if grouped is None:
            return block
        (n_rows, _), (n_experts, *_) = grouped.shapes[:2]
        n_logits = self.n_tokens * n_experts
        moved_bytes, n_kernels = n_logits * (4 * self.item_bytes + 2 * FP32), 8
        extra_bytes = n_logits * (4 * self.item_bytes + FP32) + n_rows * (self.item_bytes + FP32 + INT64)

        kept_bytes = block.kept_bytes + n_logits * self.item_bytes

        def add_cost(work: Any, again: bool = True) -> Any:
            work = replace(work, transient_bytes=work.transient_bytes + extra_bytes)
            computed = {"pointwise_bytes": work.pointwise_bytes + moved_bytes, "n_kernels": work.n_kernels + n_kernels}
            return replace(work, **computed) if again else work

        tiers = (replace(add_cost(t, False), saved_bytes=kept_bytes) if t.saved is Saved.ALL else add_cost(t) for t in block.tiers)
        return replace(add_cost(block), kept_bytes=kept_bytes, tiers=tuple(tiers))  # type: ignore[no-any-return]

    def embedding(self) -> Block:
        """Build the embedding: a table lookup per token and later calls; backward computes a dense gradient per table."""
        tree, trace = self.tree["embedding"], LayerTrace.from_json(self.tree["embedding"])
        parameters = tuple(self._parameters(trace.parameters))
        tape, ids_bytes = Tape(self.item_bytes), self.n_tokens * INT64
        handed_bytes = side_bytes = peak_bytes = 0
        if trace.tensors:
            replay(trace, tape, self.semantics, Part(frozenset(p.name for p in parameters if not p.frozen)), self.n_tokens)
            handed_bytes, peak_bytes = _bytes_of(tree.get("handed", ()), self.item_bytes), tape.backward_peak_bytes()
            needed = sum(p.n_elements for p in parameters if p.name in tree.get("needed", ()))
            side_bytes = handed_bytes + tape.kept_bytes + needed * self.item_bytes
        return Block(
            name=self.tree["names"]["embedding"],
            kind=BlockKind.EMBEDDING,
            parameters=parameters,
            matmuls=tuple(tape.matmuls),
            side_bytes=side_bytes,
            pointwise_bytes=sum(n * self.item_bytes + other_bytes for n, other_bytes in (call.moved for call in trace.calls)),
            n_kernels=len(trace.calls),
            boundary_bytes=self.boundary_bytes,
            kept_bytes=ids_bytes,
            # Recomputed output, gradient before a scale, dense table gradients; gradients of tensors handed to layers: one layer's
            # contribution (at most all of it), and the sum over layers
            transient_bytes=max(sum(p.n_elements for p in parameters if not p.frozen) * self.item_bytes, peak_bytes)
            + 2 * self.boundary_bytes
            + handed_bytes
            + ids_bytes,
        )

    def with_projector(self, block: Block, name: str, tree: Mapping[str, Any]) -> Block:
        """Add a vision-language model's projector to the embedding, as if every token were of an image."""
        trace, tape, lora = LayerTrace.from_json(tree), Tape(self.item_bytes), self.semantics.train.lora
        part = Part(frozenset(() if lora else trace.parameters), frozenset(trace.linear if lora else ()), lora)
        plain: dict[str, Any] = {"norm": "eager", "pointwise": "eager", "products": "compute", "mlp_tile_tokens": None}
        replay(trace, tape, replace(self.semantics, **plain), part, self.n_tokens)
        parameters = _under(name, tuple(_with_adapters(trace, part)))
        work = {name: n + getattr(block, name) for name, n in tape.work._asdict().items()}
        # Weights are copied, because the backward has no slot of them
        held = trace.tensors[0].n_elements + sum(p.n_elements for p in parameters)
        return replace(
            block,
            parameters=(*block.parameters, *parameters),
            matmuls=(*block.matmuls, *tape.matmuls),
            side_bytes=block.side_bytes + tape.kept_bytes + held * self.item_bytes,
            # Gradients of the rows of images, and of the others
            transient_bytes=block.transient_bytes + tape.backward_peak_bytes() + 2 * self.boundary_bytes,
            **work,
        )

    def _parameters(self, shapes: Mapping[str, Sequence[int]], tied_to: str | None = None) -> Iterator[Parameter]:
        """Convert shapes by name in the model; a tied weight is trained if the embedding is."""
        trains = {name: self.semantics.train.trains(tied_to or name) for name in shapes}
        names = [name for name in shapes if trains[name] or name not in _wide(self.tree, self.semantics)]
        return (Parameter(name, tuple(shapes[name]), tied_to, not trains[name]) for name in names)

    def head(self) -> Block:
        """Build the head: final norm, output matrix and loss; each tile of tokens runs forward and backward."""
        semantics, tree, tokens = self.semantics, self.tree, self.n_tokens
        width = tree["width"] - tree.get("carried", 0)
        names, vocab, tied_to, bias_name = tree["names"], tree["vocab"], tree["tied"], tree["names"].get("bias")
        name = names["head"]
        if semantics.objective.n_labels is not None:  # cost as if every token were scored
            name, vocab, tied_to, bias_name = SCORE.removesuffix(".weight"), semantics.objective.n_labels, None, None
        tape, norm = Tape(self.item_bytes), LayerTrace.from_json(tree["norm"])
        of_norm = [*self._parameters({f"{names['norm']}.{n}": shape for n, shape in norm.parameters.items()})]
        trained = (n for n in norm.parameters if semantics.train.trains(f"{names['norm']}.{n}"))
        replay(norm, tape, semantics, Part(frozenset(trained)), tokens)
        bias = [*self._parameters({bias_name: (vocab,)} if bias_name else {})]
        (weight,) = self._parameters({f"{name}.weight": (vocab, width)}, tied_to)
        trains, tile = not weight.frozen, min(semantics.loss_tile_tokens, tokens)
        n_tiles, rest = divmod(tokens, tile)
        tiles = (Matmul(m, width, vocab, count, not trains) for m, count in ((tile, n_tiles), (rest, 1)) if m)
        logit_bytes, moved_bytes, softmax_bytes, n_calls = self._loss(vocab)
        if any(not p.frozen for p in bias):  # its gradient sums the logits' gradient over rows
            moved_bytes, n_calls = moved_bytes + tokens * vocab * self.item_bytes, n_calls + 2
        # Weight gradient of a tile, its rows and their gradient; `loss: online` accumulates the first and has the rest in place
        scratch_bytes = (vocab * trains + 2 * tile) * width * self.item_bytes
        if semantics.loss == "online":
            scratch_bytes = self._online_scratch_bytes(tile, vocab, width)
        own_sum_bytes = vocab * width * FP32 if semantics.n_micro_batches > 1 and trains else 0
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
            # A later micro-batch sums its tiles before the sum joins the accumulator
            + own_sum_bytes
            + self._bytes_of_tokens(tile)
            + tape.backward_peak_bytes()
            + 2 * self.boundary_bytes,  # normed rows and their gradient
        )

    def _loss(self, vocab: int) -> tuple[int, int, int, int]:
        """Return the cost of the loss: peak bytes per logit, memory traffic of forward, fused share of it, and calls per tile."""
        semantics, tokens, narrow, item = self.semantics, self.n_tokens, self.item_bytes < FP32, self.item_bytes
        if semantics.loss == "online":
            # Logits are overwritten by their gradient. Values are a third of forward and backward together: traffic is two reads
            # and a write; calls are the product, the kernel, its sum and two products
            return item, tokens * vocab * item, tokens * vocab * item, 2
        n_after, n_kept = self.tree["logits"] if semantics.objective.n_labels is None else (0, 0)
        n_extra, softmax_bytes = semantics.objective.wide - CROSS_ENTROPY.wide, log_softmax_bytes(tokens, vocab)
        # Live in a tile's backward: logits, tensors saved by soft-capping, log-probabilities, two gradients, extras of the loss.
        # Traffic: calls on logits, conversion to fp32, log-softmax. Calls: those, product, log-softmax, sum, extras of the loss
        each_bytes = 2 * item * n_after + (item + FP32 if narrow else 0) + 2 * n_extra * FP32
        logit_bytes = item * (1 + n_kept) + semantics.objective.wide * FP32
        return logit_bytes, tokens * vocab * each_bytes + softmax_bytes, softmax_bytes, n_after + narrow + 3 + n_extra

    def _online_scratch_bytes(self, tile: int, vocab: int, width: int) -> int:
        """Temporaries of `loss: online` on a CPU, which has no kernel for it: a chunk of logits in fp32; then, for a bf16 weight
        gradient, all rows of the tile and a chunk of logits in fp32."""
        lanes = loss_lanes(vocab)
        wide_bytes = min(tile, max(1, LOSS_SCRATCH_ELEMENTS // lanes)) * lanes * LOSS_SCRATCH_BYTES
        is_narrow = self.item_bytes < FP32
        return max(wide_bytes, is_narrow * (tile * width + min(tile * vocab, max(tile, LOSS_SCRATCH_ELEMENTS))) * FP32)

    def _bytes_of_tokens(self, tile: int) -> int:
        """Bytes of a loss's per-token inputs and intermediates, in addition to logits."""
        semantics, objective, tokens = self.semantics, self.semantics.objective, self.n_tokens
        if objective.has_first_pass:  # log-probability, its slope in fp32 and fp64, temporary of the sums
            return tokens * (3 * FP32 + FP64)
        if (k := objective.n_top) is not None:  # packed top-k of two steps; temporaries of a tile
            return 2 * semantics.batch_size * semantics.seq_len * objective.teacher_bytes + tile * (k + 1) * TEACHER_COPIES * FP32
        n_extras = len(objective.extras) + (objective.per is not objective.of)
        return 2 * tokens * FP64 * n_extras  # as uploaded, and in order


def _with_adapters(trace: LayerTrace, part: Part) -> Iterator[Parameter]:
    """Yield a layer's weights, frozen or trained, then the two LoRA factors of each weight with an adapter."""
    parameters, linear = [Parameter(n, tuple(s)) for n, s in trace.parameters.items()], trace.linear
    yield from (replace(p, frozen=p.name not in part.trained) for p in parameters)
    for name, (n_experts, n_in, n_out) in trace.stacks.items():
        if rank := part.rank(name):
            prefix = name.rpartition(".")[0] + ("" if name.endswith(".down_proj") else ".base_layer")  # as PEFT nests them
            yield Parameter(f"{prefix}.lora_A.weight", (n_experts * rank, n_in))
            yield Parameter(f"{prefix}.lora_B.weight", (n_out, rank * n_experts))
    for name in (p.name.removesuffix(".weight") for p in parameters):
        if name in linear and (rank := part.rank(name)):
            n_out, n_in = linear[name]
            yield Parameter(f"{name}.lora_A.weight", (rank, n_in))
            yield Parameter(f"{name}.lora_B.weight", (n_out, rank))


def log_softmax_bytes(tokens: int, vocab: int) -> int:
    """Memory traffic of PyTorch's fp32 log-softmax: three reads of each row (maximum, sum, output) and one write."""
    return tokens * vocab * (LOG_SOFTMAX_READS + 1) * FP32


@lru_cache(maxsize=4096)
def _under(name: str, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(replace(p, name=f"{name}.{p.name}") for p in parameters)
