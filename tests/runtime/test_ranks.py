"""Several ranks and sums in groups: bits of one rank, plans, shares of a step, shared memory and a common end."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import plan as planned
from penstock.checkpoint.checkpoint import load_state, refuse_another
from penstock.emulated import EmulatedRanks
from penstock.hwprofiles.device_parts import on_network, shared_by
from penstock.hwprofiles.schema import read_profile
from penstock.planner.check.claim import check_origin
from penstock.planner.check.shape import Shape
from penstock.planner.lower.lower import lower
from penstock.planner.model.workload import build_workload
from penstock.runtime.errors import CheckpointError, PlanError
from penstock.runtime.executor import AgreedStop, Stop
from penstock.runtime.host.slabs import shared_slab, slab_of
from penstock.runtime.plan import Kind, Policy, Semantics
from penstock.runtime.plan.train import Lora, Train
from penstock.runtime.plan.workload import Block, BlockKind, Model, Parameter
from penstock.runtime.ranks import folded
from tests.edits import small
from tests.lanes import mostly_slow
from tests.rank_law import every_case, trained_alone, trained_by
from tests.running import make_home, one_line, penstock, plan_in, train
from tests.strategies import MODEL, PROFILE, small_workload
from tests.tiny import tiny_config
from tests.training import differences, has_fp8_products, plain, plan_of, same_bits, semantics_of, trained

# The fourth: one micro-batch each
SMOKE = ["llama:early:2", "qwen3_moe:deferred:4", "llama:pairs:2", "mistral:spilling:2:2", "llama:lean:2", "qwen3_moe:lion:4:4"]
SMOKE += [
    "llama:summed:2",
    "mistral:summed:4:8",
    "qwen3_moe:packed:2:4",
    "llama:adapters:2:2",
    "mistral:parts:2:2",
    "llama:table:2:2",
    "llama:int8:2:2",
    *(["llama:scaled:2:2", "mistral:fp8:2:4", "mixtral:scaled:2:2", "gpt_oss:fp8:2:2"] if has_fp8_products() else []),
]


@mostly_slow(("cases", "by_memory"), [(SMOKE[::2], True), (SMOKE[1::2], True), (SMOKE, False)])
def test_two_processes_train_to_the_bits_of_one(cases, by_memory, tmp_path):
    """Compare masters, moments, losses and norms after three steps with dropout, random delays and poisoned slots."""
    assert trained_by(2, cases, tmp_path / "found.json", by_memory=by_memory) == {case: trained_alone(case) for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hosts", "by_memory", "groups", "batch"), [(4, 1, True, 4, 4), (4, 2, False, 8, 8)])
def test_processes_train_types_to_the_bits_of_one(ranks, hosts, by_memory, groups, batch, tmp_path):
    cases = every_case(groups, batch, hosts - 1)
    assert trained_by(ranks, cases, tmp_path / "found.json", hosts, by_memory) == {case: trained_alone(case) for case in cases}


def test_sum_groups_of_ranks_are_the_plain_loops_tree():
    """Run one process, with the norm's tiles cut like the ranks'. fp32 sums of a few bf16 numbers are exact in any order."""
    for fields in ({"compute_dtype": "fp32", "gradient_dtype": "fp32"}, {"train": Train(lora=Lora(rank=4))}):
        semantics = semantics_of("llama", batch_size=8, micro_batch=1, sum_groups=8, **fields)
        machine = trained(plan_of(tiny_config("llama"), semantics, Policy()))
        assert differences(machine) == []
        assert "train" in fields or differences(machine, plain("llama", replace(semantics, sum_groups=1))), "the order shows"


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.integers(0, 4))
def test_pieces_are_equal_and_hold_each_element_once(sizes, log_pieces):
    n_pieces = 1 << log_pieces
    block = Block("layer", BlockKind.LAYER, tuple(Parameter(f"p{i}", (n,)) for i, n in enumerate(sizes)))
    piece, cuts, offsets = block.piece_elements(n_pieces), block.cuts(n_pieces), block.offsets()[0]
    assert piece % 128 == 0
    assert piece * n_pieces >= block.state_elements > (piece - 128) * n_pieces
    for p in block.parameters:
        assert [i for cut in cuts[p.name] for i in cut] == list(range(p.n_elements))
        for cut in cuts[p.name]:
            first, last = offsets[p.name] + cut.start, offsets[p.name] + cut.stop - 1
            assert first // piece == last // piece
            assert cut.start % 128 == 0
    assert n_pieces > 1 or all(len(ranges) == 1 for ranges in cuts.values())


@given(st.integers(0, 4), st.integers(1, 40), st.integers(0, 99))
def test_partial_sums_are_folded_by_a_balanced_tree(log_n, n_elements, seed):
    n, generator = 1 << log_n, torch.Generator().manual_seed(seed)
    parts = torch.randn(n, n_elements, generator=generator) * 10.0 ** torch.randint(-3, 4, (n, 1), generator=generator)

    def tree(rows):
        return rows[0] if len(rows) == 1 else tree(rows[: len(rows) // 2]) + tree(rows[len(rows) // 2 :])

    wanted = tree(list(parts.clone()))
    assert same_bits(folded(parts.flatten(), n), wanted)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_share_of_a_step_says_what_the_whole_is(ranks):
    step = Semantics(seq_len=16, batch_size=16, micro_batch=2, sum_groups=8)
    part = step.shared_by(ranks)
    assert (part.n_micro_batches, part.sum_groups, part.ranks) == (8 // ranks, 8 // ranks, ranks)
    assert part.all_ranks == step
    assert part.tokens_per_step == step.tokens_per_step
    assert part.n_pieces == 8
    for n in (1, 2, 4, 8):
        assert part.shared_by(n) == step.shared_by(n)


@pytest.mark.parametrize(
    ("semantics", "ranks", "message"),
    [
        (Semantics(16, 8, 1), 2, "cannot share 1 sum groups"),
        (Semantics(16, 8, 1, sum_groups=4), 8, "cannot share 4 sum groups"),
        (Semantics(16, 8, 1, sum_groups=8), 3, "choose a power of two"),
        (Semantics(16, 7, 2, sum_groups=4), 2, "not equal micro-batches of 2"),
    ],
)
def test_ranks_that_cannot_share_a_step_are_refused(semantics, ranks, message):
    with pytest.raises(PlanError, match=message):
        semantics.shared_by(ranks)


def test_weights_are_gathered_before_a_sum_is_exchanged():
    """One lane does both: a gather of the block after next behind the exchange delays every backward."""
    plan = small(n_layers=6, n_micro_batches=2, ranks=2, accumulation_group=2, prefetch_depth=2)
    ops = [(op.kind, op.block) for op in plan.ops]
    in_turn = [ops.index((Kind.LOSS, 7)), *(ops.index((Kind.BACKWARD, b)) for b in range(6, -1, -1))]  # by depth
    for down, b in enumerate(range(7, 1, -1)):
        exchange = ops.index((Kind.EXCHANGE, b))
        assert in_turn[down + 1] < exchange < in_turn[down + 2]
        begins_anew = len(ops) - 1 - ops[::-1].index((Kind.GATHER, b - 2)) if b > 2 else 0
        assert begins_anew < exchange


def test_a_rank_holds_its_part_of_the_state_and_all_weights():
    model = Model(tiny_config("llama"))
    alone = semantics_of("llama", batch_size=8, micro_batch=1, sum_groups=4)
    host, weights = [], []
    for ranks in (1, 2, 4):
        semantics = alone.shared_by(ranks)
        policy = Policy(accumulation_group=semantics.n_micro_batches)
        plan = lower(model, build_workload(model, semantics), semantics, policy, PROFILE)
        host.append(plan.arena("state").n_bytes)
        weights.append(plan.arena("weights").n_bytes)
    assert host[0] <= 2 * host[1] <= host[0] * 1.2
    assert host[1] <= 2 * host[2] <= host[1] * 1.2
    assert weights[0] <= weights[1] == weights[2] <= weights[0] * 1.2


def test_hosts_that_have_not_as_many_ranks_are_refused():
    box, sizes = read_profile("8xh100"), {"seq_len": 64, "batch_size": 8, "micro_batch": 1, "gpus": 4, "hosts": 2}
    plan = planned("qwen2.5-0.5b", box, policy="megatrain", **sizes).plan
    check_origin(plan)
    network = plan.profile["network"] | {"n_hosts": 3}
    with pytest.raises(PlanError, match="8 ranks cannot be divided among 3 hosts"):
        check_origin(replace(plan, profile=plan.profile | {"network": network}))
    two = shared_by(on_network(box, 100), 4, 2)
    assert [shared_by(two, gpus).n_hosts for gpus in (1, 2)] == [1, 1], "the requested number of hosts, not that of the profile"
    assert two.n_hosts == 2


def test_a_slab_is_known_by_its_name():
    """Emulate another host with the same process numbers: other memory at the same address is no slab."""
    mine, slab = shared_slab(4096)
    second, _ = shared_slab(4096)
    for wrong in (replace(mine, name=second.name), replace(mine, n_bytes=4097), replace(mine, descriptor=-1)):
        with pytest.raises(OSError):
            slab_of(wrong)
    second.close()
    mine.close()
    assert slab.numel() == 4096


def test_all_ranks_end_a_step_after_they_hear_of_the_end():
    stop = Stop()
    agreed = AgreedStop(stop)
    agreed.hear(4, False)
    assert not agreed.is_requested
    stop.request()
    assert not agreed.is_requested, "no other rank has heard of it"
    agreed.hear(5, True)
    assert agreed.is_requested
    agreed.hear(6, True)
    assert agreed.last_step(9) == 6


def test_ranks_that_are_all_alike_share_what_one_does():
    ranks, rows, gathered, received = EmulatedRanks(3), torch.zeros(3, 2, dtype=torch.float64), torch.arange(6.0), torch.zeros(6)
    ranks.share(torch.tensor([1.0, 2.0], dtype=torch.float64), rows)
    assert rows.tolist() == [[1.0, 2.0]] * 3
    ranks.gather(gathered)
    ranks.exchange(torch.arange(6.0), received)
    assert gathered.tolist() == received.tolist() == [0.0, 1.0] * 3


@given(st.integers(0, 5), st.integers(1, 5))
def test_a_sum_waits_for_its_right_part_and_no_longer(log_groups, of_a_group):
    """Compare with a stack: complete neighbours are joined at once. The checker's result is equal."""
    n_groups = 1 << log_groups
    semantics = Semantics(seq_len=4, batch_size=n_groups * of_a_group, micro_batch=1, sum_groups=n_groups)
    shape = Shape(lower(MODEL, small_workload(1, tied=False), semantics, Policy(), PROFILE))
    stack, deepest = list[range](), 0
    for m in range(semantics.n_micro_batches):
        begins = not stack or len(stack[-1]) % of_a_group == 0
        assert semantics.begins_sum(m) == begins
        if begins:
            stack.append(range(m, m))
        stack[-1] = range(stack[-1].start, m + 1)
        deepest = max(deepest, len(stack))
        assert semantics.sum_level(m) == len(stack) - 1
        together = [stack[-1]]
        while len(stack) > 1 and len(stack[-1]) == len(stack[-2]):
            stack[-2:] = [range(stack[-2].start, m + 1)]
            together.append(stack[-1])
        assert semantics.n_joined(m) == len(together) - 1
        assert shape.summed_with(m) == together
    assert stack == [range(semantics.n_micro_batches)]
    assert semantics.n_sums >= deepest


def test_a_run_is_resumed_with_the_same_sum_groups_only(tmp_path):
    """A checkpoint without groups has one."""
    home = make_home(tmp_path)
    plan, second = (plan_in(home, "--policy", "megatrain", "--micro-batch", 1, "--sum-groups", n, name=f"{n}.json") for n in (4, 2))
    assert penstock("check", plan).exit_code == 0
    assert train(home, plan, steps=2).exit_code == 0
    one_line(train(home, second, "--resume", steps=4), 2, "of another meaning of a step", "sum_groups")
    state = load_state(home / "out" / "checkpoint-2")
    now = state.fields["semantics"]
    assert now["sum_groups"] == 4
    older = replace(state, fields={"semantics": {name: value for name, value in now.items() if name != "sum_groups"}})
    refuse_another(older, {"semantics": now | {"sum_groups": 1}})
    with pytest.raises(CheckpointError, match="sum_groups"):
        refuse_another(older, {"semantics": now})
