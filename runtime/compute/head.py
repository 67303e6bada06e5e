"""Output head: final norm, output matrix and loss, by tiles of logits (chunked loss)."""

# B sequences, T tokens, N = B * T or a tile of it, D width, V vocabulary, C labels
from collections.abc import Callable, Collection, Iterator
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.runtime.batch import UNSUPERVISED
from penstock.runtime.layers.kernels import use_fused_norm
from penstock.runtime.layers.layer_chain import LayerChain
from penstock.runtime.layers.views import Weights
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.objective import ANSWER, LAST, TOKEN_REFERENCE, LossUnit

from .cross_entropy import add_product, row_losses
from .losses import Extras, LossFunction, known_loss, top_and_rest
from .response_sums import Responses

Loss = Callable[[Weights, Tensor], tuple[Tensor, Tensor]]  # (head weights, rows) to (summed loss, differentiated loss)
Gradients = tuple[Tensor, Tensor, Weights]  # summed loss; gradients of rows and of trained weights
_NONE: Extras = MappingProxyType({})


class OutputHead:
    """Stateless modules after a model's layers. Weights are passed by their names in the model."""

    def __init__(self, chain: LayerChain, semantics: Semantics, trained: Collection[str], loss: LossFunction | None = None) -> None:
        """`trained`: names of trained parameters; `loss`: a user's, required if the objective is one."""
        self.objective, self.function = semantics.objective, loss or known_loss(semantics.objective)
        self._chain, self._trained = chain, trained
        self._is_online, self._n_rows = semantics.loss == "online", semantics.loss_tile_tokens
        self.weight, self._prefix = f"{chain.parts.head_name}.weight", f"{chain.norm_name}."
        parts = [name for name in ("weight", "bias") if getattr(chain.parts.head, name, None) is not None]
        self._names = [f"{chain.parts.head_name}.{name}" for name in parts]
        if semantics.norm == "fused":
            use_fused_norm(chain.norm)

    def loss(
        self, weights: Weights, hidden_BTD: Tensor, targets_BT: Tensor, n_losses: int, sum_VD: Tensor | None, extras: Extras = _NONE
    ) -> Gradients:
        """Forward and backward of the head; at most one tile of logits exists. Accumulate the output matrix's gradient, if wanted,
        onto `sum_VD` (fp32) in tile order. Return the summed loss (fp64, on the device), and gradients of the mean over
        `n_losses` with respect to the hidden state and other trained parameters of the head."""
        norm_weights = {
            n: w.detach().requires_grad_(self._prefix + n in self._trained) for n, w in self._norm_weights(weights).items()
        }
        hidden_BTD = hidden_BTD.detach().requires_grad_()
        with torch.enable_grad():
            normed_BTD = functional_call(self._chain.norm, norm_weights, (self._chain.norm_input(hidden_BTD),), strict=True)
        normed_ND, head = normed_BTD.detach().reshape(-1, normed_BTD.shape[-1]), self._head(weights)
        sums = {} if sum_VD is None else {self.weight: sum_VD}
        compute_loss = self._by_scores if self.objective.n_labels is not None else self._by_tiles
        loss_sum, gradient_ND = compute_loss(head, normed_ND, targets_BT, n_losses, sums, extras)
        sums.pop(self.weight, None)
        trained = {self._prefix + name: weight for name, weight in norm_weights.items() if weight.requires_grad}
        inputs = [hidden_BTD, *trained.values()]
        d_hidden_BTD, *norm_gradients = torch.autograd.grad(normed_BTD, inputs, gradient_ND.view_as(normed_BTD))
        return loss_sum, d_hidden_BTD, sums | dict(zip(trained, norm_gradients, strict=True))

    def _by_scores(
        self, head: Weights, normed_ND: Tensor, targets_BT: Tensor, n_losses: int, sums: Weights, extras: Extras
    ) -> tuple[Tensor, Tensor]:
        """Summed loss of scores, and gradient of the normed rows. Accumulate the head's gradient onto `sums`."""
        answers = self._answers(targets_BT, extras)

        def of_scores(head: Weights, rows_ND: Tensor) -> tuple[Tensor, Tensor]:
            assert self.function is not None
            total = self.function.values(self._scores(head, rows_ND, answers, extras), answers.n_tokens, extras).sum()
            return total, total / n_losses

        loss, gradient_ND, gradients = _differentiated(of_scores, head, normed_ND, sums)
        for name, gradient in gradients.items():
            sums[name] += gradient
        return loss, gradient_ND

    def _by_tiles(
        self, head: Weights, normed_ND: Tensor, targets_BT: Tensor, n_losses: int, sums: Weights, extras: Extras
    ) -> tuple[Tensor, Tensor]:
        """Summed loss of tokens or sequences, and gradient of the normed rows. Gradients of weight and bias are added to `sums`."""
        loss_sum, row_inputs = self._first_pass(head, normed_ND, targets_BT, n_losses, extras)
        biases = [name for name in self._names if name != self.weight and name in self._trained]
        sums |= {name: torch.zeros_like(head[name], dtype=torch.float32) for name in biases}
        gradient_ND = torch.empty_like(normed_ND)
        for rows_ND, out_ND, targets_N, *tiles in self._tiles(normed_ND, gradient_ND, targets_BT.reshape(-1), *row_inputs.values()):
            tile_inputs = dict(zip(row_inputs, tiles, strict=True))
            if self._is_online:
                loss = self._online_tile(head[self.weight], rows_ND, targets_N, n_losses, sums, tile_inputs, out_ND)
            else:
                loss, out_ND[:], head_gradients = self._tile(head, rows_ND, targets_N, n_losses, sums.keys(), tile_inputs)
                for name in sums:
                    sums[name] += head_gradients[name]
                del head_gradients  # before the next tile's gradients
            if not self.objective.has_first_pass:
                loss_sum += loss
        return loss_sum, gradient_ND

    def _first_pass(
        self, head: Weights, normed_ND: Tensor, targets_BT: Tensor, n_losses: int, extras: Extras
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """First pass: summed loss of whole sequences, and inputs of each row by name (extras, or the slope of its sequence)."""
        n_tokens, answers = targets_BT.shape[1], self._answers(targets_BT, extras)
        if not self.objective.has_first_pass:
            inputs = {name: extras[name] if extras[name].dim() > 1 else extras[name][:, None] for name in self.objective.extras}
            if self.objective.per is LossUnit.SEQUENCES:
                inputs["n_tokens"] = answers.spread(answers.n_tokens.clamp(min=1))
            zero = torch.zeros((), dtype=torch.float64, device=normed_ND.device)
            return zero, {name: x.expand(-1, n_tokens, *x.shape[2:]).flatten(0, 1) for name, x in inputs.items()}
        assert self.function is not None
        logps = answers.sum(self._target_logps(head, normed_ND, targets_BT))
        total, slopes = self.function.of_sequences(logps, answers.n_tokens, extras)
        return total, {"slope": answers.spread((slopes / n_losses).float()).reshape(-1)}

    @torch.no_grad()
    def _online_tile(
        self, weight_VD: Tensor, rows_ND: Tensor, targets_N: Tensor, n_losses: int, sums: Weights, inputs: Weights, out_ND: Tensor
    ) -> Tensor:
        """Return the summed loss of a tile. Write the gradient of its rows to `out_ND`; accumulate the weight's onto `sums`."""
        supervised_N, slope_N = targets_N != UNSUPERVISED, inputs.get("slope")
        each_N = supervised_N / n_losses if slope_N is None else -slope_N * supervised_N
        logits_NV = nn.functional.linear(rows_ND, weight_VD)
        losses_N, gradient_NV = row_losses(logits_NV, targets_N, each_N), logits_NV  # overwritten
        if self.weight in sums:
            add_product(sums[self.weight], gradient_NV, rows_ND)
        torch.mm(gradient_NV, weight_VD, out=out_ND)
        return losses_N.sum()

    def _tile(
        self, head: Weights, normed_ND: Tensor, targets_N: Tensor, n_losses: int, trained: Collection[str], inputs: Weights
    ) -> Gradients:
        """Summed loss of a tile; gradients of its share of the step's mean, for its rows and trained weights. After a first pass
        over sequences, each row's log-probability has its slope as gradient, and the summed loss is unused."""
        slope_N = inputs.get("slope") if self.objective.has_first_pass else None

        def of_tile(head: Weights, rows_ND: Tensor) -> tuple[Tensor, Tensor]:
            if slope_N is not None:
                loss = self._cross_entropy(head, rows_ND, targets_N).mul(-slope_N).sum()
                return loss, loss
            if self.function is None:
                loss = self._cross_entropy(head, rows_ND, targets_N, "sum")
            else:
                loss = self.function.of_tile(self._logits(head, rows_ND), targets_N, inputs)
            return loss, loss / n_losses

        return _differentiated(of_tile, head, normed_ND, trained)

    def summed_losses(self, weights: Weights, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Summed cross entropy by tiles (fp64, on the device), bitwise identical to `loss` if that is cross entropy."""
        head, normed_ND = self._head(weights), self._normed(weights, hidden_BTD).flatten(0, 1)
        loss_sum = torch.zeros((), dtype=torch.float64, device=hidden_BTD.device)
        for rows_ND, targets_N in self._tiles(normed_ND, targets_BT.reshape(-1)):
            loss_sum += self._cross_entropy(head, rows_ND, targets_N, "sum")
        return loss_sum

    def divergence(self, weights: Weights, hidden_BTD: Tensor, targets_BT: Tensor, extras: Extras) -> Tensor:
        """Summed loss of tokens (fp64, on the device)."""
        assert self.function is not None
        head, normed_ND = self._head(weights), self._normed(weights, hidden_BTD).flatten(0, 1)
        total, row_inputs = self._first_pass(head, normed_ND, targets_BT, 1, extras)
        for rows_ND, targets_N, *tiles in self._tiles(normed_ND, targets_BT.reshape(-1), *row_inputs.values()):
            total += self.function.of_tile(self._logits(head, rows_ND), targets_N, dict(zip(row_inputs, tiles, strict=True)))
        return total

    def log_probabilities(self, weights: Weights, hidden_BTD: Tensor, targets_BT: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """Summed log-probabilities of each sequence's targets, (B,) fp64, packed (B, K), bitwise identical to those of a loss of
        sequences; and target counts. Instead of sums: (B, T) fp32 per target, for a loss of tokens with a reference;
        (B, T, 3 K + 1) int16 per position (`top_and_rest`), with a teacher; scores, for a head with labels."""
        head, normed_ND = self._head(weights), self._normed(weights, hidden_BTD).flatten(0, 1)
        answers = self._answers(targets_BT, extras)
        if self.objective.n_labels is not None:
            return self._scores(head, normed_ND, answers, extras), answers.n_tokens
        if (k := self.objective.n_top) is not None:
            temperature = self.objective.numbers["temperature"]
            rows = [top_and_rest(self._logits(head, rows_ND), k, temperature) for (rows_ND,) in self._tiles(normed_ND)]
            return torch.cat(rows).view(*targets_BT.shape, -1), answers.n_tokens
        each_BT = self._target_logps(head, normed_ND, targets_BT)
        return each_BT if TOKEN_REFERENCE in self.objective.inputs else answers.sum(each_BT), answers.n_tokens

    def target_logps(self, weights: Weights, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Log-probability of each target, (B, T) fp32."""
        return self._target_logps(self._head(weights), self._normed(weights, hidden_BTD).flatten(0, 1), targets_BT)

    def logits(self, weights: Weights, hidden_ND: Tensor) -> Tensor:
        """(N, V) fp32."""
        return self._logits(self._head(weights), self._normed(weights, hidden_ND[None])[0])

    def _head(self, weights: Weights) -> Weights:
        return {name: weights[name] for name in self._names}

    def _norm_weights(self, weights: Weights) -> Weights:
        return {name.removeprefix(self._prefix): weights[name] for name in self._chain.epilogue_parameters}

    def _normed(self, weights: Weights, hidden: Tensor) -> Tensor:
        return functional_call(self._chain.norm, self._norm_weights(weights), (self._chain.norm_input(hidden),), strict=True)  # type: ignore[no-any-return]

    def _tiles(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(x.split(self._n_rows) for x in tensors), strict=True)

    def _logits(self, head: Weights, normed_ND: Tensor) -> Tensor:
        return self._chain.parts.logits(head, normed_ND.unsqueeze(0)).squeeze(0).float()

    def _answers(self, targets_BT: Tensor, extras: Extras) -> Responses:
        return Responses(targets_BT, extras.get(ANSWER.name), self.objective.rows_each)

    def _scores(self, head: Weights, normed_ND: Tensor, answers: Responses, extras: Extras) -> Tensor:
        """Fp64 scores (B,) of the last token or of the mean over tokens; for several labels (B, C), packed (B, K, C)."""
        if self.objective.numbers["mean"]:
            last_B = extras[LAST.name].long()
            normed_BTD = normed_ND.view(len(last_B), -1, normed_ND.shape[1])
            is_there_BT = torch.arange(normed_BTD.shape[1], device=last_B.device) <= last_B[:, None]
            pooled_BD = ((normed_BTD * is_there_BT[..., None]).float().sum(dim=1) / (last_B[:, None] + 1)).to(normed_BTD.dtype)
        else:
            pooled_BD = normed_ND[answers.token_indices(extras[LAST.name])]
        scores_BC = nn.functional.linear(pooled_BD, head[self.weight]).double()
        return scores_BC.squeeze(-1) if self.objective.n_labels == 1 else scores_BC

    def _cross_entropy(self, head: Weights, normed_ND: Tensor, targets_N: Tensor, reduction: str = "none") -> Tensor:
        """Cross entropy (fp32) per row, 0 for unsupervised ones; or their `sum`."""
        if self._is_online:
            losses_N = row_losses(nn.functional.linear(normed_ND, head[self.weight]), targets_N)
            return losses_N.sum() if reduction == "sum" else losses_N
        logits_NV = self._logits(head, normed_ND)
        return nn.functional.cross_entropy(logits_NV, targets_N, ignore_index=UNSUPERVISED, reduction=reduction)

    def _target_logps(self, head: Weights, normed_ND: Tensor, targets_BT: Tensor) -> Tensor:
        """Log-probabilities of targets, (B, T) fp32, 0 for unsupervised ones."""
        losses_N = torch.empty(len(normed_ND), device=normed_ND.device)
        with torch.no_grad():
            for rows_ND, targets_N, out_N in self._tiles(normed_ND, targets_BT.reshape(-1), losses_N):
                out_N.copy_(self._cross_entropy(head, rows_ND, targets_N))
        return -losses_N.view_as(targets_BT)


def _differentiated(function: Loss, head: Weights, normed_ND: Tensor, trained: Collection[str]) -> Gradients:
    """Value of a function of head and rows, with gradients of rows and trained weights."""
    head, normed_ND = {n: w.detach().requires_grad_(n in trained) for n, w in head.items()}, normed_ND.detach().requires_grad_()
    with torch.enable_grad():
        loss, share = function(head, normed_ND)
        gradient_ND, *gradients = torch.autograd.grad(share, [normed_ND, *(head[name] for name in trained)])
    return loss.detach(), gradient_ND, dict(zip(trained, gradients, strict=True))


def weights_within(prefix: str, weights: Weights) -> Weights:
    """Weights with this prefix, by names without it."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
