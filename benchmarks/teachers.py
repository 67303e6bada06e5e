"""Losses, distillation and heads compared with plain loops and transformers, and runs that learn from a teacher and from pairs.

    python -m benchmarks.teachers > docs/benchmarks/teachers_cpu-2core_DATE.md

Two minutes of two cores.
"""

import json
import platform
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from benchmarks.preferences import BYTES, EVERY, N_BEFORE, N_HELD_OUT, N_PAIRS, SMALL, manners, penstock, ranked, shown, write
from penstock.planner.model.workload import build_workload
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.compute.losses import top_and_rest
from penstock.runtime.layers.meta_models import DTYPE
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.objective import parse_objective
from penstock.runtime.plan.workload import Model

DISTILLED = ("distill:k=96", "distill:k=96,beta=1", "distill:k=96,beta=0.5,temperature=2", "distill:k=16")
PLAIN = ("cross-entropy", "label-smoothing:0.1", "z-loss:0.01", "orpo", "simpo")
HEADS = ("classify:3", "reward", "reward:center=0.1")
KIND = ("gladly", "sure", "friend", "happy", "kindly", "welcome", "yes", "thanks")
RUDE = ("never", "fool", "no", "go", "hate", "stop", "idiot", "bah")
END, N_STEPS = 256, 60  # end-of-text token of bytes
STUDENT = BYTES | {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
SIZES = ("--machine", "cpu-2core", "--compute", "fp32", "--seq-len", 64, "--batch-size", 8)


def plain_divergence(teacher_BTV: Tensor, student_BTV: Tensor, numbers: dict[str, float], rounded_BTK: Tensor | None) -> Tensor:
    """Return the divergence per position from whole logits in fp64: over the top ids, with all others as one outcome.
    `rounded_BTK`: log-probabilities from a file instead of the teacher's."""
    ids = teacher_BTV.topk(int(numbers["k"])).indices
    both = [(z.double() / numbers["temperature"]).softmax(-1) for z in (teacher_BTV, student_BTV)]
    top = [x.gather(-1, ids) for x in both]
    p, q = (torch.cat([t, 1 - t.sum(-1, keepdim=True)], -1).clamp(min=1e-30) for t in top)
    p = p if rounded_BTK is None else rounded_BTK.double().clamp(min=-60).softmax(-1)
    beta, mixed = numbers["beta"], numbers["beta"] * p + (1 - numbers["beta"]) * q
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    return kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)


def plain_loss(name: str, numbers: dict[str, float], logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean of a loss without extras, from whole logits in fp64, by the formula of its paper."""
    logps, is_there, n = logits_BTV.double().log_softmax(-1), targets_BT != -100, numbers
    logp = logps.gather(-1, targets_BT.clamp(min=0)[..., None])[..., 0] * is_there
    better, worse = (logp.sum(1) / is_there.sum(1)).view(-1, 2).unbind(1)
    match name:
        case "label-smoothing":
            logp = (1 - n["epsilon"]) * logp + n["epsilon"] * logps.mean(-1)
        case "z-loss":
            logp = logp - n["weight"] * logits_BTV.double().logsumexp(-1) ** 2
        case "orpo":
            odds = [x.exp() / (1 - x.exp()) for x in (better, worse)]
            return (-better - n["beta"] * (odds[0] / odds[1]).log().sigmoid().log()).mean()
        case "simpo":
            return -(n["beta"] * (better - worse) - n["gamma"]).sigmoid().log().mean()
    return -logp[is_there].mean()


def differences(name: str, dtype: str, is_rounded: bool = True) -> Iterator[float]:
    """Yield relative differences of the loss, and of the gradients of the last hidden state and output matrix."""
    torch.manual_seed(3)
    spec, n, n_tokens, hidden = parse_objective(name), 4, 16, list[Tensor]()
    if spec.n_labels is None:
        model: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).to(DTYPE[dtype])
    else:
        config = LlamaConfig(**SMALL, num_labels=spec.n_labels, pad_token_id=0)
        model = AutoModelForSequenceClassification.from_config(config).to(DTYPE[dtype])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    ids, labels, last = torch.randint(1, 96, (n, n_tokens)), torch.tensor([0, 2, 1, 1]), torch.tensor([15, 9, 3, 12])
    ids[torch.arange(n_tokens) > last[:, None]] = 0
    targets = torch.where(ids > 0, ids, -100)

    def remember(_: object, args: tuple[Tensor, ...]) -> None:
        args[0].retain_grad()
        hidden.append(args[0])

    model.model.norm.register_forward_pre_hook(remember)
    teacher = torch.randn(n, n_tokens, 96) * 2
    extras, held = {"last": last, "label": labels.float()}, None
    if spec.n_top is not None:
        rows = top_and_rest(teacher.flatten(0, 1), spec.n_top, spec.numbers["temperature"])
        extras["teacher"] = rows.view(n, n_tokens, -1)
        held = extras["teacher"][..., 2 * spec.n_top :].contiguous().view(torch.float16)
    out = model(ids, labels=labels) if spec.name == "classify" else model(ids)
    match spec.name:
        case "classify":
            loss = out.loss
        case "reward":
            chosen, rejected = out.logits[0::2, 0], out.logits[1::2, 0]
            loss = (spec.numbers["center"] * (chosen + rejected) ** 2 - F.logsigmoid(chosen - rejected)).mean()
        case "distill":
            loss = plain_divergence(teacher, out.logits.float(), spec.numbers, held if is_rounded else None)[targets != -100].mean()
        case _:
            loss = plain_loss(spec.name, spec.numbers, out.logits.float(), targets)
    loss.backward()

    semantics = Semantics(n_tokens, n, n, compute_dtype=dtype, objective=spec, loss_tile_tokens=5)  # type: ignore[arg-type]
    workload, weights = build_workload(Model(SMALL), semantics), dict(model.named_parameters())
    templates = Templates(SMALL, workload, semantics)
    head = {p.name: weights[p.name].detach() for p in workload.blocks[-1].parameters}
    matrix = weights[templates.head.weight]
    n_losses, total = semantics.n_losses(int((targets != -100).sum())), torch.zeros(matrix.shape)
    actual, of_hidden, _ = templates.head.loss(head, hidden[0].detach(), targets, n_losses, total, extras)
    yield abs(float(actual) / n_losses / float(loss) - 1)
    for our, their in ((of_hidden, hidden[0].grad), (total, matrix.grad)):
        assert their is not None
        yield float((our.float() - their.float()).norm() / their.float().norm())


def compared(names: tuple[str, ...]) -> Iterator[str]:
    is_rounded = names is DISTILLED
    yield f"| loss | fp32 | bf16 |{' fp32, and the teacher is not rounded |' * is_rounded}\n|---|---|---|{'---|' * is_rounded}"
    for name in names:
        cells = [", ".join(map(shown, differences(name, dtype))) for dtype in ("fp32", "bf16")]
        cells += [", ".join(map(shown, differences(name, "fp32", is_rounded=False)))] * is_rounded
        yield f"| `{name}` | {' | '.join(cells)} |"


def answers(n: int, seed: int) -> list[dict[str, str]]:
    """Return pairs of four words in random order: two kind words in the chosen, two rude ones in the rejected answer."""
    draw, rows = random.Random(seed), list[dict[str, str]]()
    for i in range(n):
        both = [draw.choices(words, k=2) + draw.choices(("it", "then", "so", "well", "now"), k=2) for words in (KIND, RUDE)]
        for words in both:
            draw.shuffle(words)
        rows.append({"prompt": f"Pass {i}. ", "chosen": " ".join(both[0]), "rejected": " ".join(both[1])})
    return rows


def learned(home: Path) -> Iterator[str]:
    """Train a teacher on both kinds of answers, students of a fifth of its size, and a model that scores answers."""

    def config(name: str, fields: dict[str, Any]) -> Path:
        (home / name).mkdir()
        (home / name / "config.json").write_text(json.dumps(fields | {"architectures": ["LlamaForCausalLM"]}))
        return home / name

    def run(plan: str, data: Path, steps: int, *flags: object) -> Path:
        out, rate = home / plan.partition(".")[0], "1e-3" if plan == "reward.json" else "3e-3"
        arguments = ("--data", data, "--steps", steps, "--lr", rate)
        penstock("run", home / plan, *arguments, "--tokenizer", "bytes", "--out", out, *flags)
        return out / f"checkpoint-{steps}"

    def divergence(folder: Path) -> float:
        """Return the mean KL(teacher || student) of whole logits over tokens of held-out texts, by transformers."""
        per_text = list[Tensor]()
        both = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (teacher, folder)]
        for row in held_out:
            for half in ("chosen", "rejected"):
                ids = torch.tensor([[*(row["prompt"] + row[half]).encode(), END]])
                with torch.no_grad():
                    p, q = (model(ids).logits[0, :-1].log_softmax(-1) for model in both)
                per_text.append((p.exp() * (p - q)).sum(-1))
        return float(torch.cat(per_text).mean())

    pairs, held_out = manners(N_PAIRS, 0), manners(N_HELD_OUT, N_PAIRS)
    texts = write(home / "texts.jsonl", [{"text": row["prompt"] + row[half]} for row in pairs for half in ("chosen", "rejected")])
    large, small = config("large", BYTES), config("small", STUDENT)
    penstock("plan", large, *SIZES, "-o", home / "teacher.json")
    teacher = run("teacher.json", texts, N_BEFORE, "--from-scratch")
    penstock("plan", teacher, *SIZES, "--loss", "distill:k=16", "-o", home / "writes.json")
    penstock("forward", home / "writes.json", "--data", texts, "--tokenizer", "bytes", "--out", home / "top.safetensors")
    n_bytes = (home / "top.safetensors").stat().st_size
    yield f"The teacher's file: {n_bytes:,} bytes."
    yield f"\n| student, {N_STEPS} steps | KL(teacher \\|\\| student), held-out, whole logits |\n|---|---:|"
    penstock("plan", small, *SIZES, "-o", home / "none.json")
    yield f"| random weights, 1 step by cross entropy | {divergence(run('none.json', texts, 1, '--from-scratch')):.3f} |"
    for name, loss, flags in (
        ("plain", "cross-entropy", ()),
        ("kl", "distill:k=16", ("--reference", home / "top.safetensors")),
        ("jsd", "distill:k=16,beta=0.5", ("--reference", home / "top.safetensors")),
    ):
        penstock("plan", small, *SIZES, "--loss", loss, "-o", home / f"{name}.json")
        yield f"| `{loss}` | {divergence(run(f'{name}.json', texts, N_STEPS, '--from-scratch', *flags)):.3f} |"
    penstock("plan", large, *SIZES, "--loss", "reward", "-o", home / "reward.json")
    flags = ("--eval-data", write(home / "held-out.jsonl", answers(N_HELD_OUT, 1)), "--eval-every", EVERY // 3, "--from-scratch")
    run("reward.json", write(home / "pairs.jsonl", answers(N_PAIRS, 0)), 2 * EVERY, *flags)
    yield "\n| steps of `reward`, 4 pairs each | held-out loss | ranked rightly |\n|---:|---:|---:|"
    yield from ranked(home / "reward")


def main() -> None:
    print(f"""# Does a student come nearer to its teacher, and are heads those of transformers?

Made with `python -m benchmarks.teachers`, torch {torch.__version__}, transformers {transformers.__version__}, Python
{platform.python_version()}, on two cores.

## The same sequences, a two-layer Llama of 96 ids

Relative differences of the loss, and of the gradients of the last hidden state and of the output matrix. Distillation against
definitions on whole logits in fp64, with the teacher from a file, in fp16, and with the exact teacher:
""")
    print(*compared(DISTILLED), sep="\n")
    print("\nOther losses against theirs on whole logits in fp64:\n")
    print(*compared(PLAIN), sep="\n")
    print("\nHeads against `AutoModelForSequenceClassification`, which rounds its scores' gradients in bf16:\n")
    print(*compared(HEADS), sep="\n")
    print(f"""
## Runs

{N_PAIRS} pairs of polite and rude answers, as texts; {N_HELD_OUT} others held out. The teacher: a byte-level Llama of 0.8 M
parameters that had learned both manners for {N_BEFORE} steps; students of 0.15 M, of random weights, {N_STEPS} steps of 8
sequences of 64 tokens. Then a model of the teacher's size, of random weights, with a head that scores answers: {N_PAIRS} pairs of
four words in any order, two of them kind or rude, and {N_HELD_OUT} others.
""")
    with tempfile.TemporaryDirectory() as home:
        print(*learned(Path(home)), sep="\n")
    print("""
## Limits

No GPU, no useful model, and no large teacher: plans of a 70B are in [losses](../losses.md).""")


if __name__ == "__main__":
    main()
