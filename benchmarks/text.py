"""The text that benchmarks train on."""

import json
import sysconfig
from pathlib import Path


def standard_library(path: Path) -> None:
    """Write the source of the standard library as JSONL, one line per file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip"}
    with path.open("w", encoding="utf-8") as out:
        for file in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
            if file.parent.name not in left_out:
                out.write(json.dumps({"text": file.read_text(encoding="utf-8", errors="ignore")}) + "\n")
