"""Models of published systems: uploads, buffers, memory and seconds against their sources."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.system_costs import Software, SystemCosts
from benchmarks.published.system_memory import runtime_bytes
from benchmarks.published.system_pipeline import Task, ends_s
from benchmarks.published.systems import SYSTEMS, MegaTrain, Run, claimed_flop, predict
from penstock.hwprofiles.components import AttentionCall
from penstock.hwprofiles.schema import read_profile
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.region import Demand, Region, Resource
from penstock.planner.predict.scaled_profile import Group, faster
from penstock.runtime.plan import Semantics
from penstock.runtime.units import GiB

SERVERS = ("mi355x", "gh200", "h100-sxm", "rtx4090-server")
SOFTWARE = Software()


def outcome(system="megatrain", machine="mi355x", model="qwen2.5-7b", batch=16, seq_len=1024, **options):
    return predict(Run(system, machine, model, batch, seq_len, **options), read_model(model), read_profile(machine), SOFTWARE)


def costs_of(machine="mi355x", model="qwen2.5-7b", batch=16, seq_len=1024, profile=None):
    semantics = Semantics(seq_len, batch, batch)
    return SystemCosts(profile or read_profile(machine), SOFTWARE, build_workload(read_model(model), semantics), semantics)


def megatrain_tasks(costs, system="megatrain", **options):
    m = MegaTrain(costs, Run(system, costs.profile.name, "", costs.semantics.batch_size, costs.semantics.seq_len, **options))
    forward = m.forward()
    m.loss()
    m.backward()
    m.embedding()
    return m.program.tasks, forward


@st.composite
def programs(draw):
    n = draw(st.integers(1, 12))
    tasks = []
    for i in range(n):
        seconds = draw(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.25, 1.0, 2.0])))
        uses = draw(st.sampled_from([(), ((Resource.DRAM, 6.0),), ((Resource.DRAM, 3.0), (Resource.H2D, 2.0))]))
        dependencies = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        tasks.append(Task(draw(st.sampled_from("abc")), Demand(*seconds, uses), tuple(sorted(dependencies))))
    return tasks


def longest_paths(tasks):
    """Reference implementation: a task starts after its dependencies and after the previous task of its queue."""
    ends, queue_ends = [], {}
    for task in tasks:
        begin_s = max([queue_ends.get(task.queue, 0.0), *(ends[j] for j in task.dependencies)])
        ends.append(begin_s + task.demand.uncontended_s)
        queue_ends[task.queue] = ends[-1]
    return ends


@given(programs())
def test_without_contention_a_task_ends_at_its_longest_path(tasks):
    assert ends_s(tasks, None) == pytest.approx(longest_paths(tasks))


@given(programs())
@settings(max_examples=50)
def test_contention_ends_no_task_sooner_and_conserves_work(tasks):
    capacity = {Resource.DRAM: 7.0, Resource.H2D: 2.0}
    ends = ends_s(tasks, Region(tuple(capacity.items())))
    assert all(end >= alone - 1e-9 for end, alone in zip(ends, longest_paths(tasks), strict=True))
    for resource, per_s in capacity.items():
        moved = sum(task.demand.alone_s * dict(task.demand.uses).get(resource, 0.0) for task in tasks)
        assert max(ends) * per_s >= moved - 1e-9


@pytest.mark.parametrize(("system", "n_uploads", "n_forwards"), [("megatrain", 3, 3), ("megatrain-plus", 2, 2)])
def test_a_layer_is_uploaded_as_often_as_the_source_says(system, n_uploads, n_forwards):
    costs = costs_of()
    tasks, _ = megatrain_tasks(costs, system)
    layer = costs.layers[0]
    n_layers = len(costs.layers)
    assert sum(task.queue == "h2d" for task in tasks) == n_uploads * n_layers
    assert sum(task.demand == costs.forward(layer) for task in tasks) == n_forwards * n_layers
    assert sum(task.demand == costs.backward(layer) for task in tasks) == n_layers
    unpacked = costs.unpack(layer.n_params * 2, len(layer.parameters))
    assert sum(task.demand == unpacked for task in tasks) == (0 if system == "megatrain-plus" else n_uploads * n_layers)
    assert sum(task.queue == "d2h" for task in tasks) == n_layers + 2  # and the two vocabulary blocks
    assert sum(task.queue.startswith("worker") for task in tasks) == n_layers + 2
    tied, _ = megatrain_tasks(costs_of(model="qwen2.5-0.5b"), system)
    assert sum(task.queue == "d2h" for task in tied) == 24 + 1, "a tied head sends its gradient with the embedding"


@pytest.mark.parametrize(("system", "n_buffers", "slow"), [("megatrain", 2, Group.UPLOAD), ("megatrain-plus", 3, Group.MATMUL)])
def test_no_buffer_is_filled_while_it_is_still_read(system, n_buffers, slow):
    """In the forward, loads k and k + n_buffers use the same pinned buffer and the same flat buffer."""
    costs = costs_of(profile=faster(read_profile("mi355x"), {slow: 0.02}))
    tasks, forward = megatrain_tasks(costs, system)
    ends = ends_s(tasks, None)
    starts = [end - task.demand.uncontended_s for end, task in zip(ends, tasks, strict=True)]
    layer = costs.layers[0]
    reader = costs.forward(layer) if system == "megatrain-plus" else costs.unpack(layer.n_params * 2, len(layer.parameters))
    tasks_of = {name: [i for i, t in enumerate(tasks[: forward + 1]) if t.demand == demand] for name, demand in {
        "flatten": costs.flatten(layer), "upload": costs.copy("h2d", layer.n_params * 2), "read": reader,
    }.items()}  # fmt: skip
    assert [len(indices) for indices in tasks_of.values()] == [28, 28, 28]
    for k in range(28 - n_buffers):
        assert starts[tasks_of["flatten"][k + n_buffers]] >= ends[tasks_of["upload"][k]] - 1e-9
        assert starts[tasks_of["upload"][k + n_buffers]] >= ends[tasks_of["read"][k]] - 1e-9
        assert starts[tasks_of["read"][k]] >= ends[tasks_of["upload"][k]] - 1e-9
        assert starts[tasks_of["upload"][k]] >= ends[tasks_of["flatten"][k]] - 1e-9


def test_in_one_pool_nothing_overlaps_but_the_gradient_threads():
    costs = costs_of("gb10", batch=2, seq_len=512)
    tasks, forward = megatrain_tasks(costs)
    assert {task.queue for task in tasks} == {"gpu", "worker 0"}
    ends = ends_s(tasks, None)
    assert ends[forward] == pytest.approx(sum(task.demand.uncontended_s for task in tasks[: forward + 1]))
    assert not costs_of("gh200").one_pool


@pytest.mark.parametrize("machine", SERVERS)
@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "qwen2.5-14b"])
def test_variants_never_save_time_and_the_fork_does(machine, model):
    full = outcome(machine=machine, model=model).step_s
    assert outcome("megatrain-plus", machine, model).step_s < full
    assert outcome(machine=machine, model=model, variant="no-double-buffer").step_s >= full * 1.001
    assert outcome(machine=machine, model=model, variant="no-slab-pool").step_s >= full * (1 - 1e-9)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("machine", ["mi355x", "rtx4090-server", "gb10"])
def test_more_sequences_take_longer_and_more_memory(system, machine):
    """ZeRO-3 may begin to recompute, and then need less."""
    outcomes = [outcome(system, machine, "qwen2.5-1.5b", batch, 512) for batch in (2, 8, 64)]
    assert outcomes[0].step_s < outcomes[1].step_s < outcomes[2].step_s
    if system != "zero3-offload":
        assert outcomes[0].device_peak_bytes < outcomes[1].device_peak_bytes < outcomes[2].device_peak_bytes


def test_attention_over_long_sequences_nears_the_unmasked_rate():
    """FlashAttention-2's published rates on the H100, forward and backward: with a causal mask at 16k, and without."""
    profile = read_profile("h100-sxm")
    for backward, (causal, plain) in {False: (335e12, 370e12), True: (300e12, 322e12)}.items():
        rates = [profile.attention_rate(AttentionCall("bf16", n, 128, False), backward).value for n in (16384, 65536, 262144)]
        assert rates[0] == pytest.approx(causal, rel=0.06)
        assert rates[2] == pytest.approx(plain, rel=0.03)
        assert rates == sorted(rates)


def test_host_memory_is_the_published_formula():
    """12 B/param + 14 pow2(layer) + 2 pow2(embedding) + the process: 190.5 GiB was measured."""
    costs = costs_of("mi355x", "qwen2.5-14b")
    n_bytes = 12 * costs.workload.n_params + 14 * GiB + 2 * 2 * GiB + runtime_bytes(costs)
    assert outcome(model="qwen2.5-14b").host_peak_bytes == n_bytes
    assert n_bytes / GiB == pytest.approx(190.5, rel=0.02)


def test_device_memory_per_token_is_the_published_formula():
    """2V + 2H(ceil(L / 4) + 1) + 16H bytes a token, in the loss phase."""
    small, large = (outcome(model="qwen2.5-14b", batch=b).device_peak_bytes for b in (64, 192))
    per_token = (large - small) / (128 * 1024)
    assert per_token == 2 * 152064 + 2 * 5120 * (48 // 4 + 1) + 16 * 5120


def test_the_paper_counts_work_as_we_do():
    """401.2 TFLOP/s in 236.1 s: attention over the whole square, embedding table included."""
    assert claimed_flop(costs_of("gh200", "qwen2.5-7b", 1, 262144)) == pytest.approx(401.2e12 * 236.1, rel=1e-3)
