"""Load-balancing loss of routers (`load_balancing_loss_func` of transformers).

E sum_e (C_e / N) (P_e / N): C counts selections of expert e, P sums its probabilities, over the N rows of all layers with a router.
dL/dP is equal for all layers, and known after the last router. Therefore forwards record their sums, the head computes the loss,
and each layer's backward adds the loss's gradient to that of its router's logits.
"""

# N rows, E experts
from collections import defaultdict
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.errors import WorkloadError


class Balance:
    """Sums of micro-batches in progress. Set `position` to (micro-batch, block) before each forward."""

    def __init__(self, model: Any, layers: list[nn.Module], weight: float, n_micro_batches: int) -> None:
        """`weight`: relative to the mean token loss. WorkloadError if the model's own forward has no load-balancing loss."""
        recorders = [getattr(part, "_can_record_outputs", None) or {} for part in (model, model.base_model)]
        self._recorder: Any = next((outputs["router_logits"] for outputs in recorders if "router_logits" in outputs), None)
        is_known = "load_balancing_loss_func" in unwrap(type(model).forward).__globals__
        target = getattr(self._recorder, "target_class", None)
        if not is_known or target is None:
            raise WorkloadError(f"{type(model).__name__}'s own forward has no load-balancing loss; omit --router-loss")
        self.n_experts, self.n_chosen = int(model.num_experts), int(model.num_experts_per_tok)
        self.weight = weight / n_micro_batches
        self.position: tuple[int, int] | None = None
        self._sums: dict[int, dict[int, tuple[Tensor, Tensor, int]]] = defaultdict(dict)
        self._slopes: dict[int, Tensor] = {}
        for layer in layers:
            for part in layer.modules():
                if type(part) is target:
                    part.register_forward_hook(self._routed)

    def _routed(self, part: nn.Module, inputs: Any, out: Any) -> Any:
        """Forward hook of a router: connect its output to the logits in the autograd graph."""
        if self.position is None:
            return None
        outputs = list(out) if isinstance(out, tuple) else [out]
        logits_NE = outputs[self._recorder.index if len(outputs) > 1 else 0]
        differentiable = [i for i, t in enumerate(outputs) if t.is_floating_point() and t is not logits_NE]
        i = differentiable[0] if differentiable else self._recorder.index if len(outputs) > 1 else 0
        outputs[i] = _ConnectLogits.apply(outputs[i], logits_NE, self)  # type: ignore[no-untyped-call]
        return tuple(outputs) if isinstance(out, tuple) else outputs[0]

    def record(self, logits_NE: Tensor) -> None:
        assert self.position is not None
        weights_NE = torch.softmax(logits_NE, -1)
        chosen = weights_NE.topk(self.n_chosen, -1).indices.reshape(-1)
        counted = chosen.to(torch.float32 if chosen.device.type == "cpu" else torch.int32)
        counts_E = torch.histc(counted, bins=self.n_experts, min=0, max=self.n_experts)
        m, block = self.position
        self._sums[m][block] = counts_E.float(), weights_NE.float().sum(0), len(logits_NE)

    def take_loss(self, m: int) -> Tensor:
        """Weighted fp64 loss of a micro-batch after its last router."""
        layers = [sums for _, sums in sorted(self._sums.pop(m).items())]
        counts_E, sums_E, n = (sum(column) for column in zip(*layers, strict=True))
        with torch.enable_grad():
            sums_E = sums_E.requires_grad_()
            value = (torch.sum(counts_E / n * (sums_E / n).unsqueeze(0)) * self.n_experts) * self.weight
            self._slopes[m] = torch.autograd.grad(value, sums_E)[0]
        return value.detach().double()

    def gradient(self, m: int, logits_NE: Tensor) -> Tensor:
        """Gradient of the loss with respect to the logits of a layer."""
        weights_NE = torch.softmax(logits_NE, -1)
        slopes_NE = self._slopes[m].expand(weights_NE.shape).to(weights_NE.dtype)
        return torch.ops.aten._softmax_backward_data(slopes_NE, weights_NE, -1, weights_NE.dtype)  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Drop the sums of a step that failed."""
        self._sums.clear()
        self._slopes.clear()


class _ConnectLogits(torch.autograd.Function):
    """Identity on a tensor. Its backward also returns the load-balancing gradient of the logits."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, logits_NE: Tensor, balance: Balance) -> Tensor:
        balance.record(logits_NE)
        ctx.balance, ctx.micro_batch = balance, balance.position[0] if balance.position is not None else 0
        ctx.save_for_backward(logits_NE)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (logits_NE,) = ctx.saved_tensors
        return gradients[0], ctx.balance.gradient(ctx.micro_batch, logits_NE), None
