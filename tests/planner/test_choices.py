"""Memory constraints of the relaxation against footprints: peaks of the integer program equal peaks of plans."""

import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.planner.bounds.integer import Program
from penstock.planner.search.choices import Choices
from penstock.planner.search.evaluation import Evaluator
from penstock.planner.search.policies import slots_of
from penstock.runtime.plan import Policy
from tests.adversary import Cell, cell, family_of, sample_policy
from tests.lanes import mostly_slow

CELLS, N_PER_TEST, N_POLICIES = range(10_000, 10_100), 20, 4
WITHIN_FRACTION = 8e-6  # of machine memory: solver tolerance, and squared norms of gradients kept on the device


def choices_of(case: Cell, policy: Policy) -> Choices | None:
    """Return the choices of the policy's family, or None if its device-resident state is not among them."""
    family, group = family_of(policy, case.semantics, case.workload), policy.accumulation_group
    family = replace(family, accumulation_group=group, largest_group=group)
    smallest = replace(family.policy(), gradient_slots=policy.gradient_slots, saved_slots=policy.saved_slots)
    evaluator = Evaluator(case.model, case.workload, case.semantics, case.profile, case.clipped_fraction)
    choices = Choices(evaluator, smallest, family, slots_of(policy))
    may_stay = {*smallest.device_blocks}.union(*(choice.blocks for choice in choices.staying.values()))
    can_be_early = case.clipped_fraction is not None or not policy.speculate_blocks
    if case.workload.trains_all:  # the program lets every block with state on the device compute with the weights in its state
        both, setup = {*policy.resident_blocks}.intersection(policy.device_blocks), evaluator.setup(policy)
        in_place = {b for b in policy.device_blocks if not case.workload.blocks[b].tied}
        can_be_early &= both == in_place == {*filter(setup.computes_in_place, policy.device_blocks)}
    return choices if may_stay.issuperset(policy.device_blocks) and can_be_early else None


def as_chosen(choices: Choices, policy: Policy) -> dict[int, float]:
    """Return the values of the program variables that encode this policy."""
    resident, on_disk = {*policy.resident_blocks}, {*policy.disk_blocks}
    named = (
        (choices.resident, resident - on_disk - {*choices.may_stay}.intersection(policy.device_blocks)),
        (choices.summed, policy.sum_blocks),
        (choices.on_disk, on_disk - resident),
        (choices.read_once, on_disk & resident),
        (choices.spilled, policy.spill_blocks),
        (choices.early_updated, policy.speculate_blocks),
        (choices.staying, policy.device_blocks),
    )
    chosen = {choices.depth: float(policy.prefetch_depth), choices.squares: float(policy.square_on_device)}
    counts = [(choice, sum(b in blocks for b in choice.blocks)) for by_blocks, blocks in named for choice in by_blocks.values()]
    for (_, way), choice in choices.saving.items():
        ways = [(policy.saved(b), b in policy.offload_blocks) for b in choice.blocks]
        counts.append((choice, ways.count((way.saved, way.away))))
    for choice, count in counts:
        chosen |= {choice.count: float(count), choice.used: float(count > 0)}
    return chosen


def peaks(choices: Choices, policy: Policy) -> list[float]:
    """Minimize the device and host memory rows for this policy; return fractions of machine memory."""
    program, n_rows = choices.program, len(choices.program.limits)
    choices.within_memory()
    for variable, value in as_chosen(choices, policy).items():
        program.low[variable] = program.high[variable] = value
    *rows, device, host = program.matrix.toarray()
    shares = []
    for row, limit in zip((device, host), program.limits[-2:], strict=True):
        least = Program(row.tolist(), program.low, program.high, program.integer)
        least.at_most_each(np.array(rows[n_rows:]), np.array(program.limits[n_rows:-2]))
        solution = least.solve()
        assert solution is not None
        shares.append(solution[0] + 1 - limit)
    return shares


@mostly_slow("first", CELLS[::N_PER_TEST])
def test_memory_rows_are_the_footprint(first):
    n_held = 0
    for number in range(first, first + N_PER_TEST):
        case, rng = cell(number), random.Random(number)
        for policy in [sample_policy(rng, case) for _ in range(N_POLICIES)]:
            choices = choices_of(case, policy)
            if choices is None:
                continue
            device, host = peaks(choices, policy)
            needs, n_held = case.needs(policy), n_held + 1
            device_fraction = needs.device_peak_bytes / needs.device_memory_bytes
            host_fraction = needs.host_peak_bytes / needs.host_memory_bytes
            assert host == pytest.approx(host_fraction, rel=WITHIN_FRACTION, abs=WITHIN_FRACTION), (number, policy)
            assert device <= device_fraction * (1 + WITHIN_FRACTION) + WITHIN_FRACTION, (number, policy)
            if case.workload.trains_all:  # partial training may omit the update of state that is always on the device
                assert device == pytest.approx(device_fraction, rel=WITHIN_FRACTION, abs=WITHIN_FRACTION), (number, policy)
    assert n_held > N_PER_TEST
