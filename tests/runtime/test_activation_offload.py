"""Activations offloaded to the host: reloaded bitwise identical, or the run stops."""

from dataclasses import replace

import pytest
import torch

from penstock.planner.model.workload import build_workload
from penstock.runtime.executor import OpError
from penstock.runtime.layers.recompute import Replay
from penstock.runtime.layers.views import Shelf
from penstock.runtime.plan import Policy, Semantics, saves
from penstock.runtime.plan.workload import SLOT_ALIGN_BYTES, Block, Model, Saved, Tier, Workload
from tests.tiny import tiny_config
from tests.training import Remembering, semantics_of, streamed

LAYERS = (1, 2)
PRODUCTS = Policy(save=saves(products=LAYERS), offload_blocks=LAYERS)
BOTH = Policy(save=saves(attention=(1,), products=(2,)), offload_blocks=LAYERS)


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
    first = shelf.restored(replay.results[0][0])
    assert torch.equal(first, x @ weights[0])
    assert first.data_ptr() == shelf.slot.data_ptr()
    elsewhere = shelf.slot.clone()
    shelf.slot.fill_(0xFF)  # NaN reveals a late read
    shelf.slot = elsewhere
    assert all(map(torch.equal, wanted, torch.autograd.grad(y.sum(), weights)))


@pytest.mark.parametrize(
    ("saved", "smaller_alone", "policy"),
    [
        (Saved.PRODUCTS, True, PRODUCTS),
        (Saved.ATTENTION, False, BOTH),
    ],  # first: its slot also has room for the other tensors
    ids=["products of a smaller micro-batch", "attention"],
)
def test_undercounted_bytes_are_an_error_and_no_wrong_bits(monkeypatch, saved, smaller_alone, policy):
    """Halve the saved bytes in a plan, for every micro-batch or for a smaller one."""

    def halve_tiers(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        def halved(tier: Tier) -> Tier:
            return replace(tier, saved_bytes=tier.saved_bytes // 2, n_saved=0) if tier.saved is saved else tier

        return tuple(replace(block, tiers=tuple(map(halved, block.tiers))) for block in blocks)

    def build(model: Model, semantics: Semantics) -> Workload:
        true = build_workload(model, semantics)
        return Workload(true.blocks if smaller_alone else halve_tiers(true.blocks), halve_tiers(true.smaller))

    monkeypatch.setattr("tests.training.build_workload", build)
    with pytest.raises(OpError, match="do not fit into their slot"):
        streamed(tiny_config("llama"), semantics_of("llama", batch_size=3, micro_batch=2), policy, machine_type=Remembering)
