"""The page of largest trainable models by host memory.

`penstock fits --json | python -m benchmarks.ram_page > docs/ram-to-model.md`: the page only depends on the command's output.
"""

import json
import sys
from typing import Any

from benchmarks.common import without_arguments

HEAD = """# RAM to model

*Largest model that a machine can train with its host memory, and the approximate speed.* Made by

    penstock fits --json | python -m benchmarks.ram_page > docs/ram-to-model.md

All parameters are trained, in bf16 with fp32 master weights and AdamW: no adapters, nothing frozen, nothing quantised. A step
is {batch_size} sequences of {seq_len:,} tokens; shorter ones need less memory and are slower by the token. Each cell names the
largest shipped model of a family that fits, and its tokens per second. Memory is computed; the speed is {how}, from
profiles with the sources listed by `penstock machines`. `penstock fits rtx4090 --host-memory 96GB --tokens
100M` answers for other memory, with days and dollars; `penstock plan MODEL --machine M --host-memory 128GB` for one plan in
full. 128 GB of memory has 137 x 10^9 bytes: 128 x 10^9 of them are counted, and the rest is left to the system.
"""


def page(output: dict[str, Any]) -> str:
    """Return the page for the output of `penstock fits --json`."""
    how = "an estimate, from a greedy plan" if output["is_estimate"] else "that of the plan found by a search"
    text = HEAD.format(**output, how=how)
    gpus = dict.fromkeys(fit["gpu"] for fit in output["fits"])
    for gpu in gpus:  # rows are ordered by family
        fits = [fit for fit in output["fits"] if fit["gpu"] == gpu]
        families = list(dict.fromkeys(fit["family"] for fit in fits))
        cells = {(fit["host_memory_bytes"], fit["family"]): fit for fit in fits}
        text += f"\n## {gpu}\n\n| host memory | {' | '.join(families)} | on |\n|---|{'---|' * len(families)}---|\n"
        for n_bytes in sorted({n for n, _ in cells}):
            row = [cells[n_bytes, family] for family in families]
            text += f"| {n_bytes / 1e9:g} GB | {' | '.join(map(_cell, row))} | {row[0]['machine']} |\n"
    return text


def _cell(fit: dict[str, Any]) -> str:
    """Format a cell. Example: `qwen2.5-32b: 525`."""
    return "-" if fit["model"] is None else f"{fit['model']}: {fit['tokens_per_s']:,.0f}"


if __name__ == "__main__":
    without_arguments(__doc__)
    sys.stdout.write(page(json.load(sys.stdin)))
