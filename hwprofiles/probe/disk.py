"""Disk benchmark: read a file like frozen weights in a run, alone and during copies in both directions of the link."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from pathlib import Path

from penstock.hwprofiles.schema import Profile
from penstock.runtime.host.base_file import N_READERS, PIECE_BYTES, BaseFile
from penstock.runtime.host.slabs import host_slab
from penstock.runtime.host.workers import Workers
from penstock.runtime.units import MiB, show_bytes

from . import kernels_to_time as kernels
from .device import Device
from .probe import Progress
from .timings import Timing

LAYER_BYTES, N_LAYERS = 128 * MiB, 16  # file larger than the usual cache of a disk
FILE_BYTES = N_LAYERS * LAYER_BYTES
COPY_BYTES = 64 * MiB
N_PASSES = 5


def with_disk(profile: Profile, device: Device, folder: Path, progress: Progress) -> Profile:
    """Return the profile with the rate of the folder's disk. Raise DiskError of one line if it cannot be written or read."""
    progress("the disk", 0.0)
    with _file(folder / "penstock-probe") as file:
        alone = _rate(file)
        with ExitStack() as stack:
            both = [stack.enter_context(device.prepared(kernels.copy(way, COPY_BYTES))) for way in ("h2d", "d2h")]
            stack.enter_context(device.background(both))
            loaded = _rate(file)
    facts, fields = device.facts(), profile.to_json()
    detail = (
        f"penstock probe --disk: medians of {N_PASSES} passes over {show_bytes(FILE_BYTES)}, direct reads of "
        f"{show_bytes(PIECE_BYTES)} by {N_READERS} threads, alone and while both directions of the link copy"
    )
    source = {"kind": "measured", "detail": detail, "date": date.today().isoformat(), "device": facts.host, "driver": facts.driver}
    fields["disk"] = {"read_bytes_per_s": alone.quantity("disk"), "under_copies_bytes_per_s": loaded.quantity("disk")}
    return Profile.from_json(fields | {"sources": fields["sources"] | {"disk": source}}, profile.name)


@contextmanager
def _file(path: Path) -> Iterator[BaseFile]:
    """Create the file of random bytes; delete it when the context ends."""
    with suppress(OSError):  # creation reports it
        path.unlink()  # left by a killed probe
    file = BaseFile(path, dict.fromkeys(range(N_LAYERS), LAYER_BYTES))
    try:
        content = random.randbytes(LAYER_BYTES)
        for layer in range(N_LAYERS):
            file.view(layer)[:] = content
        file.settle()
        yield file
    finally:
        for file_path in (path, path.with_name(path.name + ".partial")):
            file_path.unlink(missing_ok=True)


def _rate(file: BaseFile) -> Timing:
    """Return bytes/s over N_PASSES passes."""
    target, rates = host_slab(LAYER_BYTES).numpy().data, list[float]()
    readers = Workers[None](N_READERS, lambda: None)
    with readers.helped():
        for _ in range(N_PASSES):
            began_s = time.perf_counter()
            for layer in range(N_LAYERS):
                readers.run(file.reads(layer, target))
            rates.append(FILE_BYTES / (time.perf_counter() - began_s))
    return Timing.from_repeats(rates)
