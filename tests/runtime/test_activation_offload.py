"""Does what layers save come back from the host as it left?"""

from dataclasses import replace

import pytest
import torch

from planner.model.workload import build_workload
from planner.show.schedule import clauses
from runtime.executor import OpError
from runtime.layers.recompute import Replay
from runtime.layers.views import Shelf
from runtime.plan import Policy, Semantics, Update, saves
from runtime.plan.workload import SLOT_ALIGN_BYTES, Block, Model, Saved, Tier, Workload
from tests.tiny import EAGER_ONLY, STRUCTURES, tiny_config
from tests.training import Remembering, differences, plain, plan_of, semantics_of, streamed

LAYERS = (1, 2)
WAYS = {
    "products, one micro-batch after another": Policy(save=saves(products=LAYERS), offload_blocks=LAYERS),
    "products, in groups, with inputs": Policy(
        save=saves(products=LAYERS), offload_blocks=LAYERS, accumulation_group=2, spill_blocks=(0, 1)
    ),
    "one of them, the other stays": Policy(
        save=saves(products=LAYERS), offload_blocks=(2,), accumulation_group=4, update=Update.DEFERRED, prefetch_depth=2
    ),
    "attention": Policy(save=saves(attention=LAYERS), offload_blocks=LAYERS, accumulation_group=4),
    "attention of one, products of the other": Policy(save=saves(attention=(1,), products=(2,)), offload_blocks=LAYERS),
}


def possible(policy: Policy, model_type: str, experts: str = "eager") -> Policy:
    """What types cannot save on its own is left: attention that is spelled out, products to which biases are added in place."""
    without = {Saved.ATTENTION} if model_type in EAGER_ONLY else set()
    without |= {Saved.PRODUCTS} if (model_type, experts) == ("gpt_oss", "grouped_mm") else set()
    kept = {b: saved for b in LAYERS if (saved := policy.saved(b)) not in without}
    save = saves(
        products=[b for b, saved in kept.items() if saved is Saved.PRODUCTS],
        attention=[b for b, saved in kept.items() if saved is Saved.ATTENTION],
    )
    return replace(policy, save=save, offload_blocks=tuple(b for b in policy.offload_blocks if b in kept))


@pytest.mark.fast("values")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", STRUCTURES)
def test_training_is_the_plain_loop_to_the_bit_wherever_activations_wait(model_type: str, way: str) -> None:
    """Slots are poisoned as soon as nobody is to read them, and lanes are late at random."""
    semantics = semantics_of(model_type)
    policy = possible(WAYS[way], model_type)
    if not policy.offload_blocks:
        pytest.skip("nothing that this type can save on its own")
    assert differences(streamed(tiny_config(model_type), semantics, policy), plain(model_type, semantics)) == []


@pytest.mark.fast("values")
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_so_are_experts_in_one_call_or_in_a_loop(model_type: str, experts: str) -> None:
    semantics = semantics_of(model_type, experts=experts, compute_dtype="bf16")
    policy = possible(WAYS["products, in groups, with inputs"], model_type, experts)
    assert differences(streamed(tiny_config(model_type), semantics, policy), plain(model_type, semantics)) == []


@pytest.mark.parametrize("way", ["products, in groups, with inputs", "attention"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_so_are_mlps_by_tiles(model_type: str, way: str) -> None:
    """Every tile puts what it saves beside that of the others, and what it makes last makes room for the next one's."""
    semantics = semantics_of(model_type, mlp_tile_tokens=5)
    policy = possible(WAYS[way], model_type)
    if not policy.offload_blocks:
        pytest.skip("nothing that this type can save on its own")
    assert differences(streamed(tiny_config(model_type), semantics, policy), plain(model_type, semantics)) == []


def test_of_a_smaller_last_micro_batch_only_that_moves() -> None:
    semantics = semantics_of("llama", batch_size=5, micro_batch=2)
    policy = replace(WAYS["products, one micro-batch after another"], accumulation_group=2)
    assert differences(streamed(tiny_config("llama"), semantics, policy), plain("llama", semantics)) == []
    plan = plan_of(tiny_config("llama"), semantics, policy)
    assert plan.recompute(1, 2).slot_bytes < plan.recompute(1, 1).slot_bytes == plan.recompute(1).slot_bytes


def test_a_plan_says_what_waits_on_the_host() -> None:
    policy = Policy(save=saves(products=(1, 2, 3), attention=(4,)), offload_blocks=(1, 4))
    plan = plan_of(tiny_config("llama", num_hidden_layers=4), semantics_of("llama"), policy)
    said = "matmul outputs of 3 layers (1 of them on the host), attention's output of 1 layer (on the host)"
    assert clauses(policy, plan)["activations"] == f"saved for backward: {said}; the rest is recomputed (activation checkpointing)"


def test_products_are_computed_where_they_wait_and_the_last_which_nobody_asks_for_leaves_its_place() -> None:
    x, weights = torch.randn(6, 8), [torch.randn(8, 8, requires_grad=True) for _ in range(3)]

    def forward() -> torch.Tensor:
        y = x
        for weight in weights:
            y = torch.relu(y @ weight)
        return y @ weights[0].detach()  # a product that autograd does not save

    wanted = torch.autograd.grad(forward().sum(), weights)
    shelf = Shelf(torch.zeros(4 * SLOT_ALIGN_BYTES, dtype=torch.uint8))
    replay = Replay(Saved.PRODUCTS, forward, shelf)
    with replay.recording():
        y = forward()
    assert shelf.n_bytes == 3 * SLOT_ALIGN_BYTES, "three products of 192 bytes, each at an aligned place"
    first = shelf.found(replay._results[0].result)
    assert torch.equal(first, x @ weights[0])
    assert first.data_ptr() == shelf.slot.data_ptr()
    elsewhere = shelf.slot.clone()
    shelf.slot.fill_(0xFF)  # NaN: who still reads there is seen
    shelf.slot = elsewhere
    assert all(map(torch.equal, wanted, torch.autograd.grad(y.sum(), weights)))


def test_a_slot_that_is_too_small_is_no_silent_loss() -> None:
    """A result without a place would be asked for where another lies."""
    weight = torch.randn(8, 8, requires_grad=True)
    shelf = Shelf(torch.zeros(SLOT_ALIGN_BYTES, dtype=torch.uint8))
    replay = Replay(Saved.PRODUCTS, lambda: None, shelf)
    with pytest.raises(AssertionError, match="finds no room"), replay.recording():
        torch.relu(torch.relu(torch.randn(6, 8) @ weight) @ weight).sum()


def undercounted(monkeypatch: pytest.MonkeyPatch, saved: Saved, smaller_alone: bool) -> None:
    """Plans say half of the bytes that layers save in this way: of every micro-batch, or of a smaller one."""

    def less(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        def halved(tier: Tier) -> Tier:
            return replace(tier, saved_bytes=tier.saved_bytes // 2, n_saved=0) if tier.saved is saved else tier

        return tuple(replace(block, tiers=tuple(map(halved, block.tiers))) for block in blocks)

    def build(model: Model, semantics: Semantics) -> Workload:
        true = build_workload(model, semantics)
        return Workload(true.blocks if smaller_alone else less(true.blocks), less(true.smaller))

    monkeypatch.setattr("tests.training.build_workload", build)


def test_a_smaller_micro_batch_that_is_undercounted_is_an_error_and_no_wrong_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot is that of the others, with room for what does not move."""
    semantics = semantics_of("llama", batch_size=3, micro_batch=2)
    undercounted(monkeypatch, Saved.PRODUCTS, smaller_alone=True)
    with pytest.raises(OpError, match="finds no room"):
        streamed(tiny_config("llama"), semantics, WAYS["products, one micro-batch after another"], machine_type=Remembering)


def test_so_is_a_layer_that_saves_less_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    undercounted(monkeypatch, Saved.ATTENTION, smaller_alone=False)
    with pytest.raises(OpError, match="finds no room"):
        streamed(
            tiny_config("llama"),
            semantics_of("llama"),
            WAYS["attention of one, products of the other"],
            machine_type=Remembering,
        )


def test_what_stays_where_it_is_has_no_graph() -> None:
    """It would keep alive what the forward made until backward has come."""
    shelf = Shelf(torch.zeros(SLOT_ALIGN_BYTES, dtype=torch.uint8))
    nothing = torch.zeros(0, 8, requires_grad=True)
    made, noted = shelf.computed(torch.ops.aten.relu.default, (nothing,), {})
    assert (made.requires_grad, noted.requires_grad) == (True, False)
    assert shelf.n_bytes == 0


def test_a_product_that_is_already_told_where_to_go_is_copied() -> None:
    """Only of the plain call is it known what the one with a place for its result computes."""
    a, b, c = torch.randn(4, 8), torch.randn(8, 6), torch.empty(4, 6)
    shelf = Shelf(torch.zeros(SLOT_ALIGN_BYTES, dtype=torch.uint8))
    made, noted = shelf.computed(torch.ops.aten.mm.out, (a, b), {"out": c})
    assert torch.equal(c, a @ b)
    assert torch.equal(made, c)
    assert torch.equal(shelf.found(noted), c)
    assert made.data_ptr() == shelf.slot.data_ptr()
