"""The small model, and the text and chats that benchmarks train on.

38 million parameters, bytes as tokens; sources of the standard library, and questions and answers from their docstrings.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from demo.demo import CONFIG as DEMO
from demo.demo import STATE_BYTES_PER_PARAM as STATE_BYTES_PER_PARAM
from penstock.planner.model.workload import build_workload
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.workload import Model

SEQ_LEN, BATCH_SIZE = 256, 8
HELD_OUT = 40  # one of this many questions is held out
CONFIG = DEMO | {"num_hidden_layers": 12, "tie_word_embeddings": False}
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip"}  # folders of the standard library


def state_bytes(config: dict[str, object]) -> int:
    """Return the bytes of the training state of a model."""
    return build_workload(Model(config), Semantics(SEQ_LEN, 1, 1)).n_params * STATE_BYTES_PER_PARAM


def _sources() -> Iterator[tuple[str, str]]:
    """Yield the name and source of modules of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if file.parent.name not in LEFT_OUT:
            module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            yield module, file.read_text(encoding="utf-8", errors="ignore")


def write_sources(path: Path) -> Path:
    """Write the source of the standard library as JSONL, one line per file."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for _, text in _sources()), encoding="utf-8")
    return path


def questions() -> Iterator[tuple[str, str]]:
    """Yield (question, answer) about classes and functions of the standard library, from their docstrings."""
    for module, text in _sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                answer = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
                if 20 <= len(answer) <= 200:
                    yield f"What is {module}.{node.name} for?", answer


def write_chats(training: Path, held_out: Path) -> None:
    """Write one conversation per line, in the `messages` format."""
    with training.open("w", encoding="utf-8") as training_file, held_out.open("w", encoding="utf-8") as held_out_file:
        for number, (question, answer) in enumerate(questions()):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            (training_file if number % HELD_OUT else held_out_file).write(json.dumps({"messages": messages}) + "\n")
