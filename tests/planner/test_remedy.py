"""Remedies: suggested changes of memory, sizes and dtypes make a model fit."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings

from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.lower.lower import lower, plan_ops
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.memory import footprint, frame
from penstock.planner.search.micro_batch import SIZES, sizes_of
from penstock.planner.search.policies import baseline, smallest_plans
from penstock.planner.search.remedy import (
    MAX_PLAN_OPS,
    Request,
    _bitwise_identical,
    _changes,
    _frozen,
    _with_memory,
    does_not_fit,
    in_fp8,
    most_ops,
)
from penstock.planner.search.search import search_machine
from penstock.planner.show.facts import Facts
from penstock.planner.show.report_lines import short_report
from penstock.runtime.plan import MAX_REPETITIONS, PlanFile, Policy, Semantics
from penstock.runtime.plan.optimizer import optimizing
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.units import GB, MB, parse_bytes
from tests.lanes import mostly_slow
from tests.strategies import MODEL as SYNTHETIC
from tests.strategies import cases, small_workload

MODEL = read_model("qwen2.5-0.5b")
SEMANTICS = Semantics(seq_len=1024, batch_size=8, micro_batch=1)
DESKTOP = read_profile("rtx4090-desktop")
SMALL = DESKTOP.with_memory(3 * GB, 64 * GB)
# Policies need between (4.01 GB device, 15.1 GB host) and (4.76 GB device, 13.7 GB host).
MEMORY = [(n_device * 10 * MB, n_host * 10 * MB) for n_device in (100, 430, 600) for n_host in (600, 1400, 1510, 10000)]


def refusal(profile, fixed):
    needs = needs_of(profile, fixed)
    return None if any(n.fits for n in needs) else does_not_fit(Request(MODEL, SEMANTICS, profile, fixed, frozenset()), needs)


def needs_of(profile, fixed):
    if fixed is not None:
        return [needs_with(Request(MODEL, SEMANTICS, profile, fixed, frozenset()), fixed)]
    return [needs for _, needs in smallest_plans(MODEL, build_workload(MODEL, SEMANTICS), SEMANTICS, profile)]


def needs_with(request, policy=Policy()):  # noqa: B008 frozen
    """Return the memory footprint of this policy at the sizes of the request."""
    model, semantics = request.model, request.semantics
    return footprint(frame(model, build_workload(model, semantics), semantics, policy), request.profile)


@mostly_slow(("device", "host"), MEMORY)
@pytest.mark.parametrize("fixed", [None, Policy(spill_blocks=tuple(range(23)))])
def test_missing_bytes_are_those_of_the_nearest_policy(device, host, fixed):
    profile = DESKTOP.with_memory(device, host)
    error = refusal(profile, fixed=fixed)
    if error is None:
        return
    short = {"device": error.short_device_bytes, "host": error.short_host_bytes}
    named = {place: parse_bytes(size) for place, size in re.findall(r"--(device|host)-memory (\w+)", error.smallest_change)}
    assert {place for place, n_bytes in short.items() if n_bytes} == set(named), str(error)
    # Device memory is reported as short only if no policy fits the device.
    assert bool(error.short_device_bytes) == all(needs.short_device_bytes for needs in needs_of(profile, fixed=fixed))
    has = {"device": device, "host": host}
    for place, n_bytes in named.items():
        assert has[place] + short[place] <= n_bytes < has[place] + short[place] + 10 * GB
    assert refusal(DESKTOP.with_memory(device + short["device"], host + short["host"]), fixed=fixed) is None
    assert refusal(DESKTOP.with_memory(named.get("device", device), named.get("host", host)), fixed=fixed) is None


@mostly_slow(
    ("host_memory", "optimizer", "suggestion"),
    [
        (100 * GB, "adamw", "adamw:moments=bf16 (10 bytes a parameter instead of 14; other rounding: docs/optimizers.md)"),
        (100 * GB, "adamw:master=bf16", "adamw:moments=bf16 (10 bytes a parameter instead of 12; other rounding: docs"),
        (80 * GB, "adamw:moments=bf16", "adamw:moments=int8 (8.1 bytes a parameter instead of 10; other rounding: docs"),
        (64 * GB, "adamw", "adamw:moments=int8,master=split24 (7.1 bytes"),
        (60 * GB, "adamw:moments=int8,master=split24", "adamw:moments=int8,master=bf16 (6.1 bytes"),
        (60 * GB, "adamw:moments=int8,master=bf16", "lion:moments=bf16,master=bf16 (6 bytes"),
    ],
)
def test_less_optimizer_state_is_named_where_it_fits(host_memory, optimizer, suggestion):
    """8 G parameters; a new request with the suggested optimizer fits."""
    model, profile = read_model("qwen3-8b"), read_profile("rtx4090-desktop").with_memory(None, host_memory)
    plain = Semantics(4096, 16, 1)
    request = Request(model, replace(plain, **optimizing(optimizer, None)), profile, None, SIZES).resized()
    changes = dict(_changes(request, [needs_with(request)]))
    (text,) = [text for text in changes if text.startswith("--optimizer")]
    assert text.startswith(f"--optimizer {suggestion}")
    again = replace(request, semantics=replace(plain, **optimizing(text.split()[1], None))).resized()
    assert again.fits()
    assert again.semantics == changes[text].semantics


@pytest.mark.parametrize("fixed", [None, "megatrain"])
def test_what_changes_no_bit_is_named_first_and_each_with_its_rate(fixed):
    """An 8B model in 64 GB: 24-bit masters fit because the device can hold the state of one layer."""
    model, profile = read_model("qwen3-8b"), read_profile("rtx4090-desktop").with_memory(None, 64 * GB)
    initial = Semantics(4096, 16, 1, loss="online", norm="fused", pointwise="fused", attention_kernel="flash")
    request = Request(model, initial, profile, None, SIZES).resized()
    policy = baseline(fixed, request.semantics, build_workload(model, request.semantics)) if fixed else None
    error = does_not_fit(replace(request, fixed=policy), [needs_with(request, policy or Policy())])
    memory, *lossy = error.smallest_change.split(", or ")
    assert memory.startswith("--host-memory 1")
    assert all(re.search(r"about [1-9],\d{3} tokens/s\)$", change) for change in (memory, *lossy)), lossy
    if fixed is None:
        assert lossy[0].startswith("--optimizer adamw:moments=int8,master=split24 (7.1 bytes")


def test_no_change_makes_a_plan_too_long_to_write():
    semantics = replace(SEMANTICS, batch_size=2**21)
    assert most_ops(build_workload(MODEL, semantics), semantics) > MAX_PLAN_OPS
    request = Request(MODEL, semantics, DESKTOP.with_memory(None, GB), Policy(), frozenset())
    assert "no change that was tried" in does_not_fit(request, [needs_with(request)]).smallest_change


@mostly_slow("named", [SIZES, frozenset(), {"loss_tile_tokens"}, {"mlp_tile_tokens"}, {"micro_batch"}])
def test_no_change_resets_a_size_that_the_user_named(named):
    """With fp32 gradients and 3 GB of device memory every kind of change is tried, fitting or not."""
    model = read_model("qwen2.5-7b")
    semantics = Semantics(32768, 8, 2, loss_tile_tokens=7, mlp_tile_tokens=48, gradient_dtype="fp32")
    free = SIZES - named
    request = Request(model, semantics, SMALL, None, free).resized()
    needs = needs_with(request)
    changes = [*_changes(request, [needs]), *_with_memory(request, needs)]  # fitting or not
    assert {text.split()[0] for text, _ in changes} >= {"--master", "--gradient-dtype", "--device-memory"}
    for text, changed in changes:
        is_size = text.startswith("--micro-batch")
        for field in named - ({"micro_batch"} if is_size else set()):
            assert getattr(changed.semantics, field) == getattr(semantics, field), text
        again = replace(changed, free=free - ({"micro_batch"} if is_size else set())).resized()
        assert again.fits() == changed.fits(), f"{text}: asked for anew, it would be otherwise"


def test_no_change_makes_the_policy_that_was_named_illegal():
    """Other sizes may have fewer micro-batches than the accumulation group of the policy."""
    semantics = replace(SEMANTICS, batch_size=64, micro_batch=16)
    profile = read_profile("rtx4090-server").with_memory(10**12, 10**12)
    request = Request(MODEL, semantics, profile, Policy(accumulation_group=4), SIZES)
    assert request.fits()
    assert not replace(request, semantics=replace(semantics, micro_batch=32)).fits()


@pytest.mark.slow
def test_more_memory_for_a_named_policy_comes_with_a_micro_batch():
    """More host memory changes the fastest sizes, and this policy would not fit the device with them."""
    model, profile = read_model("qwen2.5-14b"), read_profile("rtx5090-desktop")
    initial = Semantics(4096, 16, 1, loss="online", norm="fused", pointwise="fused")
    request = Request(model, initial, profile, None, SIZES).resized()
    fixed = baseline("megatrain", request.semantics, build_workload(model, request.semantics))
    error = does_not_fit(replace(request, fixed=fixed), [needs_with(request, fixed)])
    changed = re.search(r"--host-memory (\w+)(?: --micro-batch \d+)? \(about", error.smallest_change)
    assert changed, error
    larger = profile.with_memory(None, parse_bytes(changed[1]))
    several = sizes_of(model, request.semantics, larger)
    assert any(footprint(frame(model, workload, size, fixed), larger).fits for size, workload in several)


@pytest.mark.slow
@given(cases())
@settings(deadline=None)
def test_no_plan_has_more_ops_than_the_count_in_refusals(case):
    assert len(case.plan.ops) <= most_ops(case.workload, case.semantics, case.policy)


@pytest.mark.parametrize("policy", [Policy(), Policy(spill_blocks=(0, 1, 2), accumulation_group=3), Policy(boundary_stride=3)])
def test_a_long_plan_has_few_ops_and_no_more_than_the_count(policy):
    workload = small_workload(3, tied=False)
    for n in (400, 2000, MAX_REPETITIONS):
        semantics = Semantics(seq_len=4, batch_size=n, micro_batch=1)
        plan = lower(SYNTHETIC, workload, semantics, policy, {})
        assert plan.repeat is not None
        assert len(plan.ops) <= most_ops(workload, semantics, policy)
        assert len(plan.ops) <= 1.5 * plan_ops(workload, semantics, policy) + 20 * len(workload.blocks)


def test_a_frozen_base_larger_than_the_host_goes_to_a_disk():
    """Exactly one change suggests a disk; none does for full training or with a disk of this rate."""
    model, profile = read_model("qwen3-8b"), DESKTOP.with_memory(None, 12 * GB)
    adapters = Semantics(4096, 16, 1, train=Train(lora=Lora()))

    def named(semantics, profile):
        request = Request(model, semantics, profile, None, SIZES).resized()
        smallest_first = [n for _, n in smallest_plans(model, build_workload(model, request.semantics), request.semantics, profile)]
        assert not any(n.fits for n in smallest_first)
        return {text: changed for text, changed in _bitwise_identical(request, smallest_first[0]) if "--disk-read 7GB" in text}

    (changed,) = named(adapters, profile).values()
    assert changed.fits()
    assert not named(replace(adapters, train=Train()), profile)
    assert not named(adapters, profile.with_memory(None, 6 * GB).with_disk(7 * GB))


def advice(answer, profile):
    facts = Facts(PlanFile(answer.plan, answer.claim.to_json()), "the plan", answer=answer)
    (line,) = [text for name, text in short_report(facts) if name == "advice"] or [""]
    rate, times = re.search(r"about ([\d,]+) tokens/s, ([\d.]+) times", line).groups() if line else ("0", "0")
    assert (
        re.match("--compute fp8: about " if answer.plan.semantics.train.all else "--base fp8-rows --compute fp8: about ", line)
        or not line
    )
    return float(rate.replace(",", "")), float(times)


@mostly_slow("base", ["int8", "trained", "bf16", "fp8", "nf4"], fast=(0, 1))
def test_fp8_is_advised_with_the_speed_that_a_search_confirms(base):
    """Not for a base in 4 bits, on a GPU with slow or no FP8 products, or for a given policy."""
    model = read_model("qwen2.5-3b")
    train = {} if base == "trained" else {"train": Train(lora=Lora()), "gradient_dtype": "fp32", "base": base}
    semantics = replace(SEMANTICS, **(train | {"batch_size": 2} if train else {"batch_size": 64, "micro_batch": 16}))
    as_advised = {"products": "fp8"} | ({"base": "fp8-rows"} if train else {})
    answer, profile = search_machine(model, semantics, DESKTOP, None, frozenset())
    rate, times = advice(answer, profile)
    assert (base == "nf4") == (rate == 0.0)
    if base != "nf4":
        searched = search_machine(model, replace(semantics, **as_advised), DESKTOP, None, frozenset())[0].claim
        assert 0.9 * searched.prediction.tokens_per_s <= rate <= 1.001 * searched.prediction.tokens_per_s
        assert times == pytest.approx(rate / answer.claim.prediction.tokens_per_s, abs=0.01)
        assert times > 1.05
    fields = DESKTOP.to_json()
    fields["device"]["fp8_rate_fraction"] |= {"value": 0.5}
    for machine, policy in ((read_profile("rtx3090-desktop"), None), (Profile.from_json(fields), None), (DESKTOP, Policy())):
        assert advice(*search_machine(model, semantics, machine, policy, frozenset())) == (0.0, 0.0)


BY_ROW = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BY_ROW |= {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}
FORMS = {
    "bf16": {},
    "fp8-rows": BY_ROW,
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


@pytest.mark.parametrize(
    ("form", "machine", "frozen", "in_adapters", "in_whole"),
    [
        ("bf16", "rtx4090-desktop", ["--train lora"], True, True),
        ("fp8-rows", "rtx4090-desktop", ["--train lora --base fp8-rows --compute fp8"], True, False),
        ("fp8-rows", "rtx3090-desktop", [], False, False),
        ("fp8", "rtx4090-desktop", ["--train lora"], True, True),
        ("nf4", "rtx4090-desktop", ["--train lora --base nf4"], False, False),
    ],
)
def test_only_bases_are_advised_that_published_weights_are_read_with(form, machine, frozen, in_adapters, in_whole):
    model, profile = read_model("qwen2.5-3b"), read_profile(machine)
    model = replace(model, config=model.config | ({"quantization_config": FORMS[form]} if FORMS[form] else {}))
    trained = Request(model, Semantics(1024, 16, 1), profile, None, SIZES).resized()
    adapters = replace(trained, semantics=replace(trained.semantics, train=Train(lora=Lora()), gradient_dtype="fp32"))
    assert [text for text, _ in _frozen(trained)] == frozen
    assert [in_fp8(request) is not None for request in (adapters, trained)] == [in_adapters, in_whole]
    assert not any("fp8-rows" in text for text, _ in _frozen(adapters)), "in_fp8 has it"


@mostly_slow(("base", "machine"), [("bf16", "rtx4090-desktop"), ("bf16", "rtx3090-desktop"), ("nf4", "rtx4090-desktop")])
def test_fp8_is_the_last_change_of_a_base_that_does_not_fit(base, machine):
    model, profile = read_model("qwen3-8b"), read_profile(machine).with_memory(None, 16 * GB)
    adapters = Semantics(4096, 16, 1, train=Train(lora=Lora()), gradient_dtype="fp32", base=base)
    request = Request(model, adapters, profile, None, SIZES).resized()
    changes = does_not_fit(request, [needs_with(request)]).smallest_change.split(", or ")
    start = "--base fp8-rows --compute fp8 (activations in 8 bits, too: docs/fp8.md, about"
    in_fp8 = [text for text in changes if text.startswith(start)]
    assert in_fp8 == (changes[-1:] if (base, machine) == ("bf16", "rtx4090-desktop") else [])
    assert len(changes) - len(in_fp8) <= 3
