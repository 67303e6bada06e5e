"""Command line of the GPU benchmark.

    python -m benchmarks.gpu --home FOLDER --host-memory 118GB            # on the GPU's machine; repeat until all is done
    python -m benchmarks.gpu --device cpu --tiny --home FOLDER            # all of it, small, without a GPU

Arguments are stages, or `first` to `sixth` for the stages of one call of ten minutes; default: all. `first` and `second` are a
visit of a quarter of an hour; every line prints the expected figure and the decision that follows. A stage is a separate process
with a time limit, and writes each result to FOLDER/results at once. Finished stages are not repeated; failed ones are retried.
"""

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from .expected import expectation, figures
from .harness import FINISHED, SKIPPED, SKIPPED_CODE, Harness, Results, go_on, say
from .packages import WheelsError, carried, missing, missing_words
from .stages import CALL_S, CALLS, PAGE, STAGES, TINY_CONFIG, TINY_MACHINE, TINY_PATIENCE, Request, SkippedError, Stage

TRACED_S = 5.0  # before the limit: dump the tracebacks of all threads to the log


def main(words: Sequence[str]) -> int:
    request, options = _parsed(words)
    if options.perform:
        return _perform(request, options.fail == request.stage)
    if request.tiny:
        request.home.mkdir(parents=True, exist_ok=True)
        (request.home / request.sizes.model).write_text(json.dumps(TINY_CONFIG))
    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        try:
            if options.wheels is not None:
                say(f"installed from {options.wheels}: {', '.join(carried(options.wheels, Path(folder))) or 'nothing was missing'}")
        except WheelsError as error:
            say(f"error: {error}")
            return 2
        for_all, for_one = missing_words(Path(folder))
        for line in [*for_all, *for_one]:
            say(line)
        if for_all:
            return 2
        stream = go_on(request.home, request.results)

        def command(stage: Stage, limit_s: float) -> list[str]:
            options = ("--perform", stage.name, "--stage-limit-s", str(limit_s))
            return [sys.executable, "-m", "benchmarks.gpu", *words, *options]

        harness = Harness(request.home, stream, command, partial(_environment, Path(folder), request))
        patience = TINY_PATIENCE if request.tiny else 1.0
        outcomes = harness.perform_all(_chosen(options.stages, patience), patience * options.limit_s)
    return 0 if {*outcomes.values()} <= {FINISHED, SKIPPED} else 1


def _environment(site: Path, request: Request, stage: Stage) -> dict[str, str]:
    """Return the environment of a stage. The allocator uses expandable segments, so that freed memory does not fragment a full
    device."""
    folder = getattr(request, stage.is_given) if stage.is_given else None
    folders = [str(site), *([str(folder)] if folder else []), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
    }


def _perform(request: Request, is_to_fail: bool) -> int:
    """Run a stage in this process."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, request.stage_limit_s - TRACED_S))
    stage = next(stage for stage in (*STAGES, PAGE) if stage.name == request.stage)
    note = partial(_noted, Results(request.results), stage.name)
    module, _, function = stage.perform.partition(":")
    try:
        if is_to_fail:
            raise RuntimeError("made to fail on purpose")
        _see_to_it(stage, request)
        getattr(import_module(f".{module}", __package__), function)(request, note)
    except SkippedError as error:
        print(error, flush=True)
        return SKIPPED_CODE
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        return 1
    return 0


def _noted(results: Results, stage: str, line: str, /, **values: object) -> None:
    """Write a line to the stream. If there is an estimate, print it and the decision next to the measured figure."""
    if (expected := expectation(stage, line, values)) is not None:
        print(f"{stage}, {line}: {figures(values)}; expected {expected.figure}; decides: {expected.decision}", flush=True)
        values = {**values, "expected": expected.figure, "decision": expected.decision}
    results.note(stage, line, **values)


def _see_to_it(stage: Stage, request: Request) -> None:
    """SkippedError if a requirement of this stage alone is missing."""
    if request.tiny and not stage.in_tiny:
        raise SkippedError("a tiny run is without it: another of its kind speaks for it")
    if names := missing(stage.needs):
        raise SkippedError(f"not installed: {', '.join(names)}")
    folder = getattr(request, stage.is_given) if stage.is_given else None
    if stage.is_given and (folder is None or not folder.is_dir()):
        raise SkippedError(f"not given: name a checkout with --{stage.is_given} FOLDER")


def _chosen(words: Sequence[str], patience: float) -> list[Stage]:
    """Return the named stages in the order of the table."""
    numbers = {CALLS[word] for word in words if word in CALLS}
    chosen = [stage for stage in STAGES if not words or stage.name in words or stage.call in numbers]
    return [replace(stage, limit_s=patience * stage.limit_s) for stage in chosen]


def _parsed(words: Sequence[str]) -> tuple[Request, argparse.Namespace]:
    names = [*CALLS, *(stage.name for stage in STAGES), PAGE.name]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(names)}")
    parser.add_argument("--home", type=Path, default=Path("gpu-benchmark"), help="plans and logs, and the results of earlier calls")
    parser.add_argument("--results", type=Path, help="the few files that must come back [HOME/results]")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that show whether it works, and nothing else")
    parser.add_argument("--machine", help="a shipped profile, for plans that are not of a probed one")
    parser.add_argument("--device-memory", metavar="SIZE", help="device memory, for those plans")
    parser.add_argument(
        "--host-memory", metavar="SIZE", help="to plan for, e.g. 118GB [92 %% of the system's memory, which may grow]"
    )
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="install missing packages from here")
    parser.add_argument("--megatrain", type=Path, metavar="FOLDER", help="a checkout of its public repository")
    parser.add_argument("--limit-s", type=float, default=CALL_S, help="limit of the whole call [%(default)s]")
    parser.add_argument("--fail", metavar="STAGE", help="this stage fails: to see that the others do not mind")
    parser.add_argument("--perform", help=argparse.SUPPRESS)
    parser.add_argument("--stage-limit-s", type=float, default=CALL_S, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if odd := {*options.stages} - {*names}:
        parser.error(f"no such stage: {', '.join(sorted(odd))}")
    home = options.home.resolve()
    request = Request(
        home, (options.results or home / "results").resolve(), options.device, options.tiny, options.machine,
        options.device_memory, options.host_memory, options.megatrain and options.megatrain.resolve(),
        options.perform or "", options.stage_limit_s,
    )  # fmt: skip
    return (replace(request, machine=TINY_MACHINE) if request.tiny and request.machine is None else request), options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
