"""Emulated machine: a small computer performs a large machine's plan in the predicted time.

The CPU computes a tiny stand-in model with equal blocks. Each op also draws the planned model's demand from a live copy of the
large machine's capacity region, slowed by a common factor; it ends when its demand is served and its real work is done. Lanes,
waits and contention are real.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.planner.predict.region import Demand, Region, shares
from penstock.runtime.executor import Record
from penstock.runtime.host.slabs import Shared, host_slab
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Lane, Op, Semantics
from penstock.runtime.plan.objective import CROSS_ENTROPY
from penstock.runtime.plan.timeline import Span
from penstock.runtime.ranks import ExchangeScope

MEDIAN_OP_S = 0.020  # shorter ops would measure thread switches (about 0.1 ms), not the plan


def time_scale_for(demands: Sequence[Demand]) -> float:
    """Smallest slow-down, at least 1, at which the median op lasts MEDIAN_OP_S."""
    lasting = sorted(d.overhead_s + d.alone_s for d in demands)
    return max(1.0, MEDIAN_OP_S / lasting[len(lasting) // 2])


_STAND_IN_SIZES = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": 320}
_STAND_IN_SIZES |= dict.fromkeys(("head_dim", "query_pre_attn_scalar", "sliding_window"), 8)
_STAND_IN_SIZES |= dict.fromkeys(("num_attention_heads", "num_local_experts", "num_experts"), 4)
_STAND_IN_SIZES |= dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2)
_LEFT_OUT = ("rope_scaling", "rope_parameters", "max_position_embeddings")
_NO_SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))  # defaults of a model type may exceed the vocabulary
STAND_IN_SEQ_LEN = 16


def stand_in_config(config: dict[str, Any]) -> dict[str, Any]:
    """Config of a tiny model with equal numbers and kinds of layers, each of a few thousand parameters."""
    if isinstance(text := config.get("text_config"), dict):  # of a vision-language model
        return config | _NO_SPECIAL | {"text_config": stand_in_config(text)}
    small = {key: value for key, value in config.items() if key not in _LEFT_OUT}
    small |= {key: value for key, value in _STAND_IN_SIZES.items() if config.get(key) is not None}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    places = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}} if "mrope_section" in rope else {}
    return small | _NO_SPECIAL | places | {"head_dim": _STAND_IN_SIZES["head_dim"]}


def stand_in_semantics(semantics: Semantics) -> Semantics:
    """Semantics with an equal number of micro-batches, each of one short sequence, and the cross entropy loss."""
    sizes = {"seq_len": STAND_IN_SEQ_LEN, "batch_size": semantics.n_micro_batches, "micro_batch": 1}
    return replace(semantics, **sizes, library_kernels=(), objective=CROSS_ENTROPY)  # type: ignore[arg-type]


class EmulatedRanks:
    """Emulated ranks: collectives copy this rank's data, so results have real sizes and arbitrary numbers."""

    def __init__(self, n: int, n_here: int | None = None) -> None:
        self.rank, self.n, self.n_here = 0, n, n if n_here is None else n_here
        self.by_memory = False

    def common(self, mine: Shared) -> None:
        return None

    def of_host(self, n_bytes: int) -> torch.Tensor:
        return host_slab(n_bytes)

    def meet(self) -> None:
        return None

    def gather(self, weights: torch.Tensor) -> None:
        parts = weights.view(self.n, -1)
        parts[1:] = parts[0]

    def exchange(self, parts: torch.Tensor, received: torch.Tensor, scope: ExchangeScope = "here") -> None:
        n = self.n_here if scope == "here" else self.n // self.n_here
        received.view(n, -1)[:] = parts.view(n, -1)[0]

    def share(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        rows[:] = row


@dataclass(slots=True)
class _Share:
    """Op in service: first its overhead, then its work at a varying speed."""

    demand: Demand
    work_from_s: float  # when its overhead ends
    left_s: float  # seconds of work at full speed
    speed: float = 0.0
    served_s: float | None = None


class LiveRegion:
    """Serve demands in real time. Speeds are recomputed at the due time of each start and end, even if a thread wakes late."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._shares: list[_Share] = []
        self._at_s = time.perf_counter()
        self._changed = threading.Condition()

    def begin(self, demand: Demand, due_s: float | None = None) -> _Share:
        """Start serving a demand now. Its overhead counts from `due_s`, if given; its work begins now at the earliest."""
        with self._changed:
            now_s = time.perf_counter()
            self._advance(now_s)
            overhead_from_s = now_s if due_s is None else min(due_s, now_s)
            share = _Share(demand, max(now_s, overhead_from_s + demand.overhead_s), demand.alone_s)
            self._shares.append(share)
            self._solve()
            self._changed.notify_all()
            return share

    def wait(self, share: _Share) -> None:
        with self._changed:
            self._advance(time.perf_counter())
            while share.served_s is None:
                self._changed.wait(max(0.0, self._next_event_s(share) - time.perf_counter()))
                self._advance(time.perf_counter())

    def _next_event_s(self, share: _Share) -> float:
        """End of this share's overhead or, at the present speeds, of its work."""
        if self._at_s < share.work_from_s:
            return share.work_from_s
        return self._at_s + share.left_s / share.speed if share.speed > 0 else self._at_s + MEDIAN_OP_S

    def _solve(self) -> None:
        working = [s for s in self._shares if s.work_from_s <= self._at_s]
        for share, speed in zip(working, shares(tuple(s.demand.uses for s in working), self._region), strict=True):
            share.speed = speed

    def _advance(self, to_s: float) -> None:
        while self._shares:
            event_s = min(self._next_event_s(s) for s in self._shares)
            until_s = min(event_s, to_s)
            for share in self._shares:
                if share.work_from_s <= self._at_s:
                    share.left_s -= (until_s - self._at_s) * share.speed
            self._at_s = until_s
            if event_s > to_s:
                return
            # Remaining work may be too small to advance a clock that has run for days: such a share ends now
            for share in [s for s in self._shares if s.work_from_s <= self._at_s and self._next_event_s(s) <= self._at_s]:
                share.served_s = self._at_s
                self._shares.remove(share)
            self._solve()
            self._changed.notify_all()
        self._at_s = to_s


class EmulatedMachine:
    """Perform a plan on a stand-in model at the pace of the planned machine, slowed `time_scale` times. The op overhead of a
    profile is mostly the hand-over to a lane. Lanes of this machine hand over too, so that time is subtracted from the overhead."""

    def __init__(self, stand_in: TorchMachine, demands: Sequence[Demand], region: Region, time_scale: float) -> None:
        """`demands`: of the planned model's ops, in plan order; the stand-in's plan must have equal ops."""
        self.stand_in, self.time_scale = stand_in, time_scale
        self.on_thread, self.lane, self.prepare, self.result = stand_in.on_thread, stand_in.lane, stand_in.prepare, stand_in.result
        self._demands = [Demand(d.overhead_s * time_scale, d.alone_s * time_scale, d.uses) for d in demands]
        self._live = LiveRegion(region)
        self._due_s: dict[Lane, float] = {}  # when the lane's next op could begin, if lanes took no time to wake
        self.n_performed = self.n_real_work_binds = 0  # the latter: ops whose stand-in's work lasted longer than the emulated op

    def perform(self, index: int, op: Op, step: int) -> None:
        share = self._live.begin(self._demands[index], self._due_s.get(op.lane))
        self.stand_in.perform(index, op, step)
        done_s = time.perf_counter()
        self._live.wait(share)
        assert share.served_s is not None
        self._due_s[op.lane] = max(share.served_s, done_s)
        self.n_performed += 1
        self.n_real_work_binds += done_s > share.served_s

    def mark(self, op: Op) -> float:
        return self._due_s[op.lane]  # when this op ended

    def follow(self, lane: Lane, token: float) -> None:
        self._due_s[lane] = max(self._due_s.get(lane, token), token)

    def measured(self, records: Sequence[Record]) -> Sequence[Span]:
        return [span for span, _ in records]
