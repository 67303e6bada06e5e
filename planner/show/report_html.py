"""How is a page written so that nothing it shows can harm who opens it?

Names come from files that anybody may have made. Text is escaped, data is JSON in which no tag can begin, and the page's own policy
lets a browser run nothing but the script written here: no other script, no network, no frame.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

SCRIPTS = ("draw.js", "step.js", "memory.js", "curves.js")
_PLACE = re.compile(r"\{\{([a-z_]+)\}\}")


def text(words: object) -> str:
    """Words as they stand between tags, or in an attribute. What no terminal would print is written out."""
    plain = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(words))
    return html.escape(plain, quote=True)


def inline_json(value: Any) -> str:
    """JSON for a `<script>` element: no tag and no comment begins in it."""
    packed = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return packed.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table of cells that are HTML already; the first of a row names it, a picture or a number stands in the others."""
    heads = "".join(f'<th scope="col"{_class(i, rows)}>{text(cell)}</th>' for i, cell in enumerate(head))
    body = ""
    for name, *cells in rows:
        body += f'<tr><th scope="row">{name}</th>'
        body += "".join(f"<td{_class(i, rows)}>{cell}</td>" for i, cell in enumerate(cells, start=1)) + "</tr>\n"
    titled = f"<caption>{text(caption)}</caption>" if caption else ""
    is_drawn = any(cell.startswith("<svg") for row in rows for cell in row)
    kind = ' class="drawn"' if is_drawn else ""
    return f'<div class="scroll"><table{kind}>{titled}<thead><tr>{heads}</tr></thead><tbody>\n{body}</tbody></table></div>\n'


def _class(column: int, rows: Sequence[Sequence[str]]) -> str:
    """Of a column: its cells are pictures, or numbers and so set to the right."""
    if column == 0 or not rows:
        return ""
    return ' class="picture"' if rows[0][column].startswith("<svg") else ' class="number"'


def bar(parts: Sequence[tuple[str, float, float]], scale: float, range_to_show: tuple[float, float] | None = None) -> str:
    """A picture of a row: rectangles of a kind, from and to, on a scale that ends at `scale`; and a range across them."""

    def percent(value: float) -> str:
        return f"{100 * min(max(value / scale, 0.0), 1.0):.3f}%"

    drawn = "".join(
        f'<rect class="{kind}" x="{percent(start)}" width="{percent(end - start)}" y="2" height="14"/>'
        for kind, start, end in parts
    )
    if range_to_show is not None:
        low, high = map(percent, range_to_show)
        drawn += f'<line class="range" x1="{low}" x2="{high}" y1="9" y2="9"/>'
        drawn += "".join(f'<line class="range" x1="{at}" x2="{at}" y1="5" y2="13"/>' for at in (low, high))
    return f'<svg class="bar" aria-hidden="true">{drawn}</svg>'


def lines(sentences: Sequence[str]) -> str:
    """Sentences as a list; what stands between backticks is a command."""
    marked = (re.sub("`([^`]*)`", r"<code>\1</code>", text(sentence)) for sentence in sentences)
    return '<ul class="lines">\n' + "".join(f"<li>{sentence}</li>\n" for sentence in marked) + "</ul>\n"


def page(parts: Mapping[str, str]) -> str:
    """The page, its places filled with HTML. What fills a place is not searched for places again."""
    folder = resources.files("planner.show") / "page"
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = (folder / "page.css").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    )
    filled = {**parts, "script": script, "style": style, "policy": policy}
    written = _PLACE.sub(lambda place: filled[place[1]], (folder / "page.html").read_text(encoding="utf-8"))
    return written.encode("utf-8", "backslashreplace").decode("utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")
