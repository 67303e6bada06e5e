"""Training sessions of tiny models without input files; a run takes a second."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.checkpoint.checkpoint import State, complete_checkpoints, latest, load_state, put_back, refuse_another
from penstock.run_config import RunRequest
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import PlanFile, Policy
from penstock.settings import CheckpointSettings, DataSettings, RunSettings
from penstock.training.inputs import RunInputs
from penstock.training.session import Session, predicted
from penstock.training.trainer import Trainer
from penstock.training.validation import Validation

from .row_of_tokens import RowOfTokens
from .tiny import tiny_config
from .training import plan_of, same_bits, scheduled, semantics_of, state_of

SAVING = ("every", "keep", "background", "copy_bytes", "minutes", "weights_only")


def session_of(folder: Path, policy: Policy = Policy(), machine_type=TorchMachine, model_type: str = "llama", **fields) -> Session:  # noqa: B008 frozen
    """Return a session of a tiny model with random weights; `fields`: checkpoint settings, the semantics', `sizes` of the model."""
    saving = {name: fields.pop(name) for name in SAVING if name in fields}
    plan = plan_of(tiny_config(model_type, **fields.pop("sizes", {})), semantics_of(model_type, **fields), policy)
    ids = np.random.default_rng(5).integers(0, 96, 16 * 50, dtype=np.uint16)
    data = RowOfTokens(ids, seq_len=16, batch_size=4, pad_id=0, shuffle_seed=3)
    machine = machine_type(plan, data.batch, scheduled)
    machine.initialise(7)
    folder.mkdir(parents=True, exist_ok=True)
    settings = RunSettings(DataSettings("row of tokens"), out=str(folder), checkpoint=CheckpointSettings(**saving))
    inputs = RunInputs(RunRequest(settings, PlanFile(plan, None)), plan, "cpu", data)
    return Session(inputs, plan, "cpu", machine, machine, 4, predicted(plan)[2])


def resumed(session: Session, state: State | None = None) -> Session:
    """Return the session resumed from a checkpoint, by default the last one."""
    state = state or load_state(latest(session.folder))
    refuse_another(state, session.inputs.identity)
    put_back(state, session.store.host, session.inputs.data)
    return replace(session, first_step=state.step)


def train(session: Session, n_steps: int = 4, on_step=lambda metrics: None, validations: Sequence[Validation] = ()) -> Session:
    session = replace(session, n_steps=n_steps)
    Trainer(session, on_step, validations).train()
    return session


def evaluating(session: Session, every: int | None) -> Session:
    settings = replace(session.settings, evaluation=replace(session.settings.evaluation, every=every))
    request = replace(session.inputs.request, settings=settings)
    return replace(session, inputs=replace(session.inputs, request=request))


def same_state(session: Session, expected: Session | tuple) -> bool:
    """True if master weights and moments are bitwise equal."""
    states = state_of(session.store), expected if isinstance(expected, tuple) else state_of(expected.store)
    return all(same_bits(x[name], y[name]) for x, y in zip(*states, strict=True) for name in y)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / name).read_text().splitlines()]


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of all checkpoints in a folder; all must be complete."""
    for _, path in complete_checkpoints(folder):
        load_state(path)
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in folder.glob("checkpoint-*/*")}


def steps_of(folder: Path) -> list[int]:
    return [step for step, _ in complete_checkpoints(folder)]
