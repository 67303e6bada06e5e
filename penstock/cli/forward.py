"""`penstock forward` and `penstock chat`: log-probabilities of data, and conversations, by streamed forward passes."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from penstock.run_config import RunRequest, read_run
from penstock.runtime.errors import DataError
from penstock.runtime.executor import Stop
from penstock.runtime.plan import PlanFile
from penstock.runtime.plan.packed import Base
from penstock.runtime.plan.policy import COMPUTES
from penstock.runtime.units import on_one_line, show_bytes
from penstock.signals import handled

from .options import COUNT, PATH, RunCommand, flag_of, given_settings, together
from .outputs import check_output
from .progress import Preparing

if TYPE_CHECKING:
    from penstock.chat.conversation import Answer, Conversation

_FLAGS = ("data.path", "data.format", "data.columns", "data.split", "data.bad_rows", "evaluation.data", "model", "from_scratch")
with_flags = together(*map(flag_of, (*_FLAGS, "data.images", "adapter", "packed", "tokenizer", "seed", "device", "deterministic")))


@click.command(cls=RunCommand)
@click.argument("plan_file", metavar="PLAN", type=PATH)
@click.option("--config", type=PATH, help="YAML or TOML file of a run's settings; flags override it.")
@with_flags
@click.option("--tower", "of_images", is_flag=True, help="Write the features of images instead, for the --tower of a run.")
@click.option("--out", "output", required=True, type=click.Path(path_type=Path), help="The file to write; with --tower a folder.")
def forward(plan_file: Path, config: Path | None, of_images: bool, output: Path, **flags: Any) -> None:
    """Write the log-probability of each answer of --data and --eval-data under the model of PLAN, with the adapter in --adapter if
    given. If the plan's loss is distill, write its most likely tokens at each position.

    The weights stream through device memory once, or a few times, in no more memory than training takes. `penstock run --reference
    FILE` reads the file. It rejects a file of other data, template or length, and a reference with other weights, precision or
    kernels. With --tower, the features of the data's images under the frozen vision tower are written into the folder --out.
    """
    if not of_images:
        check_output(output)
    options = given_settings(flags) | {"plan": str(plan_file), "out": f"{output}.work"}
    options |= {"tower": str(output)} if of_images else {}
    with Preparing() as report:
        request = RunRequest(read_run(config, options), PlanFile.read(plan_file), str(plan_file), report=report)
        from penstock.training.session import write_forward, write_image_features

        n = write_image_features(request) if of_images else write_forward(request, output)
    unit = "answers" if request.file.plan.semantics.objective.n_top is None else "sequences"
    content = f"features of {n:,} images" if of_images else f"log-probabilities of {n:,} {unit}"
    click.echo(f"{on_one_line(str(output))}: {content}")


# -- chat -----------------------------------------------------------------------------------------------------------------

_CHAT_FLAGS = ("adapter", "packed", "tokenizer", "data.chat_template", "seed", "device")


@click.command(cls=RunCommand)
@click.argument("model", metavar="MODEL|CHECKPOINT")
@together(*map(flag_of, _CHAT_FLAGS))
@click.option("--system", help="Text of a system message.")
@click.option("--max-new-tokens", type=COUNT, default=256, show_default=True, help="Longest answer, in tokens.")
@click.option("--context", type=COUNT, help="Longest conversation, in tokens.  [default: 4096, or the model's positions]")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0: the likeliest token.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Share of the probability to draw from.")
@click.option("--compute", type=click.Choice(COMPUTES), default="bf16", show_default=True, help="As in penstock plan.")
@click.option("--base", type=click.Choice(get_args(Base)), default="bf16", show_default=True, help="Storage of its weights.")
def chat(
    model: str, system: str | None, max_new_tokens: int, context: int | None, temperature: float, top_p: float, **flags: Any
) -> None:
    """Talk to a model, a checkpoint, or a model with --adapter, to try the result of a run.

    Weights are streamed as in training, so any model fits that can be trained. Each token streams all weights once and computes
    the whole conversation again, without a KV cache: this is slow; serve a merged model with another program. On a terminal,
    Ctrl-C ends an answer and Ctrl-D leaves. From a pipe, each line is a turn, and standard output has the answers alone.
    """
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
