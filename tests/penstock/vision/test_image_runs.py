"""Runs on images: the same bytes after a kill and on two ranks, stored features, adapters in PEFT, generation with an image."""

import json
import os
import shutil
import time
from contextlib import nullcontext

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from penstock.api import train
from penstock.data.image_processor import ImageReader
from penstock.runtime.errors import DataError, PlanError
from penstock.runtime.executor import Stop
from penstock.runtime.plan import Semantics
from penstock.vision import stored_outputs
from tests.lanes import mostly_slow
from tests.penstock.test_run_ranks import logged
from tests.rank_runs import begun, contents, run_to_end, said_by
from tests.running import SIZES, UNSEARCHED, lines_of, one_line, penstock, succeeded, weights_sha
from tests.seers import data_with_images, drawing, own_inputs, write_seer

LONG = [64 if word == "32" else word for word in SIZES]


def planned(home, model_type, *extra, name="plan.json"):
    if not (home / model_type).exists():
        write_seer(home / model_type, model_type)
    schedule = () if "--policy" in extra else UNSEARCHED
    succeeded(penstock("plan", home / model_type, *LONG, "--compute", "fp32", "-o", home / name, *extra, *schedule))
    return home / name


def words(home, plan, *extra, out="out", steps=4):
    run = ["run", plan, "--data", home / "rows" / "images.jsonl", "--eval-data", home / "held" / "images.jsonl"]
    return [str(word) for word in [*run, "--out", home / out, "--steps", steps, "--lr", "1e-3", *extra]]


def write_the_same_bytes(home, model_type, *extra):
    """Train alone; on two ranks, resumed on one; and alone, ended by SIGKILL after a checkpoint and resumed."""
    batch = ("--policy", "megatrain", "--batch-size", 8, "--micro-batch", 1, "--sum-groups", 4, *extra)
    one, two = (planned(home, model_type, *batch, "--gpus", n, name=f"{n}.json") for n in (1, 2))
    every, steps = ("--save-every", 2, "--eval-every", 2), 8
    succeeded(penstock(*words(home, one, *every, out="alone", steps=steps)))
    written_ns = {path: path.stat().st_mtime_ns for path in (home / "cache" / "towers").glob("*/*")}
    shared = run_to_end(words(home, two, *every, steps=2))
    assert shared.returncode == 0, shared.stderr
    assert contents(home / "out" / "checkpoint-2") == contents(home / "alone" / "checkpoint-2")
    running = begun(words(home, one, *every, out="killed", steps=steps))
    while not (home / "killed" / "checkpoint-2").exists():
        assert running.poll() is None, said_by(running)
        time.sleep(0.005)
    running.kill()
    running.communicate(timeout=60)
    assert not (home / "killed" / f"checkpoint-{steps}").exists(), "killed before its end"
    for out in ("out", "killed"):
        succeeded(penstock(*words(home, one, *every, "--resume", out=out, steps=steps)))
        assert weights_sha(home / out / f"checkpoint-{steps}") == weights_sha(home / "alone" / f"checkpoint-{steps}")
        assert logged(home, out) == logged(home, "alone")
    now_ns = {path: path.stat().st_mtime_ns for path in (home / "cache" / "towers").glob("*/*")}
    assert len(now_ns) == 1, "a file of features"
    assert now_ns == written_ns, "computed once"


@mostly_slow("model_type", ["qwen2_5_vl", "gemma3"], fast=(0,))
def test_a_killed_run_and_two_ranks_write_the_same_bytes(home, model_type):
    write_the_same_bytes(home, model_type)


def test_a_stopped_pass_goes_on_and_another_key_is_refused(home, monkeypatch):
    """Three images a file; a stop after the second file loses none of them."""
    monkeypatch.setattr(stored_outputs, "FILE_IMAGES", 3)
    plan, tower, computed = planned(home, "llava"), home / "features", list[str]()
    write = stored_outputs.StoredOutputs._write

    def stopping(self, batch, *arguments):
        computed.extend(batch)
        write(self, batch, *arguments)
        if len(computed) == 6:
            monkeypatch.setattr(Stop, "is_requested", True)

    monkeypatch.setattr(stored_outputs.StoredOutputs, "_write", stopping)
    forward = ["forward", plan, "--tower", "--data", home / "rows" / "images.jsonl", "--out", tower]
    one_line(penstock(*forward), 2, "those that are done are kept")
    monkeypatch.setattr(Stop, "is_requested", False)
    n = int(succeeded(penstock(*forward)).output.split("features of ")[1].split()[0])
    assert len(computed) == len(set(computed)) == n
    stored = [name for path in tower.glob("*.safetensors") for name in load_file(path)]
    assert sorted(stored) == sorted(computed)
    succeeded(penstock(*words(home, plan, "--tower", tower, steps=1)))
    assert len(computed) == n + 3, "held-out images are added"
    bf16 = planned(home, "llava", "--compute", "bf16", name="other.json")
    one_line(
        penstock(*words(home, bf16, "--tower", tower, steps=1, out="b")),
        2,
        "image features of another dtype than this run's (bf16)",
    )
    changed = load_file(home / "llava" / "model.safetensors")
    changed[next(name for name in changed if name.endswith("multi_modal_projector.linear_1.bias"))] += 1
    save_file(changed, home / "llava" / "model.safetensors", {"format": "pt"})
    one_line(penstock(*words(home, plan, "--tower", tower, steps=1, out="c")), 2, "image features of another tower")
    one_line(penstock("forward", plan, "--tower", "--data", home / "texts.jsonl", "--out", tower), 2, "texts.jsonl")
    for refused in ([*forward[:-1], plan], words(home, plan, "--tower", plan, out="d")):
        one_line(penstock(*refused), 2, "plan.json: is a file; name a folder for the features of images")


def test_an_image_that_changes_while_a_run_begins_is_an_error(home, monkeypatch):
    """Before, its row is read again, and a run that began with the former image is not resumed."""
    plan = planned(home, "llava", "--train", "lora:r=4")
    succeeded(penstock(*words(home, plan, steps=1)))
    drawing(77, (80, 80))[0].save(home / "rows" / "3-0.png")
    with monkeypatch.context() as patched:
        patched.setattr(ImageReader, "changed", lambda *_: {})
        changed = "images.jsonl:4: an image changed after this row was read; run again"
        one_line(penstock(*words(home, plan, "--tower", home / "tower", out="b")), 2, changed)
    one_line(
        penstock(*words(home, plan, "--resume")), 2, "of another set of data", "or start a new run from its weights, with --adapter"
    )
    succeeded(penstock(*words(home, plan, out="b", steps=1)))


def test_an_image_that_is_mended_is_not_left_out_of_cached_tokens(home):
    """Missing, then damaged, then whole: a later run neither reports the old fault nor trains without the image."""
    plan, image = planned(home, "llava"), home / "rows" / "3-0.png"
    content = image.read_bytes()
    image.unlink()
    one_line(penstock(*words(home, plan)), 2, "no image '3-0.png'")
    image.write_bytes(content[:200])
    one_line(penstock(*words(home, plan)), 2, "images.jsonl:4: image 1: an image that cannot be read")
    assert "1 of 12, left out" in succeeded(penstock(*words(home, plan, "--bad-rows", 0.5, out="skipped", steps=1))).output
    image.write_bytes(content)
    assert "left out" not in succeeded(penstock(*words(home, plan, out="mended", steps=1))).output


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        ({"patch_size": 16}, "the tower does not take the pixels of its processor"),
        ({"merge_size": 1}, "the tower does not take the pixels of its processor"),
        ({"image_processor_type": "CLIPImageProcessor"}, "the model's processor rejects it"),
    ],
)
def test_a_processor_of_another_model_is_a_line(home, processor, message):
    plan, path = planned(home, "qwen2_5_vl"), home / "qwen2_5_vl" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | processor))
    one_line(penstock(*words(home, plan)), 2, message)


def test_images_of_a_grid_next_to_each_other_are_refused(home):
    """Positions of such models begin anew at each image, which its tokens alone do not show."""
    template = home / "adjacent.jinja"
    text = "{{ m.role }}{% for p in m.content %}{{ p.text or '<|image_pad|>' }}{% endfor %}"
    template.write_text(f"{{% for m in messages %}}<|im_start|>{text}<|im_end|>{{% endfor %}}")
    one_line(penstock(*words(home, planned(home, "qwen2_5_vl"), "--chat-template", template)), 2, "nothing between two images")


def test_unfinished_files_of_killed_passes_are_removed(home):
    plan, tower = planned(home, "llava"), home / "features"
    tower.mkdir()
    old, new = (tower / f"images-0.safetensors.{n}.partial" for n in (1, 2))
    for path, age_s in ((old, 2 * stored_outputs.OLD_S), (new, 0)):
        path.touch()
        os.utime(path, times=(time.time() - age_s,) * 2)
    succeeded(penstock("forward", plan, "--tower", "--data", home / "rows" / "images.jsonl", "--out", tower))
    assert (old.exists(), new.exists()) == (False, True), "the new one may be that of another process"


def test_batches_of_a_program_have_no_token_of_images(home):
    plan = planned(home, "llava", "--batch-size", "1", "--micro-batch", "1")
    token = json.loads((home / "llava" / "config.json").read_text())["image_token_index"]
    for ids in ([5, 6, 7], [5, token, 7]):
        with pytest.raises(DataError, match="the token of images") if token in ids else nullcontext():
            train(plan, [{"input_ids": [ids], "labels": [ids]}], out=home / str(token in ids), steps=1, lr=1e-3)
    with pytest.raises(PlanError, match=r"stop is a int; give a penstock\.Stop"):
        train(plan, [{"text": "a"}], out=home / "out", steps=1, stop=3)
    with pytest.raises(PlanError, match=r'^settings={"tower": \.\.\.}: the data has no images; leave it out'):
        train(plan, [{"text": "a b c"}] * 4, out=home / "out", steps=1, settings={"tower": str(home / "features")})


@mostly_slow("model_type", ["qwen2_5_vl", "llava"], fast=(0,))
def test_adapters_are_read_by_peft_and_generation_sees_the_image(home, model_type):
    """Next to the whole model, and merged into it: transformers generates the same from both, and other text without it."""
    plan = planned(home, model_type, "--train", "lora:r=4,alpha=8")
    succeeded(penstock(*words(home, plan, "--lr", "1e-2", steps=6)))
    losses = [line["eval_loss"] for line in lines_of(home, "out") if "eval_loss" in line]
    assert losses[-1] < losses[0]
    last, folder = home / "out" / "checkpoint-6", home / model_type
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, last).eval()
    succeeded(penstock("merge", folder, last, "--out", home / "merged"))
    assert (home / "merged" / "preprocessor_config.json").is_file()
    merged = AutoModelForImageTextToText.from_pretrained(home / "merged", dtype=torch.float32).eval()
    data = data_with_images(folder, home / "rows" / "images.jsonl", home, Semantics(64, 1, 1, compute_dtype="fp32"))
    inputs = own_inputs(data, merged, 0, 0)
    first = int(data.parts[0].documents.runs(0)[0, 0])
    labels = inputs.pop("labels")
    inputs = {k: x[:, :first] if isinstance(x, torch.Tensor) and x.shape == labels.shape else x for k, x in inputs.items()}
    inputs |= {"use_cache": True, "attention_mask": torch.ones_like(inputs["input_ids"]), "max_new_tokens": 8, "do_sample": False}
    texts = [model.generate(**inputs).tolist() for model in (adapted, merged, base)]
    assert texts[0] == texts[1]
    logits = [
        model(**{k: x for k, x in inputs.items() if k not in ("max_new_tokens", "do_sample")}).logits for model in (adapted, merged)
    ]
    assert (logits[0] - logits[1]).abs().max() < 1e-4


def test_preferences_about_images_train_with_a_reference(home):
    """Both answers have the images of the prompt; the reference is computed with them, so that the first loss is ln 2."""
    rows = [json.loads(line) for line in (home / "rows" / "images.jsonl").read_text().splitlines()]
    pairs = [
        {"prompt": row["messages"][:1], "chosen": row["messages"][1:], "rejected": [{"role": "assistant", "content": "A dog."}]}
        for row in rows
    ]
    shutil.copytree(home / "rows", home / "held", dirs_exist_ok=True)
    for folder, part in (("rows", pairs), ("held", pairs[:2])):
        (home / folder / "images.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    plan = planned(home, "qwen2_5_vl", "--loss", "dpo")
    succeeded(penstock(*words(home, plan, steps=2)))
    assert next(line["loss"] for line in lines_of(home, "out") if "loss" in line) == pytest.approx(0.693147, abs=1e-5)
