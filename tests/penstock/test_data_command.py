"""Runs on data of every kind, and `penstock data`, which prints the learned tokens."""

import csv
import gzip
import json
import re
import shutil

import pyarrow
import pyarrow.parquet
import pytest

from penstock import PenstockError, train
from tests.chats import write_talker
from tests.running import SCRATCH, SIZES, lines_of, make_home, one_line, penstock, plan_in, succeeded, weights_sha

PAIRS = [(f"What is {i}?", f"A number, {i}.") for i in range(12)]
CHATS = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in PAIRS]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def hub(folder):
    (folder / "data").mkdir(parents=True)
    for split, rows in (("train_sft", CHATS[:8]), ("test_sft", CHATS[8:])):
        pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), folder / "data" / f"{split}-00000-of-00001-1a2b.parquet")
    (folder / "README.md").write_text("about the data")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Shared folder; tests write only runs."""
    home = make_home(tmp_path_factory.mktemp("home"))
    plan_in(home, *SIZES[2:4], "--seq-len", 64)
    return home


@pytest.fixture(scope="module")
def given(home):
    """Arguments after `run PLAN` for each kind of data."""
    (home / "pairs.jsonl").write_bytes(lines({"prompt": f"{q} ", "completion": a} for q, a in PAIRS))
    (home / "qa.json").write_text(json.dumps([{"question": q, "answer": a} for q, a in PAIRS], indent=1))
    (home / "chats.jsonl.gz").write_bytes(gzip.compress(lines({"messages": chat} for chat in CHATS)))
    with (home / "odd.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("frage", "antwort"), *PAIRS])
    hub(home / "hub")
    mapped = ["--columns", "prompt=frage", "--columns", "completion=antwort"]
    return {
        "gz": ["--data", home / "chats.jsonl.gz", "--streaming"],
        "csv": ["--data", home / "odd.csv", *mapped],
        "hub": ["--data", home / "hub", "--eval-data", home / "hub"],
        "mix": ["--data", f"{home}/qa.json:0.75", "--data", f"{home}/pairs.jsonl:0.25"],
    }


@pytest.mark.parametrize("way", ["gz", "csv", "hub"])
def test_a_run_learns_from_data_of_every_kind(home, given, way):
    how = (*given[way], *SCRATCH, "--steps", 2, "--lr", "1e-3", "--out", home / f"run-{way}")
    result = succeeded(penstock("run", home / "plan.json", *how))
    trained = [line for line in lines_of(home, f"run-{way}") if "loss" in line]
    assert [line["step"] for line in trained] == [1, 2]
    assert all(0 < line["supervised_tokens"] < line["tokens"] for line in trained)
    if way == "hub":
        assert "of train_sft, leaving out test_sft, 1 file of no split" in result.stderr
        assert "8 documents" in result.stderr
        assert lines_of(home, f"run-{way}")[-1]["eval_tokens"] == sum(len(a) + 1 for _, a in PAIRS[8:])


def test_a_mix_is_resumed_to_the_last_bit(home, given):
    for out, steps in (("whole", 4), ("broken", 2)):
        how = (*given["mix"], *SCRATCH, "--steps", steps, "--lr", "1e-3", "--out", home / out)
        succeeded(penstock("run", home / "plan.json", *how))
    succeeded(penstock("run", "--config", home / "broken" / "run.yaml", "--resume", "--steps", 4))
    assert weights_sha(home / "whole" / "checkpoint-4") == weights_sha(home / "broken" / "checkpoint-4") != {}
    changed_mix = ["--data", f"{home}/qa.json:0.5", "--data", f"{home}/pairs.jsonl:0.5"]
    one_line(penstock("run", "--config", home / "broken" / "run.yaml", "--resume", "--steps", 6, *changed_mix), 2, "data")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "qa.json:0.7", "--data", "pairs.jsonl:0.4"], ("the weights of the data sets add up to 1.1",)),
        (["--data", "qa.json", "--columns", "prompt=a", "--columns", "prompt=b"], ("a name is given two columns of the file",)),
        (["--data", "qa.json", "--lora-r", "8"], ("--lora-r: no such option; the plan sets it: `penstock plan --train lora",)),
        (["--data", "qa.json", "--lerning-rate", "1"], ("No such option", "--lerning-rate")),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_a_wrong_flag_of_data_is_one_line_and_leaves_nothing(home, given, monkeypatch, flags, words):
    monkeypatch.chdir(home)
    one_line(penstock("run", "plan.json", *SCRATCH, *flags, "--out", home / "o"), 2, *words)
    assert not (home / "o").exists()


def test_flags_have_the_names_of_other_trainers_too(home, given):
    words = ["--train-file", home / "pairs.jsonl", "--learning_rate=1e-3", "--max-steps", 1, "--output-dir", home / "o2"]
    succeeded(penstock("run", home / "plan.json", *SCRATCH, *words))
    (line,) = [line for line in lines_of(home, "o2") if "loss" in line]
    assert line["lr"] == 1e-3


def test_learned_tokens_are_marked_and_all_are_counted(home, given):
    write_talker(home / "talker", "chatml, unmarked")
    weighed = {"messages": [*CHATS[0], CHATS[1][0], {**CHATS[1][1], "weight": 0}]}
    (home / "more.jsonl").write_bytes(lines([weighed, {"messages": CHATS[1]}, {"messages": CHATS[2][:1]}]))
    words = ["data", home / "more.jsonl", "--model", home / "talker", "--seq-len", 64]
    result = succeeded(penstock(*words, "--samples", 2))
    assert re.search(r"^template: \d+ of \d+ tokens \(39%\) are its own, not the messages'$", result.stderr, re.M)
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert rows[0] == ["where", "tokens", "learned", "text"]
    assert [row[0] for row in rows[1:3]] == [f"{home}/more.jsonl:1", f"{home}/more.jsonl:2"]
    assert rows[1][3].count("[[") == 1, "an answer of weight 0 is not learned"
    assert rows[2][3] == "<|im_start|>user\\nWhat is 1?<|im_end|>\\n<|im_start|>assistant\\n[[A number, 1.<|im_end|>]]\\n"
    counted = dict(rows[rows.index(["what", "count"]) + 1 :])
    assert [counted[name] for name in ("rows", "cut", "left out with nothing to learn", "sequences")] == ["3", "0", "1", "2"]
    in_json = json.loads(penstock(*words, "--json").stdout)
    assert [sample["n_learned"] for sample in in_json["samples"]] == [int(rows[1][2]), int(rows[2][2]), 0]
    assert in_json["counts"]["learned_tokens"] == int(rows[1][2]) + int(rows[2][2])


@pytest.mark.parametrize("packing", ["documents", "one"])
def test_learned_tokens_of_pairs_are_counted_however_they_lie(tmp_path, packing):
    """Chosen answers alone are longer than the two sequences shared by several pairs."""
    pairs = [{"prompt": "tea? ", "chosen": "yes " * (2 + 6 * (n % 2)), "rejected": "no" * (1 + n % 3)} for n in range(12)]
    (tmp_path / "pairs.jsonl").write_bytes(lines(pairs))
    result = penstock("data", tmp_path / "pairs.jsonl", "--seq-len", 44, "--packing", packing, "--json")
    counts = json.loads(result.stdout)["counts"]
    assert counts["learned_tokens"] == sum(len(pair["chosen"] + pair["rejected"]) + 2 for pair in pairs)  # and their end tokens
    assert counts["sequences"] == 12 if packing == "one" else counts["sequences"] < 12


def test_kept_tokens_serve_other_runs_and_no_run_needs_them(home, given, tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))

    def run_to(out, steps=1, *extra):
        words = ["run", home / "plan.json", "--data", home / "qa.json", *SCRATCH, "--steps", steps, "--out", tmp_path / out, *extra]
        return succeeded(penstock(*words)).stderr

    assert f"tokens: made, and kept in {tmp_path}/cache/tokens\n" in run_to("a")
    assert f"tokens: found in {tmp_path}/cache/tokens\n" in run_to("b")
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no folder, and none can be made there")
    assert f"tokens: made, and kept in {tmp_path}/a/tokens\n" in run_to("a", 2, "--resume")


def test_without_a_model_bytes_are_shown(home, given):
    result = succeeded(penstock("data", f"{home}/qa.json:0.5", f"{home}/pairs.jsonl:0.5", "--samples", 1))
    assert "no tokenizer: text is read as bytes" in result.stderr
    assert "What is 0? [[A number, 0.<end>]]" in result.stdout
    one_line(penstock("data", home / "odd.csv"), 2, "its columns are frage, antwort")
    one_line(penstock("data", home / "qa.json", "--model", home / "none"), 2, "no such folder")


def test_bad_rows_are_a_line_each_and_left_out_by_share(home, given):
    rows = lines({"prompt": f"{q} ", "completion": a} for q, a in PAIRS)
    (home / "dirty.jsonl").write_bytes(b'{"prompt": "\n' + rows + b'{"prompt": "x"}\n{"text": "y"}\n')
    words = ["run", home / "plan.json", "--data", home / "dirty.jsonl", *SCRATCH, "--steps", 1, "--out", home / "dirty"]
    for share in ("1", "few"):  # one per cent, one row, or all of them?
        one_line(penstock(*words, "--bad-rows", share), 2, "--bad-rows", "write 1% or 0.01")
    refused = penstock(*words, "--bad-rows", "1%")
    one_line(refused, 2, "dirty.jsonl:1: ", "3 of 15 rows are bad; mend them, or skip them with --bad-rows 20%")
    assert [line.split(": ")[0] for line in refused.stderr.splitlines()[-3:-1]] == [f"  {home}/dirty.jsonl:{n}" for n in (14, 15)]
    stderr = succeeded(penstock(*words, "--bad-rows", "20%", "--eval-data", home / "dirty.jsonl")).stderr
    assert all(f"bad rows{infix} 3 of 15, left out: " in stderr for infix in (":", "")), "of the held-out data, too"
    assert "bad rows\t3" in succeeded(penstock("data", home / "dirty.jsonl", "--bad-rows", 0.2)).stdout


def test_a_program_may_mix_too(home, given, tmp_path):
    words = {"steps": 1, "lr": 1e-3, "from_scratch": True, "settings": {"tokenizer": "bytes"}}
    parts = [{"path": str(home / "qa.json"), "weight": 0.75}, {"path": str(home / "pairs.jsonl"), "weight": 0.25}]
    assert train(home / "plan.json", parts, out=tmp_path / "run", **words).n_done == 1
    with pytest.raises(PenstockError, match=r"data: a int is not read; give a path"):
        train(home / "plan.json", 3, out=tmp_path / "other", **words)
