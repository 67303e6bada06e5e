"""How is the picture of a report made for the docs?

`python -m tests.screenshot demo/out/report.html docs/report.png '#waterfall'` shows the page from its top down to where that
element begins; without one, all of it. `dark` and a width in pixels may follow.
"""

import sys
from pathlib import Path

from .browser import browser

WIDTH, HEIGHT = 1240, 900


def main(words: list[str]) -> None:
    page, picture, *wishes = words
    width = next((int(wish) for wish in wishes if wish.isdigit()), WIDTH)
    until = next((wish for wish in wishes if wish.startswith("#")), None)
    with browser() as b:
        b.look(width, HEIGHT, dark="dark" in wishes)
        b.open(Path(page))
        b.screenshot(Path(picture), until=until)
        for problem in b.problems:
            print(problem, file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
