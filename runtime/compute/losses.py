"""Loss functions of logits per position, or of log-probabilities per sequence or pair.

Arguments are selected by parameter names, so that a user's loss is a plain function:

    tokens      logits (N, V) fp32, targets (N,)                    positions of a tile; each extra is (N,)
    sequences   logps, n_tokens (B,) fp64                           sums over the tokens of a sequence; each extra is (B,)
    pairs       chosen, rejected, n_chosen, n_rejected (P,) fp64    two sequences; an extra `e` is passed as e_chosen, e_rejected
    answers     own, other, n_own, n_other (A,) fp64                likewise; `other` has the same prompt, and is not trained

In this file `gain_chosen` etc. are differences of log-probabilities to the reference's. A function returns one loss per item; items
without supervised tokens are excluded. For sequences and pairs, the gradient with respect to `logps` scales the gradients of their
tokens in a second pass over the tiles.
"""

# B sequences, P pairs, T tokens, N = B * T or a tile of it, V vocabulary, K likeliest ids of a teacher
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.runtime.batch import UNSUPERVISED
from penstock.runtime.errors import PlanError, user_code
from penstock.runtime.plan.objective import REFERENCE, LossUnit, Objective

from .response_sums import unpacked_order

Extras = Mapping[str, Tensor]
MOST_AHEAD = 20.0  # upper clamp of log-ratios, with gradient 0 above
LEAST = 1e-30  # lower clamp of probabilities before their logarithm
HALVES = {LossUnit.PAIRS: ("chosen", "rejected"), LossUnit.ANSWERS: ("own", "other")}  # names of two consecutive sequences


def label_smoothing(logits: Tensor, targets: Tensor, epsilon: float) -> Tensor:
    """Cross entropy with `epsilon` of the target distributed over the vocabulary (Szegedy et al., arXiv 1512.00567)."""
    return F.cross_entropy(logits, targets, ignore_index=UNSUPERVISED, reduction="none", label_smoothing=epsilon)


def z_loss(logits: Tensor, targets: Tensor, weight: float) -> Tensor:
    """Cross entropy plus `weight` times the squared log-sum-exp (PaLM, arXiv 2204.02311)."""
    losses = F.cross_entropy(logits, targets, ignore_index=UNSUPERVISED, reduction="none")
    return losses + weight * logits.logsumexp(dim=-1).square()


def grpo(
    logits: Tensor,
    targets: Tensor,
    advantage: Tensor,
    old: Tensor,
    epsilon_low: float,
    epsilon_high: float,
    beta: float,
    reference: Tensor | None = None,
) -> Tensor:
    """Clipped objective of PPO with separate bounds (GRPO, arXiv 2402.03300; DAPO, arXiv 2503.14476), plus `beta` times the k3
    estimate of the KL divergence from a reference. `old`, `reference`: log-probabilities of the targets. Ratios are clamped to
    exp(MOST_AHEAD), because an infinite ratio times 0 would be NaN in the gradient."""
    logps = -F.cross_entropy(logits, targets, ignore_index=UNSUPERVISED, reduction="none")
    ratio = (logps - old).clamp(max=MOST_AHEAD).exp()
    losses = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantage)
    if reference is None:
        return losses
    ahead = (reference - logps).clamp(max=MOST_AHEAD)
    return losses + beta * (ahead.exp() - ahead - 1)


def _smoothed(margin: Tensor, label_smoothing: float) -> Tensor:
    """Binary cross entropy of a preference that is wrong with probability `label_smoothing`."""
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def dpo(gain_chosen: Tensor, gain_rejected: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Direct preference optimization (arXiv 2305.18290); cDPO with label smoothing."""
    return _smoothed(beta * (gain_chosen - gain_rejected), label_smoothing)


def robust(gain_chosen: Tensor, gain_rejected: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """DPO, unbiased if labels are flipped with probability `label_smoothing` (rDPO, arXiv 2403.00409)."""
    margin = beta * (gain_chosen - gain_rejected)
    flipped = label_smoothing * F.logsigmoid(-margin)
    return (flipped - (1 - label_smoothing) * F.logsigmoid(margin)) / (1 - 2 * label_smoothing)


def hinge(gain_chosen: Tensor, gain_rejected: Tensor, beta: float) -> Tensor:
    """Hinge loss with margin 1 (SLiC as in RSO, arXiv 2309.06657)."""
    return F.relu(1 - beta * (gain_chosen - gain_rejected))


def ipo(gain_chosen: Tensor, gain_rejected: Tensor, n_chosen: Tensor, n_rejected: Tensor, beta: float) -> Tensor:
    """Identity preference optimization (arXiv 2310.12036) of means over tokens, as corrected by its authors."""
    return (gain_chosen / n_chosen - gain_rejected / n_rejected - 1 / (2 * beta)).square()


def orpo(chosen: Tensor, rejected: Tensor, n_chosen: Tensor, n_rejected: Tensor, beta: float) -> Tensor:
    """Odds ratio preference optimization (arXiv 2403.07691): mean cross entropy of the chosen response, plus an odds-ratio term."""
    better, worse = chosen / n_chosen, rejected / n_rejected
    odds = (better - worse) - (torch.log1p(-better.exp()) - torch.log1p(-worse.exp()))
    return -better - beta * F.logsigmoid(odds)


def simpo(
    chosen: Tensor, rejected: Tensor, n_chosen: Tensor, n_rejected: Tensor, beta: float, gamma: float, label_smoothing: float
) -> Tensor:
    """Simple preference optimization (arXiv 2405.14734): means over tokens, no reference, margin `gamma`."""
    return _smoothed(beta * (chosen / n_chosen - rejected / n_rejected) - gamma, label_smoothing)


def kto(
    gain_own: Tensor,
    gain_other: Tensor,
    label_own: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
    group: float,
) -> Tensor:
    """Kahneman-Tversky optimization (arXiv 2402.01306). Baseline: mean log-ratio of the `other` responses in a group."""
    kl = gain_other.detach().view(-1, int(group)).mean(dim=1).clamp(min=0).repeat_interleave(int(group))
    gain = beta * (gain_own - kl)
    return torch.where(label_own > 0, desirable_weight * (-gain).sigmoid(), undesirable_weight * gain.sigmoid())


def reward(chosen: Tensor, rejected: Tensor, center: float) -> Tensor:
    """Bradley-Terry loss of scores, plus `center` times the square of their sum, which centres them at 0 (arXiv 2312.09244)."""
    return center * (chosen + rejected).square() - F.logsigmoid(chosen - rejected)


def classify(scores: Tensor, label: Tensor) -> Tensor:
    """Cross entropy of labels with scores (B, C)."""
    return F.cross_entropy(scores, label.long(), reduction="none")


class _TopAndRest(torch.autograd.Function):
    """Log-probabilities (N, K + 1) of K ids in each row, and of the remaining ids together, summed for precision of small rests."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_NK: Tensor, temperature: float) -> Tensor:
        remaining_NV = (logits_NV if temperature == 1 else logits_NV / temperature).log_softmax(dim=-1)
        top_NK = remaining_NV.gather(1, ids_NK)
        remaining_NV.exp_().scatter_(1, ids_NK, 0.0)
        rest_N1 = remaining_NV.sum(dim=1, keepdim=True).clamp(min=LEAST)
        ctx.save_for_backward(remaining_NV, ids_NK, top_NK, rest_N1)
        ctx.temperature = temperature
        return torch.cat([top_NK, rest_N1.log()], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        remaining_NV, ids_NK, top_NK, rest_N1 = ctx.saved_tensors
        d_top_NK, d_rest_N1 = (gradients[0] / ctx.temperature).tensor_split([top_NK.shape[1]], dim=1)
        all_N1 = d_top_NK.sum(dim=1, keepdim=True) + d_rest_N1
        d_logits_NV = remaining_NV * (d_rest_N1 / rest_N1 - all_N1)
        return d_logits_NV.scatter_(1, ids_NK, d_top_NK - top_NK.exp() * all_N1), None, None


def top_and_rest(logits_NV: Tensor, k: int, temperature: float) -> Tensor:
    """Rows of a teacher as in files, (N, 3 k + 1) int16: the `k` likeliest ids (int32, two words each), then fp16 log-probabilities
    of these and of the remaining ids together."""
    ids_NK = logits_NV.topk(k, dim=-1).indices
    logps_NK = _TopAndRest.apply(logits_NV, ids_NK, temperature)  # type: ignore[no-untyped-call]
    return torch.cat([ids_NK.int().view(torch.int16), logps_NK.half().view(torch.int16)], dim=1)


def _kl(p_NK: Tensor, q_NK: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities."""
    return (p_NK.exp() * (p_NK - q_NK)).sum(dim=1)


def distill(logits: Tensor, targets: Tensor, teacher: Tensor, k: float, beta: float, temperature: float) -> Tensor:
    """Generalised Jensen-Shannon divergence (GKD, arXiv 2306.13649). `beta` 0: KL(teacher || student), 1: KL(student || teacher).
    It covers the teacher's likeliest ids, and the remaining ids as a single one."""
    n = int(k)
    ids_NK, teacher_NK = teacher[:, : 2 * n].contiguous().view(torch.int32).long(), teacher[:, 2 * n :].contiguous()
    teacher_NK = teacher_NK.view(torch.float16).float().clamp(min=math.log(LEAST)).log_softmax(dim=1)  # renormalise
    student_NK = _TopAndRest.apply(logits, ids_NK, temperature)  # type: ignore[no-untyped-call]
    if beta in (0, 1):
        return _kl(student_NK, teacher_NK) if beta else _kl(teacher_NK, student_NK)
    mixed_NK = torch.logaddexp(student_NK + math.log1p(-beta), teacher_NK + math.log(beta))
    return beta * _kl(teacher_NK, mixed_NK) + (1 - beta) * _kl(student_NK, mixed_NK)


_NAMED = (dpo, ipo, hinge, robust, orpo, simpo, kto, distill, reward, classify)
FUNCTIONS: dict[str, Callable[..., Tensor]] = {function.__name__: function for function in _NAMED}
FUNCTIONS |= {"label-smoothing": label_smoothing, "z-loss": z_loss, **dict.fromkeys(("grpo", "dapo", "dr-grpo"), grpo)}


@dataclass(frozen=True)
class LossFunction:
    objective: Objective
    function: Callable[..., Tensor]

    @cached_property
    def _parameters(self) -> tuple[str, ...]:
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.default is p.empty or p.name in self.objective.extras)

    def per_item(self, first: Tensor, second: Tensor, extras: Extras) -> Tensor:
        """Loss per item. `first`, `second`: logits and targets, or log-probabilities and token counts."""
        arguments: dict[str, Tensor]
        match self.objective.of:
            case LossUnit.TOKENS:
                arguments = {"logits": first, "targets": second, **extras}
            case LossUnit.SEQUENCES:
                arguments = {"logps": first, "scores": first, "n_tokens": second, **extras}
            case LossUnit.PAIRS | LossUnit.ANSWERS as items:
                has_gain, halves = REFERENCE.name in extras and self.objective.sha256 is None, enumerate(HALVES[items])
                gain = {"gain": first - extras[REFERENCE.name]} if has_gain else {}
                by_name = (gain | {"": first, "n": second, **extras}).items()
                arguments = {f"{name}_{half}".removeprefix("_"): x[i::2] for i, half in halves for name, x in by_name}
        known = {**arguments, **self.objective.numbers}
        with nullcontext() if self.objective.sha256 is None else user_code(f"the loss {self.objective.name}"):
            return self.function(**{name: known[name] for name in self._parameters})

    def of_tile(self, logits_NV: Tensor, targets_N: Tensor, extras: Extras) -> Tensor:
        """Sum over the supervised positions of a tile."""
        is_excluded = targets_N == UNSUPERVISED  # computed before a user's function may change the targets
        losses_N = self.per_item(logits_NV, targets_N, extras)
        if self.objective.per is LossUnit.SEQUENCES:  # the sum over tokens is a mean
            losses_N = losses_N / self.objective.numbers.get("max_completion_length", extras["n_tokens"])
        return losses_N.masked_fill(is_excluded, 0.0).sum()

    def values(self, logps_B: Tensor, n_tokens_B: Tensor, extras: Extras) -> Tensor:
        """Loss per item, 0 without supervised tokens, of log-probabilities (B,) or scores (B, C); packed (B, K) or (B, K, C)."""
        rows_each = self.objective.rows_each
        extras = {n: unpacked_order(x, rows_each, n_tokens_B) for n, x in extras.items() if n in self.objective.extras}
        logps_B, n_tokens_B = (unpacked_order(x, rows_each, n_tokens_B) for x in (logps_B, n_tokens_B))
        is_counted = n_tokens_B > 0
        if self.objective.of in HALVES:
            is_counted = is_counted[0::2] & is_counted[1::2]
        is_present_B = is_counted.repeat_interleave(len(logps_B) // len(is_counted)).view(-1, *[1] * (logps_B.dim() - 1))
        # Absent items: a value with a finite slope (0 may have an infinite one, and NaN gradients), or with log-ratio 0
        absent = extras[REFERENCE.name] if self.objective.of is LossUnit.ANSWERS else -1.0
        logps_B = torch.where(is_present_B, logps_B, absent)
        return torch.where(is_counted, self.per_item(logps_B, n_tokens_B.clamp(min=1).to(logps_B.dtype), extras), 0.0)

    def of_sequences(self, logps_B: Tensor, n_tokens_B: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """Summed loss, and its gradient with respect to the log-probability of each sequence; both fp64."""
        logps_B = logps_B.detach().requires_grad_()
        with torch.enable_grad():
            total = self.values(logps_B, n_tokens_B, extras).sum()
            (slopes_B,) = torch.autograd.grad(total, [logps_B])
        return total.detach(), slopes_B


def known_loss(objective: Objective) -> LossFunction | None:
    """Loss function of a named objective; None for the built-in cross entropy. PlanError for a user's function."""
    if objective.sha256 is not None:
        raise PlanError(f"the plan's loss is a user's function; pass it with --loss {objective.name[:80]}")
    return None if objective.is_default else LossFunction(objective, FUNCTIONS[objective.name])
