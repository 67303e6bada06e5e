"""What is looked at while a run goes on?"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .errors import CheckpointError
from .units import on_one_line, show_seconds

if TYPE_CHECKING:
    from .cli_assembly import Assembled, Prompts
    from .evaluation import Evaluated
    from .inference import ForwardMachine
    from .monitors import Monitor
    from .trainer import Training

SHOWN_PROMPT, SHOWN_ANSWER = 80, 300  # characters of a sample's line; samples.jsonl holds all


@contextmanager
def watched(run: "Assembled", first_step: int, online: bool) -> "Iterator[Training]":
    """The training with what the settings ask to see: monitors, held-out data, prompts. Monitors are closed in the end."""
    from .executor import say
    from .monitors import open_monitors

    settings, looks = run.settings, _looks(run)
    with ExitStack() as until_the_end:
        monitors = open_monitors(settings.monitors, Path(settings.out), asdict(settings), first_step, say, online)
        for monitor in monitors:
            until_the_end.callback(monitor.close)

        def evaluate(step: int) -> None:
            for look in looks:
                look(step, monitors)

        every = settings.evaluation.every
        yield replace(run.training, monitors=monitors, evaluate=evaluate if looks else None, evaluate_every=every)


Look = Callable[[int, "tuple[Monitor, ...]"], None]


def _looks(run: "Assembled") -> list[Look]:
    """What is done after every so many steps, while all lanes are idle."""
    from .evaluation import Evaluator

    asked, machine, looks = run.settings.evaluation, cast("ForwardMachine", run.training.machine), list[Look]()
    if run.held_out is not None:
        n_sequences = min(asked.max_sequences, run.held_out.n_steps or asked.max_sequences)
        evaluator = Evaluator(machine, run.held_out, n_sequences)
        looks.append(lambda step, monitors: _show_evaluation(run, step, evaluator.run(), monitors))
    if run.prompts is not None:
        looks.append(partial(_show_samples, run, machine, run.prompts))
    return looks


def _show_evaluation(run: "Assembled", step: int, found: "Evaluated", monitors: "tuple[Monitor, ...]") -> None:
    from .executor import say

    values = {
        "eval_loss": found.loss,
        "eval_perplexity": found.perplexity,
        "eval_tokens": found.n_tokens,
        "eval_s": found.seconds,
    }
    _log(run.training.folder / "metrics.jsonl", {"step": step} | values)
    for monitor in monitors:
        monitor.log(step, values)
    say(
        f"evaluation after step {step}: loss {found.loss:.4f}  perplexity {found.perplexity:.4g}  {found.n_tokens:,} tokens  "
        f"{show_seconds(found.seconds)}"
    )


def _show_samples(
    run: "Assembled", machine: "ForwardMachine", prompts: "Prompts", step: int, monitors: "tuple[Monitor, ...]"
) -> None:
    from .executor import say
    from .generation import samples

    asked = run.settings.evaluation
    found = samples(
        machine,
        prompts.texts,
        prompts.encode,
        prompts.decode,
        asked.max_new_tokens,
        asked.temperature,
        asked.top_p,
        run.settings.seed,
        prompts.end_ids,
    )
    for number, sample in enumerate(found):
        _log(run.training.folder / "samples.jsonl", {"step": step, "prompt": sample.prompt, "text": sample.text})
        for monitor in monitors:
            monitor.text(step, f"samples/{number}", f"{sample.prompt}\n\n{sample.text}")
        asked_words, said_words = (json.dumps(text, ensure_ascii=False) for text in (sample.prompt, sample.text))
        say(f"sample after step {step}: {on_one_line(asked_words, SHOWN_PROMPT)} > {on_one_line(said_words, SHOWN_ANSWER)}")


def _log(path: Path, fields: dict[str, Any]) -> None:
    """Add a line; a number that is not finite is null, as JSON knows no other way to say it."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    try:
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(plain) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written ({error.strerror}); make room, or choose another --out") from None
