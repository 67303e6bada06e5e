"""The small model and the chats that benchmarks train on.

38 million parameters, bytes as tokens; questions and answers from the docstrings of the standard library.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SEQ_LEN, BATCH_SIZE = 256, 8
HELD_OUT = 40  # one of this many questions is held out
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
STATE_BYTES_PER_PARAM = 2 + 4 + 8 + 2  # bf16 weight, fp32 master, two fp32 moments, bf16 gradient


def questions(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (question, answer) about classes and functions of the standard library, from their docstrings."""
    left_out = {"site-packages", "test", "tests", "idlelib", "turtledemo", "ensurepip"}
    for file in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        if file.parent.name in left_out:
            continue
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="ignore"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                answer = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
                if 20 <= len(answer) <= 200:
                    yield f"What is {module}.{node.name} for?", answer


def write_chats(training: Path, held_out: Path) -> None:
    """Write one conversation per line, in the `messages` format."""
    with training.open("w", encoding="utf-8") as training_file, held_out.open("w", encoding="utf-8") as held_out_file:
        for number, (question, answer) in enumerate(questions(Path(sysconfig.get_paths()["stdlib"]))):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            (training_file if number % HELD_OUT else held_out_file).write(json.dumps({"messages": messages}) + "\n")
