"""Stages that run the project's own commands on the GPU machine: plan, probe, tests."""

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
from penstock.runtime.units import parse_bytes

from .stages import ROOT, TINY_CONFIG, Note, Request

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


def plan_of(request: Request, note: Note) -> Path:
    """Plan the stage for the probed machine if requested, otherwise for the named one. Raises without either, because a plan for
    another machine predicts nothing."""
    if request.case.is_probed and request.profile.exists():
        try:
            return make_plan(request, str(request.profile), request.plans / f"{request.stage}.probed.plan.json")
        except (CommandError, PenstockError) as error:
            note("failed", case="planned with the profile probed here", said=str(error))
    if request.machine is None:
        raise CommandError("this machine was not probed and none is named with --machine; another machine's plan predicts nothing")
    return make_plan(request, request.machine, request.plans / f"{request.stage}.plan.json")


def make_plan(request: Request, machine: str, path: Path) -> Path:
    case = request.case
    words = ["plan", str(model_of(request)), "--machine", machine, "--seq-len", str(request.sizes.seq_len)]
    words += ["--batch-size", str(case.batch_size), *request.sizes.plan_words, *case.plan_words]
    if not request.tiny:
        words += ["--host-memory", f"{host_bytes(request)}B"]
    if request.device_memory is not None and machine != str(request.profile):  # a probed profile contains it
        words += ["--device-memory", request.device_memory]
    print(command([*words, "-o", str(path)]), flush=True)  # to the stage's log
    return path


def claim_of(path: Path) -> dict[str, Any]:
    claim = PlanFile.read(path).claim
    assert claim is not None, f"{path} claims nothing"
    return claim


def model_of(request: Request) -> Path:
    """Write the model of the stage, with its number of layers."""
    from penstock.planner.model.workload import read_model

    case, model = request.case, request.sizes.model
    config = dict(read_model(str(request.home / model) if request.tiny else case.model or model).config)
    path = request.plans / f"{request.stage}.model.json"
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
PAIRS, TEXT = "".join(json.dumps(row) + "\n" for row in CHATS), "To be, or not to be, that is the question. " * 200
RESUMED = {
    "resumed": Resumed(TEXT),
    "resumed-lion": Resumed(TEXT, ("--optimizer", "lion:moments=bf16,master=bf16"), ("--packing", "joined")),
    "resumed-pairs": Resumed(PAIRS, ("--loss", "dpo:beta=0.1", "--optimizer", "adamw:moments=bf16"), refers=True),
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
