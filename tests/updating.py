"""An optimizer step on one flat parameter, all on the calling thread."""

import torch

from penstock.runtime.host.chunks import Scratch
from penstock.runtime.host.optimizer import ParamState, Step, SummedGradient, summed
from penstock.runtime.plan.optimizer import Hyperparameters


def update_(
    to: ParamState,
    gradient: torch.Tensor | SummedGradient,
    factor: float,
    n_updates: int,
    settings: Hyperparameters,
    start_from: ParamState | None = None,
    scratch: Scratch | None = None,
) -> None:
    own = scratch or Scratch()
    for task in Step(to, summed(gradient), factor, n_updates, settings, start_from).tasks():
        task(own)
