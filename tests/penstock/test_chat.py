"""`penstock chat`: the tokens of transformers for models, checkpoints and adapters, over several turns."""

import json
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.chat import conversation
from penstock.chat.conversation import Sampling
from penstock.cli.forward import _converse
from penstock.cli.main import cli
from tests.bytes_of_files import write_lines
from tests.chats import write_talker
from tests.real_layers import hf_model
from tests.running import one_line, penstock, plan_in, succeeded
from tests.tiny import tiny_config

TURNS = ["Hello, who are you?", "And the river?"]
CHATS = [{"messages": [{"role": "user", "content": turn}, {"role": "assistant", "content": "The sea."}]} for turn in TURNS * 6]


def talk(*words, turns=TURNS, compute="fp32"):
    flags = ("--compute", compute, "--max-new-tokens", 12)
    return CliRunner().invoke(cli, [str(word) for word in ("chat", *words, *flags)], input="".join(f"{turn}\n" for turn in turns))


def expected(folder, adapter=None, system=None, tokens=None):
    """Return what transformers answers to each turn, as printed lines; add the answers' tokens to the list."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    messages, answers = [{"role": "system", "content": system}] if system else [], []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            new = model.generate(**ids, do_sample=False, max_new_tokens=12, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
        (tokens if tokens is not None else []).append(new.tolist())
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answers[-1]})
    return "".join(f"{answer}\n" for answer in answers)


@pytest.fixture
def home(tmp_path, no_fsync):
    size = write_talker(tmp_path / "model", "chatml, unmarked")
    torch.manual_seed(3)
    hf_model(tiny_config("qwen3", vocab_size=size, initializer_range=0.3, max_position_embeddings=512)).save_pretrained(
        tmp_path / "model"
    )
    write_lines(tmp_path / "chats.jsonl", CHATS)
    return tmp_path


def trained(home, *extra, out):
    plan = plan_in(home, "--seq-len", 64, *extra, name=f"{out}.json")
    run = ("run", plan, "--data", home / "chats.jsonl", "--out", home / out, "--steps", 2, "--lr", "3e-2")
    succeeded(penstock(*run))
    return home / out / "checkpoint-2"


def test_several_turns_are_answered_as_by_transformers_until_an_end_token(home):
    result, tokens = succeeded(talk(home / "model", "--system", "Be short.")), []
    assert result.stdout == expected(home / "model", system="Be short.", tokens=tokens)
    assert len(set(result.stdout)) > 8, "nothing could go wrong"
    assert "computes the conversation again (no KV cache)" in result.stderr.splitlines()[0]
    assert result.stderr.count("(12 tokens, ") == result.stderr.count(" tokens/s; cut by --max-new-tokens 12)") == 2
    (home / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[0][2]]}))
    ended = succeeded(talk(home / "model", "--system", "Be short."))
    assert ended.stdout == expected(home / "model", system="Be short.")
    assert re.fullmatch(r"\([123] tokens, [\d.e+]+ tokens/s\)", ended.stderr.splitlines()[1])


def test_checkpoints_adapters_and_merged_models_are_talked_to(home):
    checkpoint = trained(home, out="whole")
    assert succeeded(talk(checkpoint)).stdout == expected(checkpoint)
    adapter = trained(home, "--train", "lora:r=4", out="lora")
    with_adapter = expected(home / "model", adapter)
    assert with_adapter != expected(home / "model")
    assert succeeded(talk(adapter)).stdout == with_adapter, "its configuration names the base"
    assert succeeded(talk(home / "model", "--adapter", adapter)).stdout == with_adapter
    succeeded(penstock("merge", home / "model", adapter, "--out", home / "merged"))
    assert succeeded(talk(home / "merged")).stdout == expected(home / "merged")
    packed = ("--base", "nf4", "--packed", home / "packed")
    assert succeeded(talk(home / "model", *packed)).stdout != expected(home / "model")
    in_fp8 = succeeded(talk(home / "model", "--base", "fp8-rows", *packed[2:], compute="fp8")).stdout
    assert in_fp8.strip()
    one_line(talk(home / "model", "--base", "fp8-rows"), 2, "add --compute fp8")
    shutil.move(home / "model", home / "elsewhere")
    one_line(talk(adapter), 2, "an adapter without its base", f"give BASE --adapter {adapter}")


def test_words_that_cannot_be_obeyed_are_refused(home):
    one_line(talk(home / "none"), 2, "no such folder; give a model's folder")
    one_line(talk(home / "model", "--top-p", 0.5), 2, "--top-p does nothing without --temperature")
    one_line(talk(home / "model", "--context", 1000), 2, "the model has 512 positions")
    (home / "untrained").mkdir()
    (home / "untrained" / "config.json").write_text((home / "model" / "config.json").read_text())
    one_line(talk(home / "untrained"), 2, "untrained: holds no weights; give a folder with a model's weights")
    one_line(talk(home / "model", "--context", 16), 2, "and the context holds 16; begin a new one, or give a larger --context")


def test_a_terminal_survives_ctrl_c_and_long_turns(home, monkeypatch, capsys):
    """Ctrl-C in an answer keeps what was said; at the prompt it ends nothing."""
    model = conversation.Conversation(*loaded(home), None, Sampling())
    typed, original = iter(["Hello", KeyboardInterrupt, "x " * 600, "\udcff", " ", "Again", EOFError]), conversation.generate

    def generate(*arguments):
        *arguments_before, on_token = arguments
        return original(*arguments_before, lambda token: (on_token(token), signal.raise_signal(signal.SIGINT)))

    def read(prompt):
        word = next(typed)
        if not isinstance(word, str):
            raise word
        return word

    monkeypatch.setattr(conversation, "generate", generate)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    _converse(model, 12)
    errors = capsys.readouterr().err
    assert errors.count("(1 tokens, ") == errors.count("; interrupted)") == 2
    assert "error: the conversation has" in errors
    assert "error: a turn is not UTF-8; convert it" in errors
    monkeypatch.setattr("sys.stdin", None)  # closed by the shell
    _converse(model, 12)
    assert [message["role"] for message in model.messages] == ["user", "assistant"] * 2


def loaded(home):
    from penstock.chat.model import load
    from penstock.settings import DataSettings, RunSettings

    return load(RunSettings(DataSettings("chat"), model=str(home / "model")), None, "fp32", "bf16", lambda words: None)


def test_draws_are_seeded_and_from_the_likeliest():
    logits_V = torch.tensor([0.0, 2.0, 1.0, -1.0])
    assert Sampling().chooser()(logits_V) == 1
    shares = (logits_V / 0.7).softmax(0)
    choose, again = (Sampling(0.7, 0.9, seed=5).chooser() for _ in range(2))
    draws = [choose(logits_V) for _ in range(4000)]
    assert draws == [again(logits_V) for _ in range(4000)]
    assert {*draws} == {1, 2}, "with 95 % of the probability"
    assert draws.count(1) / 4000 == pytest.approx((shares[1] / (shares[1] + shares[2])).item(), abs=0.03)
