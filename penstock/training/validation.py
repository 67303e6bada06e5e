"""Validation: the loss on held-out data and samples of what the model writes, logged and shown every N steps."""

# B sequences, T positions of a sequence
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from runtime.batch import UNSUPERVISED, Batch
from runtime.compute.compute import LastHidden
from runtime.errors import DataError
from runtime.executor import Stop
from runtime.forward_plan import forward_plan, most_micro_batches
from runtime.machines.torch_machine import TorchMachine
from runtime.units import on_one_line, show_seconds

from .generation import generate
from .inputs import Prompts
from .monitors import Monitors
from .run_folder import add_lines, lines_of
from .session import Session

SHOWN_PROMPT, SHOWN_ANSWER = 80, 300  # characters on stderr; samples.jsonl holds all


@dataclass(frozen=True, slots=True)
class Validation:
    """Looks at the weights while all lanes are idle, and adds lines to a log of the run."""

    log: str  # file in the run's folder
    field: str  # that its lines have, and no others there
    perform: Callable[[int], None]  # given the number of steps done; Abandoned when the run is asked to end
    first: bool = False  # before the first step, too

    def is_logged(self, session: Session, step: int) -> bool:
        return any(fields.get("step") == step and self.field in fields for _, fields in lines_of(session.folder / self.log))


def validations_of(session: Session, monitors: Monitors) -> tuple[Validation, ...]:
    """Those that the settings ask for."""
    found = []
    if session.held_out is not None:
        perform = partial(_evaluate, session, monitors)
        found.append(Validation("metrics.jsonl", "eval_loss", perform, session.settings.evaluation.first))
    if session.prompts is not None:
        found.append(Validation("samples.jsonl", "prompt", partial(_sample, session, monitors, session.prompts)))
    return tuple(found)


def _evaluate(session: Session, monitors: Monitors, step: int) -> None:
    """The loss on held-out data; where the settings say so, that without the adapter too."""
    data, asked = session.held_out, session.settings.evaluation
    assert data is not None
    measure = partial(
        evaluate, session.store, data.batch, min(asked.max_sequences, data.n_steps or asked.max_sequences), session.stop
    )
    found = measure()
    values: dict[str, float] = {
        "eval_loss": found.loss,
        "eval_perplexity": found.perplexity,
        "eval_tokens": found.n_tokens,
        "eval_s": found.seconds,
    }
    without = ""
    if _compares(session):
        with session.store.compute.templates.without_adapters():
            values["base_eval_loss"] = measure().loss
        without = f"  without the adapter: loss {values['base_eval_loss']:.4f}"
    add_lines(session.folder / "metrics.jsonl", [{"step": step} | values])
    monitors.log(step, values)
    when = f"after step {step}" if step else "before the first step"
    session.say(
        f"evaluation {when}: loss {found.loss:.4f}  perplexity {found.perplexity:.4g}  {found.n_tokens:,} tokens  "
        f"{show_seconds(found.seconds)}{without}"
    )


def _sample(session: Session, monitors: Monitors, prompts: Prompts, step: int) -> None:
    """Answers to the prompts; where the settings say so, those without the adapter too."""
    asked, store = session.settings.evaluation, session.store
    ids = [prompts.encode(text) for text in prompts.texts]

    def answers() -> list[str]:
        sampling = (asked.max_new_tokens, asked.temperature, asked.top_p, session.settings.seed)
        return [prompts.decode(new) for new in generate(store, ids, *sampling, prompts.end_ids, session.stop)]

    lines = [{"step": step, "prompt": prompt, "text": text} for prompt, text in zip(prompts.texts, answers(), strict=True)]
    if _compares(session):
        with store.compute.templates.without_adapters():
            lines = [line | {"base_text": text} for line, text in zip(lines, answers(), strict=True)]
    add_lines(session.folder / "samples.jsonl", lines)
    for number, line in enumerate(lines):
        monitors.text(step, f"samples/{number}", f"{line['prompt']}\n\n{line['text']}")
        prompt, text = (json.dumps(line[key], ensure_ascii=False) for key in ("prompt", "text"))
        session.say(f"sample after step {step}: {on_one_line(prompt, SHOWN_PROMPT)} > {on_one_line(text, SHOWN_ANSWER)}")


def _compares(session: Session) -> bool:
    return session.settings.evaluation.base and session.plan.semantics.train.lora is not None


# -- the loss on held-out data --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation."""

    loss: float  # mean over all supervised tokens
    n_tokens: int  # supervised
    seconds: float

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where no float is as large."""
        return torch.tensor(self.loss, dtype=torch.float64).exp().item()


def evaluate(machine: TorchMachine, sequence: Callable[[int], Batch], n_sequences: int, stop: Stop | None = None) -> Evaluated:
    """The loss on `n_sequences`, batches of one as long as the plan's, of the weights as they are: as in training, without dropout.

    All lanes of the machine must be idle. DataError where no token is supervised; Abandoned after `stop.request()`, once the pass
    in progress is done.
    """
    began_s, losses, n_tokens = time.perf_counter(), list[torch.Tensor](), 0
    n_micro_batches = -(-n_sequences // machine.plan.semantics.micro_batch)
    n_passes = -(-n_micro_batches // most_micro_batches(machine.plan))
    plan = forward_plan(machine.plan, -(-n_micro_batches // n_passes))

    def batch(number: int) -> Batch:
        nonlocal n_tokens
        n = plan.semantics.batch_size
        found = _padded(sequence, range(number * n, min((number + 1) * n, n_sequences)), n)
        n_tokens += found.n_supervised
        return found

    def add_loss(last: LastHidden) -> None:
        losses.append(last.templates.scores(last.weights, last.hidden_BTD, last.targets_BT))

    machine.forward(plan, batch, add_loss, n_passes, stop)
    if not n_tokens:
        raise DataError("the evaluation data has no token to be predicted; choose other data")
    return Evaluated(sum(loss.item() for loss in losses) / n_tokens, n_tokens, time.perf_counter() - began_s)


def _padded(sequence: Callable[[int], Batch], numbers: range, n: int) -> Batch:
    """A batch of `n` sequences: these, and padding without a supervised token."""
    rows = [sequence(number) for number in numbers]
    ids_BT, targets_BT = torch.cat([row.input_ids for row in rows]), torch.cat([row.targets for row in rows])
    n_padding, documents = n - len(rows), None
    if rows[0].document_tokens is not None:
        documents = tuple(of for row in rows for of in row.document_tokens or ()) + ((ids_BT.shape[1],),) * n_padding
    below = (0, 0, 0, n_padding)
    return Batch(F.pad(ids_BT, below), F.pad(targets_BT, below, value=UNSUPERVISED), documents)
