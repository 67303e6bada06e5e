"""Results of planning and training, with HTML views for notebooks."""

from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from penstock.hwprofiles.schema import Profile
from penstock.planner.search.claim import Certificate
from penstock.runtime.plan import Plan, PlanFile
from penstock.runtime.plan.timeline import Timeline
from penstock.runtime.units import on_one_line, show_seconds

from .run_config import PLAN_FILE

if TYPE_CHECKING:
    from penstock.planner.search.result import SearchResult
    from penstock.planner.show.run_log import LoggedRun

    from .training.trainer import Metrics

PAGE_PIXELS = 900  # height of a report in a notebook


@dataclass(frozen=True, slots=True, repr=False)
class Planned:
    """A plan with its prediction and certificate. `print` shows the output of `penstock plan`; a notebook shows the report."""

    answer: "SearchResult"
    profile: Profile

    @property
    def plan(self) -> Plan:
        return self.answer.plan

    @property
    def step_s(self) -> float:
        """Predicted seconds per step."""
        return self.answer.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.plan.semantics.tokens_per_step / self.step_s

    @property
    def certificate(self) -> Certificate:
        """Lower bounds on the step time of any schedule, and the plan's gap to them."""
        return self.answer.certificate

    @property
    def file(self) -> PlanFile:
        return PlanFile(self.plan, self.answer.claim.to_json())

    def save(self, path: str | Path) -> Path:
        """Write the plan and its claim, for `penstock check`, `report` and `run`."""
        self.file.write(Path(path))
        return Path(path)

    def __repr__(self) -> str:
        name = f"{self.plan.model.name or self.plan.model.path} on {self.profile.name}"
        return f"Planned({on_one_line(name)}: {show_seconds(self.step_s)} a step, {self.tokens_per_s:,.0f} tokens/s)"

    def __str__(self) -> str:
        from penstock.planner.show.facts import Facts
        from penstock.planner.show.text import print_plan

        text = StringIO()
        print_plan(Facts(self.file, "the plan", answer=self.answer), Console(file=text))
        return text.getvalue().rstrip()

    def _repr_html_(self) -> str:
        return _framed(_page(self.file, self.plan.model.name or "plan"))


@dataclass(frozen=True, slots=True)
class Trained:
    """The folder, metrics and timeline of a run."""

    folder: Path  # metrics.jsonl, timeline.json, checkpoint-N/
    n_done: int  # total steps, including those before a resume
    metrics: "tuple[Metrics, ...]"  # one for each step of this call
    timeline: Timeline  # ops of the last step; an emulated run has times of the plan's machine
    late_fraction: float = 0.0  # emulated run: share of ops that took longer on this computer than on the plan's machine

    @property
    def checkpoint(self) -> Path:
        """Folder of the last checkpoint. transformers loads it."""
        return self.folder / f"checkpoint-{self.n_done}"

    @property
    def best(self) -> Path | None:
        """Folder of the best checkpoint by `evaluation.best`; None if none was kept."""
        from .checkpoint.best import read_best

        best = read_best(self.folder)
        return None if best is None else self.folder / f"checkpoint-{best.step}"

    def page(self) -> str:
        """Return the page of `penstock report`, predicted and measured: one HTML file that needs no network."""
        from .run_files import read_logged_run

        file = PlanFile.read(self.folder / PLAN_FILE)
        return _page(file, self.folder.name, read_logged_run(self.folder, file.plan))

    def _repr_html_(self) -> str:
        return _framed(self.page())


def _page(file: PlanFile, where: str, run: "LoggedRun | None" = None) -> str:
    from penstock.planner.show.facts import Facts
    from penstock.planner.show.page import page

    return page(Facts(file, where, run), where)


def _framed(page: str) -> str:
    return f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" width="100%" height="{PAGE_PIXELS}"></iframe>'
