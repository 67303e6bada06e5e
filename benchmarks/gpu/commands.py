"""Stages that run the project's own commands on the GPU machine: plan, probe, tests.

Planning needs no torch, so plans for a GPU can be made on another machine.
"""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from penstock.runtime.errors import PenstockError
from penstock.runtime.plan import PlanFile
from penstock.runtime.units import parse_bytes, show_bytes, show_seconds

from .stages import ROOT, TINY_CONFIG, Case, Note, Request

CLI = (sys.executable, "-m", "penstock")
HOST_SHARE = 0.92  # of the system's memory: default to plan for
MOST_FAILURES = 20
ENDED_S = 25.0  # before its limit, a stage of tests is interrupted
TESTS = (
    "tests/runtime/test_on_a_gpu.py", "tests/hwprofiles/test_cuda_device.py", "tests/runtime/test_cuda_machine.py",
    "tests/runtime/test_packed_weights.py", "tests/runtime/test_device_norms.py",
)  # fmt: skip
TESTS_OF_KERNELS = (*TESTS[3:], "tests/runtime/test_kernels.py", "tests/runtime/test_cross_entropy.py")


class CommandError(RuntimeError):
    """A failed command of the project, with its last line."""


# -- plans ----------------------------------------------------------------------------------------------------------------


def prepare(request: Request) -> int:
    """Make the plans of every training stage for the named machine, and print their requirements."""
    if request.machine is None or request.host_memory is None:
        print("error: name the machine to plan for, and its host memory: --machine h100-sxm --host-memory 118GB", file=sys.stderr)
        return 2
    n_failed = 0
    for name, case in request.sizes.cases.items():
        try:
            path = make_plan(request, name, case, request.machine, request.plans / f"{name}.plan.json")
            command(["check", str(path)])
        except (CommandError, PenstockError) as error:
            print(f"{name}: {error}")
            n_failed += 1
            continue
        prediction = claim_of(path)["prediction"]
        needs = f"device {show_bytes(prediction['device_peak_bytes'])}, host {show_bytes(prediction['host_peak_bytes'])}"
        print(f"{name}: {show_seconds(prediction['step_s'])} a step predicted on {request.machine}; {needs}", flush=True)
    return 1 if n_failed else 0


def plan_of(request: Request, note: Note) -> Path:
    """Return the plan of the stage: for the probed machine if requested, otherwise the prepared one, otherwise one for the named
    machine. Raises without any of the three, because a plan for another machine predicts nothing."""
    carried = request.plans / f"{request.stage}.plan.json"
    if request.case.is_probed and request.profile.exists():
        try:
            return make_plan(
                request, request.stage, request.case, str(request.profile), request.plans / f"{request.stage}.probed.plan.json"
            )
        except (CommandError, PenstockError) as error:
            note("failed", case="planned with the profile probed here", said=str(error))
    if carried.exists():
        return carried
    if request.machine is None:
        raise CommandError(
            f"{carried} was not carried and no machine is named with --machine, and another machine's plan would predict nothing"
        )
    return make_plan(request, request.stage, request.case, request.machine, carried)


def make_plan(request: Request, name: str, case: Case, machine: str, path: Path) -> Path:
    words = ["plan", str(model_of(request, name, case)), "--machine", machine, "--seq-len", str(request.sizes.seq_len)]
    words += ["--batch-size", str(case.batch_size), *request.sizes.plan_words, *case.plan_words]
    if not request.tiny:
        words += ["--host-memory", f"{host_bytes(request)}B"]
    if request.device_memory is not None and machine != str(request.profile):  # a probed profile contains it
        words += ["--device-memory", request.device_memory]
    output = command([*words, "-o", str(path)])
    if request.stage:
        print(output, flush=True)  # to the stage's log
    return path


def claim_of(path: Path) -> dict[str, Any]:
    claim = PlanFile.read(path).claim
    assert claim is not None, f"{path} claims nothing"
    return claim


def model_of(request: Request, name: str, case: Case) -> Path:
    """Write the model of a case, with its number of layers."""
    from penstock.planner.model.workload import read_model

    config = dict(read_model(str(request.home / request.sizes.model) if request.tiny else case.model or request.sizes.model).config)
    path = request.plans / f"{name}.model.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config | ({} if case.n_layers is None else {"num_hidden_layers": case.n_layers})))
    return path


def host_bytes(request: Request) -> int:
    """Return --host-memory, or most of the system's memory. Free memory is a poor measure because it may grow on demand."""
    if request.host_memory is not None:
        return parse_bytes(request.host_memory)
    return int(HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def command(words: list[str]) -> str:
    """Run a `penstock` command in this process, without installation. Return its output."""
    from penstock.cli.main import cli

    out, err, code = StringIO(), StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli(words)
        except SystemExit as end:
            code = int(end.code or 0)
    if code:
        raise CommandError((err.getvalue().strip().splitlines() or [f"exit code {code}"])[-1])
    return out.getvalue()


# -- stages ---------------------------------------------------------------------------------------------------------------


def probe(request: Request, note: Note) -> None:
    """Run a quick probe. The profile is returned with the results, and later stages plan with it."""
    words = ["probe", "--device", request.device, "--quick", "-o", str(request.profile)]
    if request.host_memory is not None and "--host-memory" in command(["probe", "--help"]):
        words += ["--host-memory", request.host_memory]
    subprocess.run([*CLI, *words], cwd=ROOT, check=True)
    note("measured", profile=request.profile.name, n_bytes=request.profile.stat().st_size)


@dataclass(frozen=True, slots=True)
class Resumed:
    """A small run: arguments for `plan` and `run`, data, and True if a reference file is written first."""

    data: str
    plan_words: tuple[str, ...] = ()
    run_words: tuple[str, ...] = ()
    refers: bool = False


CHATS = [{"prompt": f"How much is {n} and {n}? ", "chosen": f"It is {2 * n}.", "rejected": f"No idea, {n}?"} for n in range(24)]
RESUMED = {
    "resumed": Resumed("To be, or not to be, that is the question. " * 200),
    "resumed-lion": Resumed(
        "To be, or not to be, that is the question. " * 200,
        ("--optimizer", "lion:moments=bf16,master=bf16"),
        ("--packing", "joined"),
    ),
    "resumed-pairs": Resumed(
        "".join(json.dumps(row) + "\n" for row in CHATS),
        ("--loss", "dpo:beta=0.1", "--optimizer", "adamw:moments=bf16"),
        refers=True,
    ),
}


def resumed(request: Request, note: Note) -> None:
    """Plan and train a small model by command, once uninterrupted and once resumed. Both must write equal bytes."""
    case = RESUMED[request.stage]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "model").mkdir()
        (home / "model" / "config.json").write_text(json.dumps(TINY_CONFIG | {"num_hidden_layers": 3}))
        data = home / ("data.jsonl" if case.data.startswith("{") else "data.txt")
        data.write_text(case.data)
        plan, machine = home / "plan.json", request.machine or "h100-sxm"
        sizes = ["--seq-len", "32", "--batch-size", "4", "--micro-batch", "2", "--loss-tile-tokens", "16"]
        command(["plan", str(home / "model"), "--machine", machine, "--deterministic", *sizes, *case.plan_words, "-o", str(plan)])
        of_run = [str(plan), "--data", str(data), "--device", request.device, "--tokenizer", "bytes", *case.run_words]
        of_run += ["--deterministic"] * (request.device == "cuda")
        for out, n_steps, *words in (("whole", 6, "--from-scratch"), ("cut", 3, "--from-scratch"), ("cut", 6, "--resume")):
            began_s = time.perf_counter()
            of_this = [*of_run, "--out", str(home / out), "--steps", str(n_steps), "--lr", "1e-3", *words]
            subprocess.run([*CLI, "run", *of_this], cwd=ROOT, check=True)
            note("ran", out=out, n_steps=n_steps, seconds=time.perf_counter() - began_s)
        files = sorted((home / "whole" / "checkpoint-6").glob("*.safetensors"))
        odd = [file.name for file in files if file.read_bytes() != (home / "cut" / "checkpoint-6" / file.name).read_bytes()]
        note("measured", n_files=len(files), n_different=len(odd))
        if odd or not files:
            raise CommandError(f"{len(odd)} of {len(files)} files are others after a stop, the first: {odd[:1]}")
        if case.refers:  # with the trained model, which starts equal to its reference
            _referred(request, note, home, of_run)


def _referred(request: Request, note: Note, home: Path, of_run: list[str]) -> None:
    """Check that a reference file gives the same losses as a reference made by the run."""
    of_model, losses = [*of_run, "--model", str(home / "whole" / "checkpoint-6")], {}
    subprocess.run([*CLI, "forward", *of_model, "--out", str(home / "reference.safetensors")], cwd=ROOT, check=True)
    for name in ("base", str(home / "reference.safetensors")):
        out = home / Path(name).stem
        words = [*of_model, "--out", str(out), "--steps", "2", "--lr", "1e-3", "--reference", name]
        subprocess.run([*CLI, "run", *words], cwd=ROOT, check=True)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [row["loss"] for row in rows if "loss" in row]
    note("referred", losses=list(losses.values()))
    first, again = losses.values()
    if first != again or not math.isclose(first[0], math.log(2), rel_tol=1e-6):
        raise CommandError(f"losses {first} with a reference of its own, {again} with the file; both are to begin with ln 2")


def tests(request: Request, note: Note) -> None:
    """Run all GPU tests."""
    _tested(request, note, TESTS)


def tests_of_kernels(request: Request, note: Note) -> None:
    """Run the GPU tests of kernels alone."""
    _tested(request, note, TESTS_OF_KERNELS)


def _tested(request: Request, note: Note, files: tuple[str, ...]) -> None:
    """Run the GPU tests of some files, in parallel if pytest-xdist is installed."""
    files = TESTS[1:2] if request.tiny else files
    words = [sys.executable, "-m", "pytest", "-v", "-ra", "--tb=short", "-m", "gpu", "-p", "no:cacheprovider", *files]
    n_cores = len(os.sched_getaffinity(0))
    if not request.tiny and importlib.util.find_spec("xdist"):
        # Two cores per worker, set by a plugin: otherwise the lanes of all workers are pinned to the same first cores
        words += ["-n", str(max(1, min(12, n_cores // 2))), "--maxschedchunk", "1", "-p", "benchmarks.gpu.cores"]
    if importlib.util.find_spec("pytest_timeout"):
        words += ["--timeout", str(int(request.stage_limit_s * 0.8))]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        process = subprocess.Popen([*words, f"--junitxml={report}"], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(1.0, request.stage_limit_s - ENDED_S))
        if process.poll() is None:  # an interrupt still reports the failures
            process.send_signal(signal.SIGINT)
            process.wait()
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = {f"{c.get('classname')}::{c.get('name')}": bad for c in cases for bad in (*c.findall("failure"), *c.findall("error"))}
    for name, bad in list(failed.items())[:MOST_FAILURES]:
        note("failed", case=name, said=(bad.get("message") or "").partition("\n")[0][:300])
    n_skipped = sum(case.find("skipped") is not None for case in cases)
    note("measured", n_tests=len(cases), n_failed=len(failed), n_skipped=n_skipped, exit_code=process.returncode)
    if process.returncode:
        raise CommandError(f"{len(failed)} of {len(cases)} tests failed (exit code {process.returncode})")
