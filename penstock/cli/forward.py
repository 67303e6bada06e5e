"""`penstock forward`: write the log-probabilities of data under a model, by a streamed forward pass in a plan's arenas."""

from pathlib import Path
from typing import Any

import click

from penstock.run_config import RunRequest, read_run
from penstock.runtime.plan import PlanFile
from penstock.runtime.units import on_one_line

from .options import PATH, RunCommand, flag_of, given_settings, together
from .outputs import check_output
from .progress import Preparing

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
    with Preparing() as report:
        request = RunRequest(read_run(config, options), PlanFile.read(plan_file), str(plan_file), report=report)
        from penstock.training.session import write_forward, write_image_features

        n = write_image_features(request, output) if of_images else write_forward(request, output)
    unit = "answers" if request.file.plan.semantics.objective.n_top is None else "sequences"
    content = f"features of {n:,} images" if of_images else f"log-probabilities of {n:,} {unit}"
    click.echo(f"{on_one_line(str(output))}: {content}")
