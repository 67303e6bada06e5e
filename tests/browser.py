"""Headless Chromium: run a script in a page, and take screenshots.

`python -m tests.browser report.html docs/report.png '#waterfall'` captures the page from its top to the start of that
element; without one, the whole page.
"""

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
FLAGS += ("--virtual-time-budget=5000",)
WIDTH = 1240
PATIENCE_S = 120  # a busy machine starts a browser slowly
PROBLEMS = "<script>const problems = []; addEventListener('error', event => problems.push(event.message))</script>"
DRAW_ALL = "for (const draw of pictures) draw();"


def chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def browse(page: Path, *flags: str, width: int = WIDTH, height: int = 900) -> str:
    """Open a file and run its scripts; return stdout, which is the document with the flag `--dump-dom`."""
    program = chromium()
    assert program is not None, "no Chromium is installed"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        words = [program, *FLAGS, f"--user-data-dir={home}", f"--window-size={width},{height}", *flags, page.resolve().as_uri()]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE_S).stdout


def run_in(page: Path, body: str, width: int = WIDTH) -> tuple[Any, list[str]]:
    """Evaluate a function body in the page after its pictures are drawn; return its value and the errors of the page's scripts.

    Works on a copy without the page's Content-Security-Policy, which would block the script.
    """
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', PROBLEMS, page.read_text(encoding="utf-8"))
    work = f"let told = null; try {{ told = (() => {{ {DRAW_ALL} {body} }})(); }} catch (error) {{ problems.push(String(error)); }}"
    work += " document.body.dataset.told = JSON.stringify([told, problems]);"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(text.replace("</body>", f"<script>{work}</script></body>"), encoding="utf-8")
        dom = browse(copy, "--dump-dom", width=width)
    match = re.search(r'<body[^>]* data-told="([^"]*)"', dom)
    assert match is not None, dom[-500:]
    value, problems = json.loads(html.unescape(match[1]))
    return value, problems


def picture(page: Path, png: Path, until: str | None = None) -> None:
    """Write a screenshot of the page from its top to the start of element `until`."""
    end = f"document.querySelector({until!r}).getBoundingClientRect().top" if until else "document.documentElement.scrollHeight"
    height, _ = run_in(page, f"return Math.ceil({end})")
    browse(page, f"--screenshot={png.resolve()}", height=height)


if __name__ == "__main__":
    picture(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
