"""Validation: loss on held-out data and generated samples, logged and shown every N steps.

Generation recomputes the whole sequence for each new token, without a KV cache: with streamed weights a forward pass takes the same
time for one token and for hundreds, and the plan reserves no device memory for a cache. A token costs one upload of the model,
shared by all prompts.
"""

# B sequences, T positions of a sequence, D width, S sequences of all prompts, V vocabulary
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from penstock.data.sampling import MapStyleData
from penstock.planner.lower.forward import forward_plan
from penstock.runtime.batch import UNSUPERVISED, Batch
from penstock.runtime.compute.compute import LastHidden
from penstock.runtime.compute.losses import HALVES
from penstock.runtime.compute.response_sums import unpacked_order
from penstock.runtime.errors import DataError, PenstockError, PlanError
from penstock.runtime.executor import Stop
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan.objective import LABEL, OLD, REFERENCE, TEACHER, LossUnit
from penstock.runtime.units import on_one_line, show_seconds

from .inputs import Prompts
from .monitors import Monitors
from .run_folder import add_lines, lines_of
from .session import Session
from .streamed_forward import log_probabilities, passes

RATIO_SEQUENCES = 16  # of rollouts, for their mean ratio before the first step
RATIO_ERROR = 0.02  # beyond which a cause is named; kernels of a generator differ by less
SHOWN_PROMPT, SHOWN_ANSWER = 80, 300  # characters on stderr; samples.jsonl holds full texts
LENGTH_STEP_TOKENS = 64  # sequences are padded to a multiple: fewer distinct shapes, which suit kernels


@dataclass(frozen=True, slots=True)
class Validation:
    """A check of the weights while all lanes are idle. Appends lines to a log of the run."""

    log: str  # file in the run's folder
    field: str  # present only in this validation's lines
    perform: Callable[[int], None]  # called with the number of finished steps; raises Abandoned on a stop request
    first: bool = False  # True: also before the first step

    def is_logged(self, session: Session, step: int) -> bool:
        return any(fields.get("step") == step and self.field in fields for _, fields in lines_of(session.folder / self.log))


def validations_of(session: Session, monitors: Monitors) -> tuple[Validation, ...]:
    """Return the validations in the settings."""
    validations = []
    if session.inputs.held_out is not None:
        perform = partial(_evaluate, session, monitors)
        validations.append(Validation("metrics.jsonl", "eval_loss", perform, session.settings.evaluation.first))
    if session.inputs.prompts is not None:
        validations.append(Validation("samples.jsonl", "prompt", partial(_sample, session, monitors, session.inputs.prompts)))
    return tuple(validations)


def _evaluate(session: Session, monitors: Monitors, step: int) -> None:
    """Log the loss on held-out data, and with `evaluation.base` the loss without the adapter."""
    measure = partial(held_out_loss, session, session.stop)
    values, base_text = measure(), ""
    if _compares(session):
        with session.store.compute.templates.without_adapters():
            values["base_eval_loss"] = measure()["eval_loss"]
        base_text = f"  without the adapter: loss {values['base_eval_loss']:.4f}"
    add_lines(session.folder / "metrics.jsonl", [{"step": step, "held_out": session.inputs.held_out_digest} | values])
    monitors.log(step, values)
    when = f"after step {step}" if step else "before the first step"
    n, n_all = len(session.inputs.evaluated), session.inputs.held_out and session.inputs.held_out.n_steps
    part = "" if n == n_all else f"  {n:,} of {n_all:,} sequences"
    session.say(f"evaluation {when}: {_in_words(values)}{part}  {show_seconds(values['eval_s'])}{base_text}")


def held_out_loss(session: Session, stop: Stop | None = None) -> dict[str, float]:
    """Run `evaluate` on the held-out data, or on the sample of it. PlanError without held-out data."""
    data = session.inputs.held_out
    if data is None:
        raise PlanError("no held-out data to evaluate on; name it in the settings, as evaluation.data")
    samples = session.inputs.evaluated
    return evaluate(session.store, lambda number: data.batch(samples[number]), len(samples), stop)


def report_ratio(session: Session) -> None:
    """Print the mean ratio of the probabilities of rollouts in files, of the model before the first step to those in the rows, and
    the likely cause if it is not 1."""
    data, machine = session.inputs.data, session.store
    if OLD not in machine.plan.semantics.objective.inputs or not isinstance(data, MapStyleData):
        return
    n, ratios_of_batches = min(RATIO_SEQUENCES, machine.plan.semantics.batch_size), list[torch.Tensor]()
    plan, n_passes, batch = passes(machine.plan, lambda i: data.batch_of_samples([data.sample(i)]), n)

    def note(last: LastHidden) -> None:
        logps_BT = last.templates.head.target_logps(last.weights, last.hidden_BTD, last.targets_BT)
        ratios_of_batches.append((logps_BT - last.extras[OLD.name])[last.targets_BT != UNSUPERVISED].double().exp().cpu())

    machine.forward(plan, batch, note, n_passes, session.stop)
    ratio, words = float((ratios := torch.cat(ratios_of_batches)).mean()), ""
    if abs(ratio - 1) > RATIO_ERROR:
        of_sampling = "top_p, top_k, min_p or a temperature below 1 give higher ones"
        of_other = "a temperature above 1 gives lower ones"
        cause = f'"logprobs" are not of this model over its whole vocabulary: {of_sampling if ratio < 1 else of_other}'
        words = f"; warning: {cause}, and so may other weights; export them before such changes (docs/losses.md)"
    session.say(f"rollouts before the first step: mean ratio {ratio:.4f} over {len(ratios):,} tokens{words}")


def _in_words(values: dict[str, float]) -> str:
    if "eval_perplexity" in values:
        nearness = f"  divergence {values['eval_divergence']:.4f}" if "eval_divergence" in values else ""
        of_tokens = f"perplexity {values['eval_perplexity']:.4g}{nearness}  {values['eval_tokens']:,} tokens"
        return f"loss {values['eval_loss']:.4f}  {of_tokens}"
    how = "labelled" if f"eval_{LossUnit.SEQUENCES}" in values else "preferred" if "eval_pairs" in values else "judged"
    right = f"  {values['eval_accuracy']:.1%} {how} rightly" if "eval_accuracy" in values else ""
    n = next((f"{values[f'eval_{unit}']:,} {unit}" for unit in LossUnit if f"eval_{unit}" in values), "")
    return f"loss {values['eval_loss']:.4f}{right}  {n}"


def _sample(session: Session, monitors: Monitors, prompts: Prompts, step: int) -> None:
    """Log answers to the prompts, and with `evaluation.base` the answers without the adapter."""
    evaluation, store = session.settings.evaluation, session.store
    tokenizer = prompts.tokenizer

    def answers() -> list[str]:
        new = generate(store, prompts.ids, evaluation.max_new_tokens, tokenizer.answer_ends, session.stop)
        return [tokenizer.decode(ids) for ids in new]

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


def evaluate(
    machine: TorchMachine, sequence: Callable[[int], Batch], n_sequences: int, stop: Stop | None = None
) -> dict[str, float]:
    """Return the loss on `n_sequences` batches of one sequence with the plan's length. Current weights, no dropout.

    Names like in metrics.jsonl. Loss of tokens: mean cross entropy over supervised tokens, perplexity, token count, seconds, and
    mean divergence from a teacher. Other losses: the mean loss; for pairs also the share with the chosen answer preferred. All
    lanes of the machine must be idle. DataError without supervised tokens. Abandoned after `stop.request()`, at the end of a pass.
    """
    began_s, losses, divergences, n_tokens = time.perf_counter(), list[torch.Tensor](), list[torch.Tensor](), 0
    objective = machine.plan.semantics.objective
    if objective.of is not LossUnit.TOKENS:
        return _of_answers(machine, sequence, n_sequences, stop) | {"eval_s": time.perf_counter() - began_s}
    plan, n_passes, batch_of = passes(machine.plan, sequence, n_sequences)

    def batch(number: int) -> Batch:
        nonlocal n_tokens
        result = batch_of(number)
        n_tokens += result.n_supervised
        return result

    def note(last: LastHidden) -> None:
        arguments, head = (last.weights, last.hidden_BTD, last.targets_BT), last.templates.head
        losses.append(head.summed_losses(*arguments))
        if TEACHER.name in last.extras:
            divergences.append(head.divergence(*arguments, last.extras))

    machine.forward(plan, batch, note, n_passes, stop)
    if not n_tokens:
        raise DataError("the evaluation data has no token to be predicted; choose other data")
    loss = torch.tensor(sum(loss.item() for loss in losses) / n_tokens, dtype=torch.float64)
    results = {"eval_loss": loss.item(), "eval_perplexity": loss.exp().item(), "eval_tokens": n_tokens}  # exp may be infinite
    if divergences:
        results["eval_divergence"] = sum(divergence.item() for divergence in divergences) / n_tokens
    return results | {"eval_s": time.perf_counter() - began_s}


def _of_answers(machine: TorchMachine, sample: Callable[[int], Batch], n_samples: int, stop: Stop | None) -> dict[str, float]:
    """Return the mean of a loss over answers, and the accuracy. A pair is correct if the chosen answer gains more on the reference
    than the rejected one; without a reference, if its mean log-probability is higher. Ties count half. A KTO answer is correct if
    it gains more than its group's baseline when desirable, less when not."""
    sums, n_tokens, extras = log_probabilities(machine, sample, n_samples, stop)
    loss, objective = machine.compute.templates.head.function, machine.plan.semantics.objective
    assert loss is not None
    sums, n_tokens, rows_each = sums.flatten(0, 1), n_tokens.flatten(0, 1), objective.rows_each
    values = loss.values(sums, n_tokens, extras)

    def in_groups(tensor: torch.Tensor) -> torch.Tensor:
        """Return one row per complete pair or group."""
        by_group = [
            unpacked_order(part, rows_each, n_tokens).view(-1, rows_each, *part.shape[n_tokens.dim() :])
            for part in (tensor, n_tokens)
        ]
        return by_group[0][(by_group[1] > 0).all(dim=1)]

    n_losses = len(in_groups(n_tokens)) * rows_each // (2 if objective.of in HALVES else 1)
    report = {"eval_loss": values.sum().item() / n_losses, f"eval_{objective.of}": n_losses}
    reference = extras.get(REFERENCE.name)
    scores = in_groups(sums - reference if reference is not None else sums if objective.n_labels else sums / n_tokens)
    if objective.of is LossUnit.PAIRS:
        report["eval_accuracy"] = ((scores[:, 0] - scores[:, 1]).sign() / 2 + 0.5).mean().item()
    elif objective.of is LossUnit.ANSWERS:
        over = scores[:, 0::2] - scores[:, 1::2].mean(dim=1, keepdim=True).clamp(min=0)
        is_desirable = in_groups(extras[LABEL.name])[:, 0::2] > 0
        report["eval_accuracy"] = (torch.where(is_desirable, over, -over).sign() / 2 + 0.5).mean().item()
    elif objective.n_labels is not None:
        report["eval_accuracy"] = (scores.argmax(dim=-1) == in_groups(extras[LABEL.name])).float().mean().item()
    return report


# -- samples -------------------------------------------------------------------------------------------------------------


def generate(
    machine: TorchMachine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_ids: Collection[int] = (),
    stop: Stop | None = None,
    choose: Callable[[torch.Tensor], int] = lambda logits_V: int(logits_V.argmax()),
    on_token: Callable[[int], None] = lambda token: None,
) -> list[list[int]]:
    """Generate after each prompt, by default greedily: up to `max_new_tokens`, a token of `end_ids`, or the plan's sequence length.

    `choose(logits_V)`: the next token by its fp32 logits; `on_token` receives each. All lanes must be idle. Abandoned if stopped.
    """
    semantics = machine.plan.semantics
    sequences = [list(map(int, prompt)) for prompt in prompts]

    def is_open(number: int) -> bool:
        n_new, n = len(sequences[number]) - len(prompts[number]), len(sequences[number])
        return n_new < max_new_tokens and n < semantics.seq_len and not (n_new and sequences[number][-1] in end_ids)

    while unfinished := [number for number in range(len(prompts)) if is_open(number)]:
        for first in range(0, len(unfinished), semantics.loss_tile_tokens):  # at most one tile of logits
            numbers = unfinished[first : first + semantics.loss_tile_tokens]
            for number, logits_V in zip(numbers, _next_logits(machine, [sequences[n] for n in numbers], stop), strict=True):
                if not bool(logits_V.isfinite().all()):
                    raise PenstockError("the model's logits are not finite: its weights are spoilt; resume an earlier checkpoint")
                sequences[number].append(choose(logits_V))
                on_token(sequences[number][-1])
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def _next_logits(machine: TorchMachine, sequences: list[list[int]], stop: Stop | None) -> torch.Tensor:
    """Return (S, V) fp32 logits of the token after each sequence, on the host."""
    semantics = machine.plan.semantics
    longest = max(map(len, sequences))
    seq_len = min(semantics.seq_len, -(-longest // LENGTH_STEP_TOKENS) * LENGTH_STEP_TOKENS)
    plan = forward_plan(machine.plan, -(-len(sequences) // semantics.micro_batch), seq_len)
    tokens_BT = torch.zeros((plan.semantics.batch_size, seq_len), dtype=torch.int64)  # right padding: attention is causal
    for row, sequence in enumerate(sequences):
        tokens_BT[row, : len(sequence)] = torch.tensor(sequence)
    n_tokens = (*map(len, sequences), *(seq_len,) * (plan.semantics.batch_size - len(sequences)))
    batch, parts = Batch(tokens_BT, torch.full_like(tokens_BT, UNSUPERVISED), n_tokens=n_tokens), list[torch.Tensor]()

    def note(last: LastHidden) -> None:
        first = last.micro_batch * semantics.micro_batch
        ends = [len(sequence) - 1 for sequence in sequences[first : first + semantics.micro_batch]]
        rows_SD = torch.stack([last.hidden_BTD[b, end] for b, end in enumerate(ends)])
        parts.append(last.templates.head.logits(last.weights, rows_SD))

    machine.forward(plan, lambda step: batch, note, 1, stop)
    return torch.cat([logits.cpu() for logits in parts])
