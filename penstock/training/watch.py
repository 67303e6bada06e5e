"""What is evaluated and logged during training?"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.units import on_one_line, show_seconds

if TYPE_CHECKING:
    from runtime.machines.emulated import EmulatedMachine
    from runtime.machines.torch_machine import TorchMachine
    from runtime.plan.timeline import Timeline

    from .assembly import Session
    from .evaluation import Evaluated
    from .inputs import Prompts
    from .monitors import Monitor
    from .trainer import Look, Metrics, Training

SHOWN_PROMPT, SHOWN_ANSWER = 80, 300  # characters of a sample's line; samples.jsonl holds all


@contextmanager
def watched(run: "Session", first_step: int, online: bool) -> "Iterator[Training]":
    """The training with what the settings ask to see: monitors, held-out data, prompts. Monitors are closed in the end."""
    from runtime.executor import say

    from .monitors import open_monitors

    settings = run.settings
    with ExitStack() as until_the_end:
        monitors = open_monitors(settings.monitors, Path(settings.out), asdict(settings), first_step, say, online)
        for monitor in monitors:
            until_the_end.callback(monitor.close)
        yield _that_looks(run, monitors)


def performed(
    run: "Session", training: "Training", first_step: int, on_step: "Callable[[Metrics], None]"
) -> "tuple[Timeline, list[float]]":
    """Train to the end: the timeline, and the seconds of each step after the warm-up, on the clock of the plan's machine."""
    from .trainer import scaled

    timeline, times_s = training.run(first_step, run.n_steps, on_step)
    if run.scale == 1.0:
        return timeline, times_s
    timeline = scaled(timeline, run.scale)
    training.keep_timeline(timeline)
    return timeline, [t / run.scale for t in times_s]


def late_fraction(run: "Session") -> float:
    """Of the ops of an emulated run: those whose real work took this computer longer than they were to last."""
    machine: EmulatedMachine | Any = run.training.machine
    return machine.n_real_work_binds / max(machine.n_performed, 1) if run.device == "emulated" else 0.0


def lacks_evaluation(run: "Session", first_step: int) -> bool:
    """Whether a run that has trained all its steps has yet to look at what came of them."""
    return _that_looks(run, ()).lacks_evaluation(first_step, run.n_steps)


def _that_looks(run: "Session", monitors: "tuple[Monitor, ...]") -> "Training":
    return replace(run.training, monitors=monitors, looks=_looks(run, monitors), evaluate_every=run.settings.evaluation.every)


def _looks(run: "Session", monitors: "tuple[Monitor, ...]") -> "tuple[Look, ...]":
    """What is done every `evaluation.every` steps, while all lanes are idle."""
    from .evaluation import Evaluator
    from .trainer import Look

    asked, machine, looks = run.settings.evaluation, run.training.store, list[Look]()
    compares = _compares(run)
    if (held_out := run.held_out) is not None:
        n_sequences = min(asked.max_sequences, held_out.n_steps or asked.max_sequences)
        evaluator = Evaluator(machine, held_out, n_sequences, run.training.stop)

        def evaluate(step: int) -> None:
            found = evaluator.run()
            with machine.compute.templates.without_adapters():
                base = evaluator.run() if compares else None
            _show_evaluation(run, step, found, base, monitors)

        looks.append(Look("metrics.jsonl", "eval_loss", evaluate, asked.first))
    if (prompts := run.prompts) is not None:
        looks.append(Look("samples.jsonl", "prompt", lambda step: _show_samples(run, machine, prompts, step, monitors)))
    return tuple(looks)


def _compares(run: "Session") -> bool:
    """Whether what an adapter does is shown beside what the model does without it."""
    return run.settings.evaluation.base and run.plan.semantics.train.lora is not None


def _show_evaluation(
    run: "Session", step: int, found: "Evaluated", base: "Evaluated | None", monitors: "tuple[Monitor, ...]"
) -> None:
    from runtime.executor import say

    from .log import add_lines

    values = {
        "eval_loss": found.loss,
        "eval_perplexity": found.perplexity,
        "eval_tokens": found.n_tokens,
        "eval_s": found.seconds,
    } | ({} if base is None else {"base_eval_loss": base.loss})
    add_lines(run.training.folder / "metrics.jsonl", [{"step": step} | values], say, run.training.stop)
    for monitor in monitors:
        monitor.log(step, values)
    when = f"after step {step}" if step else "before the first step"
    say(
        f"evaluation {when}: loss {found.loss:.4f}  perplexity {found.perplexity:.4g}  {found.n_tokens:,} tokens  "
        f"{show_seconds(found.seconds)}" + ("" if base is None else f"  without the adapter: loss {base.loss:.4f}")
    )


def _show_samples(run: "Session", machine: "TorchMachine", prompts: "Prompts", step: int, monitors: "tuple[Monitor, ...]") -> None:
    from runtime.executor import say

    from .generation import samples
    from .log import add_lines

    asked = run.settings.evaluation
    of_model, said = (prompts.texts, prompts.encode, prompts.decode), (asked.max_new_tokens, asked.temperature, asked.top_p)
    rest = run.settings.seed, prompts.end_ids, run.training.stop
    found = samples(machine, *of_model, *said, *rest)
    lines = [{"step": step, "prompt": s.prompt, "text": s.text} for s in found]
    if _compares(run):
        with machine.compute.templates.without_adapters():
            base = samples(machine, *of_model, *said, *rest)
        lines = [line | {"base_text": s.text} for line, s in zip(lines, base, strict=True)]
    add_lines(run.training.folder / "samples.jsonl", lines, say, run.training.stop)
    for number, sample in enumerate(found):
        for monitor in monitors:
            monitor.text(step, f"samples/{number}", f"{sample.prompt}\n\n{sample.text}")
        asked_words, said_words = (json.dumps(text, ensure_ascii=False) for text in (sample.prompt, sample.text))
        say(f"sample after step {step}: {on_one_line(asked_words, SHOWN_PROMPT)} > {on_one_line(said_words, SHOWN_ANSWER)}")
