"""Masters and moments on the device: updates are bitwise identical to the host's."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.runtime.host.memory import DTYPE
from penstock.runtime.host.optimizer import KernelLayout, Master, ParamState, Step, matches_host, summed
from penstock.runtime.plan import Kind, Policy, Update
from penstock.runtime.plan.optimizer import AdamW
from tests.cuda_in_cpp import NEEDS_A_COMPILER, by_two_threads, in_cpp
from tests.lanes import mostly_slow
from tests.tiny import tiny_config
from tests.training import LEAN, differences, semantics_of, streamed

from .test_optimizer import KINDS, LEAN_KINDS, copied, random_state

CPU = torch.device("cpu")
ALL_KEPT = [({"compute_dtype": "fp32"}, 4), ({}, 1), ({"master_dtype": "bf16"}, 4), ({"gradient_dtype": "fp32"}, 1)]
EVERYWHERE = Policy(accumulation_group=4, device_blocks=(0, 1, 2, 3), update=Update.DEFERRED)


@mostly_slow(("fields", "n_sequences"), [*ALL_KEPT, *((fields, 4) for fields in LEAN.values())])
def test_a_state_all_on_the_device_trains_the_plain_loops_bits(fields: dict, n_sequences: int) -> None:
    """The law in test_exactness covers plans with part of the state on the device."""
    config = tiny_config("qwen3", tie_word_embeddings=False)
    policy = replace(EVERYWHERE, accumulation_group=n_sequences)
    machine = streamed(config, semantics_of("qwen3", **fields, batch_size=n_sequences), policy)
    assert machine.plan.arena("state").n_bytes == machine.plan.arena("host_gradients").n_bytes == 0
    assert not {Kind.UPDATE, Kind.OFFLOAD_GRADIENT} & {op.kind for op in machine.plan.ops}
    assert differences(machine) == []


EVERY_BLOCK = (0, 1, 2, 3)
SUMMING = [
    Policy(sum_blocks=EVERY_BLOCK, square_on_device=True, gradient_slots=2),
    Policy(sum_blocks=(0, 2, 3), accumulation_group=2, update=Update.DEFERRED, speculate_blocks=(1, 2)),
    Policy(sum_blocks=EVERY_BLOCK, device_blocks=(0, 1, 3), update=Update.DEFERRED),
    Policy(
        sum_blocks=EVERY_BLOCK, device_blocks=EVERY_BLOCK, resident_blocks=EVERY_BLOCK, update=Update.DEFERRED
    ),  # a resident trainer
]


@pytest.mark.parametrize("tied", [False, True])
@mostly_slow(
    ("policy", "fields"), [(policy, fields) for fields in ({}, {"sum_groups": 2}) for policy in SUMMING], fast=(0, 3, 5, 6)
)
def test_sums_on_the_device_train_the_plain_loops_bits(policy: Policy, fields: dict, tied: bool) -> None:
    """The sum of a tied weight's gradients is rounded once, also if each is the gradient that its block is updated with."""
    config = tiny_config("qwen3", tie_word_embeddings=tied)
    machine = streamed(config, semantics_of("qwen3", **fields, batch_size=4), policy)
    sent = [op.block for op in machine.plan.ops if op.kind is Kind.OFFLOAD_GRADIENT and op.block in policy.sum_blocks]
    assert sent == sorted({*policy.sum_blocks} - {*policy.device_blocks}, reverse=True)
    assert differences(machine) == []


@NEEDS_A_COMPILER
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_of_a_gpu_gives_the_hosts_bits_in_cpp_too(kind: str, fused: bool, tmp_path) -> None:
    """Multiply-adds that round twice must change the bits."""
    weight = torch.float32 if kind == "fp32" else torch.bfloat16
    assert in_cpp_matches_host(KernelLayout(weight, kind == "split", weight), tmp_path, fused) == fused


@NEEDS_A_COMPILER
@mostly_slow(("rule", "kind", "moments"), LEAN_KINDS, fast=(0, 7, 11, 17))
def test_the_kernel_of_less_state_gives_the_hosts_bits_in_cpp(rule, kind, moments, tmp_path) -> None:
    weight = torch.float32 if kind == "fp32" else torch.bfloat16
    layout = KernelLayout(weight, kind.startswith("split"), weight, DTYPE[moments], rule, is_stochastic=kind in ("bf16", "split24"))
    assert in_cpp_matches_host(layout, tmp_path)


def in_cpp_matches_host(layout: KernelLayout, folder: Path, fused: bool = True) -> bool:
    return matches_host(by_two_threads(layout.compiled(partial(in_cpp, folder, fused=fused))), CPU, layout)


@NEEDS_A_COMPILER
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 7), (1, 70), (2, 66), (4, 69)])
def test_the_kernel_updates_parts_that_are_no_whole_or_aligned_vectors(start: int, end: int, tmp_path) -> None:
    """Compare with a step on all 80 elements, which fill the vector registers of torch's kernel."""
    kernel = by_two_threads(KernelLayout(torch.bfloat16, True, torch.bfloat16).compiled(partial(in_cpp, tmp_path)))
    initial = random_state("split", 80, seed=0)
    full, part = copied(initial), copied(initial)
    gradient, settings = torch.randn(80, generator=torch.Generator().manual_seed(1)).bfloat16(), AdamW(lr=1e-2)
    for state, cut, compute in ((full, slice(0, 80), None), (part, slice(start, end), kernel)):
        weight, remainder, *moments = (tensor[cut] for tensor in state.tensors)
        Step(ParamState(Master(weight, remainder), tuple(moments)), summed(gradient[cut]), 0.37, 3, settings).on_device(compute)
    for old, expected, updated in zip(initial.tensors, full.tensors, part.tensors, strict=True):
        assert torch.equal(updated, torch.cat([old[:start], expected[start:end], old[end:]]))
