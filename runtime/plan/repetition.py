"""Plans with repeated ops, unrolled or shortened, to be looked at; they are performed, simulated and checked as they are."""

from dataclasses import replace

from .ops import Op, Repeat, Wait
from .plan import Plan


def unrolled(plan: Plan) -> Plan:
    """The plan that does the same with every op once a step."""
    repeat = plan.repeat
    if repeat is None:
        return plan
    performed: list[tuple[int, int | None]] = [(i, None) for i in range(len(plan.ops))]
    performed[repeat.start : repeat.end] = [(i, k) for k in range(repeat.times) for i in range(repeat.start, repeat.end)]
    return replace(plan, ops=tuple([_written_out(plan.ops[i], repeat, k) for i, k in performed]), repeat=None)


def _written_out(op: Op, repeat: Repeat, repetition: int | None) -> Op:
    """The op, in this repetition if it repeats, with the numbers that ops have when all are written out."""
    waits = []
    for wait in op.waits:
        number, distance, last = wait.op, wait.distance, (repeat.times - 1) * repeat.n_ops
        if wait.op >= repeat.end or (wait.op in repeat and (repetition is None or distance)):
            number += last
        elif wait.op in repeat and repetition is not None:
            of = repetition - wait.back
            number, distance = (number + of * repeat.n_ops, 0) if of >= 0 else (number + last, 1)
        waits.append(Wait(number, distance))
    return replace(repeat.op(op, repetition or 0), waits=tuple(dict.fromkeys(waits)))


def shortened(plan: Plan, times: int) -> Plan:
    """The plan of a step with fewer micro-batches, in which the same ops repeat `times` times."""
    repeat = plan.repeat
    assert repeat is not None, "the plan repeats something"
    assert 2 <= times <= repeat.times, "fewer repetitions are asked for"
    n_fewer = (repeat.times - times) * repeat.micro_batches
    semantics = replace(plan.semantics, batch_size=plan.semantics.batch_size - n_fewer * plan.semantics.micro_batch)
    ops = [
        replace(op, micro_batch=op.micro_batch - n_fewer) if i >= repeat.end and op.micro_batch is not None else op
        for i, op in enumerate(plan.ops)
    ]
    return replace(plan, semantics=semantics, ops=tuple(ops), repeat=replace(repeat, times=times))
