"""Attention kernels: execution of the planned kernel, and rejection of machines without it before allocation."""

import dataclasses
import re

import pytest
import torch

from penstock.hwprofiles.schema import read_profile
from penstock.model_checks import missing_kernels
from penstock.model_checks.missing_kernels import refuse_any_order, refuse_missing_attention
from penstock.planner.lower.lower import lower
from penstock.planner.model.config import read_model
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import build_workload, supported_attention
from penstock.planner.show.facts import Facts
from penstock.planner.show.report_lines import request_lines, short_report
from penstock.runtime.errors import PlanError
from penstock.runtime.machines.streams import use_attention
from penstock.runtime.plan import PlanFile, Policy, Semantics
from penstock.runtime.plan.workload import Model
from tests.running import make_home, one_line, plan_in, train
from tests.tiny import tiny_config
from tests.training import plan_of, semantics_of


@pytest.fixture
def _flags():
    backends = torch.backends.cuda
    enabled = backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled()
    yield
    backends.enable_cudnn_sdp(enabled[0])
    backends.enable_flash_sdp(enabled[1])


@pytest.mark.usefixtures("_flags")
@pytest.mark.parametrize(("kernel", "cudnn"), [("flash", False), ("deterministic", False), ("cudnn", True)])
def test_exactly_one_of_the_two_fused_kernels_is_allowed(kernel, cudnn):
    use_attention(kernel)
    assert (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()) == (cudnn, not cudnn)


def plan_with(kernel, **fields):
    return plan_of(tiny_config("llama"), semantics_of("llama", attention_kernel=kernel, **fields), Policy())


def test_a_missing_kernel_is_refused_with_another_to_plan(monkeypatch):
    queries = []
    monkeypatch.setattr(missing_kernels, "_can_use", lambda *arguments: queries.append(arguments))
    refuse_missing_attention(plan_with("flash"))  # PyTorch falls back to another kernel
    refuse_missing_attention(plan_with("cudnn", attention="eager"))  # eager attention needs no fused kernel
    assert queries == []
    with pytest.raises(PlanError, match=r"cuDNN's attention.* 4 heads of 8 in bf16; plan again with --kernels eager$"):
        refuse_missing_attention(plan_with("cudnn"))
    with pytest.raises(PlanError, match=r"4 heads of 8 in fp32; .* without --deterministic$"):
        refuse_missing_attention(plan_with("deterministic", compute_dtype="fp32"))
    assert queries == [("cudnn", 4, 8, torch.bfloat16), ("deterministic", 4, 8, torch.float32)]
    monkeypatch.setattr(missing_kernels, "_can_use", lambda *arguments: True)
    refuse_missing_attention(plan_with("cudnn"))
    for can_use, width in ((True, 12), (False, 16)):  # in layers with sinks nothing pads heads
        monkeypatch.setattr(missing_kernels, "_can_use", lambda *arguments, result=can_use: result)
        with pytest.raises(PlanError, match=rf"FlashAttention.* 4 heads of {width} in bf16; plan again with --kernels eager$"):
            refuse_missing_attention(plan_of(tiny_config("gpt_oss", head_dim=width), semantics_of("gpt_oss"), Policy()))


def test_sinks_are_planned_with_eager_attention_if_flash_attention_does_not_take_them():
    machine, how = read_profile("h100-sxm"), Semantics(256, 4, 1)
    in_fp32 = dataclasses.replace(how, compute_dtype="fp32")
    for semantics, kernels, config in ((how, "eager", {}), (in_fp32, None, {}), (how, None, {"head_dim": 12})):
        assert with_kernels(Model(tiny_config("gpt_oss", **config)), semantics, machine, kernels).attention == "eager"
    assert with_kernels(Model(tiny_config("gpt_oss")), how, machine).attention == "sdpa"
    assert with_kernels(Model(tiny_config("gpt_oss")), how, read_profile("cpu-2core")).attention == "sdpa"
    assert with_kernels(Model(tiny_config("llama")), how, machine, "eager").attention == "sdpa"


def test_a_plan_says_which_attention_is_not_fused_and_what_that_costs():
    for model, options, line in (
        ("gpt-oss-20b", {}, "fused with sinks and a window of 128 tokens in 12 layers; fused with sinks in 12 layers"),
        (
            "gemma2-2b",
            {"attention": "eager"},
            r"eager in 26 layers: [\d.]+ m?s a step \(\d+%\) of memory traffic that fused attention does not have",
        ),
        ("gemma3-270m", {}, r"fused with a dense mask \(window of 512 tokens\) in 15 layers, .*; fused in 3 layers"),
        ("qwen3-0.6b", {}, None),
    ):
        semantics, profile = Semantics(1024, 2, 1, **options), read_profile("h100-sxm")
        plan = lower(read_model(model), build_workload(read_model(model), semantics), semantics, Policy(), profile.to_json())
        facts = Facts(PlanFile(plan, None), "here")
        words = dict(request_lines(facts)).get("attention")
        assert words is None if line is None else re.fullmatch(line, words), words
        assert dict(short_report(facts)).get("attention") == (words if "eager" in (words or "") else None)


def test_a_run_refuses_it_before_anything_is_allocated(tmp_path, monkeypatch):
    home = make_home(tmp_path)
    plan = plan_in(home, "--kernels", "fused")
    monkeypatch.setattr("penstock.runtime.machines.streams.has_cuda", lambda: True)
    text = plan.read_text()
    plan.write_text(text.replace('"attention_kernel": "flash"', '"attention_kernel": "cudnn"'))
    assert plan.read_text() != text
    monkeypatch.setattr(missing_kernels, "_can_use", lambda *arguments: False)
    for place in ("runtime.machines.torch_machine.TorchMachine.__init__", "training.inputs.refuse_what_does_not_fit"):
        monkeypatch.setattr(f"penstock.{place}", lambda *_: pytest.fail("something was begun"))
    one_line(train(home, plan, "--device", "cuda"), 2, "which this GPU or this version of PyTorch does not support")
    one_line(train(home, plan, "--device", "cuda", "--deterministic"), 2, "plan again with --deterministic")
    assert not (home / "out").exists()


def test_deterministic_runs_need_deterministic_plans():
    for kernel in ("flash", "cudnn"):
        with pytest.raises(PlanError, match="which sums in any order; plan again with --deterministic"):
            refuse_any_order(semantics_of("llama", attention_kernel=kernel))
    refuse_any_order(semantics_of("llama", attention_kernel="deterministic"))
    refuse_any_order(semantics_of("gemma2"))


@pytest.mark.parametrize(
    ("model", "machine", "options", "kernels"),
    [
        ("qwen2.5-7b", "h100-sxm", {}, ("fused", "online", "fused", "cudnn")),
        ("qwen2.5-7b", "h100-sxm", {"deterministic": True}, ("fused", "online", "fused", "deterministic")),
        ("qwen2.5-7b", "rtx4090-server", {}, ("fused", "online", "fused", "flash")),  # no cuDNN rate in this profile
        ("qwen2.5-7b", "cpu-2core", {}, ("eager", "eager", "eager", "flash")),
        ("gpt-oss-120b", "h100-sxm", {}, ("fused", "online", "eager", "flash")),  # windows and sinks
    ],
)
def test_a_plan_names_the_fastest_kernels_of_model_and_machine(model, machine, options, kernels):
    config = read_model(model)
    plain = Semantics(2048, 4, 1, attention=supported_attention(config)[0])
    how = with_kernels(config, plain, read_profile(machine), **options)
    assert (how.norm, how.loss, how.pointwise, how.attention_kernel) == kernels


def test_cudnn_is_not_planned_for_windows_wide_heads_or_fp32():
    """A window needs a mask of seq_len x seq_len, and the cuDNN backward supports head sizes up to 128."""
    machine, how = read_profile("h100-sxm"), Semantics(256, 4, 1)
    for model, semantics, kernel in (
        (Model(tiny_config("mistral", sliding_window=512)), how, "cudnn"),
        (Model(tiny_config("mistral", sliding_window=128)), how, "flash"),
        (Model(tiny_config("qwen3", head_dim=256)), how, "flash"),
        (Model(tiny_config("qwen3", head_dim=12)), how, "flash"),
        (Model(tiny_config("qwen3")), dataclasses.replace(how, compute_dtype="fp32"), "flash"),
    ):
        assert with_kernels(model, semantics, machine).attention_kernel == kernel
