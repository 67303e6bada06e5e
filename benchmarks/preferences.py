"""Preference losses compared with TRL, and a run that learns from pairs.

    python -m benchmarks.preferences > docs/benchmarks/preferences_cpu-2core_DATE.md

One batch of two pairs through TRL's `DPOTrainer` and through our head of a two-layer Llama, if TRL is installed (`pip install
trl`); and 24 steps of adapters on pairs of polite and rude answers, with the command line. Three minutes of two cores.
"""

import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.planner.model.workload import build_workload
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.compute.losses import orpo, simpo
from penstock.runtime.layers.meta_models import DTYPE
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.objective import parse_objective
from penstock.runtime.plan.workload import Model

LOSSES = {  # TRL's name -> ours
    "sigmoid": "dpo:beta=0.3",
    "ipo": "ipo:beta=0.3",
    "hinge": "hinge:beta=0.3",
    "robust": "robust:beta=0.3,label_smoothing=0.2",
}
SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"model_type": "llama", "vocab_size": 96, "tie_word_embeddings": False}
BYTES = SMALL | {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 320}
N_PAIRS, N_HELD_OUT, N_BEFORE, N_STEPS, EVERY = 100, 50, 120, 24, 12
OUR_ORDER = [0, 2, 1, 3]  # to chosen, rejected, chosen, rejected; TRL's chosen answers precede


def of_trl(loss_type: str, numbers: dict[str, float], model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of TRL's trainer."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import DPOConfig, DPOTrainer

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(SMALL["vocab_size"])}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w94", eos_token="w95")
    extra = {"loss_type": [loss_type], "precompute_ref_log_probs": True, "use_cpu": True, "bf16": False, "report_to": [], **numbers}
    config = DPOConfig(tempfile.mkdtemp(), gradient_checkpointing=False, per_device_train_batch_size=2, **extra)
    rows = Dataset.from_list([{"prompt": "w1", "chosen": "w3", "rejected": "w4"}] * 2)
    trainer: Any = type("Trainer", (DPOTrainer,), {"_precompute_ref_logps": lambda self, rows, *_, **__: rows})
    return trainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)._compute_loss(model, batch, False)  # type: ignore[no-any-return]


def differences(loss_type: str, name: str, dtype: str) -> Iterator[float]:
    """Yield relative differences of the loss, and of the gradients of the last hidden state and output matrix."""
    torch.manual_seed(3)
    model, n, n_tokens = LlamaForCausalLM(LlamaConfig(**SMALL)).to(DTYPE[dtype]), 4, 16
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    ids, answer, shown = torch.randint(0, 94, (n, n_tokens)), torch.zeros(n, n_tokens).long(), torch.ones(n, n_tokens).long()
    answer[:, 5:] = 1
    for row, end in ((1, 12), (2, 14)):
        answer[row, end:] = shown[row, end:] = 0
    reference, hidden = torch.randn(n) * 3 - 60, []

    def remember(_: object, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        hidden.append(args[0])

    model.model.norm.register_forward_pre_hook(remember)
    objective = parse_objective(name)
    halves = {"ref_chosen_logps": reference[:2], "ref_rejected_logps": reference[2:]}
    batch = {"input_ids": ids, "attention_mask": shown, "completion_mask": answer, **halves}
    expected = of_trl(loss_type, dict(objective.numbers), model, batch)
    expected.backward()  # type: ignore[no-untyped-call]

    semantics = Semantics(n_tokens, n, n, compute_dtype=dtype, objective=objective, loss_tile_tokens=5)  # type: ignore[arg-type]
    workload, weights = build_workload(Model(SMALL), semantics), dict(model.named_parameters())
    head = {p.name: weights[p.name].detach() for p in workload.blocks[-1].parameters}
    targets = torch.full((n, n_tokens), -100)
    targets[:, :-1] = torch.where(answer.bool(), ids, -100)[:, 1:]
    total = torch.zeros(weights["lm_head.weight"].shape)
    arguments = hidden[0].detach()[OUR_ORDER], targets[OUR_ORDER], 2, total, {"reference": reference[OUR_ORDER].double()}
    actual, of_hidden, _ = Templates(SMALL, workload, semantics).head.loss(head, *arguments)
    yield abs(float(actual) / 2 / float(expected) - 1)
    for our, their in ((of_hidden, hidden[0].grad[OUR_ORDER]), (total, weights["lm_head.weight"].grad)):  # type: ignore[index]
        assert their is not None
        yield float((our.float() - their.float()).norm() / their.float().norm())


def without_reference() -> Iterator[tuple[str, float]]:
    """Yield for ORPO and SimPO the largest difference of values and slopes, against TRL's functions of the same
    log-probabilities."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    torch.manual_seed(0)
    chosen, rejected = ((-torch.rand(5, dtype=torch.double) * 20 - 1).requires_grad_() for _ in range(2))
    n_chosen, n_rejected = torch.tensor([3.0, 5, 7, 9, 4]).double(), torch.tensor([6.0, 2, 8, 4, 5]).double()
    means, cpu = (chosen / n_chosen, rejected / n_rejected), SimpleNamespace(device="cpu")
    of_simpo = {"simpo_gamma": 1.0, "label_smoothing": 0.1, "loss_type": "simpo", "alpha": 0.0}
    both = {
        "orpo": (
            -means[0] - ORPOTrainer.odds_ratio_loss(SimpleNamespace(beta=0.1, accelerator=cpu), *means)[0],
            orpo(chosen, rejected, n_chosen, n_rejected, 0.1),
        ),
        "simpo": (
            CPOTrainer.cpo_loss(SimpleNamespace(beta=2.0, accelerator=cpu, **of_simpo), *means)[0],
            simpo(chosen, rejected, n_chosen, n_rejected, 2.0, 1.0, 0.1),
        ),
    }
    for name, losses in both.items():
        expected, actual = ([x, *torch.autograd.grad(x.sum(), [chosen, rejected], retain_graph=True)] for x in losses)
        yield name, max(float((a - b).abs().max()) for a, b in zip(expected, actual, strict=True))


def shown(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


def compared() -> Iterator[str]:
    if importlib.util.find_spec("trl") is None:
        yield "TRL is not installed: nothing is held against it (pip install trl)."
        return
    yield f"Against TRL {version('trl')}. Relative differences of the loss, and of the gradients of the last hidden state and"
    yield "of the output matrix.\n"
    yield "| loss | fp32 | bf16 |\n|---|---|---|"
    for loss_type, name in LOSSES.items():
        cells = (", ".join(map(shown, differences(loss_type, name, dtype))) for dtype in ("fp32", "bf16"))
        yield f"| `{name}` | {' | '.join(cells)} |"
    largest = ", ".join(f"{name} {shown(d)}" for name, d in without_reference())
    yield f"\nOf the same log-probabilities in fp64, the largest difference of values and slopes by TRL's own functions: {largest}."


def manners(n: int, begin: int) -> list[dict[str, str]]:
    requests = ("open the door", "pass the salt", "read page", "count to", "call room")
    rows = (
        (f"Please {requests[i % 5]} {i}. ", f"Gladly, {i} it is, my friend.", f"No. Do {i} yourself, fool.")
        for i in range(begin, begin + n)
    )
    return [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]


def penstock(*words: object) -> None:
    """Run a command of the project."""
    subprocess.run([sys.executable, "-m", "penstock", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ranked(folder: Path) -> Iterator[str]:
    """Yield a row per evaluation of a run on pairs."""
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "eval_loss" in line:
            yield f"| {line.get('step', 0)} | {line['eval_loss']:.4f} | {line['eval_accuracy']:.0%} |"


def learned(home: Path) -> Iterator[str]:
    """Train a model on both kinds of answers, then on pairs."""

    (home / "config.json").write_text(json.dumps(BYTES | {"architectures": ["LlamaForCausalLM"]}))
    pairs, held_out = manners(N_PAIRS, 0), manners(N_HELD_OUT, N_PAIRS)
    both = write(
        home / "both.jsonl", [{"text": row["prompt"] + row[half]} for row in pairs + held_out for half in ("chosen", "rejected")]
    )
    sizes = ("--machine", "cpu-2core", "--compute", "fp32", "--seq-len", 64, "--batch-size", 8)
    flags = ("--tokenizer", "bytes", "--out")
    penstock("plan", home / "config.json", *sizes, "-o", home / "first.json")
    penstock(
        "run", home / "first.json", "--data", both, "--steps", N_BEFORE, "--lr", "3e-3", "--from-scratch", *flags, home / "both"
    )
    model = home / "both" / f"checkpoint-{N_BEFORE}"
    penstock("plan", model, *sizes, "--train", "lora:r=8", "--loss", "dpo:beta=0.1", "-o", home / "dpo.json")
    data = (
        "--data",
        write(home / "pairs.jsonl", pairs),
        "--eval-data",
        write(home / "held-out.jsonl", held_out),
        "--eval-every",
        EVERY,
    )
    penstock("run", home / "dpo.json", *data, "--steps", N_STEPS, "--lr", "1e-3", *flags, home / "out")
    yield "| steps | held-out loss | preferred rightly |\n|---:|---:|---:|"
    yield from ranked(home / "out")


def main() -> None:
    print(f"""# Are losses of preferences those of others, and does a run learn from pairs?

Made with `python -m benchmarks.preferences`, torch {torch.__version__}, transformers {transformers.__version__}, Python
{platform.python_version()}, on two cores.

## The same two pairs, a two-layer Llama
""")
    print(*compared(), sep="\n")
    print(f"""
## A run

{N_PAIRS} pairs of polite and rude answers, {N_HELD_OUT} others held out; a byte-level Llama of 0.8 M parameters that had learned
both manners, of all their prompts, for {N_BEFORE} steps; adapters of rank 8 by `dpo:beta=0.1`, 8 sequences a step, in fp32.
""")
    with tempfile.TemporaryDirectory() as home:
        print(*learned(Path(home)), sep="\n")
    print("""
## Limits

No GPU, and no useful model. The two manners differ so much that any loss would learn them.""")


if __name__ == "__main__":
    main()
