"""Replanning: search for a faster plan with the measured ratios of a run, in another process during its steps.

`python -m penstock.replanning FOLDER` reads the plan and the ratios in the folder of a run. It writes a plan with enough predicted
gain to REPLAN_FILE there, and prints both predictions.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

from penstock.checkpoint.disk import writing
from penstock.hwprofiles.schema import Profile
from penstock.planner.predict.abridged import WARM_UP_STEPS
from penstock.planner.predict.cost import costs, region_of
from penstock.planner.predict.simulate import simulate
from penstock.planner.search.claim import claimed
from penstock.planner.search.search import search
from penstock.planner.show.schedule import clauses
from penstock.run_config import PLAN_FILE, Replaced, RunRequest
from penstock.run_files import MEASURED_FILE, policy_fields, read_measured, write_measured
from penstock.runtime.errors import CheckpointError, DoesNotFitError, PenstockError
from penstock.runtime.plan import Plan, PlanFile
from penstock.runtime.plan.timeline import Span, Timeline
from penstock.runtime.units import on_one_line, show_seconds

REPLAN_FILE = "replan.json"
LEAST_GAIN_FRACTION = 0.02
LOWEST_PRIORITY = 19
MOST_SPANS = 2**16  # in memory; the last ones count
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl: the signal to this process when its parent ends


def described(replaced: Replaced, plan: Plan, step: int, measured_s: float) -> str:
    """Describe both plans, and the predicted and the measured gain. `step`: the last one under the former plan."""
    old, new = clauses(replaced.policy, plan), clauses(plan.policy, plan)
    topics = [topic for topic in dict.fromkeys([*old, *new]) if old.get(topic) != new.get(topic)]
    changes = "; ".join(f"{old.get(topic, 'nothing')} -> {new.get(topic, 'nothing')}" for topic in topics)
    predicted, measured = _compared(replaced.former_s, replaced.step_s), _compared(replaced.measured_s, measured_s)
    return f"replanned after step {step}: {changes or 'other blocks'}; predicted {predicted}; measured {measured}"


def _compared(before_s: float, after_s: float) -> str:
    return f"{show_seconds(before_s)} -> {show_seconds(after_s)} a step ({after_s / before_s - 1:+.1%})"


class Replanning:
    """Measured steps of a run and, with the setting `replan`, its search. Leaving the context ends the search.

    A process replans once. After that, the line on both plans is printed after N more settled steps.
    """

    def __init__(self, request: RunRequest, first_step: int, is_comparable: bool, say: Callable[[str], None]) -> None:
        """`is_comparable`: the run is on the kind of machine of its plan; otherwise nothing is measured."""
        self._request, self._folder, self._first_step, self._say = request, Path(request.settings.out), first_step, say
        self._n_wanted, self._is_comparable = request.settings.replan, is_comparable
        self._is_waiting = self._n_wanted is not None and request.replaced is None and is_comparable
        if self._n_wanted is not None and not is_comparable:
            say("--replan has no effect: the plan was made for another kind of machine, and predicts no time here")
        self._began = first_step  # step at which the lanes began to run
        self._spans, self._times_s = deque[Span](maxlen=MOST_SPANS), list[float]()  # of settled steps
        self._process: subprocess.Popen[str] | None = None
        self._found: tuple[PlanFile, float, float] | None = None  # the new plan, predicted seconds of a step before and with it

    def __enter__(self) -> "Replanning":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = self._found = None
        with suppress(OSError):
            (self._folder / REPLAN_FILE).unlink(missing_ok=True)

    def begins(self, n_done: int) -> int | None:
        """Note the start of the lanes. Return the step of their pause for the start of the search, if any."""
        self._began = n_done
        return n_done + WARM_UP_STEPS + (self._n_wanted or 0) - len(self._times_s) if self._is_waiting else None

    def logged(self, step: int, step_s: float) -> None:
        if step <= self._began + WARM_UP_STEPS:
            return
        self._times_s.append(step_s)
        if (replaced := self._request.replaced) is not None and len(self._times_s) == self._n_wanted:
            self._say(described(replaced, self._request.file.plan, self._first_step, median(self._times_s)))

    def paused(self, timeline: Timeline) -> None:
        """Add the timeline since `begins`, and start the search if enough steps have settled."""
        self._spans += timeline.from_step(self._began + WARM_UP_STEPS).spans if self._is_comparable else ()
        if self._is_waiting and len(self._times_s) >= (self._n_wanted or 0):
            self._is_waiting = False
            self.store()
            command = [sys.executable, "-m", "penstock.replanning", str(self._folder)]
            silent, pipe, environment = subprocess.DEVNULL, subprocess.PIPE, os.environ | {"OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, stdin=silent, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env=environment
            )

    def store(self) -> None:
        """Write the measured ratios, if any. A disk error is not fatal."""
        if not self._spans:
            return
        try:
            with writing(self._folder / MEASURED_FILE):
                write_measured(self._folder, self._request.file.plan, Timeline(tuple(self._spans)))
        except CheckpointError as error:
            self._say(str(error))

    def finds(self) -> bool:
        """Return True if the search has found a plan with enough predicted gain."""
        if self._process is None or (code := self._process.poll()) is None:
            return self._found is not None
        output, errors = self._process.communicate()
        self._process = None
        try:
            if code != 0:
                raise ValueError((errors.strip().splitlines() or [f"exit code {code}"])[-1])
            seconds = json.loads(output.splitlines()[-1])
            former_s, step_s = float(seconds["former_s"]), float(seconds["step_s"])
            if step_s <= (1 - LEAST_GAIN_FRACTION) * former_s:
                self._found = PlanFile.read(self._folder / REPLAN_FILE), former_s, step_s
            else:
                self._say(f"replanning: {_compared(former_s, step_s)} by the measured times; the run keeps its plan")
        except (ValueError, IndexError, KeyError, TypeError, PenstockError) as error:
            self._say(f"replanning: {on_one_line(str(error), 200)}; the run keeps its plan")
        return self._found is not None

    def following(self, fits: Callable[[Plan], None]) -> RunRequest | None:
        """Return the request to resume with the plan of the search; None without one, or if `fits` raises DoesNotFitError."""
        if self._found is None:
            return None
        (file, former_s, step_s), self._found = self._found, None
        plan = self._request.file.plan
        try:
            fits(file.plan)
        except DoesNotFitError as error:
            self._say(f"replanning: {error}; the run keeps its plan")
            return None
        began = policy_fields(plan) if self._request.replanned is None else self._request.replanned["former"]
        return replace(
            self._request,
            file=file,
            where=f"{self._folder / PLAN_FILE}",
            resume=True,
            resume_from=None,
            replaced=Replaced(plan.policy, former_s, step_s, median(self._times_s[: self._n_wanted])),
            replanned={"former": began, "policy": policy_fields(file.plan)},
        )


def main(folder: Path) -> None:
    """Search with the measured ratios of the run in the folder. The semantics stay."""
    with suppress(OSError, AttributeError):  # other systems than Linux
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGKILL))
        os.nice(LOWEST_PRIORITY)
    file = PlanFile.read(folder / PLAN_FILE)
    plan, semantics = file.plan, file.plan.semantics
    profile = read_measured(folder).scaled(Profile.from_json(plan.profile, "the plan's profile"), plan.model, semantics, folder)
    former_s = simulate(plan, costs(plan, profile), region_of(profile)).step_s
    often = None if file.claim is None else claimed(file.claim, str(folder)).certificate.clipped_fraction
    result = search(plan.model, [(semantics, plan.workload)], profile, clipped_fraction=often)
    if result.step_s <= (1 - LEAST_GAIN_FRACTION) * former_s:
        PlanFile(result.plan, result.claim.to_json()).write(folder / REPLAN_FILE)
    print(json.dumps({"former_s": former_s, "step_s": result.step_s}))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except PenstockError as failure:
        sys.exit(on_one_line(str(failure)))
