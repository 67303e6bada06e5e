"""How do the ranks of a run reach each other?

As processes that `torchrun`, or whoever sets its variables, has started: NCCL between GPUs, gloo between CPUs and for what lies in
host memory. Each of a machine's lanes that meets the others' has a group of its own, so that one lane's order is all that counts.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.errors import RanksError

PATIENCE = timedelta(minutes=30)  # of a collective that a thread waits in: as long as the slowest rank's longest op may take
LONG = timedelta(days=30)  # of what is issued a step ahead, or waited for between steps: a full disk, an evaluation
MAX_MESSAGE_BYTES = 2**20
# torch 2.13 gave it a new name, and warns of the old one
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Processes:
    """All ranks: processes of which this is one."""

    def __init__(self, device: torch.device, patience: timedelta = PATIENCE) -> None:
        """The process group is there. Called by every rank."""
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        is_gpu = device.type == "cuda"
        self._of_device = dist.new_group(
            backend="nccl" if is_gpu else "gloo", timeout=LONG if is_gpu else patience, device_id=device if is_gpu else None
        )
        self._of_host = dist.new_group(backend="gloo", timeout=patience)
        self._between_steps = dist.new_group(backend="gloo", timeout=LONG)

    # -- ops ----------------------------------------------------------------------------------------------------------

    def gather(self, whole: torch.Tensor) -> None:
        """As `Ranks.gather`. Bytes are moved, whatever they mean."""
        flat = whole.view(torch.uint8)
        n = flat.numel() // self.n
        with _meeting("brought weights together"):
            _gather_into(flat, flat[self.rank * n : (self.rank + 1) * n], group=self._of_device)

    def exchange(self, parts: torch.Tensor, received: torch.Tensor) -> None:
        """As `Ranks.exchange`."""
        with _meeting("exchanged gradients"):
            dist.all_to_all_single(received.view(torch.uint8), parts.view(torch.uint8), group=self._of_device)

    def share(self, row: torch.Tensor, rows: torch.Tensor) -> None:
        """As `Ranks.share`."""
        with _meeting("shared norms"):
            _gather_into(rows.view(-1), row, group=self._of_host)

    # -- between steps --------------------------------------------------------------------------------------------------

    def tell(self, message: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What rank 0 says, heard by all: JSON."""
        said = json.dumps(message).encode() if self.rank == 0 else b""
        with _meeting("waited for what rank 0 says"):
            return _read(self._sent(said, 0))

    def gathered(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rank says, heard by all, in order."""
        said = json.dumps(message).encode()
        with _meeting("compared what they are to do"):
            return [_read(self._sent(said, rank)) for rank in range(self.n)]

    def _sent(self, said: bytes, rank: int) -> bytes:
        """One rank's bytes, at every rank."""
        n = torch.tensor([len(said)])
        dist.broadcast(n, rank, group=self._between_steps)
        if not 0 < (n_bytes := int(n)) <= MAX_MESSAGE_BYTES:
            raise RanksError(f"rank {rank} sends a message of {n_bytes} bytes; start all ranks with the same version of penstock")
        content = (
            torch.frombuffer(bytearray(said), dtype=torch.uint8) if rank == self.rank else torch.empty(n_bytes, dtype=torch.uint8)
        )
        dist.broadcast(content, rank, group=self._between_steps)
        return content.numpy().tobytes()

    def to_first(self, part: torch.Tensor | None, rank: int, into: torch.Tensor | None) -> None:
        """A flat tensor of one rank's host memory into rank 0's. Called by these two."""
        with _meeting("wrote a checkpoint"):
            if self.rank == rank:
                assert part is not None
                dist.send(part.view(torch.uint8), 0, group=self._between_steps)
            elif into is not None:
                dist.recv(into.view(torch.uint8), rank, group=self._between_steps)


@contextmanager
def met(device: str) -> Iterator[Processes]:
    """All ranks, once each has come: as the environment says who and where they are. `device`: cuda, the first that this process
    sees, or cpu."""
    try:
        dist.init_process_group("gloo")
        _refuse_unlike_devices(device)
        ranks = Processes(torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"))
    except RanksError:
        raise
    except (RuntimeError, ValueError) as error:
        line = (str(error).splitlines() or [""])[0][:160]
        raise RanksError(f"ranks do not find each other ({line}); see MASTER_ADDR and MASTER_PORT") from None
    try:
        yield ranks
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _refuse_unlike_devices(device: str) -> None:
    """RanksError where some have a GPU and others none: in groups of NCCL and of gloo they would wait for each other."""
    n_gpus = torch.tensor([device == "cuda"], dtype=torch.int32)
    dist.all_reduce(n_gpus)
    if 0 < (n := int(n_gpus)) < dist.get_world_size():
        raise RanksError(f"of {dist.get_world_size()} ranks {n} see a GPU; give each of them one, or choose --device cpu")


def _read(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise RanksError("a rank sends what is no message; start all ranks with the same version of penstock")
    return fields


@contextmanager
def _meeting(what: str) -> Iterator[None]:
    """One line where another rank has gone: its own words say why."""
    try:
        yield
    except (RuntimeError, dist.DistBackendError) as error:
        line = (str(error).splitlines() or [""])[0][:160]
        raise RanksError(f"another rank has ended, or cannot be reached, while ranks {what} ({line}); see what it said") from error
