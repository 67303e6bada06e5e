"""A small plan, a synthetic run of it, and the parsed page of both."""

import json
from collections import Counter
from dataclasses import asdict, replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.hwprofiles.schema import Profile
from penstock.planner.show.facts import Facts
from penstock.planner.show.page import page
from penstock.run_files import read_logged_run
from penstock.runtime.plan import PlanFile
from tests.running import penstock, succeeded
from tests.strategies import predicted

SLOWER = 1.1  # time of the synthetic run over the prediction
MODEL = ("qwen2.5-0.5b", "--machine", "rtx4090-desktop", "--micro-batch", "2", "--seq-len", "512", "--batch-size", "4")
TOKENS_PER_STEP = 2048
FOLDER = TemporaryDirectory()  # removed at exit


@cache
def planned() -> Path:
    """Write a small plan of the planner."""
    succeeded(penstock("plan", *MODEL, "-o", Path(FOLDER.name) / "plan.json"))
    return Path(FOLDER.name) / "plan.json"


@cache
def ran() -> Path:
    """Write the folder of a run of the plan: a timeline, and a log with evaluations and one nonfinite loss."""
    folder = Path(FOLDER.name) / "run"
    folder.mkdir()
    plan = PlanFile.read(planned()).plan
    prediction = predicted(plan, Profile.from_json(plan.profile))
    last = len(prediction.timeline.step_ends_s) - 1
    spans = [
        replace(s, step=n, start_s=SLOWER * (s.start_s + n * prediction.step_s), end_s=SLOWER * (s.end_s + n * prediction.step_s))
        for n in range(5)
        for s in prediction.timeline.from_step(last).spans
    ]
    (folder / "timeline.json").write_text(json.dumps({"spans": [asdict(span) for span in spans]}))
    step_s, lines = SLOWER * prediction.step_s, []
    for step in range(1, 31):
        loss = None if step == 12 else 5 / step**0.3
        of_step = {"step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-4, "tokens": TOKENS_PER_STEP, "supervised_tokens": 2000}
        lines.append(of_step | {"step_s": step_s, "tokens_per_s": TOKENS_PER_STEP / step_s, "skipped": False})
        if step % 10 == 0:
            lines.append({"step": step, "eval_loss": 5.5 / step**0.3, "eval_perplexity": 1.0, "eval_tokens": 100, "eval_s": 1.0})
    (folder / "metrics.jsonl").write_text("".join(map(line, lines)))
    return folder


@cache
def ran_elsewhere() -> Path:
    """Write the folder of the run as a CPU would leave it, ten thousand times slower than the prediction for the GPU."""
    folder = Path(FOLDER.name) / "elsewhere"
    folder.mkdir()
    spans = json.loads((ran() / "timeline.json").read_text())["spans"]
    slower = [span | {key: 10_000 * span[key] for key in ("start_s", "end_s")} for span in spans]
    (folder / "timeline.json").write_text(json.dumps({"spans": slower}))
    plan = {"device": "CPU, 2 cores <b>", "predicted_step_s": None}
    lines = [json.loads(text) for text in (ran() / "metrics.jsonl").read_text().splitlines()]
    times = [{"step_s": 10_000 * f["step_s"], "tokens_per_s": f["tokens_per_s"] / 10_000} if "lr" in f else {} for f in lines]
    (folder / "metrics.jsonl").write_text("".join(line(f | t | (plan if t else {})) for f, t in zip(lines, times, strict=True)))
    return folder


def line(fields: dict[str, object]) -> str:
    return json.dumps(fields) + "\n"


class Page(HTMLParser):
    """Parsed page: tags, attributes, scripts, styles and text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.scripts, self.styles, self.words, self.open = Counter(), set(), [], [], [], []
        self.meta, self.comments = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attributes}
        if tag in ("script", "style"):
            {"script": self.scripts, "style": self.styles}[tag].append([dict(attributes), ""])
            self.open.append(tag)
        if tag == "meta":
            self.meta.append(dict(attributes))

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, text):
        if self.open:
            {"script": self.scripts, "style": self.styles}[self.open[-1]][-1][1] += text
        else:
            self.words.append(text)

    def handle_comment(self, text):
        self.comments.append(text)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    @property
    def data(self):
        return json.loads(self.scripts[0][1])


def written(file, run=None, where="p.json"):
    return page(Facts(file, where, run), where)


def page_of(plan_file, folder=None):
    file = PlanFile.read(plan_file)
    return Page(written(file, None if folder is None else read_logged_run(folder, file.plan), plan_file.name))
