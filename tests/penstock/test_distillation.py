"""Distillation: teacher files, training of a student, and rejected files."""

import json
import math
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.data.data import DataRequest, read_data
from penstock.hwprofiles.schema import Profile
from penstock.planner.lower.forward import most_micro_batches
from penstock.planner.predict.cost import CostModel, region_of
from penstock.planner.predict.forward_pass import forward_pass
from penstock.runtime.plan import PlanFile
from penstock.settings import DataSettings
from tests.lanes import mostly_slow
from tests.rank_runs import contents, run_to_end
from tests.rank_runs import words as run_words
from tests.running import lines_of, make_home, one_line, plan_in, succeeded, train, weights_sha
from tests.running import penstock as command
from tests.tiny import tiny_config

BYTES = ["--tokenizer", "bytes"]
LOSS = ("--loss", "distill:k=5,temperature=2", "--compute", "fp32")


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    home = make_home(tmp_path_factory.mktemp("taught"))
    (home / "model" / "config.json").write_text(json.dumps(tiny_config("llama", vocab_size=272, hidden_size=64)))
    succeeded(train(home, plan_in(home), steps=2))
    return home / "out" / "checkpoint-2"


@pytest.fixture
def school(home, taught):
    shutil.copytree(taught, home / "teacher")
    plan_in(home, *LOSS, model="teacher", name="teacher.json")
    return home


def written(home, *options, plan="teacher.json", scratch=BYTES):
    return command("forward", home / plan, "--data", home / "data", "--out", home / "top", *scratch, *options)


def test_a_teachers_file_is_what_transformers_says(school):
    succeeded(written(school))
    held = next(tensor for name, tensor in load_file(school / "top").items() if name.startswith("logps"))
    ids, logps = held[..., :10].contiguous().view(torch.int32), held[..., 10:16].contiguous().view(torch.float16)
    data = read_data(DataRequest(DataSettings(str(school / "data")), None, 272, 32, 4, 0, school / "run" / "tokens"))
    teacher = AutoModelForCausalLM.from_pretrained(school / "teacher", dtype=torch.float32)
    assert held.shape == (data.n_sequences, 1, 32, 16)
    for i in range(data.n_sequences):
        with torch.no_grad():
            likely = (teacher(data.batch_of_samples([(0, i)]).input_ids).logits[0] / 2).log_softmax(-1)
        torch.testing.assert_close(likely.gather(1, ids[i, 0].long()), logps[i, 0, :, :5].float(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(likely.topk(5).values, logps[i, 0, :, :5].float(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(logps.float().exp().sum(-1), torch.ones(held.shape[:3]), rtol=1e-3, atol=0)


def test_a_student_comes_nearer_to_its_teacher_and_resumes(school):
    succeeded(written(school))
    (school / "held-out.txt").write_text("Of which the teacher says nothing. " * 4)
    looks = ("--eval-data", school / "held-out.txt")
    plan, options = plan_in(school, *LOSS), ("--reference", school / "top", "--save-every", 3, "--save-minutes", 0, *looks)
    succeeded(train(school, plan, *options, steps=6))
    assert not any("eval_divergence" in line for line in lines_of(school, "out"))
    losses = [line["loss"] for line in lines_of(school, "out") if "loss" in line]
    assert 0 < losses[-1] < losses[0] / 3
    shutil.copytree(school / "out", school / "again")
    shutil.rmtree(school / "again" / "checkpoint-6")
    succeeded(train(school, plan, *options, "--resume", out="again", steps=6))
    assert weights_sha(school / "again" / "checkpoint-6") == weights_sha(school / "out" / "checkpoint-6")
    shutil.rmtree(school / "again" / "checkpoint-6")
    succeeded(written(school, "--from-scratch", "--seed", 0))  # from other weights
    one_line(train(school, plan, *options, "--resume", out="again", steps=6), 2, "of another set of data")


def plain_divergence(student, teacher, targets, beta, temperature):
    """Compute the divergence over whole logits, mean over supervised tokens."""
    q, p = ((logits.double() / temperature).log_softmax(-1)[targets != -100] for logits in (student, teacher))
    kl = lambda p, q: (p.exp() * (p - q)).sum(-1).mean()  # noqa: E731
    if beta in (0, 1):
        return kl(q, p) if beta else kl(p, q)
    m = torch.logaddexp(q + math.log(1 - beta), p + math.log(beta))
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@mostly_slow("beta", [0, 0.4, 1], fast=(1,))
def test_a_student_of_all_logits_learns_as_by_a_plain_loop(school, beta):
    """Loss, gradient norm and held-out divergence, from transformers' full logits; the tolerance covers the file's fp16."""
    loss = ("--loss", f"distill:k=272,temperature=0.25,beta={beta}", "--compute", "fp32", "--master", "fp32", "--clip-norm", "none")
    plan_in(school, *loss, model="teacher", name="teacher.json")
    held_out = ("--eval-data", school / "data" / "b.txt")
    succeeded(written(school, *held_out))
    succeeded(train(school, plan_in(school, *loss), "--reference", school / "top", *held_out, "--lr", "1e-30", steps=1))
    first, step, last = lines_of(school, "out")
    folders = school / "out" / "checkpoint-1", school / "teacher"
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    request = partial(DataRequest, model_folder=None, vocab_size=272, seq_len=32, seed=0, cache=school / "t")
    read = lambda path, n: read_data(request(DataSettings(str(path), shuffle=n > 1), batch_size=n))  # noqa: E731
    args = lambda batch: [model(batch.input_ids).logits for model in (student, teacher)] + [batch.targets, beta, 0.25]  # noqa: E731
    wanted = plain_divergence(*args(read(school / "data", 4).batch(0)))
    wanted.backward()
    norm = math.hypot(*(float(p.grad.norm()) for p in student.parameters()))
    assert (step["loss"], step["grad_norm"]) == (pytest.approx(wanted.item(), rel=5e-5), pytest.approx(norm, rel=2e-4))
    data = read(school / "data" / "b.txt", 1)
    with torch.no_grad():
        terms = [(plain_divergence(*args(batch)).item(), batch.n_supervised) for batch in map(data.batch, range(data.n_sequences))]
    mean = sum(loss * n for loss, n in terms) / sum(n for _, n in terms)
    assert first["eval_divergence"] == last["eval_divergence"] == pytest.approx(mean, rel=2e-5)


def test_two_ranks_learn_what_one_learns(school):
    succeeded(written(school))
    options = ("--policy", "megatrain", "--batch-size", 8, "--micro-batch", 1, "--sum-groups", 4)
    plans = [plan_in(school, *LOSS, *options, "--gpus", n, name=f"{n}.json") for n in (1, 2)]
    succeeded(command(*run_words(school, plans[0], "--reference", school / "top", out="alone", steps=2)))
    shared = run_to_end(run_words(school, plans[1], "--reference", school / "top", out="both", steps=2))
    assert shared.returncode == 0, shared.stderr
    assert contents(school / "both" / "checkpoint-2") == contents(school / "alone" / "checkpoint-2")


def test_a_teacher_of_something_else_is_refused(school):
    succeeded(written(school))
    plan, top = plan_in(school, *LOSS), school / "top"
    one_line(train(school, plan), 2, "learns from a teacher's file", "--reference FILE")
    one_line(command("plan", school / "model", "--machine", "cpu-2core", "--loss", "distill:k=273"), 2, "model has 272 token ids")
    one_line(train(school, plan, "--reference", top, "--packing", "one"), 2, "another --seq-len, --packing or --seed")
    wrong = plan_in(school, "--loss", "distill:k=6", name="other.json")
    one_line(train(school, wrong, "--reference", top), 2, "another kind (the 5 likeliest ids at temperature 2, and here", "the 6")
    (school / "data" / "c.txt").write_text("Another text.")
    one_line(train(school, plan, "--reference", top), 2, "holds nothing of this data")
    (school / "data" / "c.txt").unlink()
    (school / "small").mkdir()
    (school / "small" / "config.json").write_text(json.dumps(tiny_config("llama", vocab_size=258)))
    small = plan_in(school, *LOSS, model="small", name="small.json")
    one_line(train(school, small, "--reference", top), 2, "this model has 258 ids")
    content = top.read_bytes()
    top.write_bytes(content[:-9])
    one_line(train(school, plan, "--reference", top), 2, "not a whole safetensors file")
    top.write_bytes(content[:-99] + bytes([content[-99] ^ 1]) + content[-98:])
    one_line(train(school, plan, "--reference", top), 2, "damaged")
    assert not (school / "out").exists() or not os.listdir(school / "out")


def test_a_forward_that_is_stopped_leaves_no_file(school, monkeypatch):
    def broken(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("penstock.training.references.shutil.disk_usage", lambda _: SimpleNamespace(free=10**3))
        one_line(written(school), 2, "and 1 KB are free; make room, or plan with a smaller k")
    monkeypatch.setattr("penstock.checkpoint.tensor_files.os.fsync", broken)
    one_line(written(school), 2, "cannot be written (No space left on device)")
    assert not [path.name for path in school.iterdir() if path.name.startswith("top")]


def test_a_forward_pass_takes_as_long_as_its_busiest_lane(school):
    plan = PlanFile.read(school / "teacher.json").plan
    profile = Profile.from_json(plan.profile)
    timing = forward_pass(plan, CostModel(profile), region_of(profile))
    assert timing.n_sequences == most_micro_batches(plan) * plan.semantics.micro_batch
    assert timing.bound_s <= timing.seconds <= 3 * timing.bound_s
    shown = succeeded(command("plan", school / "teacher", "--machine", "cpu-2core", *LOSS)).output
    assert "a pass that writes log-probabilities" in shown
