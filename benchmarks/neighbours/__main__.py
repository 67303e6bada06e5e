"""Neighbours of ten kinds of silent errors: each is run here and compared with another library, or with arithmetic.

`python -m benchmarks.neighbours [KIND ...]` prints a table of Markdown for each kind. Expected values are computed by transformers,
PEFT, TRL and datasets on the same files, never by Penstock. Exit code 1 if a result is wrong.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import provenance

from .cases import brief
from .models import positions, references, targets, weights
from .rows import data_sets, tables, templates
from .runs import counts, ends, folders

KINDS = {
    "Folders that are data sets": data_sets,
    "Adapters that continue": references,
    "LoRA of every projection": targets,
    "Positions belong to the document": positions,
    "Rows from Parquet and Arrow": tables,
    "Templates": templates,
    "Files of a folder survive": folders,
    "The weights of transformers": weights,
    "Generation stops at the learned end": ends,
    "Arithmetic of runs": counts,
}


def cell(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        value = brief(value)
    text = f"{value:.7g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    """Print the tables of all kinds, or of the given numbers."""
    os.environ["PENSTOCK_CACHE"] = tempfile.mkdtemp(prefix="neighbours-cache-")
    numbers, n_wrong = [int(word) for word in sys.argv[1:]] or range(1, len(KINDS) + 1), 0
    for number in numbers:
        title, kind = [*KINDS.items()][number - 1]
        print(f"\n## {number}. {title}\n\n{' '.join((kind.__doc__ or '').split())}\n")
        print("| tried | Penstock | right value | found by | test |\n|---|---|---|---|---|")
        with tempfile.TemporaryDirectory() as root:
            for case in kind(Path(root).resolve()):
                n_wrong += not case.is_right
                mark = "" if case.is_right else "**wrong:** "
                print(
                    f"| {case.tried} | {mark}{cell(case.result)} | {cell(case.right)} | {case.source} | `{case.test}` |", flush=True
                )
    print(f"\n{provenance()}")
    sys.exit(n_wrong > 0)


if __name__ == "__main__":
    main()
