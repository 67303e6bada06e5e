"""How does a test drive a real browser?

Chromium takes commands of its DevTools protocol on two pipes: nothing is installed, and no port is opened.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--no-first-run", "--no-default-browser-check", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
# The browser reads descriptor 3 and writes 4: what puts the two there, wherever they are, and becomes the browser.
MOVE = """
import fcntl, os, sys
a, b = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3])
os.dup2(a, 3), os.dup2(b, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE_S = 60  # for one answer: a busy machine starts a browser slowly


def chromium() -> str | None:
    """The browser that is installed, if one is."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page in one headless browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.number, self.unread, self.session = 0, b"", ""
        self.problems: list[str] = []  # exceptions of the page's script, and what its policy refused
        self.requests: list[str] = []  # everything that the page asked for
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """Have the browser do something; what it answers."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        """The next answer or event; events are noted on the way."""
        until_s = time.monotonic() + PATIENCE_S
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self.answers, 2**20)
            assert piece, "the browser ended"
            self.unread += piece
        line, _, self.unread = self.unread.partition(b"\0")
        said: dict[str, Any] = json.loads(line)
        match said.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(said["params"]["exceptionDetails"])[:500])
            case "Log.entryAdded":
                self.problems.append(said["params"]["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])
        return said

    def look(self, width: int, height: int, dark: bool = False, fine: float = 1.0) -> None:
        """The size of the window, and the scheme that its user prefers."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=fine, mobile=False)
        scheme = "dark" if dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, page: Path) -> None:
        """Load a file, and wait until it is drawn."""
        self.send("Page.navigate", url=page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """`Moved`, `Pressed`, `Released` or `Wheel`, at a place in the window."""
        self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press at one place, and let go at another."""
        button: dict[str, Any] = {"button": "left", "clickCount": 1}
        self.mouse("Moved", *start)
        self.mouse("Pressed", *start, **button)
        self.mouse("Moved", *end, button="left")
        self.mouse("Released", *end, **button)
        self.settle()

    def key(self, key: str) -> None:
        """Press a key, and let it go."""
        for kind in ("keyDown", "keyUp"):
            typed = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, **typed)
        self.settle()

    def screenshot(self, path: Path, until: str | None = None) -> None:
        """The page as it looks, from top to bottom, or down to where an element begins."""
        self.settle()
        path.parent.mkdir(parents=True, exist_ok=True)
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        if until is not None:
            size["height"] = self.evaluate(f"document.querySelector({until!r}).getBoundingClientRect().top + window.scrollY")
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a fresh profile, ended and forgotten afterwards."""
    program = chromium()
    assert program is not None, "no Chromium is installed"
    from_us, commands = os.pipe()
    answers, to_us = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        words = [sys.executable, "-c", MOVE, str(from_us), str(to_us), program, *FLAGS, f"--user-data-dir={home}", "about:blank"]
        running = subprocess.Popen(words, pass_fds=(from_us, to_us), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(from_us)
        os.close(to_us)
        try:
            yield Browser(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            running.terminate()
            running.wait(30)
