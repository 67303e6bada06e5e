"""Language of a source tree: private constructions in prose, and function words as names.

`python -m tests.language [PATH ...]` prints for each folder the markers in 1,000 words of docstrings, comments and messages, and
the share of bound names that are function words. A marker is a construction such as a free relative clause; plain English has 1 to
5 in 1,000 words.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import NamedTuple

MARKERS = [
    re.compile(text, re.IGNORECASE)
    for text in (
        r"\b(what|whatever|whoever) (?!is\b.*\?)",
        r"\A(Of|That of|Those|The same|As|So|Such|And|What|Whether|Each|All|Some|None|How) \b",
        r"\b(of|in|by|to|from|for|with) which\b|\bof whose\b|\bwhose\b",
        r"\bas (many|much|long|far)\b",
        r"\b(is|are|be|been) (told|said|asked|heard)\b|\b(tells|asks|says|hears|knows|brings)\b",
        r"\bthere (is|are|was)\b|\bis there\b|\bthat there\b",
        r"\bone's own\b|\bof one's\b|\bof ours\b|\bour own\b",
        r"\bbesides?\b",
        r"\b(lies|lie|stands|stays|comes|goes)\b",
    )
]
_WORDS = """
of at by on in to from with without among apart beside besides before after above below given found said told asked
made done taken left kept drawn met seen own others other each those these such some there here which what whose whole
alike less more most first_of last_of ours theirs its it them
"""
FUNCTION_WORDS = frozenset(_WORDS.split())
LEAST_WORDS = 4  # of a string that counts as a message


class Counts(NamedTuple):
    words: int = 0
    markers: int = 0
    names: int = 0
    function_words: int = 0

    @property
    def markers_per_1000(self) -> float:
        return 1000 * self.markers / max(1, self.words)

    @property
    def function_word_percent(self) -> float:
        return 100 * self.function_words / max(1, self.names)


def texts(source: str) -> Iterator[str]:
    """Docstrings, messages of at least four words, and comments (consecutive lines are one text) of a Python file."""
    tree, docstrings = ast.parse(source), set[ast.expr]()
    for node in ast.walk(tree):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and (text := ast.get_docstring(node)) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            docstrings.add(first.value)
            yield text
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
        if is_text and len(node.value.split()) >= LEAST_WORDS:
            yield node.value
    block, line = list[str](), -1
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT and "type:" not in token.string and "noqa" not in token.string:
            if token.start[0] != line + 1 and block:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            line = token.start[0]
    if block:
        yield " ".join(block)


def paragraphs(page: str) -> Iterator[str]:
    """Paragraphs and list items of a Markdown page, without code blocks, tables, headings and targets of links."""
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"```.*?```", "\n\n", page, flags=re.DOTALL))
    for part in re.split(r"\n\s*\n|\n(?=\s*[-*\d]+[.)]?\s)", text):
        lines = [line for line in part.splitlines() if not line.lstrip().startswith(("|", "#", "<", "    "))]
        if len(" ".join(lines).split()) >= LEAST_WORDS:
            yield " ".join(lines).lstrip("-*0123456789.) ")


def bound_names(source: str) -> Iterator[str]:
    """Names of functions, classes, arguments and variables, without leading underscores."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name.strip("_").lower()
            case ast.Name(id=name, ctx=ast.Store()):
                yield name.strip("_").lower()


def counted(path: Path) -> Counts:
    """Counts of a Python file or a Markdown page."""
    source = path.read_text(encoding="utf-8")
    is_page = path.suffix == ".md"
    prose, names = list(paragraphs(source) if is_page else texts(source)), [] if is_page else list(bound_names(source))
    markers = sum(len(pattern.findall(text)) for text in prose for pattern in MARKERS)
    return Counts(sum(len(text.split()) for text in prose), markers, len(names), sum(name in FUNCTION_WORDS for name in names))


def by_folder(root: Path, paths: list[str]) -> dict[str, Counts]:
    """Sums for each folder of two levels, of the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "--", *(paths or ["."])], cwd=root, capture_output=True, text=True, check=True)
    sums = defaultdict[str, Counts](Counts)
    for name in listed.stdout.splitlines():
        if name.endswith((".py", ".md")) and (root / name).is_file():
            parts = name.split("/")
            folder = "/".join(parts[:2]) if len(parts) > 2 else parts[0]
            sums[folder] = Counts(*map(sum, zip(sums[folder], counted(root / name), strict=True)))
    return dict(sorted(sums.items()))


if __name__ == "__main__":
    for folder, counts in by_folder(Path.cwd(), sys.argv[1:]).items():
        print(f"{folder:26}{counts.words:8}{counts.markers_per_1000:8.1f}{counts.function_word_percent:8.1f} %")
