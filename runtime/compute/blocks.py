"""Templates of blocks: transformers' own modules on the meta device, computed with weights that are views of a slot.

The model's own forward is run around its layers (`layers/split.py`), so every architecture keeps its own mathematics.
"""

# B sequences, T tokens, N = B * T, D width, V vocabulary
import copy
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from runtime.batch import UNSUPERVISED, Batch
from runtime.errors import WorkloadError
from runtime.host.memory import DTYPE
from runtime.layers.adapters import AdaptedExperts, AdaptedLinear, adapt, initial_factors
from runtime.layers.apart import supports_documents
from runtime.layers.documents import attending, embed_packed
from runtime.layers.kernels import use_fused_norm, use_kernels
from runtime.layers.meta_models import meta_model
from runtime.layers.pointwise import fastest
from runtime.layers.split import Call, Split
from runtime.layers.tiles import TiledMlp
from runtime.layers.views import Weights
from runtime.plan import Policy, Semantics
from runtime.plan.objective import LAST, Of
from runtime.plan.train import is_adapter
from runtime.plan.workload import Workload

from .balance import Balance
from .losses import Extras, LossFunction, known_loss, row_losses, row_losses_and_gradients, top_and_rest


class Templates:
    """Stateless templates of every block of one model. Only one thread at a time may use them."""

    def __init__(
        self,
        config: dict[str, Any],
        workload: Workload,
        semantics: Semantics,
        policy: Policy | None = None,
        device: torch.device | None = None,
        loss: LossFunction | None = None,
    ) -> None:
        """Build the modules; WorkloadError when they do not have the parameters the workload counted.

        `policy` says what tiles of an MLP remember of their forward: nothing, without one. What the model computes for itself
        (frequencies, scales) will be on `device`; on the CPU, without one. `loss`: a program's own, where the objective is that.
        """
        self.objective = semantics.objective
        self.loss_function = loss or known_loss(self.objective)
        self.config, self.workload, self.semantics, self.device = config, workload, semantics, device or torch.device("cpu")
        self.split = Split(meta_model(config, semantics))
        self.split.look()
        self.model, self.layers = self.split.model, self.split.layers
        self.head_weight, self._norm_prefix = f"{self.split.head_name}.weight", f"{self.split.norm_name}."
        has = [name for name in ("weight", "bias") if getattr(self.split.head, name, None) is not None]
        self._of_head = [f"{self.split.head_name}.{name}" for name in has]
        self._refuse_surprises()
        self._trained = {p.name for block in workload.blocks for p in block.trained}
        pointwise = fastest(self.device, DTYPE[semantics.compute_dtype])
        for block, layer in enumerate(self.layers, start=1):
            if semantics.train.lora is not None:
                adapt(layer, self._prefix(block), self._adapters(block), semantics.train.lora)
            use_kernels(layer, semantics, pointwise)
        n_micro_batches = semantics.n_micro_batches * semantics.ranks
        self.balance = Balance(self.model, self.layers, semantics.router_loss, n_micro_batches) if semantics.router_loss else None
        self.norm: nn.Module = self.split.norm
        if semantics.norm == "fused":
            use_fused_norm(self.norm)
        self._tiled: list[TiledMlp] = []  # of each layer, where the semantics have tiles, and one would not hold all tokens
        if (n := semantics.mlp_tile_tokens) is not None and n < semantics.tokens_per_micro_batch:
            self._tiled = [TiledMlp(layer, n, policy or Policy(), block) for block, layer in enumerate(self.layers, start=1)]
        self.split.make_buffers(self.device, of_layers=True)

    def _prefix(self, block: int) -> str:
        return f"{self.split.layers_name}.{block - 1}."

    def _refuse_surprises(self) -> None:
        found = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        owned = (p for b in self.workload.blocks for p in b.parameters if p.tied_to is None)
        planned = {p.name: p.shape for p in owned if not is_adapter(p.name)}
        if odd := sorted(name for name in found.keys() | planned.keys() if found.get(name) != planned.get(name)):
            raise WorkloadError(
                f"the installed transformers builds other parameters than the plan counted (first: {odd[0]}); make the plan again"
            )

    def _adapters(self, block: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a block's adapters, which no file of the model's has, by name."""
        lora = self.semantics.train.lora
        return {p.name: p.shape for p in self.workload.blocks[block].trained} if lora is not None else {}

    # -- embedding and layers ---------------------------------------------------------------------------------------

    def embed(self, weights: Weights, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
        """The first layer's input (B, T, D), with its autograd graph if grad mode is on, and what each layer is passed besides."""
        prefix = f"{self.split.body_name}."
        short = {name.removeprefix(prefix): w for name, w in weights.items()}
        self.split.around(short, input_ids=tokens_BT, use_cache=False)
        return self.split.noted()

    def looked_up(self, weights: Weights, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding's table (B, T, D), as its module has them."""
        own = _within(f"{self.split.embedding_name}.", weights)
        found = functional_call(self.model.get_input_embeddings(), own, (tokens_BT,))
        return found if self.split.carried is None else self.split.carried.begun(found)

    def embed_packed(self, weights: Weights, packed: Batch, plain: Sequence[Call]) -> tuple[torch.Tensor, list[Call]]:
        """The same for sequences that are packed of documents, where layers are passed `plain` if they are not; WorkloadError where
        the model cannot keep documents apart."""
        if (why := supports_documents(self.config, self.semantics)) is not None:
            raise WorkloadError(f"{why}; choose another packing")
        assert packed.positions_BT is not None
        assert packed.document_tokens is not None
        prefix = f"{self.split.body_name}."
        short = {name.removeprefix(prefix): w for name, w in weights.items()}
        return embed_packed(self.split, short, packed.input_ids, packed.positions_BT, plain, packed.document_tokens)

    def layer(self, block: int, weights: Weights, hidden_BTD: torch.Tensor, inputs: Call, again: bool = False) -> torch.Tensor:
        """The output (B, T, D) of decoder layer number `block` (1 is the first).

        With `again`, for a backward, only its graph counts: what the MLP makes may be left out.
        """
        own, layer = _within(self._prefix(block), weights), self.layers[block - 1]
        attention = self.workload.blocks[block].attention
        with attending(inputs, self.semantics.attention, None if attention is None else attention.window):
            if self._tiled:
                self._tiled[block - 1].again = again
            return inputs.run(lambda *args, **kwargs: functional_call(layer, own, args, kwargs), hidden_BTD)

    # -- the head ---------------------------------------------------------------------------------------------------

    def loss(
        self,
        weights: Weights,
        hidden_BTD: torch.Tensor,
        targets_BT: torch.Tensor,
        n_losses: int,
        head_gradient_VD: torch.Tensor | None,
        extras: Extras = MappingProxyType({}),
    ) -> tuple[torch.Tensor, torch.Tensor, Weights]:
        """Forward and backward of the head, tile by tile: at most one tile of logits exists.

        Adds the output matrix's gradient to `head_gradient_VD` (fp32) in tile order; without that, makes none. Returns the loss,
        summed, not averaged (fp64, on the device), and gradients of the hidden state and of the head's other trained parameters,
        of the mean of `n_losses`. `extras`: what the batch brings for each sequence or token, by name.
        """
        prefix = self._norm_prefix
        own = _within(prefix, weights)
        norm_weights = {n: w.detach().requires_grad_(prefix + n in self._trained) for n, w in own.items()}
        hidden_BTD = hidden_BTD.detach().requires_grad_()
        with torch.enable_grad():
            normed_BTD = functional_call(self.norm, norm_weights, (self.split.last(hidden_BTD),), strict=True)
        normed_ND, targets_N = normed_BTD.detach().reshape(-1, normed_BTD.shape[-1]), targets_BT.reshape(-1)
        gradient_ND, n_rows = torch.empty_like(normed_ND), self.semantics.loss_tile_tokens
        head, sums = self._head(weights), {} if head_gradient_VD is None else {self.head_weight: head_gradient_VD}
        if self.objective.n_labels is not None:
            loss_sum, gradient_ND = self._by_scores(head, normed_ND, targets_BT, n_losses, sums, extras)
            return loss_sum, *self._through_norm(normed_BTD, hidden_BTD, norm_weights, gradient_ND)
        loss_sum, of_rows = self._of_sequences(weights, normed_ND, targets_BT, n_losses, extras)
        others = [name for name in self._of_head if name != self.head_weight and name in self._trained]
        sums |= {name: torch.zeros_like(head[name], dtype=torch.float32) for name in others}
        tiles = zip(*(t.split(n_rows) for t in (normed_ND, gradient_ND, targets_N, *of_rows.values())), strict=True)
        for rows_ND, out_ND, targets, *more in tiles:
            of_tile = dict(zip(of_rows, more, strict=True))
            loss, out_ND[:], of_head = self._tile(head, rows_ND, targets, n_losses, sums.keys(), of_tile)
            for name in sums:
                sums[name] += of_head[name]
            del of_head  # or two tiles' would be alive at a time
            if not self.objective.has_first_pass:
                loss_sum += loss
        sums.pop(self.head_weight, None)
        towards_BTD, of_norm = self._through_norm(normed_BTD, hidden_BTD, norm_weights, gradient_ND)
        return loss_sum, towards_BTD, sums | of_norm

    def _through_norm(
        self, normed_BTD: torch.Tensor, hidden_BTD: torch.Tensor, norm_weights: Weights, gradient_ND: torch.Tensor
    ) -> tuple[torch.Tensor, Weights]:
        """Gradients of the hidden state, and of the norm's weights that are trained."""
        names = [name for name, weight in norm_weights.items() if weight.requires_grad]
        inputs = [hidden_BTD, *(norm_weights[name] for name in names)]
        towards_BTD, *found = torch.autograd.grad(normed_BTD, inputs, gradient_ND.view_as(normed_BTD))
        return towards_BTD, {self._norm_prefix + name: g for name, g in zip(names, found, strict=True)}

    # -- a head of one's own ----------------------------------------------------------------------------------------

    def _by_scores(
        self, head: Weights, normed_ND: torch.Tensor, targets_BT: torch.Tensor, n_losses: int, sums: Weights, extras: Extras
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, summed, of sequences' scores, and the gradient of the normed rows; that of the head is added to `sums`."""
        assert self.loss_function is not None
        head, rows_ND = {n: w.detach().requires_grad_() for n, w in head.items()}, normed_ND.detach().requires_grad_()
        with torch.enable_grad():
            scores = self._scores(head, rows_ND, extras)
            total = self.loss_function.values(scores, (targets_BT != UNSUPERVISED).sum(dim=1), extras).sum()
            gradient_ND, *found = torch.autograd.grad(total / n_losses, [rows_ND, *(head[name] for name in sums)])
        for name, gradient in zip(sums, found, strict=True):
            sums[name] += gradient
        return total.detach(), gradient_ND

    def _scores(self, head: Weights, normed_ND: torch.Tensor, extras: Extras) -> torch.Tensor:
        """Of each sequence, (B,) fp64, or of several labels (B, C): of its last token, or the mean over its tokens."""
        last_B = extras[LAST].long()
        normed_BTD = normed_ND.view(len(last_B), -1, normed_ND.shape[1])
        if self.objective.numbers["mean"]:
            is_there_BT = torch.arange(normed_BTD.shape[1], device=last_B.device) <= last_B[:, None]
            pooled_BD = ((normed_BTD * is_there_BT[..., None]).float().sum(dim=1) / (last_B[:, None] + 1)).to(normed_BTD.dtype)
        else:
            pooled_BD = normed_BTD[torch.arange(len(last_B), device=last_B.device), last_B]
        scores_BC = nn.functional.linear(pooled_BD, head[self.head_weight]).double()
        return scores_BC.squeeze(1) if self.objective.n_labels == 1 else scores_BC

    # -- tiles ------------------------------------------------------------------------------------------------------

    def _head(self, weights: Weights) -> Weights:
        """The output matrix, and a bias if it has one."""
        return {name: weights[name] for name in self._of_head}

    def _of_sequences(
        self, weights: Weights, normed_ND: torch.Tensor, targets_BT: torch.Tensor, n_losses: int, extras: Extras
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What is known before the tiles that have a backward: the loss that is a function of whole sequences, and by name what
        each row of a tile gets besides its target."""
        n_tokens = targets_BT.shape[1]
        if not self.objective.has_first_pass:
            own = {name: extras[name] if extras[name].dim() > 1 else extras[name][:, None] for name in self.objective.extras}
            if self.objective.per is Of.SEQUENCES:
                own["n_tokens"] = (targets_BT != UNSUPERVISED).sum(dim=1, keepdim=True).clamp(min=1)
            none = torch.zeros((), dtype=torch.float64, device=normed_ND.device)
            return none, {name: of.expand(-1, n_tokens, *of.shape[2:]).flatten(0, 1) for name, of in own.items()}
        assert self.loss_function is not None
        sums_B = self._summed(weights, normed_ND, targets_BT)
        total, slopes_B = self.loss_function.of_sequences(*sums_B, extras)
        return total, {"slope": (slopes_B / n_losses).float()[:, None].expand(-1, n_tokens).reshape(-1)}

    def _tile(
        self,
        head: Weights,
        normed_ND: torch.Tensor,
        targets_N: torch.Tensor,
        n_losses: int,
        trained: Collection[str],
        of_rows: Mapping[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, Weights]:
        """Summed loss of a tile; gradients of what it adds to the step's mean: of its rows, and of what is trained. Where sequences
        were summed before, each row's log-probability has a slope, and what is summed here means nothing."""
        slope_N = of_rows.get("slope") if self.objective.has_first_pass else None
        if self.semantics.loss == "fused":
            with torch.no_grad():
                supervised_N = targets_N != UNSUPERVISED
                each_N = supervised_N / n_losses if slope_N is None else -slope_N * supervised_N
                loss, dx_ND, dw_VD = _tile_at_once(head[self.head_weight], normed_ND, targets_N, each_N, bool(trained))
            return loss, dx_ND, {} if dw_VD is None else {self.head_weight: dw_VD}
        head, normed_ND = {n: w.detach().requires_grad_(n in trained) for n, w in head.items()}, normed_ND.detach().requires_grad_()
        with torch.enable_grad():
            if slope_N is not None:
                loss = mean = self._row_losses(head, normed_ND, targets_N).mul(-slope_N).sum()
            elif self.loss_function is not None:
                loss = self.loss_function.of_tile(self._logits(head, normed_ND), targets_N, of_rows)
                mean = loss / n_losses
            else:
                loss = self._summed_loss(head, normed_ND, targets_N)
                mean = loss / n_losses
            dx_ND, *found = torch.autograd.grad(mean, [normed_ND, *(head[name] for name in trained)])
        return loss.detach(), dx_ND, dict(zip(trained, found, strict=True))

    def _summed_loss(self, head: Weights, normed_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        if self.semantics.loss == "fused":
            return self._row_losses(head, normed_ND, targets_N).sum()
        logits_NV = self._logits(head, normed_ND)
        return nn.functional.cross_entropy(logits_NV, targets_N, ignore_index=UNSUPERVISED, reduction="sum")

    def _row_losses(self, head: Weights, normed_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """The cross entropy of each row, 0 where it is not supervised; fp32."""
        if self.semantics.loss == "fused":
            return row_losses(nn.functional.linear(normed_ND, head[self.head_weight]), targets_N)[0]
        logits_NV = self._logits(head, normed_ND)
        return nn.functional.cross_entropy(logits_NV, targets_N, ignore_index=UNSUPERVISED, reduction="none")

    def _summed(self, weights: Weights, normed_ND: torch.Tensor, targets_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each sequence the log-probability of its targets (B,) fp64, summed over tokens, and how many these are."""
        each_BT = self._each(weights, normed_ND, targets_BT)
        return each_BT.sum(dim=1, dtype=torch.float64), (targets_BT != UNSUPERVISED).sum(dim=1)

    def _each(self, weights: Weights, normed_ND: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """The log-probability of each target (B, T) fp32, 0 where it is not supervised."""
        losses_N, n = torch.empty(len(normed_ND), device=normed_ND.device), self.semantics.loss_tile_tokens
        with torch.no_grad():
            for rows_ND, targets_N, out_N in zip(
                normed_ND.split(n), targets_BT.reshape(-1).split(n), losses_N.split(n), strict=True
            ):
                out_N.copy_(self._row_losses(self._head(weights), rows_ND, targets_N))
        return -losses_N.view_as(targets_BT)

    def _logits(self, head: Weights, normed_ND: torch.Tensor) -> torch.Tensor:
        return self.split.logits(head, normed_ND.unsqueeze(0)).squeeze(0).float()

    def scores(self, weights: Weights, hidden_BTD: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """The summed cross entropy (fp64, on the device), whatever the loss of tokens; to the bit as `loss` has it where it is
        that, also a tile of logits at a time; without gradients."""
        normed_ND = self._normed(weights, hidden_BTD).flatten(0, 1)
        loss_sum = torch.zeros((), dtype=torch.float64, device=hidden_BTD.device)
        n = self.semantics.loss_tile_tokens
        for rows_ND, targets_N in zip(normed_ND.split(n), targets_BT.reshape(-1).split(n), strict=True):
            loss_sum += self._summed_loss(self._head(weights), rows_ND, targets_N)
        return loss_sum

    def log_probabilities(
        self, weights: Weights, hidden_BTD: torch.Tensor, targets_BT: torch.Tensor, extras: Extras
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B,) fp64 of each sequence's targets, summed, to the bit as a loss of sequences has them, and how many these are; for a
        loss of tokens that has a reference (B, T) fp32, of each target; for one that has a teacher (B, T, 3 K + 1) int16, a
        teacher's row for each position; for one with a head of its own the scores."""
        normed_ND = self._normed(weights, hidden_BTD).flatten(0, 1)
        if self.objective.n_labels is not None:
            return self._scores(self._head(weights), normed_ND, extras), (targets_BT != UNSUPERVISED).sum(dim=1)
        if (k := self.objective.n_top) is not None:
            of_tiles = (self._logits(self._head(weights), rows_ND) for rows_ND in normed_ND.split(self.semantics.loss_tile_tokens))
            rows = [top_and_rest(logits_NV, k, self.objective.numbers["temperature"]) for logits_NV in of_tiles]
            return torch.cat(rows).view(*targets_BT.shape, -1), (targets_BT != UNSUPERVISED).sum(dim=1)
        if not self.objective.has_token_reference:
            return self._summed(weights, normed_ND, targets_BT)
        return self._each(weights, normed_ND, targets_BT), (targets_BT != UNSUPERVISED).sum(dim=1)

    def logits(self, weights: Weights, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Of some rows, (N, V) fp32; without gradients."""
        return self._logits(self._head(weights), self._normed(weights, hidden_ND))

    def _normed(self, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        return functional_call(self.norm, _within(self._norm_prefix, weights), (self.split.last(hidden),), strict=True)  # type: ignore[no-any-return]

    def constants(self) -> Weights:
        """What files hold of layers though it is no weight, by its names in the model."""
        layers = [layer.state_dict(prefix=self._prefix(i), keep_vars=True) for i, layer in enumerate(self.layers, start=1)]
        return {name: held for layer in layers for name, held in sorted(layer.items()) if not isinstance(held, nn.Parameter)}

    def set_constant(self, name: str, value: torch.Tensor) -> None:
        """Put one there, in the precision that it has."""
        parent, _, child = name.rpartition(".")
        self.model.get_submodule(parent).register_buffer(child, value.to(self.device))

    # -- modes ------------------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Until the context ends nothing is dropped, and routers do not jitter."""
        parts: list[Any] = [self.model, self.norm, *self.layers, *self._tiled]
        if self.balance is not None:
            self.balance.at = None
        for part in parts:
            part.train(False)
        try:
            yield
        finally:
            for part in parts:
                part.train(True)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Until the context ends the model is what it was before it got them."""
        found = [part for layer in self.layers for part in layer.modules() if isinstance(part, AdaptedLinear | AdaptedExperts)]
        for part in found:
            part.is_aside = True
        try:
            yield
        finally:
            for part in found:
                part.is_aside = False

    # -- random weights ---------------------------------------------------------------------------------------------

    def initial_weights(self, block: int, seed: int) -> Weights:
        """A block's own random weights as transformers makes them, and adapters as PEFT does, fp32; the same for a seed."""
        split = self.split
        if block == 0:
            names = list(dict.fromkeys(name.rpartition(".")[0] for name in split.outside))
        else:
            names = [self._prefix(block)[:-1]] if block <= len(self.layers) else [split.norm_name, split.head_name]
        torch.default_generator.manual_seed(op_seed(seed, 0, 0, block))
        weights: Weights = {}
        for prefix in names:
            module = self.norm if prefix == split.norm_name else self.model.get_submodule(prefix)
            real = copy.deepcopy(module).float().to_empty(device="cpu")
            for part in real.modules():
                self.model._init_weights(part)
            weights |= {f"{prefix}.{name}": p.detach() for name, p in real.named_parameters()}
        weights |= self.initial_adapters(block, seed)
        return {p.name: weights[p.name] for p in self.workload.blocks[block].parameters if p.tied_to is None}

    def initial_adapters(self, block: int, seed: int) -> Weights:
        """Those of a block, as `initial_weights` has them."""
        return initial_factors(self._adapters(block), op_seed(seed, 0, 1, block))


def _within(prefix: str, weights: Weights) -> Weights:
    """Those of a part of the model, by the names that it gives them."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def _tile_at_once(
    head_VD: torch.Tensor, normed_ND: torch.Tensor, targets_N: torch.Tensor, each_N: torch.Tensor, trains: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A tile's cross entropy and gradients with few passes over its logits."""
    losses_N, gradient_NV = row_losses_and_gradients(nn.functional.linear(normed_ND, head_VD), targets_N, each_N)
    return losses_N.sum(), gradient_NV @ head_VD, gradient_NV.t() @ normed_ND if trains else None


def op_seed(run_seed: int, step: int, micro_batch: int, block: int) -> int:
    """Seed of an op's generator: the same for its recompute, different for every other op."""
    digest = hashlib.blake2b(f"{run_seed} {step} {micro_batch} {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
