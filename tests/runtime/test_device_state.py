"""Masters and moments that stay on the device: they are updated there to the host's bits."""

from dataclasses import replace

import pytest
import torch

from runtime.errors import PlanError
from runtime.host.adamw import PROBE_ELEMENTS, call_by_call, emulated, gives_the_hosts_bits, on_device
from runtime.host.chunks import Scratch, update_loop
from runtime.host.optimizer import Step, summed
from runtime.plan import Kind, Policy, Update
from runtime.plan.optimizer import AdamW
from tests.tiny import tiny_config
from tests.training import differences, semantics_of, streamed
from tests.updating import update_

from .test_optimizer import KINDS, copied, random_state

CPU = torch.device("cpu")
EVERYWHERE = Policy(accumulation_group=4, device_blocks=(0, 1, 2, 3), update=Update.DEFERRED)


@pytest.mark.parametrize(
    ("fields", "n_sequences"),
    [({"compute_dtype": "fp32"}, 4), ({}, 1), ({"master_dtype": "bf16"}, 4), ({"gradient_dtype": "fp32"}, 1)],
)
def test_a_state_all_on_the_device_trains_the_plain_loops_bits(fields: dict, n_sequences: int) -> None:
    """Parts of it are there in plans of the law in test_exactness."""
    config = tiny_config("qwen3", tie_word_embeddings=False)
    policy = replace(EVERYWHERE, accumulation_group=n_sequences)
    machine = streamed(config, semantics_of("qwen3", **fields, batch_size=n_sequences), policy)
    assert machine.plan.arena("state").n_bytes == machine.plan.arena("host_gradients").n_bytes == 0
    assert not {Kind.UPDATE, Kind.OFFLOAD_GRADIENT} & {op.kind for op in machine.plan.ops}
    assert differences(machine) == []


def test_each_way_to_multiply_and_add_gives_the_hosts_bits(monkeypatch) -> None:
    """One that rounds twice does not, and a device on which none does is refused."""
    rounds_twice = call_by_call(lambda a, b, c: a * b + c)
    assert gives_the_hosts_bits(call_by_call(emulated), CPU)
    assert not gives_the_hosts_bits(rounds_twice, CPU)
    on_device.cache_clear()
    monkeypatch.setattr("runtime.host.adamw.gives_the_hosts_bits", lambda kernel, device: False)
    with pytest.raises(PlanError, match="no AdamW on cpu gives the host's bits"):
        on_device(CPU)
    on_device.cache_clear()


@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize("kind", KINDS)
def test_masters_of_every_sort_are_updated_as_on_the_host(kind: str, factor: float) -> None:
    """Chunks of another length than the host's, and one that is cut off."""
    host, settings = random_state(kind, PROBE_ELEMENTS, seed=0), AdamW(lr=1e-2, weight_decay=0.1)
    device = copied(host)
    gradient = torch.randn(PROBE_ELEMENTS, generator=torch.Generator().manual_seed(1))
    gradient = gradient.to(torch.float32 if kind == "fp32" else torch.bfloat16)
    for n_updates in (1, 2):
        update_(host, gradient, factor, n_updates, settings)
        step = Step(device, summed(gradient), factor, n_updates, settings)
        step.run(update_loop(on_device(CPU)), 0, PROBE_ELEMENTS, 1000, Scratch(1000))
    assert all(torch.equal(a, b) for a, b in zip(host.tensors, device.tensors, strict=True))
