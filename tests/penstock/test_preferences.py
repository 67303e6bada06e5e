"""Preference losses and reference models: rows of chosen and rejected answers, errors, and runs."""

import hashlib
import inspect
import json
import math
import os
import re
import shutil
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import penstock
from penstock.data.data import DataRequest, read_data
from penstock.data.formats import required_format
from penstock.data.user_batches import UserBatches
from penstock.runtime.batch import Batch
from penstock.runtime.errors import DataError, PlanError
from penstock.runtime.plan.objective import LossUnit, Source, parse_objective
from penstock.settings import DataSettings
from penstock.user_loss import planned_loss, user_loss
from tests.bytes_of_files import write_lines
from tests.lanes import mostly_slow
from tests.running import SCRATCH, lines_of, one_line, plan_in, succeeded, train
from tests.running import penstock as command

PROMPT, YES, NO = ({"role": role, "content": text} for role, text in (("user", "tea?"), ("assistant", "yes"), ("assistant", "no")))
PAIR = {"prompt": "tea? ", "chosen": "yes", "rejected": "no, never"}
ANSWER = {"prompt": "tea? ", "completion": "yes", "label": True}
DPO = ("--loss", "dpo:beta=0.5")


def read(path, loss, seq_len=64, batch_size=4, **settings):
    cache, objective = path.parent / "run" / "tokens", parse_objective(loss)
    settings = DataSettings(str(path), **settings)
    return read_data(DataRequest(settings, None, 300, seq_len, batch_size, 3, cache, objective=objective))


def pairs_of(path, *rows, **settings):
    return read(write_lines(path, rows), "dpo", **settings)


@pytest.fixture
def tea(home):
    shutil.rmtree(home / "data")
    rows = [{"prompt": f"tea {n}? ", "chosen": f"yes, {n}", "rejected": f"no {n} never"} for n in range(12)]
    write_lines(home / "data" / "pairs.jsonl", rows[:8])
    write_lines(home / "held-out.jsonl", rows[8:])
    return home


PAIRS = [PAIR, {"chosen": "tea? yes", "rejected": "tea? no, never"}, {"prompt": [PROMPT], "chosen": [YES], "rejected": [NO]}]


@pytest.mark.parametrize("row", [*PAIRS, {"chosen": [PROMPT, YES], "rejected": [PROMPT, NO], "prompt": "tea?"}])
def test_a_pair_is_two_sequences_with_only_answers_learned(tmp_path, row):
    data = pairs_of(tmp_path / "a.jsonl", row, {**row}, {**row})
    batch, (documents,) = data.batch(0), [part.documents for part in data.parts]
    assert (len(batch.input_ids), data.n_sequences, data.n_steps) == (4, 3, 2)
    for half, answer in enumerate((b"yes", b"no, never" if isinstance(row["chosen"], str) else b"no")):
        learned = batch.targets[half][batch.targets[half] != -100]
        assert bytes(learned[:-1].tolist()).strip() == answer
        assert len(learned) == documents.n_learned[half]
    assert torch.equal(*(batch.input_ids[half, :5] for half in (0, 1)))


def test_an_answer_that_is_cut_away_takes_its_pair_along(tmp_path):
    data = pairs_of(tmp_path / "a.jsonl", {"prompt": "x" * 70, "chosen": "yes", "rejected": "no"}, PAIR)
    assert data.n_sequences == 1
    assert data.parts[0].counts["unsupervised"] == 2


@pytest.mark.parametrize("loss", ["simpo", "reward"])
def test_pairs_are_streamed_whole_and_resumed(tmp_path, loss):
    """Odd shuffle buffer, across the end of an epoch; compared with map-style data."""
    rows = [{"prompt": f"tea {n}? ", "chosen": f"yes, {n}" + "!" * (60 * (n == 4)), "rejected": f"no {n}"} for n in range(7)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    map_style = read(path, loss, seq_len=32)
    streamed, again = (read(path, loss, seq_len=32, streaming=True, shuffle_buffer=5) for _ in range(2))

    def pairs(batches):
        tensors = ([batch.input_ids, batch.targets, *batch.extras.values()] for batch in batches)
        return [[tensor[i : i + 2].tolist() for tensor in batch] for batch in tensors for i in (0, 2)]

    streamed_pairs = pairs(map(streamed.batch, range(7)))
    assert sorted(streamed_pairs[:7]) == sorted(streamed_pairs[7:]) == sorted(pairs(map(map_style.batch, range(7)))[:7])
    assert streamed_pairs[:7] != streamed_pairs[7:]
    assert again.resume(3, json.loads(json.dumps(streamed.position(3))))
    assert pairs(map(again.batch, range(3, 7))) == streamed_pairs[6:]


def answers_of(path, *rows, **settings):
    return read(write_lines(path, rows), "kto:group=2", shuffle=False, **settings)


def test_ktos_answers_follow_their_prompt_with_anothers_answer(tmp_path):
    """Same pairing as TRL: previous answer of the group; the first with the last."""
    rows = [{"prompt": f"tea {n}? ", "completion": "y" * (n + 1), "label": n % 2 == 0} for n in range(5)]
    data = answers_of(tmp_path / "a.jsonl", *rows, {**rows[0], "label": 2}, bad_rows=0.2)
    assert (data.n_sequences, data.parts[0].counts["skipped"], len(data.parts[0].documents.problems)) == (2, 1, 1)
    for step, (first, second) in enumerate(((0, 1), (2, 3))):
        batch = data.batch(step)
        expected = [(first, first), (first, second), (second, second), (second, first)]
        for ids, targets, (prompt, answer) in zip(batch.input_ids, batch.targets, expected, strict=True):
            text = rows[prompt]["prompt"] + rows[answer]["completion"]
            assert bytes(ids[: len(text)].tolist()).decode() == text
            assert bytes(targets[targets != -100][:-1].tolist()).decode() == rows[answer]["completion"]
        assert batch.extras["label"].tolist() == [1, 1, 0, 0]
    with pytest.raises(DataError, match="a group has 2 answers: give more"):
        answers_of(tmp_path / "c.jsonl", rows[0])
    short = answers_of(tmp_path / "b.jsonl", {**rows[0], "prompt": "tea for two? "}, rows[4], seq_len=15).batch(0)
    assert [(targets != -100).sum() for targets in short.targets] == [2, 2, 6, 2]  # the other answer is truncated to fit


def test_labels_of_a_csv_are_words(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion,label\ntea? ,yes,True\ntea? ,no,false\n")
    data = read(tmp_path / "a.csv", "kto:group=2", shuffle=False)
    assert data.batch(0).extras["label"].tolist() == [1, 1, 0, 0]


def test_a_run_of_answers_begins_at_its_reference(home):
    """Initial loss is exactly 0.5, because policy and reference are equal."""
    shutil.rmtree(home / "data")
    rows = [{"prompt": f"tea {n}? ", "completion": f"{n} yes, tea", "label": n % 3 > 0} for n in range(9)]
    write_lines(home / "data" / "answers.jsonl", rows)
    plan = plan_in(home, "--loss", "kto:beta=0.5,group=2", "--micro-batch", 4)
    result = succeeded(train(home, plan, "--eval-data", home / "data", "--eval-every", 2, steps=4))
    first, *_, last = [line for line in lines_of(home, "out") if "eval_loss" in line]
    assert (first["eval_loss"], first["eval_answers"]) == (0.5, 8)
    assert last["eval_loss"] < 0.5
    assert "4 groups of 2 answers that share them" in result.output


GROUP = {"prompt_ids": [9, 8], "completion_ids": [[1], [2, 3, 4]], "logprobs": [[-0.5], [-0.25, -2, -1]], "rewards": [0, 1]}


def rollouts_of(path, *rows, **settings):
    return read(write_lines(path, rows), "grpo", seq_len=4, batch_size=2, shuffle=False, **settings)


@pytest.mark.parametrize(("loss", "row"), [("dpo", PAIR), ("kto:group=2", ANSWER), ("grpo", GROUP)])
def test_parquet_has_the_rows_that_a_loss_asks_for(tmp_path, loss, row):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 4), tmp_path / "a.parquet")
    paths = tmp_path / "a.parquet", write_lines(tmp_path / "a.jsonl", [row] * 4)
    actual, expected = (read(path, loss).batch(0) for path in paths)
    assert torch.equal(actual.input_ids, expected.input_ids)
    assert {name: t.tolist() for name, t in actual.extras.items()} == {name: t.tolist() for name, t in expected.extras.items()}
    own = replace(parse_objective(loss), name="own.py:f", numbers={}, of=LossUnit.SEQUENCES, sha256="0" * 64)
    assert required_format(own) is None


LABELLED = {"text": "tea", "label": 1}


@pytest.mark.parametrize(("loss", "row"), [("reward", PAIR), ("kto:group=2", ANSWER), ("grpo", GROUP), ("classify", LABELLED)])
def test_a_batch_of_files_holds_the_inputs_in_the_table(tmp_path, loss, row):
    inputs = [one for one in parse_objective(loss).inputs if one.source is not Source.FILE]
    extras = read(write_lines(tmp_path / "a.jsonl", [row] * 4), loss).batch(0).extras
    assert extras.keys() == {one.name for one in inputs}
    assert all(extras[one.name].shape == one.sizes(4, 64) for one in inputs)
    assert all(extras[one.name].dtype is getattr(torch, one.dtype) for one in inputs)


def test_a_group_of_rollouts_is_a_sequence_for_each(tmp_path):
    """Truncated completions with group-normalised advantages, and log-probabilities at their target positions."""
    data = rollouts_of(tmp_path / "a.jsonl", GROUP, GROUP | {"rewards": None, "advantages": [3, -4]})
    first, second = data.batch(0), data.batch(1)
    assert first.input_ids.tolist() == [[9, 8, 1, 256], [9, 8, 2, 3]]
    assert first.targets.tolist() == [[-100, 1, -100, -100], [-100, 2, 3, -100]]
    assert first.extras["old"].tolist() == [[0, -0.5, 0, 0], [0, -0.25, -2, 0]]
    std = torch.tensor([0.0, 1]).std()
    torch.testing.assert_close(first.extras["advantage"][:, 1], torch.tensor([-0.5, 0.5]) / (std + 1e-4))
    assert second.extras["advantage"][:, :3].tolist() == [[3, 3, 3], [-4, -4, -4]]


def ratio_in(stderr):
    """Return the mean ratio that a run prints before its first step."""
    return float(re.search(r"rollouts before the first step: mean ratio ([\d.]+) over [\d,]+ tokens", stderr)[1])


@pytest.mark.parametrize(("logp", "cause"), [(-5.0, "top_p, top_k, min_p or a temperature"), (-6.2, "a temperature above 1")])
def test_rollouts_of_other_probabilities_are_named_before_the_first_step(home, logp, cause):
    """A random model of 272 ids is nearly uniform, so that the ratio is 1 / 272 by the probability in the rows."""
    group = {"prompt_ids": [1, 2], "completion_ids": [[3, 4], [5, 6, 7]], "logprobs": [[logp] * 2, [logp] * 3], "rewards": [0, 1]}
    shutil.rmtree(home / "data", ignore_errors=True)
    write_lines(home / "data" / "groups.jsonl", [group] * 8)
    stderr = succeeded(train(home, plan_in(home, "--loss", "grpo"), steps=1, out=f"ratio{logp}")).stderr
    assert abs(ratio_in(stderr) * math.exp(logp) * 272 - 1) < 0.05
    assert cause in stderr


def test_a_run_of_rollouts_keeps_to_its_reference(home):
    """The reference file holds one value per token; before the first step the divergence is zero."""
    shutil.rmtree(home / "data")
    of_groups = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randint(0, 250, shape, generator=of_groups).tolist()  # noqa: E731
    logprobs = {"logprobs": [[-5.6] * 6] * 4}
    rows = [logprobs | {"prompt_ids": draw(4), "completion_ids": draw(4, 6), "rewards": draw(4)} for _ in range(4)]
    write_lines(home / "data" / "groups.jsonl", rows)
    plan = plan_in(home, "--loss", "grpo:beta=0.1")
    stderr = succeeded(train(home, plan, steps=4)).stderr
    held, _ = load_file(home / "out" / "reference.safetensors").values()
    assert abs(ratio_in(stderr) - (held[held != 0] + 5.6).exp().mean()) < 0.01, "of the reference, which the run begins with"
    assert "top_p" not in stderr
    assert (held.shape, held.dtype, int((held != 0).sum())) == ((6, 1, 32), torch.float32, 16 * 6)
    succeeded(command("forward", plan, "--data", home / "data", "--out", home / "ref", *SCRATCH))
    succeeded(train(home, plan, "--reference", home / "ref", out="again"))
    lines = [[{"loss": line["loss"], "norm": line["grad_norm"]} for line in lines_of(home, out)] for out in ("out", "again")]
    assert lines[0] == lines[1]
    one_line(train(home, plan_in(home, "--loss", "dapo", name="d.json"), "--reference", home / "ref", out="d"), 2, "takes none")


@pytest.mark.parametrize(
    ("rows_of", "row", "says"),
    [
        (pairs_of, {**PAIR, "chosen": " "}, 'an empty answer under "chosen"'),
        (pairs_of, {"prompt": [PROMPT], "chosen": [YES], "rejected": []}, 'an empty answer under "rejected"'),
        (pairs_of, {**PAIR, "rejected": "yes"}, "chosen and rejected are the same"),
        (pairs_of, {**PAIR, "prompt": ""}, "share no prompt"),
        (pairs_of, {"chosen": [PROMPT, YES], "rejected": [YES, NO]}, "share no prompt"),
        (pairs_of, {**PAIR, "rejected": [NO]}, 'no string under "rejected"'),
        (pairs_of, {**PAIR, "system": "be brief"}, '"system" next to a text "prompt"'),
        (pairs_of, {"question": " ", "chosen": "a yes", "rejected": "a no"}, "an empty question"),
        (pairs_of, {"chosen": "tea? yes", "rejected": "tea? yes, please"}, "one of chosen and rejected begins with the other"),
        (pairs_of, {"text": "tea"}, "a loss of pairs needs chosen and rejected"),
        (partial(pairs_of, packing="joined"), PAIR, "each answer is apart"),
        (partial(pairs_of, format="text"), PAIR, "the plan's loss is of preference rows, with chosen and rejected"),
        (answers_of, ANSWER | {"label": "good"}, 'a "label" that is neither true nor false'),
        (answers_of, ANSWER | {"completion": " "}, 'an empty answer under "completion"'),
        (answers_of, ANSWER | {"prompt": ""}, 'an empty "prompt"'),
        (answers_of, ANSWER | {"completion": [YES]}, 'no string under "completion"'),
        (rollouts_of, GROUP | {"rewards": [1]}, "of other numbers than each other"),
        (rollouts_of, GROUP | {"completion_ids": [[1]], "logprobs": [[-1]], "rewards": [1]}, "a group of too few"),
        (rollouts_of, GROUP | {"logprobs": [[-0.5], [-0.25, -2]]}, 'not one of "logprobs" for each'),
        (rollouts_of, GROUP | {"logprobs": [[-0.5], [-0.25, -2, 3]]}, '"logprobs" above 0'),
        (rollouts_of, GROUP | {"rewards": [0, float("nan")]}, '"rewards" that are no finite numbers'),
        (rollouts_of, GROUP | {"completion_ids": [[1], [2, 3, 300]]}, "a token 300; the model has ids 0 to 299"),
        (rollouts_of, GROUP | {"completion_ids": [[], [2, 3, 4]], "logprobs": [[], [-1, -1, -1]]}, "a completion that is empty"),
        (rollouts_of, GROUP | {"prompt_ids": []}, 'an empty "prompt_ids"'),
        (rollouts_of, GROUP | {"prompt_ids": "tea"}, 'no list under "prompt_ids"'),
    ],
)
def test_a_row_that_teaches_nothing_is_refused_in_a_line(tmp_path, rows_of, row, says):
    with pytest.raises(DataError) as error:
        rows_of(tmp_path / "a.jsonl", row)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_of_pairs_begins_at_its_reference_and_resumes(tea):
    """Initial loss is exactly ln 2, because policy and reference are equal. The file equals that of `penstock forward`."""
    plan = plan_in(tea, *DPO)
    options = ("--eval-data", tea / "held-out.jsonl", "--eval-every", 3, "--save-every", 3)
    succeeded(train(tea, plan, *options, steps=6))
    first, *_, last = [line for line in lines_of(tea, "out") if "eval_loss" in line]
    assert (first["eval_loss"], first["eval_accuracy"], first["eval_pairs"]) == (math.log(2), 0.5, 4)
    assert last["eval_loss"] < first["eval_loss"]
    shutil.copytree(tea / "out", tea / "again")
    shutil.rmtree(tea / "again" / "checkpoint-6")
    succeeded(train(tea, plan, *options, "--resume", scratch=SCRATCH[1:], out="again", steps=6))  # computes its reference
    files = [sorted((tea / out / "checkpoint-6").glob("*.safetensors")) for out in ("out", "again")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    written = ("forward", plan, "--data", tea / "data", "--eval-data", tea / "held-out.jsonl", "--out", tea / "ref", *SCRATCH)
    assert "24 answers" in succeeded(command(*written)).output
    assert (tea / "ref").read_bytes() == (tea / "out" / "reference.safetensors").read_bytes()


@mostly_slow("loss", ["dpo", "orpo", "reward"])
def test_pairs_that_share_sequences_are_the_same_pairs(tea, loss):
    """One step over all pairs has equal means and gradients with and without shared sequences."""
    lines = {}
    for packing, n in (("one", 16), ("documents", 8)):
        how = ("--loss", loss, "--compute", "fp32", "--batch-size", n, "--micro-batch", 4, "--seq-len", 40)
        plan = plan_in(tea, *how, name=f"{packing}.json")
        options = ("--packing", packing, "--eval-data", tea / "held-out.jsonl", "--eval-every", 2, "--lr", "1e-2")
        result = succeeded(train(tea, plan, *options, out=packing, steps=2))
        lines[packing] = lines_of(tea, packing)
    assert "4 times 2 sequences, of 8 pairs that share them" in result.output
    alone, shared = lines.values()
    assert len(alone) == len(shared)
    for names in (("loss", "grad_norm"), ("eval_loss", "eval_accuracy", "eval_pairs")):
        values = [[[line[name] for name in names] for line in log if names[0] in line] for log in (alone, shared)]
        assert values[0]
        torch.testing.assert_close(torch.tensor(values[1]), torch.tensor(values[0]), rtol=5e-5, atol=1e-6)


def test_a_reference_of_something_else_is_refused(tea):
    plan, ref = plan_in(tea, *DPO), tea / "ref"
    succeeded(command("forward", plan, "--data", tea / "data", "--out", ref, *SCRATCH))
    one_line(train(tea, plan, "--reference", ref, "--seed", 1), 2, "another weights")
    one_line(train(tea, plan_in(tea, *DPO, "--compute", "fp32", name="o.json"), "--reference", ref), 2, "another compute_dtype")
    assert {"weights", "library_kernels"} <= json.loads(safe_open(ref, "pt").metadata()["key"]).keys()
    one_line(train(tea, plan_in(tea, "--loss", "orpo", name="orpo.json"), "--reference", ref), 2, "the plan's loss takes none")
    one_line(train(tea, plan, "--loss", "dpo"), 2, "leave --loss out")
    one_line(train(tea, plan, "--reference", ref, "--eval-data", tea / "held-out.jsonl"), 2, "holds nothing of this data")
    fields = safe_open(ref, "pt").metadata()
    key = json.loads(fields["key"])
    assert key.pop("products") == "compute"  # absent from files of versions without FP8 products
    save_file(load_file(ref), older := tea / "older", fields | {"key": json.dumps(key)})
    succeeded(train(tea, plan, "--reference", older, out="of-older", steps=1))
    one_line(train(tea, plan_in(tea, *DPO, "--compute", "fp8", name="8.json"), "--reference", older), 2, "another products")
    save_file({"a": torch.zeros(1)}, ref)
    one_line(train(tea, plan, "--reference", ref), 2, "no file of a reference")


BYTES = ["--tokenizer", "bytes"]


@pytest.fixture
def sft(tea):
    """Return the plan of a tuned adapter, and the flags of a run that goes on from it."""
    succeeded(train(tea, plan_in(tea, "--loss", "orpo"), out="base", steps=2))
    plan = plan_in(tea, "--train", "lora:r=4", "--loss", "orpo", model="base/checkpoint-2", name="sft.json")
    succeeded(train(tea, plan, "--lr", "3e-2", scratch=BYTES, out="sft", steps=2))
    return tea / "sft" / "checkpoint-2"


def tuned(tea, adapter, *flags, loss="dpo", out="out", steps=4):
    """Run a loss from the adapter; return the result and the lines of its evaluations."""
    words = ("--train", "lora:r=4", "--loss", loss, *(("--micro-batch", 4) if "kto" in loss else ()))
    plan = plan_in(tea, *words, model="base/checkpoint-2", name=f"{loss[:3]}.json")
    options = ("--eval-data", tea / "held-out.jsonl", "--eval-every", 2, "--save-every", 2, *BYTES, *flags)
    result = train(tea, plan, *options, *(() if adapter is None else ("--adapter", adapter)), scratch=[], out=out, steps=steps)
    return result, [line for line in lines_of(tea, out) if "eval_loss" in line] if result.exit_code == 0 else []


@mostly_slow(
    ("loss", "first"),
    [
        ("dpo", math.log(2)),
        ("robust", math.log(2)),
        ("hinge", 1.0),
        ("ipo:beta=0.2", 1 / (4 * 0.2**2)),
        ("kto:beta=0.5,group=2", 0.5),
    ],
    fast=(0, 3),
)
def test_a_run_from_an_adapter_begins_at_its_reference(sft, tea, loss, first):
    """The reference is the model with the adapter, as in TRL. With the base alone the loss has another first value."""
    if "kto" in loss:
        rows = [{"prompt": f"tea {n}? ", "completion": f"yes, {n}", "label": n % 3 > 0} for n in range(8)]
        write_lines(tea / "data" / "pairs.jsonl", rows)
        write_lines(tea / "held-out.jsonl", rows)
    result, (begun, *_) = tuned(tea, sft, loss=loss, steps=2)
    assert begun["eval_loss"] == pytest.approx(first, abs=1e-12)
    assert f"reference: the model with the adapter that the run begins with, {sft} (SHA-256 " in succeeded(result).stderr
    base, (begun, *_) = tuned(tea, sft, "--reference", "base", loss=loss, out="on-base", steps=2)
    assert "reference: the model without an adapter" in base.stderr
    assert begun["eval_loss"] != pytest.approx(first, abs=1e-4)
    if loss == "dpo":
        alone, (begun, *_) = tuned(tea, None, out="alone", steps=2)
        assert (begun["eval_loss"], "reference: the model without an adapter" in alone.stderr) == (math.log(2), True)


def test_the_reference_of_a_run_stays_what_it_began_with(sft, tea):
    succeeded(tuned(tea, sft)[0])
    wanted = (tea / "out" / "checkpoint-4" / "adapter_model.safetensors").read_bytes()
    for out, lost, flags in (("a", False, ()), ("b", True, ()), ("c", True, ("--adapter", sft, "--reference", "start"))):
        shutil.copytree(tea / "out", tea / out)
        shutil.rmtree(tea / out / "checkpoint-4")
        if lost:
            (tea / out / "reference.safetensors").unlink()
        result, _ = tuned(tea, None, "--resume", *flags, out=out)
        assert f"reference: the model with the adapter that the run begins with, {sft}" in succeeded(result).stderr
        assert (tea / out / "checkpoint-4" / "adapter_model.safetensors").read_bytes() == wanted
    shutil.rmtree(tea / "a" / "checkpoint-4")
    result, _ = tuned(tea, sft, "--resume", "--reference", "base", out="a")
    one_line(result, 2, "its reference is the model with the adapter", "and --reference base is the model without an adapter")
    (tea / "a" / "reference.safetensors").unlink()
    moved = sft.rename(sft.with_name("moved"))
    one_line(tuned(tea, None, "--resume", out="a")[0], 2, "adapter_config.json: cannot be read")
    shutil.copytree(moved, sft)
    (sft / "adapter_model.safetensors").write_bytes((sft / "adapter_model.safetensors").read_bytes()[:-1] + b"\1")
    one_line(tuned(tea, None, "--resume", out="a")[0], 2, "reference.safetensors: is gone, and", "no longer the adapter")


def test_a_reference_file_is_of_the_adapter_or_of_the_merged_model(sft, tea):
    succeeded(tuned(tea, sft, steps=2)[0])
    files = ("--data", tea / "data", "--eval-data", tea / "held-out.jsonl", *BYTES)
    succeeded(command("forward", tea / "dpo.json", *files, "--adapter", sft, "--out", tea / "ref"))
    assert (tea / "ref").read_bytes() == (tea / "out" / "reference.safetensors").read_bytes()
    losses = [line["loss"] for line in lines_of(tea, "out") if "loss" in line]
    assert "reference: the file " in succeeded(tuned(tea, sft, "--reference", tea / "ref", out="file", steps=2)[0]).stderr
    assert [line["loss"] for line in lines_of(tea, "file") if "loss" in line] == losses
    one_line(
        tuned(tea, None, "--reference", tea / "ref", out="x")[0], 2, "a reference of another adapter", "the run has no --adapter"
    )
    one_line(tuned(tea, tea / "out" / "checkpoint-2", "--reference", tea / "ref", out="x")[0], 2, "a reference of another adapter")
    succeeded(command("merge", tea / "base" / "checkpoint-2", sft, "--out", tea / "merged"))
    merged = ("forward", tea / "dpo.json", *files, "--model", tea / "merged", "--out", tea / "whole")
    succeeded(command(*merged))
    result, (begun, *_) = tuned(tea, sft, "--reference", tea / "whole", out="merged-ref", steps=2)
    assert "of the model merged with the adapter" in succeeded(result).stderr
    assert begun["eval_loss"] == pytest.approx(math.log(2), abs=2e-2)  # merged weights are rounded to bf16
    for adapter in (None, tea / "out" / "checkpoint-2"):
        one_line(tuned(tea, adapter, "--reference", tea / "whole", out="x")[0], 2, "a reference of another weights")


USER_LOSSES = """
import torch.nn.functional as F

def focal(logits, targets, gamma=2.0):
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (1 - (-losses).exp()) ** gamma * losses

def half(chosen, rejected, n_chosen, n_rejected):
    return F.softplus(rejected / n_rejected - chosen / n_chosen)
"""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("def f(logits, targets): return ce(logits, targets)", "no sum and no mean"),
        ("def f(logits, targets): return ce(logits.detach(), targets, reduction='none')", "has no gradient"),
        ("def f(logps, n_tokens): return logps.log()", "is not finite"),
        ("def f(logits, targets): return ce(logits, targets, reduction='none') - logits.mean()", "depends on others"),
        ("def f(x, y): return x", "has the parameters of no kind of loss"),
        ("def f(logits, targets): return ce(logits, targets.clamp_(0), reduction='none')", "changes its argument targets"),
        ("def f(logits, targets):\n  for _ in range(40): logits = logits.sigmoid()\n  return logits.sum(-1)", "save at most 64"),
        ("def f(logps, **more): return -logps", "takes **more"),
        ("def f(logps, Weight): return -logps * Weight", "asks for 'Weight'"),
        ("", "holds no function 'f'"),
    ],
    ids=lambda value: value.removeprefix("def ")[:30],
)
def test_a_function_that_is_no_loss_is_refused_in_a_line(tmp_path, function, says):
    (tmp_path / "own.py").write_text(f"from torch.nn.functional import cross_entropy as ce\n{function}\n")
    with pytest.raises(PlanError) as error:
        user_loss(f"{tmp_path}/own.py:f")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["focal", "half"])
def test_a_loss_of_ones_own_is_planned_and_run_by_its_name(tea, name):
    (tea / "own.py").write_text(USER_LOSSES)
    loss_flag = ("--loss", f"{tea}/own.py:{name}")
    if name == "focal":
        write_lines(tea / "data" / "pairs.jsonl", [{"text": "tea for two " * 40}])
    plan = plan_in(tea, *loss_flag)
    assert json.loads(plan.read_text())["semantics"]["objective"]["name"] == f"own.py:{name}"
    one_line(train(tea, plan), 2, "name its file")
    succeeded(train(tea, plan, *loss_flag, steps=2))
    (tea / "own.py").write_text(USER_LOSSES.replace("softplus(", "softplus(2 * ").replace("** gamma", "** (gamma + 1)"))
    one_line(train(tea, plan, *loss_flag, out="other"), 2, "another source than the plan's")


def test_the_file_of_a_function_is_part_of_its_plan(tmp_path):
    path, digests = tmp_path / "own.py", set()
    source = "B = 1\ndef g(x):\n    return [x * B for _ in '1'][0]\ndef f(logps, n_tokens):\n    return -g(logps)\n"
    for text in (source, source.replace("B = 1", "B = 9"), source.replace("x * B", "x / B"), source):  # of equal size and mtime
        path.write_text(text)
        os.utime(path, (1, 1))
        loss = user_loss(f"{path}:f")
        digests.add((loss.objective.sha256, float(loss.function(torch.ones(1), None))))
        with pytest.raises(PlanError, match="or is of another kind"):
            planned_loss(replace(loss.objective, of=LossUnit.TOKENS), f"{path}:f")
    assert [len({one[i] for one in digests}) for i in (0, 1)] == [3, 2]
    assert len(digests) == 3


def test_a_plan_takes_no_other_function_of_its_file(tmp_path):
    """Also if a function around them made both, with one source and name."""
    source = "def made(k):\n    def f(logps, n_tokens):\n        return -k * logps\n    return f\none, two = made(1), made(2)\n"
    path = tmp_path / "own.py"
    path.write_text(source)
    planned = user_loss(f"{path}:one").objective
    assert planned.name == "own.py:one"
    assert planned_loss(planned, f"{path}:one").objective == planned
    with pytest.raises(PlanError, match=r"own\.py:two is not the plan's, own\.py:one"):
        planned_loss(planned, f"{path}:two")


def test_a_wrapper_has_its_own_source():
    @wraps(grpo)
    def twice(logits, targets, advantage, sampled):
        return 2 * grpo(logits, targets, advantage, sampled)

    assert user_loss(twice).objective.sha256 != user_loss(grpo).objective.sha256


def test_values_around_a_function_are_part_of_its_hash_or_refused_in_a_line():
    def made(k, weight=2.0):
        def f(logps, n_tokens, k=k):
            return -k * logps

        def weighted(logps, n_tokens):
            return -logps * weight

        return f, weighted

    (one, weighted), (two, _), (of_tensor, _) = map(made, (1.0, 2.0, torch.ones(1)))
    assert user_loss(one).objective.sha256 != user_loss(two).objective.sha256
    for function, name in ((of_tensor, "k"), (weighted, "weight")):
        remedy = rf"put it into a file, and give it as FILE\.py:{function.__name__}$"
        with pytest.raises(PlanError, match=rf"^loss: \w+ uses {name}, whose value is no part of its source; {remedy}"):
            user_loss(function)


def test_the_source_of_a_function_in_python_is_part_of_its_plan(tmp_path):
    """A file that holds the same function can train the plan, and a function of the same file a plan of that file."""
    (tmp_path / "own.py").write_text(f"import torch\nimport torch.nn.functional as F\n{inspect.getsource(grpo)}")
    planned = user_loss(grpo).objective
    assert planned.sha256 == hashlib.sha256(inspect.getsource(grpo).encode()).hexdigest()
    assert planned_loss(planned, f"{tmp_path}/own.py:grpo").objective == planned
    assert planned_loss(user_loss(f"{__file__}:grpo").objective, grpo).function is grpo
    with pytest.raises(PlanError, match="another source"):
        planned_loss(user_loss(f"{tmp_path}/own.py:grpo").objective, grpo)


def test_batches_bring_what_the_loss_asks_and_keep_no_more():
    ids = torch.zeros(2, 8, dtype=torch.int64)
    make_batches = lambda loss="dpo", **extras: UserBatches(  # noqa: E731
        SimpleNamespace(batch=lambda step: Batch(ids, ids, extras=extras)), 8, 2, 96, objective=parse_objective(loss)
    ).batch(0)
    assert make_batches(reference=torch.zeros(2), more=torch.zeros(())).extras.keys() == {"reference"}
    with pytest.raises(DataError, match=r"requires extras\['reference'\] of \(2,\), and step 0 has one of \(2, 8\)"):
        make_batches(reference=torch.zeros(2, 8))
    with pytest.raises(DataError, match=r"requires extras\['old'\] of \(2, 8\), and step 0 has one of \(2,\)"):
        make_batches("grpo", advantage=torch.zeros(2), old=torch.zeros(2))


def grpo(logits, targets, advantage, sampled):
    """GRPO on user rollouts with DAPO normalisation: clipped ratios to the sampling policy."""
    logps = -F.cross_entropy(logits, targets, reduction="none")
    ratio = (logps - sampled).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


class Rollouts:
    """Groups of four completions; more even tokens than the group's mean is better."""

    extras = ("advantage", "sampled")

    def batch(self, step):
        ids = torch.randint(0, 96, (8, 32), generator=torch.Generator().manual_seed(step % 2))
        targets = torch.where(torch.arange(32) < 8, -100, ids.roll(-1, 1))
        rewards = (targets % 2 == 0).double().mean(1).view(2, 4)
        advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        brought = {"advantage": advantage, "sampled": torch.full((8, 32), -math.log(272))}
        return Batch(ids, targets, extras={name: brought[name] for name in self.extras})


def test_a_loss_of_ones_own_gets_what_ones_own_batches_bring(home):
    sizes = {"seq_len": 32, "batch_size": 8, "micro_batch": 4, "compute_dtype": "fp32", "gradient_dtype": "fp32"}
    plan = penstock.plan(home / "model", "cpu-2core", loss=grpo, policy="megatrain", **sizes)
    how = {"from_scratch": True, "loss": grpo, "lr": 1e-2}
    session = penstock.train(plan, Rollouts(), out=home / "out", steps=8, **how)
    first, *_, last = (step.loss for step in session.metrics)
    assert last < first - 0.1
    Rollouts.extras = ("advantage",)
    with pytest.raises(DataError, match=r"requires extras\['sampled'\] of \(8,\) or \(8, 32\), and step 0 has none"):
        penstock.train(plan, Rollouts(), out=home / "lacking", steps=1, **how)
    with pytest.raises(DataError, match="requires 'advantage', which no file provides"):
        penstock.train(plan, home / "data", out=home / "files", steps=1, settings={"tokenizer": "bytes"}, **how)
