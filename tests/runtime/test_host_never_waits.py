"""Host synchronisation: compute and copies make no call in mid-step that waits for a GPU."""

from dataclasses import replace
from itertools import cycle, product

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runtime.compute import compute
from penstock.runtime.executor import execute
from penstock.runtime.plan import Kind, Lane, Policy, Update, saves
from tests.lanes import mostly_slow
from tests.late_streams import LateStreams, OnGpu, machine_of
from tests.tiny import STRUCTURES, WITH_SINKS, tiny_config
from tests.training import N_STEPS, batches_of, differences, machine_for, plan_of, semantics_of

WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim"}


class Watching(TorchDispatchMode):
    """Record calls that synchronise with a GPU because the host needs their result or its shape."""

    def __init__(self, hosts_own):
        super().__init__()
        self.calls, self.hosts_own = [], hosts_own

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        host_data = {t.untyped_storage().data_ptr() for t in self.hosts_own}
        if name in WAITS and args[0].untyped_storage().data_ptr() not in host_data:
            self.calls.append(name)
        if name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1]):
            self.calls.append("index with a mask")
        return out


def waits_of(config, semantics, policy, monkeypatch) -> set[str]:
    """Return the synchronising calls of compute after its first two micro-batches."""
    hosts_own, arange = [], torch.arange

    def counted(*args, **kwargs):  # no device name means the CPU, even with a GPU
        out = arange(*args, **kwargs)
        if kwargs.get("device") is None:
            hosts_own.append(out)
        return out

    monkeypatch.setattr(torch, "arange", counted)

    class Watched(OnGpu):
        n_ops = 0
        calls = []

        def work(self, index, op, step):
            with Watching(hosts_own) as watching:
                super().work(index, op, step)
            if step > 0 and op.lane is not Lane.CPU:
                self.n_ops += 1
                self.calls += watching.calls

    batches = batches_of(config["vocab_size"], semantics.batch_size, semantics.seq_len)
    counted_before = [replace(batch, n_counted=batch.n_supervised) for batch in batches]  # host calls on host data
    machine = machine_for(plan_of(config, semantics, policy), Watched, counted_before, streams=LateStreams())
    execute(machine.plan, machine, 2)
    assert machine.n_ops
    return set(machine.calls)


REMEMBERING = [Policy(), Policy(save=saves(all=(1, 2))), Policy(save=saves(products=(1,))), Policy(boundary_stride=2)]


@mostly_slow(("model_type", "policy"), [*product(["llama"], REMEMBERING), *zip(STRUCTURES[1:], cycle(REMEMBERING))])
def test_compute_never_waits_for_the_device(model_type, policy, monkeypatch):
    """Grouped products of experts are one kernel on a GPU, too."""
    config = tiny_config(model_type, **({} if model_type in WITH_SINKS else {"attention_dropout": 0.1}))
    if model_type == "gpt_oss" and policy.save:
        policy = Policy()  # its experts' biases are added to products in place
    assert waits_of(config, semantics_of(model_type), policy, monkeypatch) == set()


def test_layers_are_passed_inputs_that_change_each_time(monkeypatch):
    """Known types have no such layers. Such a layer requires the model's own forward in every step."""
    machine = machine_for(plan_of(tiny_config("llama"), semantics_of("llama"), Policy()))
    templates, given_to = machine.compute.templates, set()
    embed, layer = templates.embed, templates.layer

    def embed_noting_tokens(weights, batch):
        hidden_BTD, inputs = embed(weights, batch)
        return hidden_BTD, [replace(call, leaves=(*call.leaves, int(batch.input_ids.sum()))) for call in inputs]

    def layer_without_note(block, weights, hidden_BTD, inputs, graph_only=False):
        given_to.add(inputs.leaves[-1])
        return layer(block, weights, hidden_BTD, replace(inputs, leaves=inputs.leaves[:-1]), graph_only)

    monkeypatch.setattr(templates, "embed", embed_noting_tokens)
    monkeypatch.setattr(templates, "layer", layer_without_note)
    execute(machine.plan, machine, N_STEPS)
    assert not machine.compute.inputs.only_lookup
    assert given_to == {int(tokens.sum()) for batch in batches_of(96, 4, 16) for tokens in batch.input_ids}
    assert differences(machine) == []


@mostly_slow("model_type", STRUCTURES)
def test_a_model_is_asked_for_masks_and_positions_twice(model_type, monkeypatch):
    calls = []
    embed = compute.Templates.embed
    monkeypatch.setattr(compute.Templates, "embed", lambda self, *args: calls.append(1) or embed(self, *args))
    machine = machine_of(tiny_config(model_type), semantics_of(model_type), Policy(), haste=0.5)
    execute(machine.plan, machine, N_STEPS)
    assert len(calls) == 2
    assert differences(machine) == []


class OnlyCopying(TorchDispatchMode):
    """Record calls of a link lane other than asynchronous copies between arenas."""

    def __init__(self, slabs):
        super().__init__()
        self.slabs, self.n_copies, self.odd = slabs, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        storage = out.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self.slabs:
            self.odd.append(f"{func}: memory that is no arena's")
        if func.overloadpacket.__name__ == "copy_":
            self.n_copies += 1
            if not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)):
                self.odd.append(f"{func}: the host waits for it")
            if args[0].dtype != args[1].dtype or not (args[0].is_contiguous() and args[1].is_contiguous()):
                self.odd.append(f"{func}: by way of other memory")
        return out


EVERY_COPY = [Policy(spill_blocks=(0, 1), accumulation_group=2)]
EVERY_COPY += [Policy(accumulation_group=4, resident_blocks=(1,), update=Update.DEFERRED)]


@mostly_slow("tied", [False, True])
@mostly_slow("policy", EVERY_COPY, ids=["spills", "resident"])
def test_lanes_of_the_link_only_copy_between_arenas(policy, tied):
    """Memory that a side stream allocates on a GPU can be reused before the copy ends."""
    copies = []

    class Watched(OnGpu):
        def work(self, index, op, step):
            if op.lane not in (Lane.H2D, Lane.D2H):
                return super().work(index, op, step)
            with OnlyCopying({slab.data_ptr() for slab in self.arenas.slabs.values()}) as copying:
                super().work(index, op, step)
            copies.append(copying)
            return None

    machine = machine_of(tiny_config("llama", tie_word_embeddings=tied), semantics_of("llama"), policy, machine_type=Watched)
    execute(machine.plan, machine, 2)
    assert {op.kind for op in machine.plan.ops if op.lane in (Lane.H2D, Lane.D2H)} >= {Kind.LOAD, Kind.OFFLOAD_GRADIENT}
    assert all(copying.n_copies for copying in copies)
    assert {odd for copying in copies for odd in copying.odd} == set()
