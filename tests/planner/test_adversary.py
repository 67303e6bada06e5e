"""Lower bounds against an adversary that searches for faster plans; `python -m benchmarks.adversary` is the long version."""

import random
from dataclasses import replace

import pytest

from benchmarks.any_memory import with_any_memory
from benchmarks.hard_cells import hard_cell
from penstock.hwprofiles.schema import read_profile
from penstock.planner.bounds import work as work_module
from penstock.planner.bounds.bounds import policy_bound
from penstock.planner.model.workload import build_workload, read_model
from penstock.planner.predict.cost import CostModel
from penstock.planner.search.evaluation import Evaluator
from penstock.planner.search.policies import Family, families, family_of
from penstock.planner.search.relax import Relaxation
from penstock.runtime.plan import Policy, Semantics, Update
from tests.adversary import PLENTY_BYTES, Cell, cell, held, hill_climb, measured_cell, relaxation_of, start_of, with_state_on_device
from tests.lanes import mostly_slow

N_TRIES = 8
# Regressions: cells and policy seeds with a bound above a simulated step in an earlier version
CAUGHT = [(cell, number, ~number) for number in (10_607, 11_064, 11_359, 5_000_052)]
CAUGHT += [(cell, 700_640, 700_640), (cell, 5_000_157, 5), *((hard_cell, number, ~number) for number in (15, 53, 82, 5_000_068))]
N_STAYING = 2  # policies with optimizer state on the device, if they fit
# Regressions with accumulation groups smaller than the step: model, machine, sequence length, sequences, group sizes
GROUPED = [
    ("qwen2.5-7b", "rtx4090-desktop", 1024, 16, (8,)),
    ("qwen2.5-0.5b", "rtx4090-desktop", 1024, 32, (16, 8)),
    ("qwen2.5-0.5b", "rtx4090-desktop", 1024, 16, (8, 10, 11)),
    ("smollm2-360m", "rtx5090-desktop", 512, 32, (16, 2)),
    ("llama-3.2-1b", "rtx4090-desktop", 1024, 16, (8, 12)),
    ("qwen2.5-0.5b", "h100-sxm", 512, 32, (16,)),
]


def broken(case: Cell, seed: int) -> list[str]:
    """Return violated bounds for a sampled policy, its hill-climbing result and policies with state on the device."""
    rng = random.Random(seed)
    start = start_of(rng, case)
    if start is None:
        return []
    relaxation = relaxation_of(case)
    fastest, _ = hill_climb(rng, case, start, N_TRIES)
    staying = with_state_on_device(rng, case, N_STAYING)
    checks = [h for policy in dict.fromkeys((start, fastest, *staying)) for h in held(case, policy, relaxation)]
    return [f"cell {case.number}, {h.name}: {h.bound_s} above {h.step_s}, {h.policy}" for h in checks if h.is_broken]


CELLS = [*((cell, 5 * i) for i in range(20)), *((hard_cell, 5 * i) for i in range(8)), *((measured_cell, 5 * i) for i in range(8))]


@mostly_slow(("make", "first"), CELLS, fast=(8, 20, 31))
def test_no_plan_is_faster_than_a_bound(make, first):
    """Two policies of each of two cells are compared with their bounds."""
    assert [message for number in (first, first + 1) for message in broken(make(number), number)] == []


@mostly_slow("number", range(900_000, 900_008))
def test_what_a_search_remembers_of_blocks_changes_no_bound(number):
    """Cached block work leaves bounds unchanged; family minimum <= linear relaxation <= integer relaxation."""
    case, rng = cell(number), random.Random(number)
    evaluator = Evaluator(case.model, case.workload, case.semantics, case.profile, case.clipped_fraction)
    for policy in [start for _ in range(12) if (start := start_of(rng, case)) is not None]:
        assert evaluator.bound_s(policy) == policy_bound(evaluator.setup(policy), CostModel(case.profile)).seconds
        relaxation, family = Relaxation(evaluator), family_of(policy, case.semantics, case.workload)
        relaxed = relaxation.solve(family)
        linear_s = relaxation.linear_bound_s(family)
        assert relaxed is None or linear_s <= relaxed.bound_s * (1 + 1e-6)
        assert relaxation.least_s(family) <= linear_s * (1 + 1e-5)


@mostly_slow(("make", "number", "seed"), CAUGHT, fast=range(7))
def test_bounds_hold_in_cells_where_they_once_did_not(make, number, seed):
    assert broken(make(number), seed) == []


@pytest.mark.parametrize("number", [742, 755])
def test_packed_layers_that_stay_are_unpacked_less_often(number):
    """Regression: the family bound ignored resident packed layers and was 1.9 times a step with a boundary stride above 1."""
    case = hard_cell(number)
    steps = []
    for family in (f for f in families(case.semantics, case.workload) if f.boundary_stride > 1):
        for policy in (replace(family.policy(), resident_blocks=tuple(range(1, k + 1))) for k in (1, 8)):
            if case.needs(policy).fits and (step_s := case.mean_step_s(policy)) is not None:
                assert relaxation_of(case).least_s(family) <= step_s
                steps.append(step_s)
    assert steps


def grouped(model: str, machine: str, seq_len: int, n_sequences: int) -> Cell:
    read, s = read_model(model), Semantics(seq_len, n_sequences, 1)
    profile = with_any_memory(read_profile(machine), PLENTY_BYTES, PLENTY_BYTES)
    return Cell(0, read, build_workload(read, s), s, profile, None)


@mostly_slow(("model", "machine", "seq_len", "n_sequences", "sizes"), GROUPED)
def test_groups_smaller_than_the_step_have_true_bounds(model, machine, seq_len, n_sequences, sizes):
    case = grouped(model, machine, seq_len, n_sequences)
    relaxation = Relaxation(Evaluator(case.model, case.workload, case.semantics, case.profile))
    for size in sizes:
        smallest = Family(Update.DEFERRED, size, size, 1).policy()
        for depth, n_slots in ((1, 1), (3, 2), (1, 8)):
            checks = held(case, replace(smallest, prefetch_depth=depth, gradient_slots=n_slots), relaxation)
            assert checks, "a step that repeats"
            assert [h for h in checks if h.is_broken] == []


def test_what_was_wrong_is_caught(monkeypatch):
    """Plant a former bug: the bound counts head gradients of all micro-batches of a group, not only the last."""
    case = grouped("qwen2.5-0.5b", "rtx4090-desktop", 1024, 32)
    right = work_module.work_of

    def work_of(plan, cost, facets, block, groups):
        work = right(plan, cost, facets, block, groups)
        work["head_leaving"][:] *= plan.semantics.n_micro_batches / groups.n
        return work

    monkeypatch.setattr(work_module, "work_of", work_of)
    policy = Policy(prefetch_depth=3, gradient_slots=2, accumulation_group=16)
    assert [h.name for h in held(case, policy) if h.is_broken]
