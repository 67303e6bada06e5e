"""Markdown page of the GPU benchmark.

The page depends on the stream of results alone, which may be incomplete, and can be made on any machine.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .expected import figures
from .harness import FINISHED, Results
from .stages import STAGES, Note, Request

Row = dict[str, Any]
PAGE_NAME = "page.md"
OUR_STAGES = tuple(stage.name for stage in STAGES if stage.perform == "training:planned")
OTHER_STAGES = tuple(stage.name for stage in STAGES if stage.perform.startswith("others:"))
NOTHING = "-"


def page(request: Request, note: Note) -> None:
    text = "\n".join(lines(Results(request.results).rows())) + "\n"
    (request.results / PAGE_NAME).write_text(text, encoding="utf-8")
    print(text)


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the page. A stage with several attempts shows its best one."""
    last = _last_attempts(rows)
    yield "# GPU benchmark of penstock"
    yield ""
    yield from _facts(last.get("facts", []))
    yield from _table("stage | how it ended | seconds | said", _outcomes(last))
    yield from _section("Expected and measured")
    yield from _table("stage | line | measured | expected | decides", _decisions(last))
    yield from _section("Predicted and measured")
    yield from _table(
        "plan | layers | sequences x tokens | predicted, s | measured, s | error | tokens/s | TFLOP/s | of the bound | "
        "device peak, planned, GB | host peak, planned, GB | steps",
        (_our_row(name, row) for name in OUR_STAGES for row in last.get(name, []) if row["what"] == "measured"),
    )
    yield "TFLOP/s are of the model's work: forward and twice that, attention's causal half, nothing that is recomputed."
    yield from _section("Other systems")
    yield from _table(
        "system | layers | sequences (micro-batch) x tokens | step, s | tokens/s | TFLOP/s | device peak, GB | host peak, GB",
        _their_rows(last),
    )
    yield "Ours, of the same layers and tokens, are `eight-layers` and `lora` above."
    yield from _section("Host and link")
    yield from _table("quantity | figures", _figure_rows(last.get("host", [])))
    yield from _section("Kernels")
    yield from _table("kernel | figures", _figure_rows(last.get("kernels", [])))


def _last_attempts(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return per stage the lines of its best attempt: the last finished one, otherwise the last."""
    attempts: dict[str, list[list[Row]]] = {}
    for row in rows:
        if row["what"] == "began":
            attempts.setdefault(row["stage"], []).append([])
        if row["stage"] in attempts:
            attempts[row["stage"]][-1].append(row)
    finished = {name: [a for a in tries if any(row.get("outcome") == FINISHED for row in a)] for name, tries in attempts.items()}
    return {name: (finished[name] or tries)[-1] for name, tries in attempts.items()}


def _facts(rows: Sequence[Row]) -> Iterator[str]:
    by_name = {row["what"]: row for row in rows}
    system, versions, torch = by_name.get("system", {}), by_name.get("versions", {}), by_name.get("torch", {})
    gpu, cores, memory = by_name.get("gpu", {}), by_name.get("cores", {}), by_name.get("memory", {})
    yield f"- date: {system.get('at', 'unknown')}"
    yield f"- command: `python -m benchmarks.gpu {' '.join(_without_own(system.get('command', [])))}`"
    yield f"- commit: {system.get('commit', 'unknown')}"
    driver, power = (gpu.get(key, NOTHING) for key in ("driver_version", "power.limit"))
    yield f"- GPU: {gpu.get('name', 'none')}, driver {driver}, power limit {power}"
    n_cores, size = cores.get("n_usable", NOTHING), _scaled(memory.get("total_bytes"), 1e9)
    yield f"- host: {n_cores} cores, {cores.get('model', 'unknown')}, {size} GB"
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "triton") if versions.get(name))
    names += "".join(f", {name} {torch.get(key) or 'none'}" for name, key in (("CUDA", "cuda"), ("cuDNN", "cudnn")))
    yield f"- versions: {names}, Python {system.get('python', 'unknown')}"
    yield ""


def _without_own(words: Sequence[str]) -> list[str]:
    """Return a stage's command without its parent's options."""
    return list(words[: words.index("--perform")] if "--perform" in words else words)


def _outcomes(last: dict[str, list[Row]]) -> Iterator[list[str]]:
    for stage in STAGES:
        ended = next((row for row in reversed(last.get(stage.name, [])) if row["what"] == "ended"), None)
        if ended is not None:
            yield [stage.name, ended["outcome"], f"{ended['seconds']:.0f}", ended["said"].replace("|", "/")]
        else:
            yield [stage.name, "cut short" if stage.name in last else "to be measured", "", ""]


def _decisions(last: dict[str, list[Row]]) -> Iterator[list[str]]:
    """Yield lines with an estimate, in the order of measurement."""
    for stage in STAGES:
        for row in last.get(stage.name, []):
            if "decision" in row:
                name = row.get("name") or row["what"]
                yield [stage.name, str(name), figures(row), row["expected"], row["decision"]]


def _our_row(name: str, row: Row) -> list[str]:
    return [
        f"{name}, {'probed here' if row['is_probed'] else row['profile']}",
        *(str(row["n_layers"]), f"{row['batch_size']} x {row['seq_len']}"),
        *(f"{row['predicted_s']:.4g}", f"{row['step_s']:.4g}", f"{row['error_fraction']:+.1%}", f"{row['tokens_per_s']:,.0f}"),
        *(_scaled(row["model_flop_per_s"], 1e12), f"{row['bound_fraction']:.0%}"),
        f"{_scaled(row['device_peak_bytes'], 1e9)}, {_scaled(row['device_planned_bytes'], 1e9)}",
        f"{_scaled(row['host_peak_bytes'], 1e9)}, {_scaled(row['host_planned_bytes'], 1e9)}",
        str(len(row["times_s"])),
    ]


def _their_rows(last: dict[str, list[Row]]) -> Iterator[list[str]]:
    """Yield the fastest batch of each system, or the reason without one."""
    for name in OTHER_STAGES:
        rows = last.get(name, [])
        system = next((row for row in rows if row["what"] == "system"), {"system": name})
        tried = [row for row in rows if row["what"] == "tried" and "step_s" in row]
        if not tried:
            ended = next((row["said"] for row in reversed(rows) if row["what"] == "ended"), "to be measured")
            yield [f"{system['system']}: {ended}".replace("|", "/"), *[NOTHING] * 7]
            continue
        best = max(tried, key=lambda row: row["tokens_per_s"])
        yield [
            f"{system['system']} (optimizer: {system['optimizer']})",
            *(str(best["n_layers"]), f"{best['batch_size']} ({best['micro_batch']}) x {best['seq_len']}"),
            *(f"{best['step_s']:.4g}", f"{best['tokens_per_s']:,.0f}", _scaled(best["model_flop_per_s"], 1e12)),
            *(_scaled(best[f"{place}_peak_bytes"], 1e9) for place in ("device", "host")),
        ]


def _figure_rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield every line with figures, and failures."""
    for row in rows:
        if row["what"] == "failed":
            yield [str(row["case"]), str(row["said"]).replace("|", "/")]
        elif row["what"] not in ("began", "ended") and (text := figures(row)):
            yield [", ".join(filter(None, (row["what"], row.get("name")))), text]


def _scaled(value: float | None, scale: float) -> str:
    return NOTHING if value is None else f"{value / scale:.3g}"


def _section(title: str) -> tuple[str, ...]:
    return ("", f"## {title}", "")


def _table(head: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {head} |"
    yield "|" + "---|" * (head.count("|") + 1)
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""
