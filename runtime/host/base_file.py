"""Frozen weights on disk: a file that is written once and then read with O_DIRECT by several threads.

The file holds the frozen weights of the plan's `disk_blocks`, each block in whole pages and in the layout of a slot of `frozen`. It
is written under a temporary name and renamed when it is complete, because other runs read complete files.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path

from penstock.runtime.errors import DiskError
from penstock.runtime.files import sync
from penstock.runtime.plan.setup import DISK_PAGE_BYTES
from penstock.runtime.units import MiB

N_READERS = 4  # threads that read one layer
PIECE_BYTES = 8 * MiB  # of one task: a few milliseconds, and many requests to the disk


class BaseFile:
    """File of the frozen weights of one model, in the layout of one plan."""

    def __init__(self, path: Path, sizes: Mapping[int, int]) -> None:
        """Open the file, or create it with `sizes[block]` bytes per block, a multiple of the page size. DiskError if the disk is
        full or does not support O_DIRECT."""
        begins = accumulate(sizes.values(), initial=0)
        self._places = dict(zip(sizes, zip(begins, sizes.values(), strict=False), strict=True))
        self.path, n_bytes = path, sum(sizes.values())
        with self._disk_errors("opened"):
            self.is_whole = path.is_file() and path.stat().st_size == n_bytes
            self._partial = path.with_name(path.name + ".partial")
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_in_memory(path.parent):  # it may support O_DIRECT, but saves no memory
                raise DiskError(f"{path.parent}: its file system is in memory; choose a folder on a disk with --disk")
            file = os.open(path if self.is_whole else self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not self.is_whole:
                self._claim(file, n_bytes)
            self._direct = self._opened_directly(file)
            if not self.is_whole:
                self._allocate(file, n_bytes)
            self._bytes, self._file = mmap.mmap(file, n_bytes), file

    def _claim(self, file: int, n_bytes: int) -> None:
        """Lock the file for this process and set its size."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiskError(f"{self._partial}: another run is writing it; start this run when the other one trains") from None
        os.ftruncate(file, n_bytes)

    def _allocate(self, file: int, n_bytes: int) -> None:
        """Allocate disk space, so that a full disk raises an error before training."""
        try:
            os.posix_fallocate(file, 0, n_bytes)
        except OSError:
            os.ftruncate(file, 0)  # release the partial allocation
            raise

    def _opened_directly(self, file: int) -> int:
        """Return an O_DIRECT descriptor, after a test read of one page."""
        try:
            direct = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            os.preadv(direct, [mmap.mmap(-1, DISK_PAGE_BYTES)], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            how = "its file system rejects direct reads (O_DIRECT); choose a folder on another disk with --disk"
            raise DiskError(f"{self.path.parent}: {how}") from None
        return direct

    def view(self, block: int) -> memoryview:
        """Bytes of a block in the page cache, to fill it or to inspect it between steps."""
        offset, n_bytes = self._places[block]
        return memoryview(self._bytes)[offset : offset + n_bytes]

    def release(self, block: int) -> None:
        """Drop a filled block from this process's memory; the system writes it back later."""
        self._bytes.madvise(mmap.MADV_DONTNEED, *self._places[block])

    def settle(self) -> None:
        """Flush the file to disk, rename it to its final name, and drop it from the page cache."""
        with self._disk_errors("written"):
            self._bytes.madvise(mmap.MADV_DONTNEED)
            if not self.is_whole:
                os.fsync(self._file)
                self._partial.rename(self.path)
                sync(self.path.parent)
                self.is_whole = True
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def reads(self, block: int, target: memoryview) -> list[Callable[[None], None]]:
        """Tasks that read a block in pieces, for several threads."""
        offset, n_bytes = self._places[block]
        pieces = range(0, n_bytes, PIECE_BYTES)
        return [partial(self._read, offset + first, target[first : min(first + PIECE_BYTES, n_bytes)]) for first in pieces]

    def _read(self, offset: int, target: memoryview, scratch: None) -> None:
        with self._disk_errors("read", offset):
            while target.nbytes:
                if (n_bytes := os.preadv(self._direct, [target], offset)) % DISK_PAGE_BYTES or not n_bytes:
                    fault = f"ends at byte {offset + n_bytes}, within a layer: it is truncated"
                    raise DiskError(f"{self.path}: {fault}; delete it, and continue with --resume")
                offset, target = offset + n_bytes, target[n_bytes:]

    @contextmanager
    def _disk_errors(self, action: str, offset: int | None = None) -> Iterator[None]:
        """Convert an OSError to a DiskError."""
        try:
            yield
        except OSError as error:
            where = "" if offset is None else f" at byte {offset}"
            way_out = "make room" if error.errno == errno.ENOSPC else "check the disk"
            raise DiskError(
                f"{self.path}: cannot be {action}{where} ({error.strerror}); {way_out}, then start again (--resume)"
            ) from None


def is_in_memory(folder: Path) -> bool:
    """True if the folder is on tmpfs or ramfs, by /proc/self/mountinfo."""
    device, mounts = folder.stat().st_dev, Path("/proc/self/mountinfo").read_text().splitlines()
    kinds = {mount.split()[2]: mount.partition(" - ")[2].split()[0] for mount in mounts}
    return kinds.get(f"{os.major(device)}:{os.minor(device)}") in ("tmpfs", "ramfs")
