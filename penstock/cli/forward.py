"""`penstock forward` and `penstock chat`: log-probabilities of data, and conversations, by streamed forward passes."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.run_config import RunRequest, read_run
from penstock.runtime.errors import DataError
from penstock.runtime.executor import Stop
from penstock.runtime.plan import PlanFile
from penstock.runtime.units import on_one_line, show_bytes
from penstock.signals import handled

from .options import RunCommand, command, given_settings
from .outputs import check_output
from .progress import Preparing

if TYPE_CHECKING:
    from penstock.chat.conversation import Answer, Conversation


@command("forward", RunCommand)
def forward(plan_file: Path, config: Path | None, of_images: bool, output: Path, **flags: Any) -> None:
    if not of_images:
        check_output(output)
    options = given_settings(flags) | {"plan": str(plan_file), "out": f"{output}.work"}
    with Preparing() as report:
        request = RunRequest(read_run(config, options), PlanFile.read(plan_file), str(plan_file), report=report)
        from penstock.training.session import write_forward, write_image_features

        n = write_image_features(request, output) if of_images else write_forward(request, output)
    unit = "answers" if request.file.plan.semantics.objective.n_top is None else "sequences"
    content = f"features of {n:,} images" if of_images else f"log-probabilities of {n:,} {unit}"
    click.echo(f"{on_one_line(str(output))}: {content}")


# -- chat -----------------------------------------------------------------------------------------------------------------


@command("chat", RunCommand)
def chat(
    model: str, system: str | None, max_new_tokens: int, context: int | None, temperature: float, top_p: float, **flags: Any
) -> None:
    if top_p < 1 and not temperature:
        raise click.UsageError("--top-p does nothing without --temperature; add it, or leave out --top-p")
    compute, base = flags.pop("compute"), flags.pop("base")
    with Preparing() as report:
        report("importing torch")
        from penstock.chat.conversation import Conversation, Sampling
        from penstock.chat.model import load, located_model

        settings = located_model(read_run(None, given_settings(flags) | {"model": model, "data.path": model}))
        machine, tokenizer = load(settings, context, compute, base, report)
    n_bytes = sum(machine.plan.uploaded(block)[1] for block in range(len(machine.plan.workload.blocks)))
    where = on_one_line(f"{settings.model}, with the adapter {settings.adapter}" if settings.adapter else str(settings.model))
    cost = f"each token streams {show_bytes(n_bytes)} of weights to {machine.device_name() or 'this CPU'}"
    click.echo(f"{where}: {cost}, and computes the conversation again (no KV cache)", err=True)
    if not tokenizer.has_template:
        click.echo("note: the model has no chat template; a plain one is used, as in training", err=True)
    sampling = Sampling(temperature, top_p, settings.seed)
    _converse(Conversation(machine, tokenizer, system, sampling), max_new_tokens)


def _converse(conversation: "Conversation", max_new_tokens: int) -> None:
    """Answer each turn. On a terminal, an error of a turn is printed and the next turn is read."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    for text in _turns(is_terminal):
        try:
            answer = _answered(conversation, text, max_new_tokens, is_terminal)
        except DataError as error:
            if not is_terminal:
                raise
            click.echo(f"error: {error}", err=True)
            continue
        click.echo("" if is_terminal else answer.text)
        words = f"{answer.n_tokens:,} tokens, {answer.tokens_per_s:.3g} tokens/s"
        click.echo(f"({words}; {answer.cut})" if answer.cut else f"({words})", err=True)


def _answered(conversation: "Conversation", text: str, max_new_tokens: int, is_terminal: bool) -> "Answer":
    """Return the answer. A terminal shows it as it is generated, and Ctrl-C ends it."""
    if not is_terminal:
        return conversation.answer(text, max_new_tokens, lambda piece: None, Stop())
    stop = Stop()
    with handled(lambda *_: stop.request(), signal.SIGINT, once=True):
        return conversation.answer(text, max_new_tokens, lambda piece: click.echo(piece, nl=False), stop)


def _turns(is_terminal: bool) -> Iterator[str]:
    """Yield the turns of the user without empty ones, until the end of the input."""
    if is_terminal:
        import readline  # noqa: F401 (lines can be edited)

        click.echo("Ctrl-C ends an answer, Ctrl-D leaves", err=True)
    while True:
        try:
            line = f"{input('> ')}\n" if is_terminal else sys.stdin.readline() if sys.stdin else ""
        except KeyboardInterrupt:
            click.echo("\nCtrl-D leaves", err=True)
            continue
        except EOFError:
            line = ""
        if not line:
            return
        if line.strip():
            yield line.strip()
