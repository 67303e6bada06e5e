"""Rules of a plan's blocks and their weights."""

from runtime.errors import PlanError
from runtime.plan import Plan
from runtime.plan.packed import is_packed
from runtime.plan.train import ADAPTERS
from runtime.plan.workload import Parameter

from .shape import AGAIN

MAX_DIMS = 8  # of a weight; a bound on the size of numbers of elements


def check_workload(plan: Plan) -> None:
    """Weights have names of their own, few dimensions, and only the head shares weights with block 0; what is frozen is what the
    semantics do not train; a smaller last micro-batch goes through the same blocks, and fits their slots."""
    blocks, of = plan.workload.blocks, plan.semantics
    last = plan.blocks_of(of.n_micro_batches - 1)
    for i, (block, less) in enumerate(zip(blocks, last, strict=True)):
        if (less.kind, less.parameters) != (block.kind, block.parameters) or less.boundary_bytes > block.boundary_bytes:
            raise PlanError(f"block {i}: the smaller last micro-batch has other weights, or a larger output; {AGAIN}")
    owned = {p.name: p.shape for p in blocks[0].parameters}
    for i, block in enumerate(blocks):
        ties = [p.tied_to for p in block.parameters if p.tied_to is not None]
        if len({p.name for p in block.parameters}) != len(block.parameters) or len(set(ties)) != len(ties):
            raise PlanError(f"block {i}: two weights have one name, or are tied to one weight; {AGAIN}")
        for p in block.parameters:
            if len(p.shape) > MAX_DIMS:
                raise PlanError(f"block {i}: weight {p.name!r} has {len(p.shape)} dimensions; {AGAIN}")
            if p.tied_to is not None and (i != len(blocks) - 1 or owned.get(p.tied_to) != p.shape):
                raise PlanError(
                    f"block {i}: weight {p.name!r} is tied, but only the head may share a weight of block 0, in its shape; {AGAIN}"
                )
            if p.frozen is of.train.trains(p.tied_to or p.name):  # what is tied is frozen where its owner is
                is_said = "frozen" if p.frozen else "trained"
                raise PlanError(f"block {i}: weight {p.name!r} is {is_said}, which is not what the semantics train; {AGAIN}")
            if p.frozen and i in (0, len(blocks) - 1) and is_packed(p.name, p.shape, of.base):
                raise PlanError(f"block {i}: weight {p.name!r} is packed, as only weights of layers can be; {AGAIN}")
        if of.train.lora is not None:
            _check_adapters(i, {p.name: p for p in block.parameters}, of.train.lora.rank)


def _check_adapters(block: int, parameters: dict[str, Parameter], rank: int) -> None:
    """Of a weight (out, in) the factors (rank, in) and (out, rank), both or none."""
    for name, p in parameters.items():
        if p.frozen:
            continue
        stem = next(name[: name.index(f".{factor}.")] for factor in ADAPTERS if f".{factor}." in name)
        beside, *factors = (parameters.get(f"{stem}.{part}") for part in ("weight", *(f"{factor}.weight" for factor in ADAPTERS)))
        shapes, matrix = [factor.shape for factor in factors if factor is not None], beside.shape if beside is not None else ()
        if p not in factors or len(matrix) != 2 or shapes != [(rank, matrix[1]), (matrix[0], rank)]:
            raise PlanError(f"block {block}: weight {name!r} is no factor, of rank {rank}, of an adapter beside a matrix; {AGAIN}")
