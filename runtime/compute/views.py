"""Which tensors lie in a slot of weights, gradients or activations?"""

# B sequences, T tokens, D width
import torch

from runtime.host.memory import Arenas
from runtime.plan import Plan, Slot

from .blocks import Weights


class Views:
    """Views of a plan's slots on the device, made by each call."""

    def __init__(self, plan: Plan, arenas: Arenas) -> None:
        self._semantics, self._arenas = plan.semantics, arenas
        self._blocks = plan.workload.blocks
        self._offsets = [b.offsets()[0] for b in self._blocks]
        self._width = self._blocks[0].parameters[0].shape[1]

    def weights(self, block: int, slot: Slot) -> Weights:
        return self.parameters(block, slot, self._semantics.compute_dtype)

    def parameters(self, block: int, slot: Slot, dtype: str) -> Weights:
        """All that the block uses, weights or gradients, by name."""
        at = self._offsets[block]
        return {p.name: self._arenas.view(slot, dtype, p.shape, at[p.name]) for p in self._blocks[block].parameters}

    def activation(self, slot: Slot, m: int) -> torch.Tensor:
        """A block's output, or its gradient, (B, T, D) of micro-batch number m."""
        s = self._semantics
        return self._arenas.view(slot, s.compute_dtype, (s.n_sequences(m), s.seq_len, self._width))
