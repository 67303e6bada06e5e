"""Published systems: uploads, buffers, memory and seconds as their sources say."""

from dataclasses import replace

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.system_costs import Software, SystemCosts
from benchmarks.published.system_memory import (
    fused_kept_bytes,
    layer_bytes,
    logits_crowd_the_device,
    power_of_two,
    runtime_bytes,
    zero3_device_bytes,
    zero3_keeps_activations,
)
from benchmarks.published.system_pipeline import Program, Task, ends_s
from benchmarks.published.systems import SYSTEMS, MegaTrain, Run, claimed_flop, predict
from hwprofiles.schema import AttentionCall, read_profile
from planner.model.workload import build_workload, read_model
from planner.predict.faster import Group, faster
from runtime.plan import Semantics
from runtime.plan.region import Demand, Region, Resource
from runtime.units import GiB

SERVERS = ("mi355x", "gh200", "h100-sxm", "rtx4090-server")
SOFTWARE = Software()


def outcome(system="megatrain", machine="mi355x", model="qwen2.5-7b", batch=16, seq_len=1024, **more):
    return predict(Run(system, machine, model, batch, seq_len, **more), read_model(model), read_profile(machine), SOFTWARE)


def costs_of(machine="mi355x", model="qwen2.5-7b", batch=16, seq_len=1024, profile=None):
    semantics = Semantics(seq_len, batch, batch)
    return SystemCosts(profile or read_profile(machine), SOFTWARE, build_workload(read_model(model), semantics), semantics)


def megatrain_tasks(costs, system="megatrain", **more):
    m = MegaTrain(costs, Run(system, costs.profile.name, "", costs.semantics.batch_size, costs.semantics.seq_len, **more))
    forward = m.forward()
    m.loss()
    m.backward()
    m.embedding()
    return m.program.tasks, forward


# the event loop


@st.composite
def programs(draw):
    n = draw(st.integers(1, 12))
    tasks = []
    for i in range(n):
        seconds = draw(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.25, 1.0, 2.0])))
        uses = draw(st.sampled_from([(), ((Resource.DRAM, 6.0),), ((Resource.DRAM, 3.0), (Resource.H2D, 2.0))]))
        after = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        tasks.append(Task(draw(st.sampled_from("abc")), Demand(*seconds, uses), tuple(sorted(after))))
    return tasks


def longest_paths(tasks):
    """The slow twin: every task after those it waits for and after the one before it in its queue."""
    graph = networkx.DiGraph()
    last = {}
    for i, task in enumerate(tasks):
        graph.add_node(i)
        graph.add_edges_from((j, i) for j in (*task.after, *([last[task.queue]] if task.queue in last else [])))
        last[task.queue] = i
    ends = []
    for i, task in enumerate(tasks):
        ends.append(max((ends[j] for j in graph.predecessors(i)), default=0.0) + task.demand.uncontended_s)
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


@pytest.mark.parametrize(("work_s", "ends"), [((2.0, 2.0), (4.0, 4.0)), ((2.0, 1.0), (3.0, 2.0))])
def test_tasks_that_need_one_resource_whole_are_slowed(work_s, ends):
    """Both at half speed; the longer one then does the rest of its work alone."""
    program = Program()
    for queue, alone_s in zip("ab", work_s, strict=True):
        program.add(queue, Demand(0.0, alone_s, ((Resource.DRAM, 10.0),)))
    assert ends_s(program.tasks, Region(((Resource.DRAM, 10.0),))) == pytest.approx(ends)


# what the systems do


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


@pytest.mark.parametrize("slow", [Group.UPLOAD, Group.MATMUL, Group.DRAM])
@pytest.mark.parametrize(("system", "n_buffers"), [("megatrain", 2), ("megatrain-plus", 3)])
def test_no_buffer_is_filled_while_it_is_still_read(slow, system, n_buffers):
    """In the forward, load k and load k + n_buffers use one pinned and one flat buffer."""
    costs = costs_of(profile=faster(read_profile("mi355x"), {slow: 0.02}))
    tasks, forward = megatrain_tasks(costs, system)
    ends = ends_s(tasks, None)
    starts = [end - task.demand.uncontended_s for end, task in zip(ends, tasks, strict=True)]
    layer = costs.layers[0]
    reader = costs.forward(layer) if system == "megatrain-plus" else costs.unpack(layer.n_params * 2, len(layer.parameters))
    of = {name: [i for i, t in enumerate(tasks[: forward + 1]) if t.demand == demand] for name, demand in {
        "flatten": costs.flatten(layer), "upload": costs.copy("h2d", layer.n_params * 2), "read": reader,
    }.items()}  # fmt: skip
    assert [len(found) for found in of.values()] == [28, 28, 28]
    for k in range(28 - n_buffers):
        assert starts[of["flatten"][k + n_buffers]] >= ends[of["upload"][k]] - 1e-9
        assert starts[of["upload"][k + n_buffers]] >= ends[of["read"][k]] - 1e-9
        assert starts[of["read"][k]] >= ends[of["upload"][k]] - 1e-9
        assert starts[of["upload"][k]] >= ends[of["flatten"][k]] - 1e-9


def test_the_fork_has_three_buffers_and_keeps_every_boundary():
    plus, original = outcome("megatrain-plus", "gb10", batch=2, seq_len=512), outcome("megatrain", "gb10", batch=2, seq_len=512)
    costs = costs_of("gb10", batch=2, seq_len=512)
    n_bytes = (28 - 7) * costs.boundary_bytes - layer_bytes(costs)
    assert plus.device_peak_bytes - original.device_peak_bytes == n_bytes
    assert plus.host_peak_bytes - original.host_peak_bytes == power_of_two(layer_bytes(costs))


def test_in_one_pool_nothing_overlaps_but_the_gradient_threads():
    costs = costs_of("gb10", batch=2, seq_len=512)
    tasks, forward = megatrain_tasks(costs)
    assert {task.queue for task in tasks} == {"gpu", "worker 0"}
    ends = ends_s(tasks, None)
    assert ends[forward] == pytest.approx(sum(task.demand.uncontended_s for task in tasks[: forward + 1]))
    assert not costs_of("gh200").one_pool


def test_a_forward_overlaps_its_uploads_where_there_is_a_link():
    costs = costs_of(batch=64)
    tasks, forward = megatrain_tasks(costs)
    before = tasks[: forward + 1]
    busy = {queue: sum(t.demand.uncontended_s for t in before if t.queue == queue) for queue in ("gpu", "h2d", "main")}
    end_s = ends_s(tasks, costs.region)[forward]
    assert max(busy.values()) <= end_s < 1.1 * max(busy.values())


@pytest.mark.parametrize("machine", SERVERS)
@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "qwen2.5-14b"])
def test_variants_never_save_time_and_the_fork_does(machine, model):
    full = outcome(machine=machine, model=model).step_s
    assert outcome("megatrain-plus", machine, model).step_s < full
    assert outcome(machine=machine, model=model, variant="no-double-buffer").step_s >= full * 1.001
    assert outcome(machine=machine, model=model, variant="no-slab-pool").step_s >= full * (1 - 1e-9)


def test_without_double_buffering_uploads_and_compute_take_turns():
    costs = costs_of("rtx4090-server", batch=16)
    tasks, forward = megatrain_tasks(costs, variant="no-double-buffer")
    alone_s = sum(t.demand.uncontended_s for t in tasks[: forward + 1] if t.queue in ("gpu", "h2d") or t.demand.uses)
    assert ends_s(tasks, None)[forward] == pytest.approx(alone_s, rel=0.01)
    full, single = outcome(batch=64), outcome(batch=64, variant="no-double-buffer")
    assert full.device_peak_bytes - single.device_peak_bytes == 2 * layer_bytes(costs_of(batch=64)), "one buffer, one template"
    assert full.host_peak_bytes - single.host_peak_bytes == power_of_two(layer_bytes(costs_of(batch=64)))


def test_variants_cost_time_or_memory():
    full, single = outcome(batch=16), outcome(batch=16, variant="no-slab-pool")
    assert single.step_s > 1.02 * full.step_s, "the gradient thread is the slowest"
    assert full.host_peak_bytes - single.host_peak_bytes == 11 * power_of_two(layer_bytes(costs_of()))
    kept, full = outcome(batch=64, variant="checkpoint-every-layer"), outcome(batch=64)
    boundary_bytes = 64 * 1024 * 3584 * 2
    assert kept.device_peak_bytes - full.device_peak_bytes == (28 - 7) * boundary_bytes
    assert kept.step_s == pytest.approx(full.step_s, rel=0.02)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("machine", ["mi355x", "rtx4090-server", "gb10"])
def test_more_sequences_take_longer_and_more_memory(system, machine):
    """ZeRO-3 may begin to recompute, and then need less."""
    outcomes = [outcome(system, machine, "qwen2.5-1.5b", batch, 512) for batch in (2, 8, 64)]
    assert outcomes[0].step_s < outcomes[1].step_s < outcomes[2].step_s
    if system != "zero3-offload":
        assert outcomes[0].device_peak_bytes < outcomes[1].device_peak_bytes < outcomes[2].device_peak_bytes


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_is_its_phases_one_after_another(system):
    found = outcome(system)
    inside = {"gradient_join_s"}  # part of backward
    assert found.step_s == pytest.approx(sum(s for name, s in found.phases_s.items() if name not in inside))
    assert all(seconds > 0 for seconds in found.phases_s.values())


def test_without_an_optimizer_there_are_no_moments():
    with_it, without = outcome(), outcome(updates=False)
    assert {"clip_s", "optimizer_s", "sync_s", "zero_and_free_s"} == set(with_it.phases_s) - set(without.phases_s)
    assert set(without.phases_s) - set(with_it.phases_s) == {"zero_grad_s"}
    assert with_it.host_peak_bytes - without.host_peak_bytes == 8 * costs_of().workload.n_params
    assert without.phases_s["backward_s"] < with_it.phases_s["backward_s"], "pages that are kept are not touched anew"


def test_slideformers_optimizer_hides_behind_backward():
    found = outcome("slideformer", "rtx4090-server", "qwen3-8b", 64)
    costs = replace(costs_of("rtx4090-server", "qwen3-8b", 64), fused=True)
    assert costs.update(costs.workload.n_params, 26).uncontended_s > 1.0
    of_layers = [(costs.forward(b), costs.forward(b, but_last_product=True), costs.backward(b)) for b in costs.layers]
    device_s = costs.loss().uncontended_s + sum(demand.uncontended_s for layer in of_layers for demand in layer)
    assert device_s < found.step_s < device_s + 0.5


def test_zero3_recomputes_only_where_activations_do_not_fit():
    kept, recomputed = costs_of("mi355x", "qwen2.5-14b", 16), costs_of("mi355x", "qwen2.5-14b", 64)
    assert zero3_keeps_activations(kept)
    assert not zero3_keeps_activations(recomputed)
    assert zero3_device_bytes(recomputed) < 4 * zero3_device_bytes(kept)  # four times the tokens
    kept_s, recomputed_s = (outcome("zero3-offload", model="qwen2.5-14b", batch=batch).phases_s["backward_s"] for batch in (16, 64))
    forward_s = sum(recomputed.forward(b).uncontended_s for b in recomputed.layers)
    backward_s = [sum(costs.backward(b).uncontended_s for b in costs.layers) for costs in (kept, recomputed)]
    assert recomputed_s - kept_s > forward_s + backward_s[1] - backward_s[0]


def test_zero3_takes_fused_kernels_where_logits_crowd_the_device():
    """As the published runs: Liger kernels on 24 GB, plain modules on the MI355X."""
    crowded = {(m, batch): logits_crowd_the_device(costs_of(m, "llama-3.1-8b", batch)) for m in SERVERS for batch in (1, 8, 512)}
    assert {m for (m, _), is_crowded in crowded.items() if is_crowded} == {"rtx4090-server"}
    assert sum(crowded.values()) == 3, "whatever the batch"
    assert not logits_crowd_the_device(costs_of("rtx4090-server", "mixtral-8x7b", 8))  # 32,000 words
    small = costs_of("rtx4090-server", "llama-3.1-8b", 8)
    forward_s = replace(small, fused=True).forward(small.layers[0]).uncontended_s
    assert forward_s < 0.85 * small.forward(small.layers[0]).uncontended_s
    uploads_s = sum(small.copy("h2d", b.n_params * 2, len(b.parameters)).uncontended_s for b in small.workload.blocks)
    loss_s = replace(small, fused=True).loss().uncontended_s
    found = outcome("zero3-offload", "rtx4090-server", "llama-3.1-8b", 8)
    assert found.phases_s["forward_s"] == pytest.approx(uploads_s + 32 * forward_s + loss_s / 3)


def test_attention_over_long_sequences_nears_the_unmasked_rate():
    """FlashAttention-2's published rates on the H100, forward and backward: with a causal mask at 16k, and without."""
    profile = read_profile("h100-sxm")
    for backward, (causal, plain) in {False: (335e12, 370e12), True: (300e12, 322e12)}.items():
        rates = [profile.attention_rate(AttentionCall("bf16", n, 128, False), backward).value for n in (16384, 65536, 262144)]
        assert rates[0] == pytest.approx(causal, rel=0.06)
        assert rates[2] == pytest.approx(plain, rel=0.03)
        assert rates == sorted(rates)


# sizes


def test_host_memory_is_the_published_formula():
    """12 B/param + 14 pow2(layer) + 2 pow2(embedding) + the process: 190.5 GiB was measured."""
    costs = costs_of("mi355x", "qwen2.5-14b")
    n_bytes = 12 * costs.workload.n_params + 14 * GiB + 2 * 2 * GiB + runtime_bytes(costs)
    assert outcome(model="qwen2.5-14b").host_peak_bytes == n_bytes
    assert n_bytes / GiB == pytest.approx(190.5, rel=0.02)


def test_fused_layers_keep_what_their_products_read_and_make():
    """Qwen3-8B, per token: q, k, v, out, gate, up and their product; q and k again when normed; four rows of the width."""
    costs = costs_of("rtx4090-server", "qwen3-8b", 64)
    widths = 4096 + 1024 + 1024 + 4096 + 3 * 12288 + (4096 + 1024) + 4 * 4096
    assert fused_kept_bytes(costs, costs.layers[0]) == 65536 * widths * 2
    llama = costs_of("rtx4090-server", "llama-3.1-8b", 64)
    assert fused_kept_bytes(llama, llama.layers[0]) == 65536 * (4096 + 1024 + 1024 + 4096 + 3 * 14336 + 4 * 4096) * 2


def test_device_memory_per_token_is_the_published_formula():
    """2V + 2H(ceil(L / 4) + 1) + 16H bytes a token, in the loss phase."""
    small, large = (outcome(model="qwen2.5-14b", batch=b).device_peak_bytes for b in (64, 192))
    per_token = (large - small) / (128 * 1024)
    assert per_token == 2 * 152064 + 2 * 5120 * (48 // 4 + 1) + 16 * 5120


def test_the_paper_counts_work_as_we_do():
    """401.2 TFLOP/s in 236.1 s: attention over the whole square, embedding table included."""
    assert claimed_flop(costs_of("gh200", "qwen2.5-7b", 1, 262144)) == pytest.approx(401.2e12 * 236.1, rel=1e-3)
