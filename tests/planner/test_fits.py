"""Largest models that fit: agreement with the planner, and labels of estimates."""

import json
from dataclasses import replace

import pytest

from penstock.hwprofiles.device_parts import on_network, shared_by
from penstock.hwprofiles.schema import Profile, read_profile
from penstock.planner.model import config
from penstock.planner.model.kernels import with_kernels
from penstock.planner.model.workload import build_workload, read_model, shipped_models
from penstock.planner.search.evaluation import Evaluator
from penstock.planner.search.greedy import Greedy
from penstock.planner.search.micro_batch import sizes_of
from penstock.planner.search.search import search
from penstock.planner.show.fits import families, family_of, fits, fitting_sizes, hosts, lowest, speed_of
from penstock.runtime.errors import ProfileError, WorkloadError
from penstock.runtime.plan import Semantics
from penstock.runtime.plan.policy import trained
from penstock.runtime.units import GB

SEMANTICS = Semantics(seq_len=1024, batch_size=2, micro_batch=1)
DESKTOP, SERVER, SPARK = (read_profile(name) for name in ("rtx4090-desktop", "rtx4090-server", "gb10"))
H100 = read_profile("h100-sxm")


def members(family: str) -> tuple[str, list[str]]:
    return family, families()[family]


def test_every_model_is_of_one_family_and_families_rise_in_size(monkeypatch):
    families.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(config, "_recorder", None)  # layer traces of all models are shipped: no slow import of torch
        names_by_family = families()
    assert sorted(name for names in names_by_family.values() for name in names) == shipped_models()
    assert names_by_family["qwen3-moe"] == ["qwen3-30b-a3b", "qwen3-235b-a22b"]
    assert names_by_family["mistral"] == ["mistral-7b", "mistral-nemo-12b", "mistral-small-24b", "mistral-large-123b"]
    assert family_of("llama-3.1-70b", "llama") == family_of("llama-3.2-1b", "llama") == "llama"
    for names in names_by_family.values():
        short = replace(SEMANTICS, seq_len=64)  # a length with shipped traces
        sizes = [build_workload(read_model(name), short).n_params for name in names if not name.startswith(("gemma", "gpt"))]
        assert sizes == sorted(sizes)


def test_models_that_cannot_be_trained_as_asked_are_left_out():
    adapters = trained(SEMANTICS, "lora:r=8", None, None, None)
    assert [*families(adapters)] == [*families()]
    packed = replace(adapters, base="mxfp4")
    assert [*families(packed)] == ["gpt-oss"]
    of_experts = families(trained(SEMANTICS, "lora:r=8,targets=q_proj+experts", None, None, None))
    assert "qwen3-moe" in of_experts
    assert "qwen3" not in of_experts
    with pytest.raises(WorkloadError, match="only experts of gpt_oss"):
        families(packed, ("qwen3",))
    with pytest.raises(WorkloadError, match="a rank divisible by 8"):
        families(trained(SEMANTICS, "lora:r=4,targets=q_proj+experts", None, None, None))


def test_the_named_model_fits_and_the_next_larger_one_does_not():
    sizes, (_, names) = (32 * GB, 64 * GB), members("qwen3")
    rows = fits("rtx4090", [DESKTOP, SERVER], *members("qwen3"), SEMANTICS, sizes, searched=False)
    assert [(fit.machine, fit.host_memory_bytes) for fit in rows] == [("rtx4090-desktop", n) for n in sizes]
    for fit, n_bytes in zip(rows, sizes, strict=True):
        assert fit.is_estimate
        profile = DESKTOP.with_memory(None, n_bytes)
        assert fitting_sizes(read_model(fit.model), SEMANTICS, profile)
        assert not fitting_sizes(read_model(names[names.index(fit.model) + 1]), SEMANTICS, profile)
    (none,) = fits("rtx4090", [DESKTOP], *members("qwen3"), SEMANTICS, (6 * GB,), searched=False)
    assert (none.model, none.n_params, none.tokens_per_s, none.to_json(1000).get("job")) == (None,) * 4


def test_a_row_is_about_its_own_memory_whatever_the_others():
    larger = replace(SEMANTICS, seq_len=4096, batch_size=16)
    sizes = (24 * GB, 40 * GB, 56 * GB, 1000 * GB)  # the largest size permits another plan of the same model
    rows = fits("x", [DESKTOP, SERVER], *members("llama"), larger, sizes, False)
    assert rows == [fit for n in sizes for fit in fits("x", [DESKTOP, SERVER], *members("llama"), larger, (n,), False)]
    one, two = (fits("h100-sxm", [H100], *members("qwen3"), larger, sizes, False) for sizes in ((128 * GB,), (64 * GB, 128 * GB)))
    assert one[-1] == two[-1]
    assert two[0].model == two[1].model == "qwen3-8b"
    assert two[1].tokens_per_s > 1.1 * two[0].tokens_per_s


def test_no_machine_has_more_memory_than_it_takes():
    assert [p.name for p, _ in hosts([DESKTOP], [128 * GB, 512 * GB])] == ["rtx4090-desktop"]
    with pytest.raises(ProfileError, match="253 GB are the most that this machine takes"):
        DESKTOP.with_memory(None, 512 * GB)
    older = json.loads(json.dumps(DESKTOP.to_json()).replace('"most_bytes"', '"soldered_bytes"'))  # former name of the field
    assert Profile.from_json(older) == DESKTOP


@pytest.mark.parametrize(("gpus", "n_hosts"), [(2, 1), (2, 2)])
def test_several_gpus_train_what_their_parts_hold_together(gpus, n_hosts):
    """GPUs of a host share its memory; each additional host adds the same amount."""
    box, n_bytes = on_network(read_profile("8xrtx4090"), 100), 128 * GB
    part_of_step = replace(SEMANTICS, batch_size=8, sum_groups=4).shared_by(gpus * n_hosts)
    (fit,) = fits("8xrtx4090", [box], *members("qwen2.5"), part_of_step, (n_bytes,), False, n_hosts)
    part, (_, names) = shared_by(box.with_memory(None, n_bytes), gpus, n_hosts), members("qwen2.5")
    assert fitting_sizes(read_model(fit.model), part_of_step, part)
    assert not fitting_sizes(read_model(names[names.index(fit.model) + 1]), part_of_step, part)
    assert (fit.machine, fit.model) == ("8xrtx4090", {1: "qwen2.5-7b", 2: "qwen2.5-14b"}[n_hosts])


def test_an_estimate_is_within_some_per_cent_of_a_search():
    model = read_model("qwen3-0.6b")
    sizes = sizes_of(model, with_kernels(model, SEMANTICS, DESKTOP), DESKTOP)
    estimate, *_ = speed_of(model, fitting_sizes(model, SEMANTICS, DESKTOP), DESKTOP, searched=False)
    assert SEMANTICS.tokens_per_step / estimate == pytest.approx(search(model, sizes, DESKTOP).step_s, rel=0.1)


def test_each_size_is_on_the_nearest_machine_and_soldered_stays():
    assigned = [(profile.name, n // GB) for profile, n in hosts([DESKTOP, SERVER, SPARK], [96 * GB, 400 * GB, 2048 * GB])]
    assert assigned == [("gb10", 88), ("rtx4090-desktop", 96), ("rtx4090-server", 400), ("rtx4090-server", 2048)]
    assert SPARK.with_memory(20 * GB, 100 * GB).most_host_bytes == 100 * GB
    for device, host in ((None, 120 * GB), (60 * GB, None), (20 * GB, 101 * GB)):
        with pytest.raises(ProfileError, match="unified memory of 120 GB"):
            SPARK.with_memory(device, host)


def test_the_lowest_bound_is_found_without_asking_all():
    model, larger = read_model("qwen3-1.7b"), replace(SEMANTICS, seq_len=4096, batch_size=16)
    evaluators = [Evaluator(model, workload, s, DESKTOP) for s, workload in fitting_sizes(model, larger, DESKTOP)]
    likely = [(evaluator, policy) for evaluator in evaluators for policy in Greedy(evaluator).policies()]
    best, least = lowest(likely), min(likely, key=lambda pair: pair[0].bound_s(pair[1]))
    assert len({evaluator.bound_s(policy) for evaluator, policy in likely}) > 5
    assert best is likely[likely.index(least)]
