"""The loss of routers: how unevenly a micro-batch's tokens are spread over experts (`load_balancing_loss_func` of transformers).

E sum_e (C_e / N) (P_e / N): C counts how often expert e was chosen, P sums its probabilities, both over N rows, those of all layers
with a router. Its gradient with P is the same for every layer, and known when the last one has routed: forwards note their sums,
the head makes the loss of them, and a layer's backward adds to its router's logits what the loss gives these.
"""

# N rows, E experts
from collections import defaultdict
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.errors import WorkloadError


class Balance:
    """Sums of the micro-batches under way. A forward is to say which it is, by `at`: its micro-batch and its block."""

    def __init__(self, model: Any, layers: list[nn.Module], weight: float, n_micro_batches: int) -> None:
        """`weight`: of the loss, beside the mean over tokens; `n_micro_batches`: of a step. WorkloadError for a model whose own
        forward has no such loss."""
        recorders = [getattr(part, "_can_record_outputs", None) or {} for part in (model, model.base_model)]
        self._recorder: Any = next((found["router_logits"] for found in recorders if "router_logits" in found), None)
        is_known = "load_balancing_loss_func" in unwrap(type(model).forward).__globals__
        target = getattr(self._recorder, "target_class", None)
        if not is_known or target is None:
            raise WorkloadError(f"{type(model).__name__}'s own forward has no loss of its routers; leave --router-loss out")
        self.n_experts, self.n_chosen, self.share = int(model.num_experts), int(model.num_experts_per_tok), weight / n_micro_batches
        self.at: tuple[int, int] | None = None
        self._sums: dict[int, dict[int, tuple[Tensor, Tensor, int]]] = defaultdict(dict)
        self._slopes: dict[int, Tensor] = {}
        for layer in layers:
            for part in layer.modules():
                if type(part) is target:
                    part.register_forward_hook(self._routed)

    def _routed(self, part: nn.Module, given: Any, out: Any) -> Any:
        """Forward hook of a router: its output, through which a gradient reaches its logits too."""
        if self.at is None:
            return None
        found = list(out) if isinstance(out, tuple) else [out]
        logits_NE = found[self._recorder.index if len(found) > 1 else 0]
        others = [i for i, t in enumerate(found) if t.is_floating_point() and t is not logits_NE]
        i = others[0] if others else self._recorder.index if len(found) > 1 else 0
        found[i] = _Noted.apply(found[i], logits_NE, self)  # type: ignore[no-untyped-call]
        return tuple(found) if isinstance(out, tuple) else found[0]

    def note(self, logits_NE: Tensor) -> None:
        assert self.at is not None
        weights_NE = torch.softmax(logits_NE, -1)
        chosen = weights_NE.topk(self.n_chosen, -1).indices.reshape(-1)
        counted = chosen.to(torch.float32 if chosen.device.type == "cpu" else torch.int32)
        counts_E = torch.histc(counted, bins=self.n_experts, min=0, max=self.n_experts)
        m, block = self.at
        self._sums[m][block] = counts_E.float(), weights_NE.float().sum(0), len(logits_NE)

    def close(self, m: int) -> Tensor:
        """The loss of a micro-batch whose layers have all routed, with its weight; fp64."""
        counts_E, sums_E, n = (sum(each) for each in zip(*(of for _, of in sorted(self._sums.pop(m).items())), strict=True))
        with torch.enable_grad():
            sums_E = sums_E.requires_grad_()
            loss = (torch.sum(counts_E / n * (sums_E / n).unsqueeze(0)) * self.n_experts) * self.share
            self._slopes[m] = torch.autograd.grad(loss, sums_E)[0]
        return loss.detach().double()

    def gradient(self, m: int, logits_NE: Tensor) -> Tensor:
        """Gradient of the loss with respect to a layer's logits."""
        weights_NE = torch.softmax(logits_NE, -1)
        slopes_NE = self._slopes[m].expand(weights_NE.shape).to(weights_NE.dtype)
        return torch.ops.aten._softmax_backward_data(slopes_NE, weights_NE, -1, weights_NE.dtype)  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Drop the sums of a step that failed."""
        self._sums.clear()
        self._slopes.clear()


class _Noted(torch.autograd.Function):
    """A tensor as it is. Its backward adds the gradient of the routers' loss to the logits'."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, logits_NE: Tensor, balance: Balance) -> Tensor:
        balance.note(logits_NE)
        ctx.balance, ctx.micro_batch = balance, balance.at[0] if balance.at is not None else 0
        ctx.save_for_backward(logits_NE)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (logits_NE,) = ctx.saved_tensors
        return gradients[0], ctx.balance.gradient(ctx.micro_batch, logits_NE), None
