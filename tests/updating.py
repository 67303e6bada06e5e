"""Optimizer step of one flat parameter on the calling thread."""

from penstock.runtime.host.chunks import Scratch
from penstock.runtime.host.optimizer import ParamState, Step, summed


def update_(state: ParamState, gradient, factor: float, n_updates: int, settings, start_from=None, scratch=None) -> None:
    """Update `to`, starting from `start_from` or `to` itself. `gradient`: a tensor or a SummedGradient."""
    buffers = scratch or Scratch()
    for task in Step(state, summed(gradient), factor, n_updates, settings, start_from).tasks():
        task(buffers)
