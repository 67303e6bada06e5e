"""What does a model's own chat template make of a conversation?

A template is a program that came with the model. transformers runs it in a sandbox that keeps it from files, but not from
running for ever or filling memory; so it runs in a process of its own that the system ends. Spawned, not forked, that process
shares nothing with this one. It is given conversations and gives back text, a line of JSON each.

"Today" is always the same day there: what a template writes must not depend on when a run is resumed.
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_SECONDS = 20  # of one conversation; an ordinary one takes a thousandth
MAX_MEMORY_BYTES = 2 * 2**30  # beyond what its process has before it begins
MAX_TEXT_CHARACTERS = 2**28
TODAY = (2024, 7, 26)  # what templates fall back to that are not told the date


class ChatTemplateError(Exception):
    """Why a conversation was not written; one line."""


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation as text."""

    text: str
    generated: tuple[tuple[int, int], ...]  # (first, one past the last) character of each part that the template marks
    cuts: tuple[int | None, ...]  # characters of each shorter conversation asked for; None: the text does not begin with it


@dataclass(slots=True, eq=False)
class ChatTemplate:
    """A chat template and the special tokens that it may name; its process starts when it is first used."""

    source: str
    special_tokens: dict[str, str]
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def marks_answers(self) -> bool:
        """Whether it says itself what is generated."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source) is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.special_tokens)

    def write(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        prompt: bool = False,
        cuts: Sequence[tuple[int, bool]] = (),
    ) -> Written:
        """The messages as text, with what begins an answer if `prompt`. For each (n, prompt) of `cuts`: how far the first n go."""
        request = {"messages": messages, "tools": tools, "prompt": prompt, "cuts": cuts}
        with self._one_at_a_time:
            answer = self._answer(request)
        if isinstance(answer, str):
            raise ChatTemplateError(answer)
        return Written(answer["text"], tuple((a, b) for a, b in answer["generated"]), tuple(answer["cuts"]))

    def _answer(self, request: dict[str, Any]) -> str | dict[str, Any]:
        if self._process is None:
            # -P: the files beside this one are not to be mistaken for libraries of the same name.
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for the run, which may yet need it
                )
            except OSError as error:
                return f"no process for it: {error.strerror}"
            self._send({"source": self.source, "special_tokens": self.special_tokens, "marks_answers": self.marks_answers})
        self._send(request)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self.close()
            return f"it took more than {MAX_SECONDS} s or {MAX_MEMORY_BYTES >> 30} GiB, or was ended"
        answer: str | dict[str, Any] = json.loads(line)
        return answer

    def _send(self, value: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # ended: there will be no answer, which says so

    def close(self) -> None:
        """End the process; the next use starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _serve() -> None:
    """The other process: read conversations and write them as text until the pipe closes."""
    import contextlib
    import datetime
    import os
    import resource
    import signal

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but answers goes where answers go
    from transformers.utils import chat_template_utils

    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Frozen":
            return cls(*TODAY, tzinfo=tz)

    vars(chat_template_utils)["datetime"] = Frozen
    with open("/proc/self/statm", encoding="ascii") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = json.loads(sys.stdin.buffer.readline())
    source, special_tokens, marks = template["source"], template["special_tokens"], template["marks_answers"]

    def write(request: dict[str, Any], n: int, prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        written: Any = chat_template_utils.render_jinja_template(
            [request["messages"][:n]],
            tools=request["tools"],
            chat_template=source,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **special_tokens,
        )
        (text,), generated = written
        if len(text) > MAX_TEXT_CHARACTERS:
            raise ValueError(f"more than {MAX_TEXT_CHARACTERS} characters")
        return text, generated[0] if generated else []

    for line in sys.stdin.buffer:
        signal.alarm(MAX_SECONDS)  # ends the process, whatever it is at
        try:
            request = json.loads(line)
            text, generated = write(request, len(request["messages"]), request["prompt"])
            shorter = (write(request, n, prompt)[0] for n, prompt in request["cuts"])
            cuts = [len(cut) if text.startswith(cut) else None for cut in shorter]
            answer: Any = {"text": text, "generated": generated, "cuts": cuts}
        except MemoryError:
            answer = f"it needs more than {MAX_MEMORY_BYTES >> 30} GiB"
        except Exception as error:
            answer = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        signal.alarm(0)
        with contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    _serve()
