"""A model as blocks: sizes and work of one micro-batch.

The embedding, the decoder layers and the head, with the weights' names and shapes as transformers has them, and the work
and memory of one micro-batch. With eager attention `Attention.flop` is still the causal half: the model's work, not the
square that is really computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial

from runtime.plan import Semantics
from runtime.plan.train import TARGETS, Train
from runtime.plan.workload import ITEM_BYTES, Attention, Block, BlockKind, Matmul, Model, Parameter, Workload

from . import forward as fw
from .config import Config, config_of, read_model, shipped_models, supported_attention
from .tape import FP32, INT64, Tape, Tensor, Weights

__all__ = ["build_workload", "can_tile_mlp", "fusible", "read_model", "shipped_models", "supported_attention"]

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
AFTER_ATTENTION = "post_attention_layernorm"
LOG_SOFTMAX_READS = 3


def build_workload(model: Model, semantics: Semantics) -> Workload:
    """The model's blocks, with FLOP and bytes of one micro-batch under these semantics, and of a smaller last one.

    WorkloadError for a configuration that is not supported, or semantics that transformers does not let the model run with.
    """
    config = config_of(model)
    if semantics.attention not in config.architecture.attention:
        legal = " or ".join(config.architecture.attention)
        config.fail(f"attention {semantics.attention} is not possible for {config.model_type}; use {legal}")
    if semantics.mlp_tile_tokens is not None and not can_tile_mlp(model):
        config.fail("mlp_tile_tokens: layers with experts cannot be tiled; leave it out")
    if semantics.mlp_tile_tokens is not None and not semantics.train.all:
        config.fail("mlp_tile_tokens: an MLP by tiles is trained whole; leave it out, or --train")
    if semantics.base != "bf16" and semantics.train.lora is None:  # a checkpoint of the whole model would have to be unpacked
        config.fail(f"--base {semantics.base}: weights are packed beside adapters only; add --train lora, or leave it out")
    for part in ("norm", "loss", "pointwise"):
        if getattr(semantics, part) == "fused" and part not in fusible(model):
            config.fail(
                f"no fused kernel computes the {part} of {config.model_type}; plan with --kernels eager, or name no kernels"
            )
    n_left = semantics.n_left
    found = Workload(_blocks(config, semantics, semantics.micro_batch), _blocks(config, semantics, n_left) if n_left else ())
    _refuse_untrained(config, semantics.train, [p.name for b in found.blocks for p in b.parameters if not p.frozen])
    return found


def _refuse_untrained(config: Config, train: Train, trained: Sequence[str]) -> None:
    """WorkloadError where something is to be trained that the model has not."""
    missing: list[str] = []
    if train.lora is not None and train.lora.targets != TARGETS:  # all: as many as there are
        missing = [t for t in train.lora.targets if not any(f".{t}.lora_A." in name for name in trained)]
    elif train.names:
        missing = [pattern for pattern in train.names if not any(fnmatchcase(name, pattern) for name in trained)]
    elif train.layers is not None and train.layers[1] >= config.n_layers:
        config.fail(f"there is no layer {train.layers[1]} to train; the last one is {config.n_layers - 1}")
    if missing and train.lora is not None and config.architecture.router is not None:
        config.fail(f"experts of {config.model_type} cannot have adapters, and nothing else is called {missing[0]}; leave it out")
    if missing or not trained:
        config.fail(f"nothing of this model is called {missing[0] if missing else train}; look at its weights' names")


def _blocks(config: Config, semantics: Semantics, n_sequences: int) -> tuple[Block, ...]:
    """All blocks, with FLOP and bytes of a micro-batch of `n_sequences`."""
    embedding, head = _embedding(config, semantics, n_sequences), _head(config, semantics, n_sequences)
    # Layers of one structure, of which the same is trained, differ in nothing but their names
    kinds: dict[tuple[int | None, bool, bool, frozenset[str]], Block] = {}
    layers = []
    for i in range(config.n_layers):
        names = [p.name for p in _layer_parameters(config, config.sparse(i))]
        trained = frozenset(name for name in names if semantics.train.trains(f"model.layers.{i}.{name}"))
        key = (config.window(i), config.sparse(i), config.rotated[i], trained)
        if key not in kinds:
            kinds[key] = _layer(config, semantics, n_sequences, *key)
        layers.append(_renamed(kinds[key], f"model.layers.{i}"))
    return embedding, *layers, head


def fusible(model: Model) -> frozenset[str]:
    """Which of `norm`, `loss` and `pointwise` fused kernels compute as the model's type means them."""
    config = config_of(model)
    a = config.architecture
    can = {
        "norm": a.norm != "centred",  # 1 + weight would be rounded before it is used
        "loss": not config.final_softcap,
        "pointwise": a.rotary == "full" and a.activation[1] == "silu",
    }
    return frozenset(part for part, possible in can.items() if possible)


def can_tile_mlp(model: Model) -> bool:
    """Whether every layer's MLP runs by tiles: experts would see other shares of tokens."""
    config = config_of(model)
    return not any(map(config.sparse, range(config.n_layers)))


@dataclass(frozen=True, slots=True)
class _Part:
    """A layer's weights: which of them are trained, and where adapters are."""

    train: Train
    trained: frozenset[str]  # by their names within the layer
    has_experts: bool  # as other layers of the type: then PEFT takes the names of an MLP for those of experts, here too

    def rank(self, name: str) -> int:
        """Of the adapter beside the product of that name; 0: it has none."""
        stands = name.startswith("self_attn.") or (name.startswith("mlp.") and not self.has_experts)
        return self.train.rank(name.rpartition(".")[2]) if stands else 0

    def norm(self, name: str) -> bool:
        return f"{name}.weight" in self.trained

    def linear(self, name: str, bias: bool) -> Weights:
        """What the product of that name has."""
        rank, lora = self.rank(name), self.train.lora
        dropout = lora is not None and lora.dropout > 0
        return Weights(bias, f"{name}.weight" in self.trained, f"{name}.bias" in self.trained, rank, dropout)


def _layer(
    config: Config, semantics: Semantics, n_seq: int, window: int | None, sparse: bool, rotated: bool, trained: frozenset[str]
) -> Block:
    """A decoder layer, named for renaming: its recording is that of the module's forward, call by call."""
    of = _Part(semantics.train, trained, config.architecture.router is not None)
    a, seq_len, head_dim = config.architecture, semantics.seq_len, config.head_dim
    tokens, width = n_seq * seq_len, config.hidden
    masked = semantics.attention == "eager" or (window is not None and seq_len >= window)
    norm, pointwise = semantics.norm, semantics.pointwise
    shape = fw.AttentionShape(n_seq, seq_len, config.n_heads, config.n_kv_heads, head_dim, masked, semantics.attention_kernel)
    tape = Tape(ITEM_BYTES[semantics.compute_dtype])
    x = Tensor(tokens * width, tape.item_bytes, ours=False)
    table_width = head_dim // 2 if a.rotary == "halves" else head_dim
    table_item_bytes = FP32 if a.rotary == "interleaved" else tape.item_bytes
    table = Tensor(seq_len * table_width, table_item_bytes, ours=False, differentiable=False)
    y = _attend(tape, config, semantics, x, table if rotated else None, shape, of)
    x = tape.step([x, y], tokens * width, scratch_bytes=0)
    # By its name in the module; where a norm follows attention too, another one is that of what comes next
    normed = fw.rms_norm(tape, x, width, a.norm, norm, of.norm("pre_feedforward_layernorm" if a.sandwich else AFTER_ATTENTION))

    def rest(tape: Tape, inputs: Sequence[Tensor], n_rows: int) -> None:
        """From the norm's output on: every row for itself."""
        x, normed = inputs
        if sparse and a.router is not None:
            grouped = semantics.experts == "grouped_mm"
            y = fw.experts(tape, normed, fw.ExpertsShape(
                n_rows, width, config.expert_inner, config.n_experts, config.top_k, a.router, a.sinks, config.normalised, grouped,
                of.linear(f"mlp.{a.router_name}", a.sinks),
                frozenset(name.removeprefix("mlp.experts.") for name in trained if name.startswith("mlp.experts.")),
            ))  # fmt: skip
        else:
            linear = partial(of.linear, bias=config.mlp_bias)
            y = fw.gated_mlp(tape, normed, n_rows, width, config.inner, linear, pointwise)
        y = fw.rms_norm(tape, y, width, a.norm, norm, of.norm("post_feedforward_layernorm")) if a.sandwich else y
        tape.step([x, y], n_rows * width, scratch_bytes=0)

    tile = semantics.mlp_tile_tokens
    if tile is None or tile >= semantics.tokens_per_micro_batch:
        rest(tape, (x, normed), tokens)
    else:
        tape.tile((x, normed), tokens, min(tile, tokens), rest)
    # What all layers of a micro-batch share lies there too: rotary tables, and a mask for each kind of layer that has one; and
    # those of a smaller last micro-batch beside them
    n_masks = len({config.window(i) for i in range(config.n_layers)}) if masked else 0
    mask_bytes = (semantics.micro_batch + semantics.n_left) * seq_len**2 * (1 if semantics.attention == "sdpa" else tape.item_bytes)
    shared_bytes = (2 + 2 * bool(semantics.n_left)) * table.n_bytes + n_masks * mask_bytes
    return Block(
        name="layer",
        kind=BlockKind.LAYER,
        parameters=tuple(_with_adapters(list(_layer_parameters(config, sparse)), of)),
        matmuls=tuple(tape.matmuls),
        attention=Attention(
            n_seq, config.n_heads, head_dim, seq_len, window if window and window < seq_len else None, config.n_kv_heads
        ),
        pointwise_bytes=tape.pointwise_bytes,
        fused_bytes=tape.fused_bytes,
        norm_bytes=tape.norm_bytes,
        n_kernels=tape.n_kernels,
        boundary_bytes=tokens * width * tape.item_bytes,
        kept_bytes=tape.kept_bytes,
        transient_bytes=tape.backward_peak_bytes() + shared_bytes,
        tile_sum_bytes=tape.tile_sum_bytes,
        tiers=tape.tiers(shared_bytes),
    )


def _attend(
    tape: Tape, config: Config, semantics: Semantics, x: Tensor, table: Tensor | None, shape: fw.AttentionShape, of: _Part
) -> Tensor:
    """The first half of a decoder layer, from its input to what is added to it. Without a `table` nothing is rotated."""
    a, head_dim, norm = config.architecture, config.head_dim, semantics.norm
    tokens, width = shape.n_tokens, config.hidden
    q_width, kv_width = config.n_heads * head_dim, config.n_kv_heads * head_dim
    normed = fw.rms_norm(tape, x, width, a.norm, norm, of.norm("input_layernorm"))

    def project(name: str, n: int) -> Tensor:
        return tape.linear(normed, tokens, width, n, of.linear(f"self_attn.{name}_proj", config.qkv_bias))

    q = project("q", q_width)
    q = fw.rms_norm(tape, q, head_dim, a.norm, norm, of.norm("self_attn.q_norm")) if a.head_norms else q
    k = project("k", kv_width)
    k = fw.rms_norm(tape, k, head_dim, a.norm, norm, of.norm("self_attn.k_norm")) if a.head_norms else k
    v = project("v", kv_width)
    if table is not None and a.rotary == "interleaved":
        q, k = fw.rotate_interleaved(tape, (q, k), table)
    elif table is not None:
        q, k = (fw.rotate(tape, x, table, a.rotary, semantics.pointwise) for x in (q, k))
    if semantics.attention == "sdpa":
        mixed = fw.fused_attention(tape, q, k, v, shape)
    else:
        mixed = fw.eager_attention(tape, q, k, v, shape, config.softcap, a.sinks)
    y = tape.linear(mixed, tokens, q_width, width, of.linear("self_attn.o_proj", config.out_bias))
    return fw.rms_norm(tape, y, width, a.norm, norm, of.norm(AFTER_ATTENTION)) if a.sandwich else y


def _with_adapters(parameters: Sequence[Parameter], of: _Part) -> Iterator[Parameter]:
    """A layer's own weights, frozen or not; then the two factors beside each that has an adapter."""
    yield from (replace(p, frozen=p.name not in of.trained) for p in parameters)
    for p in parameters:
        name, _, last = p.name.rpartition(".")
        if last == "weight" and (rank := of.rank(name)):
            n_out, n_in = p.shape
            yield Parameter(f"{name}.lora_A.weight", (rank, n_in))
            yield Parameter(f"{name}.lora_B.weight", (n_out, rank))


def _layer_parameters(config: Config, sparse: bool) -> Iterator[Parameter]:
    """Weights of a layer in the order of transformers' `named_parameters`, named from within the layer."""
    a, width, head_dim = config.architecture, config.hidden, config.head_dim
    q_width, kv_width = config.n_heads * head_dim, config.n_kv_heads * head_dim

    def linear(name: str, n_out: int, n_in: int, bias: bool) -> Iterator[Parameter]:
        yield Parameter(f"{name}.weight", (n_out, n_in))
        if bias:
            yield Parameter(f"{name}.bias", (n_out,))

    if a.sinks:
        yield Parameter("self_attn.sinks", (config.n_heads,))
    yield from linear("self_attn.q_proj", q_width, width, config.qkv_bias)
    yield from linear("self_attn.k_proj", kv_width, width, config.qkv_bias)
    yield from linear("self_attn.v_proj", kv_width, width, config.qkv_bias)
    yield from linear("self_attn.o_proj", width, q_width, config.out_bias)
    if a.head_norms:
        yield from (Parameter(f"self_attn.{name}.weight", (head_dim,)) for name in ("q_norm", "k_norm"))
    if sparse:
        router = list(linear(f"mlp.{a.router_name}", config.n_experts, width, a.sinks))
        e, inner = config.n_experts, config.expert_inner
        # The type with sinks stores its experts' weights input first, and gives them biases
        shapes: dict[str, tuple[int, ...]] = {"gate_up_proj": (e, 2 * inner, width), "down_proj": (e, width, inner)}
        if a.sinks:
            shapes = {"gate_up_proj": (e, width, 2 * inner), "gate_up_proj_bias": (e, 2 * inner),
                      "down_proj": (e, inner, width), "down_proj_bias": (e, width)}  # fmt: skip
        weights = [Parameter(f"mlp.experts.{name}", shape) for name, shape in shapes.items()]
        yield from (*router, *weights) if a.router_first else (*weights, *router)
    else:
        yield from linear("mlp.gate_proj", config.inner, width, config.mlp_bias)
        yield from linear("mlp.up_proj", config.inner, width, config.mlp_bias)
        yield from linear("mlp.down_proj", width, config.inner, config.mlp_bias)
    between = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if a.sandwich else ()
    for name in ("input_layernorm", "post_attention_layernorm", *between):
        yield Parameter(f"{name}.weight", (width,))


def _embedding(config: Config, semantics: Semantics, n_sequences: int) -> Block:
    """Rows of the table, one per token; its backward makes a dense gradient of the whole table."""
    tokens, item_bytes = n_sequences * semantics.seq_len, ITEM_BYTES[semantics.compute_dtype]
    boundary_bytes, trains = tokens * config.hidden * item_bytes, semantics.train.trains(EMBEDDING)
    scaled = config.architecture.scaled_embedding  # gemma multiplies embeddings by the square root of their width
    return Block(
        name="model.embed_tokens",
        kind=BlockKind.EMBEDDING,
        parameters=(Parameter(EMBEDDING, (config.vocab, config.hidden), frozen=not trains),),
        pointwise_bytes=tokens * INT64 + (4 if scaled else 2) * boundary_bytes,
        n_kernels=2 if scaled else 1,
        boundary_bytes=boundary_bytes,
        kept_bytes=tokens * INT64,
        # The recomputed output, the gradient before the scale, and the table's gradient
        transient_bytes=config.vocab * config.hidden * item_bytes * trains + 2 * boundary_bytes + tokens * INT64,
    )


def _head(config: Config, semantics: Semantics, n_sequences: int) -> Block:
    """Final norm, output matrix and loss, by tiles of tokens with a backward each."""
    tokens, width, vocab = n_sequences * semantics.seq_len, config.hidden, config.vocab
    tile = min(semantics.loss_tile_tokens, tokens)
    tape = Tape(ITEM_BYTES[semantics.compute_dtype])
    x = Tensor(tokens * width, tape.item_bytes, ours=False)
    # A tied weight is trained with the embedding
    trains_norm, trains = (semantics.train.trains(name) for name in (NORM, EMBEDDING if config.tied else HEAD))
    fw.rms_norm(tape, x, width, config.architecture.norm, semantics.norm, trains_norm)
    n_tiles, rest = divmod(tokens, tile)
    tiles = [Matmul(tile, width, vocab, n_tiles, not trains), *([Matmul(rest, width, vocab, 1, not trains)] if rest else [])]
    narrow, capped = tape.item_bytes < FP32, config.final_softcap
    if semantics.loss == "fused":
        # Rounded logits, probabilities, and either the wide logits that a CPU makes or the rounded gradient
        logit_bytes = tape.item_bytes + 2 * FP32
        # Of forward and backward together, of which this is a third: the largest logit, probabilities (read twice), the gradient
        moved_bytes = softmax_bytes = tokens * vocab * (3 * tape.item_bytes + FP32 + FP32 + tape.item_bytes) // 3
        n_calls = 4  # a third of the product, the largest, probabilities, the row's own, the gradient and two products
    else:
        # Live per logit at the peak, in the tile's backward: rounded logits, the tanh of a cap, log-probabilities, two gradients
        logit_bytes = tape.item_bytes * (2 if capped else 1) + 3 * FP32
        # Moved per logit in the forward: scaling, tanh and scaling back of a cap, widening, and log-probabilities
        softmax_bytes = log_softmax_bytes(tokens, vocab)
        each_bytes = 2 * tape.item_bytes * (3 if capped else 0) + (tape.item_bytes + FP32 if narrow else 0)
        moved_bytes = tokens * vocab * each_bytes + softmax_bytes
        n_calls = (3 if capped else 0) + (1 if narrow else 0) + 3  # and the product, log-probabilities, their sum
    own_sum_bytes = vocab * width * FP32 if semantics.n_micro_batches > 1 and trains else 0
    weight = Parameter(HEAD, (vocab, width), EMBEDDING if config.tied else None, not trains)
    return Block(
        name="lm_head",
        kind=BlockKind.HEAD,
        parameters=(Parameter(NORM, (width,), frozen=not trains_norm), weight),
        matmuls=tuple(tiles),
        pointwise_bytes=tape.pointwise_bytes + moved_bytes,
        fused_bytes=tape.fused_bytes + softmax_bytes,
        norm_bytes=tape.norm_bytes,
        n_kernels=tape.n_kernels + (n_tiles + bool(rest)) * n_calls,
        boundary_bytes=0,
        kept_bytes=0,
        own_sum_bytes=own_sum_bytes,
        transient_bytes=tile * vocab * logit_bytes
        + (vocab * trains + 2 * tile) * width * tape.item_bytes  # the tile's weight gradient, its rows and their gradient
        # a later micro-batch sums its own tiles before they join the running sum
        + own_sum_bytes
        + tape.backward_peak_bytes()
        + 2 * x.n_bytes,  # normed rows and their gradient
    )


def log_softmax_bytes(tokens: int, vocab: int) -> int:
    """Traffic of PyTorch's log-softmax in fp32: one kernel reads a row three times, for its largest, its sum and itself."""
    return tokens * vocab * (LOG_SOFTMAX_READS + 1) * FP32


def _renamed(block: Block, name: str) -> Block:
    """The same layer under another name, its weights' names starting with it."""
    return replace(block, name=name, parameters=_under(name, block.parameters))


@lru_cache(maxsize=4096)
def _under(name: str, parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    return tuple(replace(p, name=f"{name}.{p.name}") for p in parameters)
