"""Commands `machines`, `compare` and `fits`: full names on narrow terminals, equal prices in all outputs."""

import json
import re
import sys
from pathlib import Path

import pytest

from penstock.cli.fits_compare import _compared, _larger, swept
from penstock.cli.outputs import show_table
from penstock.hwprofiles.quantity import BASES
from penstock.hwprofiles.schema import read_profile, shipped_profiles
from penstock.planner.search.search import search_machine
from penstock.planner.show.compare import COLUMNS
from penstock.planner.show.fits import Fit
from penstock.planner.show.price import JOB_TITLES, hourly
from penstock.runtime.errors import PenstockError
from penstock.runtime.plan import Policy
from penstock.runtime.units import parse_count
from tests.report_cases import Page
from tests.running import one_line, penstock, succeeded

SMALL = ["qwen2.5-0.5b", "--seq-len", "512", "--batch-size", "2", "--tokens", "3M", "--usd-per-hour", "0.5", "--usd", "4000"]


def output_of(*words: object) -> str:
    return succeeded(penstock(*words)).stdout


@pytest.mark.parametrize("width", [60, 250])
def test_no_name_and_no_title_is_cut_however_narrow_the_terminal(width, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    titles, names = (*COLUMNS, *JOB_TITLES), shipped_profiles()
    show_table(titles, [(name, *("118 s to 131 s" for _ in titles[1:])) for name in names])
    printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    assert all(any(f" {name} " in f"{line} " for line in printed.splitlines()) for name in names)
    head = re.sub("[┃│:]", " ", printed.partition("┡")[0]).split()
    assert all(set(title.replace(":", "").split()) <= set(head) for title in titles)


def test_machines_are_compared_with_all_their_gpus_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.fits_compare.MOST_WORKERS", 1)
    unsearched = lambda *args: search_machine(*args[:3], Policy(), *args[4:])  # noqa: E731
    monkeypatch.setattr("penstock.planner.show.compare.search_machine", unsearched)
    words = ("compare", "qwen2.5-0.5b", "--seq-len", "512", "--batch-size", "8", "--micro-batch", "1", "--json", "--machines")
    result = penstock(*words, "8xrtx4090,rtx5090-desktop", "--host-memory", "512GB")
    assert {row["machine"] for row in json.loads(result.stdout)["machines"]} == {"8xrtx4090, 8 GPUs", "rtx5090-desktop"}
    limited = "rtx5090-desktop: has at most 253 GB of memory, and is planned with that"
    assert result.stderr.splitlines() == [limited, "planning 2 machines"]
    assert [p.name for p in _compared("a100-sxm,a100", None)] == ["a100-sxm", "a100-40gb", "a100-pcie"], "none twice"
    for args, n, name in ((["--gpus", "1", "--micro-batch", "8"], 1, "8xrtx4090"), (["--batch-size", "4"], 4, "8xrtx4090, 4 GPUs")):
        fewer = penstock(*words, "8xrtx4090", *args)
        assert [row["machine"] for row in json.loads(fewer.stdout)["machines"]] == [name]
        assert fewer.stderr == f"8xrtx4090: {n} of its 8 GPUs\n"


def test_two_profiles_of_one_name_are_refused(tmp_path: Path) -> None:
    """Rows and marks would be ambiguous. The same profile twice is one machine."""
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(read_profile("h100-sxm").to_json()))
    assert [p.name for p in _compared(f"h100-sxm,{mine}", None)] == ["h100-sxm"]
    mine.write_text(json.dumps(read_profile("h100-sxm").with_prices(usd_per_hour=1.5).to_json()))
    message = "two different profiles have the name 'h100-sxm'; change `name` in one of the files"
    one_line(penstock("compare", "qwen2.5-0.5b", "--machines", f"h100-sxm,{mine}"), 2, message)


def test_results_of_processes_come_in_the_order_of_the_tasks() -> None:
    assert [*swept(divmod, [(7, 2), (9, 4), (8, 8)], "divisions")] == [(3, 1), (2, 1), (1, 0)]


@pytest.mark.slow
def test_a_plan_costs_the_same_in_plan_compare_and_report(tmp_path: Path) -> None:
    """Prices from the command line are stored in the plan."""
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    planned = json.loads(output_of("plan", *SMALL, "--machine", "rtx4090-desktop", "-o", plan, "--json"))
    (compared,) = json.loads(output_of("compare", *SMALL, "--machines", "rtx4090-desktop", "--json"))["machines"]
    for key in ("usd_per_million_tokens", "bought_usd_per_million_tokens", "job"):
        assert planned[key] == compared[key], key
    assert compared["usd_per_million_tokens"] == pytest.approx(0.5 / 3600 / compared["tokens_per_s"] * 1e6)
    output_of("report", plan, "-o", page)
    text = page.read_text()
    assert f"rented: {compared['usd_per_million_tokens']:.3g} USD per million tokens, at 0.5 USD an hour" in text
    assert f"bought: {compared['bought_usd_per_million_tokens']:.3g} USD per million tokens" in text
    assert "penstock report" in text.split("<footer>")[1]


def test_machines_are_listed_with_the_sources_of_their_numbers() -> None:
    machines = {m["name"]: m for m in json.loads(output_of("machines", "--json"))["machines"]}
    assert list(machines) == shipped_profiles()
    assert (machines["rtx4090-desktop"]["most_host_bytes"], machines["h100-sxm"]["most_host_bytes"]) == (253 * 10**9, None)
    assert [name for name, m in machines.items() if m["numbers"]["measured"]] == ["cpu-2core", "h100-16core", "h200-16core"]
    for *fractions, worst in (m["rests_on"].values() for m in machines.values()):
        assert sum(fractions) == pytest.approx(1), "shares of all sources add up to one"
        assert all(0 < part["fraction"] <= 1 and part["basis"] != BASES[0] for part in worst)
    assert len(output_of("machines").splitlines()) == len(machines) + 1


def test_counts_of_tokens_are_read_or_refused_in_one_line() -> None:
    assert [parse_count(text) for text in ("100M", "1.5b", "250000", "2T")] == [10**8, 15 * 10**8, 250000, 2 * 10**12]
    for text in ("", "0", "-3", "1e9", "M", "9" * 40, "100 MB"):
        with pytest.raises(PenstockError, match="100M"):
            parse_count(text)


@pytest.mark.parametrize("command", [("fits", "rtx4090"), ("compare", "qwen3-8b")], ids=lambda command: command[0])
def test_a_master_and_an_optimizer_that_contradict_are_refused(command: tuple[str, ...]) -> None:
    one_line(penstock(*command, "--master", "fp32", "--optimizer", "lion:master=bf16"), 2, "leave out --master")


def test_less_state_has_a_row_where_a_larger_model_fits() -> None:
    free = hourly(read_profile("rtx4090-desktop"))
    fits = [Fit("rtx4090", "m", gb, "f", free, True, optimizer, n_params=n) for optimizer, gb, n in FITS]
    assert [(fit.optimizer, fit.host_memory_bytes) for fit in _larger(fits)] == [("a", 1), ("a", 2), ("b", 2), ("c", 1)]


# Optimizer, memory, parameters of the largest model that fits
FITS = [("a", 1, None), ("a", 2, 4), ("b", 1, None), ("b", 2, 8), ("c", 1, 3), ("c", 2, 8)]


@pytest.mark.parametrize("work", [("--train", "lora", "--base", "fp8-rows"), ()], ids=" ".join)
def test_machines_without_fp8_are_named_and_not_planned_in_bf16(work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.fits_compare.MOST_WORKERS", 1)
    in_fp8, machines = (*work, "--compute", "fp8"), ("--machines", "rtx3090-desktop,rtx4090-desktop", "--json")
    planned, refused = json.loads(output_of("compare", *SMALL, *machines, *in_fp8))["machines"]
    assert (planned["machine"], planned["fits"], refused["machine"], refused["fits"]) == (
        "rtx4090-desktop",
        True,
        "rtx3090-desktop",
        False,
    )
    reason = "the profile of NVIDIA GeForce RTX 3090 has no FP8 products"
    assert refused["reason"] == reason
    assert refused["smallest_change"] == "leave out --compute fp8" + ", and use --base int8" * bool(work)
    in_bf16 = json.loads(output_of("compare", *SMALL, *machines, *work[:2]))["machines"]
    assert planned["tokens_per_s"] not in [row["tokens_per_s"] for row in in_bf16]
    words = ("--families", "qwen2.5", "--host-memory", "64GB", "--batch-size", "1", *in_fp8)
    result = succeeded(penstock("fits", "rtx3090-desktop", "rtx4090-desktop", *words))
    assert "rtx3090-desktop: has no FP8 products, and is left out" in result.stderr.splitlines()
    assert [line.split("\t")[0] for line in result.stdout.splitlines()[1:]] == ["rtx4090-desktop"]
    one_line(penstock("fits", "rtx3090-desktop", *words), 2, "leave out --compute fp8")


@pytest.mark.parametrize("command", [("fits", "rtx4090"), ("compare", "qwen3-8b")], ids=lambda command: command[0])
def test_a_page_that_cannot_be_written_is_refused_before_the_search(command, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("penstock.cli.fits_compare.swept", None)
    for path, message in (("none/c.html", "cannot be written"), ("plan.json", "ends in .html"), (".", "is a directory")):
        one_line(penstock(*command, "--html", tmp_path / path), 2, message)
    assert [*tmp_path.iterdir()] == []


def test_a_page_replaces_a_file_and_has_the_numbers_of_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.fits_compare.MOST_WORKERS", 1)
    unsearched = lambda *args: search_machine(*args[:3], Policy(), *args[4:])  # noqa: E731
    monkeypatch.setattr("penstock.planner.show.compare.search_machine", unsearched)
    page = tmp_path / "page.html"
    page.write_text("an older page, which is longer" * 10_000)
    answer = json.loads(output_of("compare", *SMALL, "--machines", "rtx4090-desktop,h100-sxm", "--json", "--html", page))
    shown = Page(page.read_text())
    assert shown.data == answer
    assert all(f"{row['machine']} {row['tokens_per_s']:,.0f} " in shown.text for row in answer["machines"])
    printed = output_of("fits", "rtx4090", "--families", "qwen2.5", "--host-memory", "64GB", "--batch-size", "1", "--html", page)
    text = Page(page.read_text()).text
    assert printed.count("qwen2.5-3b") == 1
    assert [line for line in printed.replace("\t", " ").splitlines() if line not in text] == []
    assert [*tmp_path.iterdir()] == [page]
