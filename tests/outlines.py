"""Shipped layer traces: `python -m tests.outlines [NAME ...]` records them again from the modules of transformers.

One file per model, with sizes as polynomials of the number of sequences and their length; two polynomials, below and above the
attention window, if layers have one.
"""

import json
import sys
from typing import Any

from penstock.planner.model import layer_traces
from penstock.planner.model.config import key_of, shipped_model, shipped_models
from penstock.planner.model.sizes import ANY
from tests.tour import ROOT

FOLDER = ROOT / "planner" / "outlines"


def shipped(name: str) -> dict[str, Any]:
    config = key_of(shipped_model(name))
    content = layer_traces.polynomials(config, layer_traces.about(config)["attention"][0])
    assert {one["to"] for one in content["outlines"]} >= {ANY}, f"{name}: sizes are no polynomials"
    return content


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or shipped_models():
        (FOLDER / f"{name}.json").write_text(json.dumps(shipped(name), separators=(",", ":")) + "\n")
        print(name, (FOLDER / f"{name}.json").stat().st_size, flush=True)
