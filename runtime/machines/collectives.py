"""What do ranks do together with what lies on their devices?"""

from runtime.host.memory import Arenas
from runtime.plan import Kind, Op, Plan
from runtime.ranks import Ranks, folded


class Collectives:
    """The ops of the net lane. Every rank performs the same ones, in the same order."""

    def __init__(self, plan: Plan, arenas: Arenas, ranks: Ranks) -> None:
        self._plan, self._arenas, self._ranks = plan, arenas, ranks

    def perform(self, op: Op) -> None:
        """Bring a block's weights together, or its partial sums to the ranks whose parts they are of."""
        arenas, dtype, at = self._arenas, self._plan.gradient_dtype(op.block), 0
        for first, n in self._plan.regions(op.block):
            if op.kind is Kind.GATHER:
                self._ranks.gather(arenas.view(op["weights"], self._plan.semantics.compute_dtype, (n,), first))
                continue
            received, n_mine = arenas.view(op["received"], "fp32", (n,)), n // self._ranks.n
            self._ranks.exchange(arenas.view(op["sum"], "fp32", (n,), first), received)
            arenas.view(op["gradient"], dtype, (n_mine,), at).copy_(folded(received, self._ranks.n))
            at += n_mine
