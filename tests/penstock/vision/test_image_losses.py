"""Losses of runs on images, against plain arithmetic with the logits of transformers' own forward; adapters on a packed base."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForImageTextToText

from penstock.data.files import Limits
from penstock.data.image_processor import ImageReader
from penstock.data.tokenizer import read_tokenizer
from tests.lanes import mostly_slow
from tests.penstock.vision.test_image_runs import planned, words
from tests.rank_runs import contents, run_to_end
from tests.running import lines_of, penstock, succeeded
from tests.seers import drawing, write_drawings, write_seer

BETA = 0.5


@pytest.fixture
def home(tmp_path, no_fsync, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for folder in ("rows", "held"):
        write_drawings(tmp_path / folder, 2)
    return tmp_path


def rewrite(home, make):
    """Replace the rows by those that `make` returns for question, answer and number."""
    for folder in ("rows", "held"):
        path = home / folder / "images.jsonl"
        rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(make(row[:1], row[1:], n)) + "\n" for n, row in enumerate(rows)))


def losses(home, out="out"):
    return [line["loss"] for line in lines_of(home, out) if "loss" in line]


def logits_of(home, folder, number, answer):
    """Return logits and targets of the answer's tokens to the question about image `number`, by the model's own forward."""
    reader = ImageReader(home / "model", read_tokenizer(home / "model"), Limits(), home)
    processor, template = reader.processor, reader.template.tokenizer.library
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    chat = [question, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    texts = [template.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)]
    texts += [f"{texts[0]}{answer}<|im_end|>"]
    image = drawing(number, (48 + 8 * number, 40))[0]
    prompt, chat = (processor(text=[text], images=[image], return_tensors="pt") for text in texts)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    n = chat["input_ids"].shape[1] - prompt["input_ids"].shape[1]
    with torch.no_grad():
        return model(**chat).logits[0, -n - 1 : -1], chat["input_ids"][0, -n:]


def logp_of(*where):
    logits, targets = logits_of(*where)
    return -F.cross_entropy(logits, targets, reduction="sum")


def gain(home, number, answer):
    """Return how much likelier the answer is after the first step than before it."""
    return logp_of(home, home / "out" / "checkpoint-1", number, answer) - logp_of(home, home / "model", number, answer)


def trained(home, model_type, *extra):
    write_seer(home / "model", model_type)
    succeeded(penstock(*words(home, planned(home, "model", *extra), "--save-every", 1, "--lr", "3e-4", steps=2)))


@mostly_slow("model_type", ["qwen3_vl", "gemma3"], fast=(0,))
def test_dpo_is_its_arithmetic(home, model_type):
    """The second step's loss, of the weights after the first, and of the reference before it."""
    rewrite(
        home, lambda ask, answer, n: {"prompt": ask, "chosen": answer, "rejected": [{"role": "assistant", "content": "A dog."}]}
    )
    trained(home, model_type, "--loss", f"dpo:beta={BETA}")
    margins = [gain(home, n, drawing(n)[1]) - gain(home, n, "A dog.") for n in range(2)]
    expected = -F.logsigmoid(BETA * torch.stack(margins)).mean().item()
    first, second = losses(home)
    assert first == pytest.approx(0.693147, abs=1e-6)
    assert second == pytest.approx(expected, abs=1e-5)
    assert 1e-3 < second < first - 1e-2, "the step matters"


@mostly_slow("model_type", ["qwen3_vl", "gemma3"], fast=(1,))
def test_kto_is_its_arithmetic_and_an_image_stays_with_its_prompt(home, model_type):
    """TRL's arithmetic: the baseline is the mean gain of each prompt, with its image, and the other row's answer."""
    rewrite(home, lambda ask, answer, n: {"prompt": ask, "completion": answer, "label": n == 0})
    trained(home, model_type, "--loss", f"kto:beta={BETA},group=2", "--micro-batch", 4)
    baseline = torch.stack([gain(home, n, drawing(1 - n)[1]) for n in range(2)]).mean().clamp(min=0)
    good, bad = (gain(home, n, drawing(n)[1]) for n in range(2))
    expected = ((1 - (BETA * (good - baseline)).sigmoid() + 1 - (BETA * (baseline - bad)).sigmoid()) / 2).item()
    first, second = losses(home)
    assert first == pytest.approx(0.5, abs=1e-6)
    assert second == pytest.approx(expected, abs=1e-5)
    assert 1e-3 < second < first - 1e-2, "the step matters"


def test_distillation_is_the_divergence_from_a_teacher_with_the_images(home):
    """The whole vocabulary is in the teacher's file, which holds fp16."""
    n_vocab = write_seer(home / "model", "qwen3_vl")["text_config"]["vocab_size"]
    write_seer(home / "teacher", "qwen3_vl", rms_norm_eps=0.3)
    loss = ("--loss", f"distill:k={n_vocab}")
    teacher, student = planned(home, "teacher", *loss, name="teacher.json"), planned(home, "model", *loss)
    data = ("--data", home / "rows" / "images.jsonl", "--eval-data", home / "held" / "images.jsonl")
    succeeded(penstock("forward", teacher, *data, "--out", home / "top"))
    succeeded(penstock(*words(home, student, "--reference", home / "top", steps=1)))
    both = [
        [logits_of(home, home / folder, n, drawing(n)[1])[0].log_softmax(-1) for n in range(2)] for folder in ("teacher", "model")
    ]
    p, q = map(torch.cat, both)
    assert losses(home)[0] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3)


@mostly_slow("base", ["int8", "nf4", "fp8-rows"], fast=(0, 2))
def test_adapters_on_a_packed_base_learn_from_images_on_any_number_of_ranks(home, base):
    """Documents packed: near the loss of the whole model's own forward, and the same bits on two ranks."""
    write_drawings(home / "rows", 24)
    write_seer(home / "model", "qwen2_5_vl")
    compute = ("--compute", "fp8") if base == "fp8-rows" else ()
    sizes = ("--policy", "megatrain", "--batch-size", 8, "--micro-batch", 1, "--sum-groups", 4, "--seq-len", 128)
    adapters = (*sizes, *compute, "--train", "lora:r=4", "--base", base)
    one, two = (planned(home, "model", *adapters, "--gpus", n, name=f"{n}.json") for n in (1, 2))
    result = succeeded(penstock(*words(home, one, out="alone", steps=2)))
    assert "packing documents" in result.output
    assert run_to_end(words(home, two, steps=2)).returncode == 0
    assert contents(home / "out" / "checkpoint-2") == contents(home / "alone" / "checkpoint-2")
    tokens = [F.cross_entropy(*logits_of(home, home / "model", n, drawing(n)[1]), reduction="none") for n in range(2)]
    first = next(line["eval_loss"] for line in lines_of(home, "alone") if "eval_loss" in line)
    assert first == pytest.approx(torch.cat(tokens).mean().item(), rel={"int8": 3e-4, "fp8-rows": 1e-3, "nf4": 6e-3}[base])
