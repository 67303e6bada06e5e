"""HTML pages of `penstock compare` and `penstock fits`: a figure, and the table that the command prints."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial
from typing import Any

from penstock.runtime.plan import Semantics
from penstock.runtime.units import GB

from .compare import COLUMNS, Candidate, notes
from .fits import Fit
from .page import rendered
from .price import JOB_TITLES
from .report_lines import Line, Table
from .schedule import counted

SCALE = (100, 300, 1000, 3000, 10000)  # tokens/s that separate the shades of cells


def compare_page(
    answer: dict[str, Any],
    ranked: Sequence[Candidate],
    n_tokens: int | None,
    semantics: Semantics,
    remarks: Sequence[str],
    created: str,
) -> str:
    """Render tokens/s against dollars, the printed table, and the reason of each missing plan. `answer`: the fields of `--json`,
    from which the script draws the figure."""
    titles = (*COLUMNS, *(JOB_TITLES if n_tokens else ()))
    table = Table(titles, tuple(entry.row(n_tokens) for entry in ranked))
    fitting = [c for c in ranked if c.speed is not None]
    refused = [(c.machine, c.refusal.in_words) for c in ranked if c.refusal is not None]
    context = {
        "is_drawn": bool(fitting),
        "refused": refused,
        "remarks": [*notes(fitting, date.today(), n_tokens), *remarks],
        "work": _work(semantics),
    }
    return rendered("compare.html", ("draw.js", "scatter.js"), answer, created, listing=table, **context)


def fits_page(
    fits: Sequence[Fit],
    titles: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    semantics: Semantics,
    remarks: Sequence[str],
    created: str,
) -> str:
    """Render a grid of families by host memory for each GPU, and the printed table."""
    has_variants, panels = len({fit.optimizer for fit in fits}) > 1, []
    for gpu in dict.fromkeys(fit.gpu for fit in fits):
        cells: dict[str, dict[tuple[int, str], Fit]] = {}
        for fit in (fit for fit in fits if fit.gpu == gpu):
            name = f"{fit.family}, {fit.optimizer}" if has_variants else fit.family
            cells.setdefault(name, {})[fit.host_memory_bytes, fit.machine] = fit
        hosts = sorted({host for by_host in cells.values() for host in by_host})
        lines = [(name, [by_host.get(host) for host in hosts]) for name, by_host in cells.items()]
        panels.append((gpu, [(f"{n_bytes / GB:g} GB", machine) for n_bytes, machine in hosts], lines))
    ends = [f"{n:,}" for n in SCALE]
    scale = [f"below {ends[0]}", *map("{} to {}".format, ends, ends[1:]), f"{ends[-1]} or more"]
    context = {"panels": panels, "scale": scale, "depth": partial(bisect, SCALE), "remarks": remarks, "work": _work(semantics)}
    is_estimate = any(fit.is_estimate for fit in fits)
    return rendered("fits.html", ("draw.js",), {}, created, listing=Table(titles, tuple(rows)), is_estimate=is_estimate, **context)


def _work(semantics: Semantics) -> Iterator[Line]:
    """Describe the job of all machines."""
    s = semantics.all_ranks
    base = f", base in {s.base}" if s.train.lora is not None else ""
    yield "step", f"{counted(s.batch_size, 'sequence')} of {s.seq_len:,} tokens: {s.tokens_per_step:,} tokens"
    yield "trained", f"{s.train}{base}" if str(s.train) != "all" else "all weights"
    yield "optimizer", f"{s.optimizer_in_words}, {s.master_dtype} master weights"
