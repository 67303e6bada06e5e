"""Ranks as processes of torch.distributed, started by torchrun or with its environment variables.

NCCL connects GPUs; gloo connects CPUs and transfers host memory. Each lane with collectives has separate process groups, so that
the order of its collectives is the order of its ops.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.errors import PlanError, RanksError
from penstock.runtime.host.slabs import shared_slab, slab_of
from penstock.runtime.ranks import ExchangeScope, Shared

PATIENCE = timedelta(minutes=30)  # timeout of blocking collectives: longer than the longest op of the slowest rank
LONG = timedelta(days=30)  # timeout of collectives issued a step ahead or between steps, where an evaluation may be long
MAX_MESSAGE_BYTES = 2**20
# torch 2.13 renamed it, and warns of the old name
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Processes:
    """`Ranks` in the process of one rank, by torch.distributed."""

    def __init__(self, device: torch.device, n_here: int | None = None, local_rank: int = 0, by_memory: bool = False) -> None:
        """Call on all ranks after `dist.init_process_group`. `n_here`: ranks of this host, None for all."""
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.n_here = self.n if n_here is None else self._agreed(n_here, local_rank)
        self.by_memory = by_memory and self.n_here == self.n
        is_gpu = device.type == "cuda"
        backend, wait = "nccl" if is_gpu else "gloo", LONG if is_gpu else PATIENCE
        self._of_device = dist.new_group(backend=backend, timeout=wait, device_id=device if is_gpu else None)
        self._here = self._between_hosts = self._of_device
        if self.n_here < self.n:
            hosts = [range(first, first + self.n_here) for first in range(0, self.n, self.n_here)]
            self._here = self._own_group(hosts, backend, wait)
            self._between_hosts = self._own_group(zip(*hosts, strict=True), backend, wait)
        self._of_host = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._of_meetings = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._between_steps = dist.new_group(backend="gloo", timeout=LONG)

    def _own_group(self, groups: Iterable[Iterable[int]], backend: str, wait: timedelta) -> Any:
        """Create a process group for each list of ranks, as all ranks have to, and return this rank's."""
        created = [(ranks, dist.new_group(ranks, backend=backend, timeout=wait)) for ranks in map(list, groups)]
        return next(group for ranks, group in created if self.rank in ranks)

    def _agreed(self, n_here: int, local_rank: int) -> int:
        """Number of ranks per host; RanksError if hosts differ, or ranks of a host are not consecutive."""
        of_ranks = torch.zeros(self.n, 2, dtype=torch.int64)
        with _rank_errors("compared their hosts"):
            _gather_into(of_ranks.view(-1), torch.tensor([n_here, self.rank - local_rank]))
        is_even = n_here > 0 and self.n % n_here == 0
        if not is_even or any(n != n_here or first != rank // n_here * n_here for rank, (n, first) in enumerate(of_ranks.tolist())):
            raise RanksError("hosts have different numbers of ranks; start equal numbers, as torchrun --nproc-per-node does")
        return n_here

    def leave(self) -> None:
        """Drop the process groups to end their threads, because a thread that frees a tensor while Python exits would crash."""
        self._of_device = self._here = self._between_hosts = self._of_host = self._of_meetings = self._between_steps = None

    def meet(self) -> None:
        with _rank_errors("brought weights together"):
            dist.barrier(group=self._of_meetings)

    def gather(self, weights: torch.Tensor) -> None:
        flat = weights.view(torch.uint8)  # any dtype
        n = flat.numel() // self.n
        with _rank_errors("brought weights together"):
            _gather_into(flat, flat[self.rank * n : (self.rank + 1) * n], group=self._of_device)

    def exchange(self, parts: torch.Tensor, received: torch.Tensor, scope: ExchangeScope = "here") -> None:
        group, where = (self._here, "") if scope == "here" else (self._between_hosts, " between hosts")
        with _rank_errors(f"exchanged gradients{where}"):
            dist.all_to_all_single(received.view(torch.uint8), parts.view(torch.uint8), group=group)

    def share(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        with _rank_errors("shared norms"):
            _gather_into(rows.view(-1), row, group=self._of_host)

    def tell(self, message: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Broadcast rank 0's message, JSON, to all."""
        with _rank_errors("waited for rank 0"):
            return self._broadcast(message, 0)

    def gathered(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        with _rank_errors("compared their settings"):
            return [self._broadcast(message, rank) for rank in range(self.n)]

    def _broadcast(self, message: Mapping[str, Any] | None, rank: int) -> dict[str, Any]:
        """Broadcast one rank's message. It is JSON, so nothing is unpickled."""
        content = bytearray(json.dumps(message).encode() if rank == self.rank else b"")
        n = torch.tensor([len(content)])
        dist.broadcast(n, rank, group=self._between_steps)
        if not 0 < (n_bytes := int(n)) <= MAX_MESSAGE_BYTES:
            raise RanksError(f"rank {rank} sends a message of {n_bytes} bytes; start all ranks with the same version of penstock")
        sent = torch.frombuffer(content or bytearray(n_bytes), dtype=torch.uint8)
        dist.broadcast(sent, rank, group=self._between_steps)
        with suppress(ValueError):
            if isinstance(fields := json.loads(sent.numpy().tobytes()), dict):
                return fields
        raise RanksError("a rank sends an invalid message; start all ranks with the same version of penstock")

    def common(self, mine: Shared) -> list[torch.Tensor] | None:
        """Implement `Ranks.common`; call on all ranks, which return equal results."""
        messages, slabs = self.gathered(asdict(mine)), list[torch.Tensor]()
        refuse_errors(messages)
        with suppress(OSError, TypeError, ValueError):
            slabs += [slab_of(Shared(**message)) for message in messages]
        has_all = all(message["has_all"] for message in self.gathered({"has_all": len(slabs) == self.n}))
        return slabs if has_all else None

    def of_host(self, n_bytes: int) -> torch.Tensor:
        """Implement `Ranks.of_host` with memory of the host's first rank, which the others map; call on all ranks."""
        first = self.rank - self.rank % self.n_here
        mine, slab = shared_slab(n_bytes) if self.rank == first else (None, None)
        messages = self.gathered({} if mine is None else asdict(mine))
        refuse_errors(messages)
        failure = dict[str, Any]()
        if slab is None:
            try:
                slab = slab_of(Shared(**messages[first]))
            except (OSError, TypeError, ValueError) as error:
                where = f"the base weights in rank {first}'s memory cannot be read ({error})"
                failure = failure_of(PlanError(f"{where}; let one user start all ranks of a host, in one container"))
        refuse_errors(self.gathered(failure))
        if mine is not None:
            mine.close()
        assert slab is not None, "refuse_errors raises if a rank cannot read it"
        return slab

    def to_first(self, part: torch.Tensor | None, rank: int, into: torch.Tensor | None) -> None:
        """Send a flat tensor in host memory from one rank to rank 0; call on these two."""
        with _rank_errors("wrote a checkpoint"):
            if self.rank == rank:
                assert part is not None
                dist.send(part.view(torch.uint8), 0, group=self._between_steps)
            elif into is not None:
                dist.recv(into.view(torch.uint8), rank, group=self._between_steps)


@contextmanager
def connected_ranks(device: str, n_here: int | None = None, local_rank: int = 0, by_memory: bool = False) -> Iterator[Processes]:
    """Connect all ranks by torchrun's environment variables. `device`: cuda (the first visible GPU) or cpu; `n_here`: as in
    `Processes`; `by_memory`: as in `Ranks`."""
    try:
        dist.init_process_group("gloo")
        _refuse_unlike_devices(device)
        ranks = Processes(torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"), n_here, local_rank, by_memory)
    except RanksError:
        raise
    except (RuntimeError, ValueError) as error:
        line = (str(error).splitlines() or [""])[0][:160]
        raise RanksError(f"ranks cannot connect ({line}); check MASTER_ADDR and MASTER_PORT") from None
    try:
        yield ranks
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()
    ranks.leave()  # not after a failure, because a thread may hang in a collective


def meeting_place(n: int) -> tuple[object, dict[str, str]]:
    """Return a store at a free port, at which `n` ranks of this host connect like under torchrun's agent while this process holds
    it; and the environment variables of all ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    return store, environment | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return the message of a rank that has failed, to be gathered by all ranks."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return {"error": line, "exit_code": getattr(error, "exit_code", 2)}


def refuse_errors(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise a PlanError with the first error among the ranks' messages."""
    for rank, message in enumerate(messages):
        if message.get("error"):
            error = PlanError(f"rank {rank}: {message['error']}")
            error.exit_code = message.get("exit_code", 2)
            raise error


def _refuse_unlike_devices(device: str) -> None:
    """RanksError if only some ranks have a GPU, because ranks in NCCL groups would wait for ranks in gloo groups."""
    n_gpus = torch.tensor([device == "cuda"], dtype=torch.int32)
    dist.all_reduce(n_gpus)
    if 0 < (n := int(n_gpus)) < dist.get_world_size():
        raise RanksError(f"of {dist.get_world_size()} ranks {n} see a GPU; give each of them one, or choose --device cpu")


@contextmanager
def _rank_errors(action: str) -> Iterator[None]:
    """Convert an error of torch.distributed to a RanksError of one line: another rank has ended."""
    try:
        yield
    except (RuntimeError, dist.DistBackendError) as error:
        line = (str(error).splitlines() or [""])[0][:160]
        raise RanksError(f"another rank has ended, or cannot be reached, while ranks {action} ({line}); see its output") from error
