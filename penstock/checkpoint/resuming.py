"""Can a run resume from this state?"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any

import torch

from runtime.errors import CheckpointError, DataError
from runtime.host.host_state import HostState
from runtime.plan import Plan, Semantics
from runtime.plan.train import Train
from runtime.plan.workload import Parameter

from .checkpoint import State

if TYPE_CHECKING:
    from penstock.data.data import Data

_IN_WORDS = {
    "data_fingerprint": "set of data, or order of it",
    "model_fingerprint": "model (its config.json differs)",
    "frozen": "model: the weights that are not trained",
    "semantics": "meaning of a step (batch, length, precision or clipping)",
}

# What a state does not say that was saved before there was a choice
_DEFAULTS = {field.name: field.default for field in fields(Semantics) if field.default is not MISSING}
_SAID_BY_NONE = {name: asdict(value) if isinstance(value, Train) else value for name, value in _DEFAULTS.items()}


def identity(plan: Plan, data: "Data", seed: int, optimizer: Mapping[str, Any], frozen: str | None = None) -> dict[str, Any]:
    """What a resumed run shares with the one that saved the state. Its plan may be another one. `frozen`: what tells the weights
    that are not trained, and not in the state, from others."""
    return ({} if frozen is None else {"frozen": frozen}) | {
        "seed": seed,
        "data_fingerprint": data.fingerprint,
        "model_fingerprint": plan.model.fingerprint,
        "semantics": _as_json(asdict(plan.semantics.whole)),
        "optimizer": _as_json(optimizer),
    }


def refuse_another(state: State, expected: Mapping[str, Any]) -> None:
    """CheckpointError that names what a state does not share with this run."""
    for key, value in expected.items():
        found = state.fields.get(key)
        if key == "semantics" and isinstance(found, dict):
            found = _as_json(_SAID_BY_NONE) | found
        if found == value:
            continue
        if key == "optimizer":
            raise CheckpointError(
                f"{state.path}: optimizer settings differ from this run's{_difference(found, value)}; resume with those it "
                f"began with, or start a new run from its weights, with --model {state.path} and another --out"
            )
        what = _IN_WORDS.get(key, key) + (_difference(found, value) if key == "semantics" else "")
        raise CheckpointError(f"{state.path}: of another {what}; resume with the model, data, --seed and semantics it began with")


def put_back(state: State, host: HostState, data: "Data") -> None:
    """Put a state onto the host, and the data to where it was; CheckpointError where something is missing or malformed."""
    n_updates, position = state.fields.get("n_updates"), state.fields.get("data_position")
    if not isinstance(n_updates, int) or isinstance(n_updates, bool) or not 0 <= n_updates <= state.step:
        raise CheckpointError(f"{state.path}: `n_updates` is no count; resume from another checkpoint")
    if not isinstance(position, dict):
        raise CheckpointError(f"{state.path}: `data_position` is no object; resume from another checkpoint")
    try:
        data.resume(state.step, position)
    except (CheckpointError, DataError) as error:
        raise type(error)(f"{state.path}: {error}") from None
    for number in range(len(host.plan.workload.blocks)):
        for p in host.owned(number):
            host.set_weight(p, _stored(state, "master", p))
            for of, moment in zip(host.plan.semantics.optimizer.moments, host.moments(p), strict=True):
                moment.copy_(_stored(state, of.name, p).reshape(-1)[host.part(p)])
        host.settle(number)
    host.n_updates = n_updates


def _stored(state: State, kind: str, p: Parameter) -> torch.Tensor:
    name = f"{kind}.{p.name}"
    tensor = state.optimizer.get(name)
    if tensor is None or tuple(tensor.shape) != p.shape:
        raise CheckpointError(f"{state.path}: {name} is missing or of another shape; resume from another checkpoint")
    return tensor


def _as_json(value: Any) -> Any:
    """As it is when it has been written and read."""
    return json.loads(json.dumps(value))


def _difference(was: Any, now: Any, at: str = "") -> str:
    """The first of the values that differ, in words; empty where there is nothing to compare."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}, key=lambda key: (key == "n_steps", key)):  # which follows from a schedule
            if was.get(key) != now.get(key):
                return _difference(was.get(key), now.get(key), f"{at}.{key}" if at else str(key))
    return f": {at} was {json.dumps(was)[:80]}, is {json.dumps(now)[:80]}" if at else ""
