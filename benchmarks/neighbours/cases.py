"""Cases of neighbours: models, data, commands, and right values by transformers."""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.chats import write_talker
from tests.every_type import tiny
from tests.running import UNSEARCHED, penstock

Rows = list[dict[str, Any]]
ASKS = ("How does the river run?", "two and two?", "Hello, and how are you today?", "What is add?", "Are you fine?", "20 €?")
SAYS = ("Down to the sea.", "It is four.", "Thanks, fine!", "def add(a, b):\n    return a + b", "I am.", "Übergrößen kosten 20 €.")
CHATS: Rows = [
    {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]}
    for ask, say in zip(ASKS, SAYS, strict=True)
]
PAIRS: Rows = [{"prompt": a, "chosen": f" {s}", "rejected": f" no, {n}"} for n, (a, s) in enumerate(zip(ASKS, SAYS, strict=True))]


class Case(NamedTuple):
    """A neighbour: its description, Penstock's result, the right value and its source, and the test of its kind."""

    tried: str
    result: Any
    right: Any
    source: str
    test: str

    @property
    def is_right(self) -> bool:
        if isinstance(self.right, float):
            return abs(self.result - self.right) <= 2e-6 * max(1.0, abs(self.right))
        return bool(self.result == self.right)


# -- models, data and commands -------------------------------------------------------------------------------------------


def lines(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def model(folder: Path, model_type: str = "qwen3", style: str = "chatml", template: str | None = None, **config: Any) -> Path:
    """Write a tiny model with random weights in fp32, and a tokenizer with a chat template."""
    size = write_talker(folder, style, template)
    torch.manual_seed(0)
    names = AutoConfig.for_model(**{**tiny(model_type), "vocab_size": size, "pad_token_id": None, **config})
    built = AutoModelForCausalLM.from_config(names, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in built.state_dict().items():
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.copy_(0.7 + 0.3 * torch.randn(tensor.shape) if tensor.dim() == 1 else torch.randn(tensor.shape) * 0.2)
    built.save_pretrained(folder)
    return folder


def command(*words: object) -> str:
    """Run a `penstock` command; return its output."""
    result = penstock(*words)
    if result.exit_code:
        raise SystemExit(f"penstock {' '.join(map(str, words))}: {result.output}")
    return str(result.output)


def plan(folder: Path, *flags: object, seq_len: int = 64, batch: int = 2) -> Path:
    path = folder.parent / "plan.json"
    sizes = ("--seq-len", seq_len, "--batch-size", batch, "--micro-batch", batch, "--compute", "fp32")
    command("plan", folder, "--machine", "cpu-2core", *sizes, *UNSEARCHED, *flags, "-o", path)
    return path


def train(planned: Path, data: Path, *flags: object, out: str, steps: int | None = 1, lr: float = 1e-30) -> tuple[Path, Rows, str]:
    """Run a plan; return the run's folder, its metrics and its output."""
    folder = planned.parent / out
    count = () if steps is None else ("--steps", steps)
    words = command("run", planned, "--data", data, "--out", folder, "--lr", lr, *count, *flags)
    return folder, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], words


def first_eval(planned: Path, data: Path, *flags: object, out: str) -> float:
    """Return the loss of the evaluation before the first step."""
    _, metrics, _ = train(planned, data, "--eval-data", data, *flags, out=out)
    return float(next(line["eval_loss"] for line in metrics if "eval_loss" in line))


def shown(data: Path, folder: Path, *flags: object) -> list[tuple[str, str]] | str:
    """Return (text, learned text) of each document by `penstock data`, or `refused` with the named file."""
    result = penstock("data", data, "--model", folder, "--samples", 99, "--json", "--seq-len", 2048, *flags)
    if result.exit_code:
        named = re.search(r"[\w ]+\.(?:json|txt|pdf|docx|md)\b", result.stderr)
        return f"refused, exit code {result.exit_code}" + (f", {named[0].strip()} named" if named else "")
    samples = json.loads(result.stdout)["samples"]
    return [tuple("".join(t for t, is_learned in s["parts"] if is_learned >= least) for least in (0, 1)) for s in samples]  # type: ignore[misc]


def warned(data: Path, folder: Path, *flags: object) -> str:
    about = json.loads(command("data", data, "--model", folder, "--json", "--seq-len", 2048, *flags).splitlines()[-1])["about"]
    return next((f"warning: {words}" for name, words in about.items() if name.startswith("warning")), "silent")


def brief(documents: Any) -> str:
    """Shorten documents to counts and a digest."""
    if isinstance(documents, str):
        return documents
    digest = sha256(json.dumps(documents).encode()).hexdigest()[:8]
    return f"{len(documents)} documents, {sum(len(text) for text, _ in documents)} characters, SHA-256 {digest}"


def templated(folder: Path, rows: Rows) -> list[tuple[str, str]]:
    """Return the documents that transformers writes and masks of these rows."""
    tokenizer, documents = AutoTokenizer.from_pretrained(folder), []
    for row in rows:
        how = {"tools": row.get("tools"), "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = tokenizer.apply_chat_template(row["messages"], **how)
        learned = [i for i, is_learned in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if is_learned]
        documents.append((tokenizer.decode(encoded["input_ids"]), tokenizer.decode(learned)))
    return documents


def loss_alone(folder: Path, documents: list[list[int]], first: int = 0, dtype: torch.dtype = torch.float32) -> float:
    """Return the mean loss by transformers over all tokens from `first` on, each document in a forward of its own."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    total, n = 0.0, 0
    for ids in documents:
        with torch.no_grad():
            logits = loaded(torch.tensor([ids]), use_cache=False).logits[0].float()
        total += cross_entropy(logits[first:-1], torch.tensor(ids[first + 1 :]), reduction="sum").item()
        n += len(ids) - 1 - first
    return total / n


def texts_of(folder: Path, texts: tuple[str, ...]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
