"""Activations that wait on the host: they come back as they left, or the run stops."""

from dataclasses import replace

import pytest
import torch

from planner.model.workload import build_workload
from runtime.executor import OpError
from runtime.layers.recompute import Replay
from runtime.layers.views import Shelf
from runtime.plan import Policy, Semantics, Update, saves
from runtime.plan.workload import SLOT_ALIGN_BYTES, Block, Model, Saved, Tier, Workload
from tests.tiny import EAGER_ONLY, EXPERT_TYPES, STRUCTURES, tiny_config
from tests.training import Remembering, differences, semantics_of, streamed

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
def test_activations_on_the_host_train_the_plain_loops_bits(model_type: str, way: str) -> None:
    """Slots are poisoned on release, lanes late. Experts run in one call or in a loop, dense MLPs whole or by tiles."""
    choices = ({"experts": "eager"}, {"experts": "grouped_mm"}) if model_type in EXPERT_TYPES else ({}, {"mlp_tile_tokens": 5})
    for fields in choices:
        policy = possible(WAYS[way], model_type, fields.get("experts", "eager"))
        if policy.offload_blocks:
            assert differences(streamed(tiny_config(model_type), semantics_of(model_type, **fields), policy)) == []


def test_of_a_smaller_last_micro_batch_only_that_moves() -> None:
    semantics = semantics_of("llama", batch_size=5, micro_batch=2)
    policy = replace(WAYS["products, one micro-batch after another"], accumulation_group=2)
    machine = streamed(tiny_config("llama"), semantics, policy)
    assert differences(machine) == []
    plan = machine.plan
    assert plan.recompute(1, 2).slot_bytes < plan.recompute(1, 1).slot_bytes == plan.recompute(1).slot_bytes


def test_products_are_computed_in_the_slot_where_they_wait() -> None:
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


@pytest.mark.parametrize(
    ("saved", "smaller_alone", "way"),
    [
        (Saved.PRODUCTS, True, "products, one micro-batch after another"),  # in a slot with room for what does not move
        (Saved.ATTENTION, False, "attention of one, products of the other"),
    ],
)
def test_undercounted_bytes_are_an_error_and_no_wrong_bits(
    monkeypatch: pytest.MonkeyPatch, saved: Saved, smaller_alone: bool, way: str
) -> None:
    undercounted(monkeypatch, saved, smaller_alone)
    with pytest.raises(OpError, match="finds no room"):
        streamed(tiny_config("llama"), semantics_of("llama", batch_size=3, micro_batch=2), WAYS[way], machine_type=Remembering)
