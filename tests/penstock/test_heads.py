"""Classification heads: runs that score texts or answers, loaded by transformers."""

import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from penstock.data.data import DataRequest, read_data
from penstock.runtime.errors import DataError
from penstock.runtime.plan.objective import parse_objective
from penstock.settings import DataSettings
from tests.bytes_of_files import write_lines
from tests.lanes import mostly_slow
from tests.rank_runs import contents
from tests.real_layers import load_model
from tests.running import SCRATCH, lines_of, one_line, penstock, plan_in, succeeded, train, weights_in, weights_sha

TEXTS = [{"text": ("good " if n % 2 else "bad ") + "x" * (n % 5), "label": n % 2} for n in range(16)]
PAIRS = [{"prompt": f"tea {n}? ", "chosen": f"yes, {n}", "rejected": f"no {n} never"} for n in range(8)]


def loaded(folder):
    return load_model(folder, AutoModelForSequenceClassification, dtype=torch.float32).eval()


@mostly_slow(("loss", "rows"), [("classify", TEXTS), ("reward:center=0.01", PAIRS), ("reward:mean=1", PAIRS)])
def test_transformers_loads_a_head_and_scores_as_the_run_does(home, loss, rows):
    shutil.rmtree(home / "data")
    write_lines(home / "data" / "rows.jsonl", rows)
    plan = plan_in(home, "--loss", loss, "--compute", "fp32", "--master", "fp32")
    held_out = ("--eval-data", home / "data", "--eval-every", 6, "--save-every", 3, "--save-minutes", 0)
    succeeded(train(home, plan, *held_out, "--lr", "1e-2", steps=12))
    first, *_, last = [line for line in lines_of(home, "out") if "eval_loss" in line]
    assert last["eval_loss"] < first["eval_loss"]
    assert last["eval_accuracy"] == 1
    model = loaded(home / "out" / "checkpoint-12")
    assert model.config.num_labels == (2 if loss == "classify" else 1)
    objective, settings = parse_objective(loss), DataSettings(str(home / "data"), shuffle=False)
    batch = read_data(DataRequest(settings, None, 272, 32, 16, 0, home / "run" / "tokens", objective=objective)).batch(0)
    with torch.no_grad():
        if objective.numbers["mean"]:
            hidden, last_B = model.model(batch.input_ids).last_hidden_state, batch.extras["last"]
            scores = torch.stack([model.score(h[: n + 1].mean(0)) for h, n in zip(hidden, last_B.tolist(), strict=True)])
        else:
            scores = model(batch.input_ids).logits
    if loss == "classify":
        wanted = F.cross_entropy(scores, batch.extras["label"].long())
    else:
        chosen, rejected = scores[0::2, 0], scores[1::2, 0]
        wanted = (objective.numbers["center"] * (chosen + rejected) ** 2 - F.logsigmoid(chosen - rejected)).mean()
    assert last["eval_loss"] == pytest.approx(float(wanted), rel=1e-4)
    shutil.copytree(home / "out", home / "again")
    for n in (6, 9, 12):
        shutil.rmtree(home / "again" / f"checkpoint-{n}")
    succeeded(train(home, plan, *held_out, "--lr", "1e-2", "--resume", out="again", steps=12))
    assert weights_sha(home / "again" / "checkpoint-12") == weights_sha(home / "out" / "checkpoint-12")


def test_a_model_of_tokens_gets_a_head_and_keeps_its_weights(home):
    succeeded(train(home, plan_in(home, name="tokens.json"), out="base", steps=1))
    shutil.rmtree(home / "data")
    write_lines(home / "data" / "rows.jsonl", TEXTS)
    plan = plan_in(home, "--loss", "classify", "--train", "names:score.weight", model="base/checkpoint-1")
    succeeded(train(home, plan, scratch=SCRATCH[1:], steps=2))
    model = loaded(home / "out" / "checkpoint-2")
    for name, weight in weights_in(home / "base" / "checkpoint-1").items():
        assert name == "lm_head.weight" or torch.equal(model.get_parameter(name), weight.float())
    onwards = plan_in(home, "--loss", "classify", model="out/checkpoint-2", name="on.json")
    succeeded(train(home, onwards, scratch=SCRATCH[1:], out="on", steps=1))
    three = plan_in(home, "--loss", "classify:3", model="out/checkpoint-2", name="three.json")
    result = train(home, three, scratch=SCRATCH[1:], out="t")
    one_line(result, 2, "score.weight is (2, ", "the configuration requires (3, ")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"label": "good"}, 'a "label" that is no whole number'),
        ({"text": " "}, 'an empty "text"'),
        ({"label": 2}, "label 2, and the plan has 2"),
    ],
)
def test_a_label_that_teaches_nothing_is_refused_in_a_line(tmp_path, row, says):
    settings = DataSettings(str(write_lines(tmp_path / "a.jsonl", [TEXTS[0], TEXTS[0] | row])))
    request = DataRequest(settings, None, 272, 32, 4, 0, tmp_path / "run" / "tokens", objective=parse_objective("classify"))
    with pytest.raises(DataError, match=rf"^.*{says}.*$") as error:
        read_data(request)
    assert "\n" not in str(error.value)


def test_a_plan_that_trains_no_head_is_refused(home):
    arguments = ("plan", home / "model", "--machine", "cpu-2core", "--loss", "reward", "--seq-len", "32", "--train", "layers:1-2")
    one_line(penstock(*arguments), 2, "nothing would train its new head")


@mostly_slow("base", ["bf16", "nf4"])
def test_peft_loads_adapters_with_a_head_and_scores_alike(home, base):
    succeeded(train(home, plan_in(home, name="tokens.json"), out="base", steps=1))
    shutil.rmtree(home / "data")
    write_lines(home / "data" / "rows.jsonl", TEXTS)
    task = ("--loss", "classify", "--compute", "fp32", "--master", "fp32", "--train", "lora:r=4", "--base", base)
    plan, flags = plan_in(home, *task, model="base/checkpoint-1"), ("--lr", "1e-2", "--save-every", 6, "--eval-data", home / "data")
    succeeded(train(home, plan, *flags, scratch=SCRATCH[1:], steps=12))
    first, last = [line for line in lines_of(home, "out") if "eval_loss" in line]
    assert last["eval_loss"] < 0.2 * first["eval_loss"]
    if base == "bf16":
        folder = home / "base" / "checkpoint-1"
        scoring = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=2, pad_token_id=256)
        with warnings.catch_warnings(action="error", category=UserWarning):  # about missing keys
            model = PeftModel.from_pretrained(scoring, home / "out" / "checkpoint-12").eval()
        settings = DataSettings(str(home / "data"), shuffle=False)
        batch = read_data(DataRequest(settings, None, 272, 32, 16, 0, home / "t", objective=parse_objective("classify"))).batch(0)
        with torch.no_grad():
            wanted = F.cross_entropy(model(batch.input_ids).logits, batch.extras["label"].long())
        assert last["eval_loss"] == pytest.approx(float(wanted), rel=1e-4)
        model.save_pretrained(home / "again")
        again = ("--adapter", home / "again", *flags)
        succeeded(train(home, plan, *again, scratch=SCRATCH[1:], out="more", steps=1))
        assert lines_of(home, "more")[0]["eval_loss"] == last["eval_loss"]
        merged = succeeded(penstock("merge", folder, home / "again", "--out", home / "merged"))
        assert "and a head that scores sequences" in merged.output
        merged = loaded(home / "merged")
        assert (merged.config.num_labels, merged.config.pad_token_id) == (2, 256)
        with torch.no_grad():
            torch.testing.assert_close(merged(batch.input_ids).logits, model(batch.input_ids).logits, rtol=2e-2, atol=2e-2)
        exact = model.merge_and_unload().state_dict()
        for name, weight in merged.state_dict().items():  # rounded once, to the dtype of the base
            torch.testing.assert_close(weight, exact[name].bfloat16().float(), rtol=0, atol=2**-7 * float(weight.abs().max()))
    shutil.copytree(home / "out", home / "resumed")
    shutil.rmtree(home / "resumed" / "checkpoint-12")
    succeeded(train(home, plan, *flags, "--resume", scratch=SCRATCH[1:], out="resumed", steps=12))
    assert contents(home / "resumed" / "checkpoint-12") == contents(home / "out" / "checkpoint-12")
