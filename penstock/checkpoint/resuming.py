"""Resuming: a checkpoint's state put back, after it was compared with the run that goes on from it."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from torch import Tensor

from penstock.data.data import Data
from runtime.errors import CheckpointError, DataError
from runtime.host.host_state import HostState
from runtime.plan import Plan, Semantics
from runtime.plan.train import Train
from runtime.plan.workload import Parameter

from .checkpoint import State

_IN_WORDS = {
    "data_fingerprint": "set of data, or order of it",
    "model_fingerprint": "model (its config.json differs)",
    "frozen": "model: the weights that are not trained",
    "semantics": "meaning of a step (batch, length, precision or clipping)",
}

# Fields that a state lacks which was saved before there was a choice have their defaults.
_DEFAULTS = {field.name: field.default for field in fields(Semantics) if field.default is not MISSING}
_SEMANTICS_BEFORE = {name: asdict(value) if isinstance(value, Train) else value for name, value in _DEFAULTS.items()}


def identity(plan: Plan, data: Data, seed: int, optimizer: Mapping[str, Any], frozen: str | None = None) -> dict[str, Any]:
    """Fields that a resumed run must share with the run that saved the state, as JSON; the plan may be another one.

    `optimizer`: its settings; `frozen`: a digest of weights that are not trained, and not in the state.
    """
    return _as_json(
        ({} if frozen is None else {"frozen": frozen})
        | {
            "seed": seed,
            "data_fingerprint": data.fingerprint,
            "model_fingerprint": plan.model.fingerprint,
            "semantics": asdict(plan.semantics.whole),
            "optimizer": optimizer,
        }
    )


def refuse_another(state: State, expected: Mapping[str, Any]) -> None:
    """CheckpointError that names the first thing that a state does not share with this run."""
    for key, value in expected.items():
        found = state.fields.get(key)
        if key == "semantics" and isinstance(found, dict):
            found = _as_json(_SEMANTICS_BEFORE) | found
        if found == value:
            continue
        if key == "optimizer":
            raise CheckpointError(
                f"{state.path}: optimizer settings differ from this run's{_difference(found, value)}; resume with those it "
                f"began with, or start a new run from its weights, with --model {state.path} and another --out"
            )
        what = _IN_WORDS.get(key, key) + (_difference(found, value) if key == "semantics" else "")
        # An older version may have saved it, which put samples in another order.
        anew = f", or train on from its weights, with --model {state.path} and another --out" if key == "data_fingerprint" else ""
        advice = f"resume with the model, data, --seed and semantics it began with{anew}"
        raise CheckpointError(f"{state.path}: of another {what}; {advice}")


def put_back(state: State, host: HostState, data: Data) -> None:
    """Put masters, moments and the data's position back; CheckpointError where something is missing or malformed."""
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


def _stored(state: State, kind: str, p: Parameter) -> Tensor:
    name = f"{kind}.{p.name}"
    if name not in state.optimizer or tuple((tensor := state.optimizer[name]).shape) != p.shape:
        raise CheckpointError(f"{state.path}: {name} is missing or of another shape; resume from another checkpoint")
    return tensor


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    """The value as it is when it has been written and read."""
    found: dict[str, Any] = json.loads(json.dumps(value))
    return found


def _difference(was: Any, now: Any, at: str = "") -> str:
    """The first value that differs, in words; empty where there is nothing to compare."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}, key=lambda key: (key == "n_steps", key)):  # n_steps follows from a schedule
            if was.get(key) != now.get(key):
                return _difference(was.get(key), now.get(key), f"{at}.{key}" if at else str(key))
    return f": {at} was {json.dumps(was)[:80]}, is {json.dumps(now)[:80]}" if at else ""
