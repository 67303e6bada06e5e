"""An optimizer step on one flat parameter, all on the calling thread."""

from penstock.runtime.host.chunks import Scratch
from penstock.runtime.host.optimizer import ParamState, Step, summed


def update_(to: ParamState, gradient, factor: float, n_updates: int, settings, start_from=None, scratch=None) -> None:
    """The gradient: a tensor or a SummedGradient. The update starts from `to` unless another state is given."""
    own = scratch or Scratch()
    for task in Step(to, summed(gradient), factor, n_updates, settings, start_from).tasks():
        task(own)
