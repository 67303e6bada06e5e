"""Self-test of a model at its first run: passes, rejections, and cached results."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from penstock.model_checks import self_test as module
from penstock.planner.model import trace_cache
from penstock.planner.model.config import shipped_model
from penstock.planner.model.workload import supported_attention
from penstock.runtime.compute.blocks import Templates
from penstock.runtime.plan import Policy
from tests.lanes import mostly_slow
from tests.running import one_line, plan_in, train
from tests.tiny import tiny_config
from tests.training import plan_of, semantics_of

SHIPPED = ["llama-3.1-405b", "qwen3-30b-a3b", "deepseek-v3-671b", "gemma3-1b", "gpt-oss-20b", "smollm3-3b", "minimax-m2-230b"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    module._tried.cache_clear()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    token = trace_cache.folder.set(tmp_path / "kept")
    yield tmp_path / "kept"
    trace_cache.folder.reset(token)


def llama():
    return plan_of(tiny_config("llama", vocab_size=97), semantics_of("llama"), Policy())


@mostly_slow("name", SHIPPED)
def test_a_model_of_any_size_is_cut_down_and_passes(name):
    model = shipped_model(name)
    semantics = semantics_of("llama", seq_len=8192, attention=supported_attention(model)[0])
    assert module._tried(module.key_of(model), semantics, name) is None


def test_a_model_that_has_passed_is_not_tried_again(cache, monkeypatch):
    messages = []
    module.self_test(llama(), messages.append)
    assert len(messages) == len([*cache.iterdir()]) == 1
    module._tried.cache_clear()
    monkeypatch.setattr(module, "reference_step", None)
    module.self_test(llama(), messages.append)
    assert len(messages) == 1, "another process remembers"


def test_a_length_at_which_windows_hide_something_is_tried_apart(cache):
    """The reduced model has one layer of each kind; at this length it has more kinds."""
    for seq_len, n_tried in ((8, 1), (9, 2), (10, 2), (7, 2)):
        semantics = semantics_of("gemma2", seq_len=seq_len)
        module.self_test(plan_of(tiny_config("gemma2"), semantics, Policy()), lambda _: None)
        assert len([*cache.iterdir()]) == n_tried, seq_len


def test_a_forward_whose_bits_depend_on_grad_mode_is_refused(tmp_path, monkeypatch):
    original = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda norm, x: original(norm, x) * (1.0 if torch.is_grad_enabled() else 1.001))
    with pytest.raises(module.WorkloadError, match="its forward has other bits under no_grad"):
        module.self_test(llama(), lambda _: None)


def test_a_run_whose_stream_computes_something_else_is_refused(home, monkeypatch):
    plan, allocations, original = plan_in(home), list[int](), Templates.layer
    monkeypatch.setattr("penstock.training.session.machine_of", lambda *_: allocations.append(1))
    monkeypatch.setattr(Templates, "layer", lambda *args, **how: original(*args, **how) * (0.999 if args[1] == 2 else 1))
    one_line(train(home, plan), 2, "self-test failed: a streamed step is not transformers' own (loss")
    assert not allocations, "nothing was allocated"


def test_a_copy_that_cannot_be_made_does_not_stop_a_run(capsys, monkeypatch):
    monkeypatch.setattr(module, "cut_down", lambda config, *_: config | {"num_key_value_heads": 3})
    module.self_test(llama(), lambda _: None)
    assert "no self-test, as its cut-down copy fails (" in capsys.readouterr().err
