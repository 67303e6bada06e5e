"""Keys and values that layers share with later layers, and residual streams, as one tensor between layers."""

# B sequences, H heads, T tokens, W width of a head, D width, E elements of all keys and values
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

States = Mapping[str, tuple[torch.Tensor, ...]]  # keys and values (B, H, T, W) by the key that layers read


@dataclass(frozen=True, slots=True)
class Carried:
    """Hidden state and keys and values for later layers, concatenated to one tensor (B, T, D + E), zero until computed. Layers
    exchange one tensor, and gradients of shared tensors accumulate. Several residual streams are flattened into D."""

    width: int  # D, of all streams
    heads: Mapping[str, tuple[tuple[int, int], ...]]  # number and width of heads of each tensor, by the key that layers read
    streams: tuple[int, int] | None = None  # number of streams, and their dimension in the model's tensor

    @property
    def sizes(self) -> list[int]:
        """Elements per token of the hidden state and of each tensor; their sum is D + E."""
        return [self.width, *(n * width for shapes in self.heads.values() for n, width in shapes)]

    def padded(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Pad the first layer's input with zeros for keys and values."""
        return nn.functional.pad(self._joined(hidden_BTD), (0, sum(self.sizes) - self.width))

    def _joined(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.streams is None or hidden.dim() < 4 else hidden.movedim(self.streams[1], 2).flatten(2)

    def hidden_state(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden state in the model's shape."""
        hidden = x[..., : self.width]
        if self.streams is not None:
            hidden = hidden.unflatten(-1, (self.streams[0], -1)).movedim(2, self.streams[1])
        return hidden.contiguous()

    def states(self, x: torch.Tensor) -> States:
        t = iter(x.split(self.sizes, -1)[1:])
        return {key: tuple(next(t).unflatten(-1, n).transpose(1, 2) for n in shapes) for key, shapes in self.heads.items()}

    def concatenated(self, hidden_BTD: torch.Tensor, states: States) -> torch.Tensor:
        return torch.cat([self._joined(hidden_BTD), *(t.transpose(1, 2).flatten(2) for key in self.heads for t in states[key])], -1)


def carried_of(hidden: torch.Tensor, n_sequences_and_tokens: torch.Size, states: States) -> Carried | None:
    """Layout of the tensor between layers; None if it is the hidden state."""
    if not states and hidden.dim() == 3:
        return None
    heads = {key: tuple((t.shape[1], t.shape[3]) for t in tensors) for key, tensors in states.items()}
    if hidden.dim() == 3:
        return Carried(hidden.shape[-1], heads)
    dim = 2 if hidden.shape[:2] == n_sequences_and_tokens else 0
    return Carried(hidden.shape[dim] * hidden.shape[-1], heads, (hidden.shape[dim], dim))


def with_states(leaves: Sequence[Any], states: States) -> tuple[list[Any], UserDict[str, tuple[torch.Tensor, ...]]]:
    """Arguments of a layer with a mapping of these states in place of the model's, and the mapping, which the layer may extend."""
    shared = next((type(t)(states) for t in leaves if isinstance(t, UserDict)), UserDict(states))
    return [shared if isinstance(t, UserDict) else t for t in leaves], shared
