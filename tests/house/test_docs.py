"""Doctest of user pages: run all commands of a page in one folder, and compare outputs; `...` on a page matches any text."""

import doctest
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import cli
from penstock.planner.search.search import search_machine
from tests.chats import write_talker
from tests.lanes import mostly_slow
from tests.real_layers import hf_model
from tests.seers import write_drawings, write_seer
from tests.tiny import tiny_config
from tests.tour import ROOT

PAGES = ("which-machine.md", "fine-tune-32b.md", "change-the-planner.md", "adapters.md", "losses.md")
PAGES += ("quickstart.md", "../README.md", "sft-then-dpo.md", "fp8.md", "images.md")
_WHOLE_PAGES = [pytest.param(page, slice(None), id=page) for page in PAGES]
ANSWERS: dict[str, Any] = {}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def commands(text: str) -> list[tuple[str, str]]:
    """Return (command, shown output) of every command in a page's console blocks."""
    rows: list[tuple[str, str]] = []
    for language, block in _BLOCK.findall(text):
        if language != "console":
            continue
        for line in block.splitlines(keepends=True):
            if line.startswith("$ "):
                rows.append((line[2:].strip(), ""))
            else:
                rows[-1] = (rows[-1][0], rows[-1][1] + line)
    return rows


def files(text: str) -> list[tuple[str, str]]:
    """Return (name, content) of every file on a page: a block that begins with a comment with the name, e.g. `# run.yaml`."""
    kinds = ("yaml", "json", "python")
    blocks = (block.partition("\n") for language, block in _BLOCK.findall(text) if language in kinds)
    return [(first.removeprefix("# ").strip(), rest) for first, _, rest in blocks if first.startswith("# ")]


def is_shown(expected: str, printed: str) -> bool:
    """True if the page's output matches the printed one, or is empty."""
    return not expected or doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)


def perform(command: str, folder: Path) -> str:
    """Run a command, which may fail before `|| true`, and return its output. `penstock` runs in this process, others in a shell."""
    words = command.removesuffix(" || true")
    if words.startswith("penstock ") and "|" not in words:
        output = StringIO()
        with chdir(folder), redirect_stdout(output), redirect_stderr(output), pytest.raises(SystemExit) as ended:
            cli(shlex.split(words)[1:])
        assert words != command or not ended.value.code, f"$ {command}\n{output.getvalue()}"
        return output.getvalue()
    room = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "HF_HOME": str(folder / "cache")}
    result = subprocess.run(
        ["bash", "-ec", command.replace("PROJECT", str(ROOT)).replace("pytest -q", "pytest -q --collect-only")],
        cwd=folder,
        env=os.environ | room,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert result.returncode == 0, f"$ {command}\n{result.stdout}"
    return result.stdout


def answer(*arguments: Any) -> Any:
    """Memoised `search_machine`, because commands of a page repeat a search with another output."""
    if (key := repr(arguments)) not in ANSWERS:
        ANSWERS[key] = search_machine(*arguments)
    return ANSWERS[key]


def what_readers_have(folder: Path) -> None:
    """Write the files that readers are assumed to have: models (tiny here), chats, published runs."""
    config = tiny_config("qwen2", vocab_size=write_talker(folder / "my-32b", "chatml"))
    hf_model(config).save_pretrained(folder / "my-32b")
    shutil.copytree(folder / "my-32b", folder / "Qwen3-14B")
    hf_model(config | {"num_hidden_layers": 1 + config["num_hidden_layers"]}).save_pretrained(folder / "my-70b")
    write_talker(folder / "my-70b", "chatml")
    turns = [("What is a penstock?", "The pipe that feeds a turbine."), ("And the reservoir?", "Host memory.")]
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns * 40]
    for name, part in (("chats.jsonl", rows[:72]), ("held-out.jsonl", rows[72:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    shutil.copy(ROOT / "benchmarks" / "published_runs.json", folder)
    write_seer(folder / "my-vlm", "qwen2_5_vl")
    write_drawings(folder / "drawings", 12)
    write_drawings(folder / "drawings", 3, "held-out.jsonl", first=20)


@mostly_slow(("page", "part"), [pytest.param(PAGES[2], slice(3, 6), id="by hand"), *_WHOLE_PAGES])
def test_every_command_of_a_page_prints_what_the_page_shows(page, part, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "132")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("penstock.planner.search.search.search_machine", answer)
    what_readers_have(tmp_path)
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name, content in files(text):
        (tmp_path / name).write_text(content)
    assert commands(text)
    for command, expected in commands(text)[part]:
        printed = perform(command, tmp_path)
        assert is_shown(expected, printed), f"$ {command}\n--- the page shows\n{expected}\n--- it prints\n{printed}"


def test_a_page_that_shows_something_else_is_seen(tmp_path: Path) -> None:
    page = "text\n```console\n$ echo one\none\n$ true\n```\n```python\n$ echo no\n```\n"
    assert commands(page) == [("echo one", "one\n"), ("true", "")]
    assert is_shown("one ... three\n...\n", "one two three\nfour\n")
    assert not is_shown("one\n...\nfour\n", "one\nthree\n")
    with pytest.raises(AssertionError, match="exit 3"):
        perform("echo it ends; exit 3", tmp_path)


def test_every_term_of_the_glossary_is_used_on_a_page() -> None:
    """Terms of the field, in italics in the right column of the glossary, must occur on a page."""
    glossary = ROOT / "docs" / "glossary.md"
    lines = (line for line in glossary.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and " | " in line)
    terms = {term.lower() for line in lines for term in re.findall(r"\*([^*]+)\*", line.split(" | ", 1)[1])}
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page != glossary)]
    text = " ".join(" ".join(page.read_text(encoding="utf-8") for page in pages).lower().split())
    assert len(terms) > 10
    assert [term for term in sorted(terms) if term not in text] == []
