"""Outlines that are shipped: `python -m tests.outlines [NAME ...]` records them again, from transformers' own modules.

One file a model, with sizes as polynomials of sequences and their length: one for sequences below the window of attention, one from
there on, where layers have a window.
"""

import json
import sys
from typing import Any

from planner.model import record
from planner.model.config import shipped_model, shipped_models
from planner.model.outline import evaluated
from tests.tour import ROOT

FOLDER = ROOT / "planner" / "outlines"
ANY = 2**31 - 1


def regimes(config: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Lengths from and to which outlines hold, and the shortest that is recorded."""
    if (window := record.window_of(config)) is None:
        return [(1, ANY, record.STEP)]
    longer = [(window, ANY, window + record.STEP)] if window <= record.LONGEST_MASK else []
    return [(1, window - 1, record.STEP), *longer]


def recorded(config: dict[str, Any], attention: str, shortest: int, numbers: list[int], last: int) -> dict[str, Any]:
    """One tree for these numbers of sequences, held against another number and length; ValueError where there is none."""
    key, lengths = json.dumps(config, sort_keys=True), [shortest + record.STEP * i for i in range(4)]
    sizes = [(n, seq_len) for n in numbers for seq_len in lengths[:3]]
    found: dict[str, Any] = record.fitted({size: record._recorded(key, attention, *size) for size in sizes})
    if evaluated(found, last, lengths[3]) != record._recorded(key, attention, last, lengths[3]):
        raise ValueError("sizes are no polynomials")
    return found


def of_lengths(config: dict[str, Any], attention: str, first: int, last: int, shortest: int) -> list[dict[str, Any]]:
    """Outlines for sequences from `first` to `last` tokens; a single sequence apart where it is computed otherwise."""
    about = {"attention": attention, "from": first, "to": last}
    try:
        return [about | {"sequences": [1, ANY], "tree": recorded(config, attention, shortest, [1, 2], 3)}]
    except ValueError:
        one, more = recorded(config, attention, shortest, [1], 1), recorded(config, attention, shortest, [2, 3], 4)
        return [about | {"sequences": [1, 1], "tree": one}, about | {"sequences": [2, ANY], "tree": more}]


def shipped(name: str) -> dict[str, Any]:
    """What is shipped of a model."""
    model = shipped_model(name)
    legal = record.supported_attention(json.dumps(model.config, sort_keys=True))
    trees = [tree for lengths in regimes(model.config) for tree in of_lengths(model.config, legal[0], *lengths)]
    return {"attention": legal, "outlines": trees}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or shipped_models():
        (FOLDER / f"{name}.json").write_text(json.dumps(shipped(name), separators=(",", ":")) + "\n")
        print(name, (FOLDER / f"{name}.json").stat().st_size, flush=True)
