"""Probe: performs the list of measurements on a device and writes the profile."""

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import date
from typing import Any

from penstock.hwprofiles.schema import FORMAT_VERSION, Profile
from penstock.runtime.errors import ProfileError, SlowKernelWarning
from penstock.runtime.units import MiB, show_bytes, show_seconds

from . import host_kernels
from . import kernels_to_time as kernels
from .cliffs import MARK, MOST_CHARACTERS, cliffs
from .cpu import resident_bytes
from .device import Device, DeviceError, DeviceOutOfMemory, Facts
from .measurements import DTYPES, Effort, Measurement, measurements
from .profile_fields import HOST, ProfileFields, Result
from .timings import Stopwatch, Timing

Progress = Callable[[str, float], None]  # kind of the current benchmark, and the fraction done

# Transformers 5 (220 MB with torch._dynamo, which it imports), datasets and pyarrow (85 MB), kernels' memory, heap fragmentation.
BEYOND_TORCH_BYTES = 340_000_000
BEYOND_PROBE_BYTES = 512 * MiB  # on a GPU: kernels that only a run uses, and cuBLAS workspaces (32 MiB per stream)
MOST_MEMORY_FRACTION = 0.6  # of free device memory, for one benchmark
MOST_DETAIL = 2000  # characters
MARGINS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)  # of free memory, tried in turn until one allocation succeeds
# By kind of device: host cores and host memory bytes per copied byte, with the reason; and the definition of its memory sizes.
COPIES = {
    "cpu": (1, 2.0, "not measured: a CPU has no device context, and copies memory with one core"),
    "cuda": (0, 1.0, "copy engines of the device perform pinned copies: no host core, one byte of host memory traffic per byte"),
}
MEMORY = {
    "cpu": "memory available when probed; a quarter is the device arena, the rest is host memory",
    "cuda": "device: memory in use after the first kernels, and the largest free piece; host: memory available when probed",
}


def probed(device: Device, effort: Effort, progress: Progress, name: str = "this-machine") -> Profile:
    """Measure a device, its link and its host. Raise ProfileError of one line if the device fails or its memory runs out."""
    probe = _Probe(device, effort, progress)
    try:
        with warnings.catch_warnings(record=True) as probe.warnings:  # torch warns about every kernel that it lacks
            warnings.simplefilter("default")
            return probe.profile(name)
    except DeviceOutOfMemory as error:
        raise ProfileError(f"out of memory while measuring {probe.now}: {error}; end other programs and probe again") from None
    except DeviceError as error:
        raise ProfileError(f"the device failed while measuring {probe.now}: {error}; check it and probe again") from None
    except ProfileError as error:
        raise ProfileError(f"the measurements contradict each other ({error}); end other programs and probe again") from None


class _Probe:
    """State of one probe: results and failures so far."""

    def __init__(self, device: Device, effort: Effort, progress: Progress) -> None:
        self.device, self.effort, self.progress = device, effort, progress
        self.watch = Stopwatch(device, effort)
        self.now = "device memory"
        self.results: list[Result] = []
        self.best: dict[tuple[str, str], float] = {}  # highest amount per second, by field and key
        self.warnings: list[warnings.WarningMessage] = []
        self.left_out: dict[str, str] = {}  # by field: description of an optional benchmark that failed on this device

    def profile(self, name: str) -> Profile:
        """Perform all measurements and return the profile."""
        self.progress(self.now, 0.0)
        free_before_bytes, total_bytes = self.device.memory()
        facts = self.device.facts()
        usable_bytes, context_bytes = self._memory(facts)
        process_bytes = resident_bytes()  # before measuring allocates memory
        rows = list(measurements(self.effort, facts, int(MOST_MEMORY_FRACTION * self.device.memory()[0])))
        try:
            for i, row in enumerate(rows):
                self.progress(row.work.kind, i / len(rows))
                self._measure(row)
        finally:
            self.device.release()
        numbers, taken_bytes = ProfileFields(self.results), max(0, total_bytes - self.device.memory()[0] - context_bytes)
        workspace = Timing(taken_bytes + BEYOND_PROBE_BYTES, 0.5).quantity("workspace")
        cores_per_copy, traffic, _ = COPIES[facts.kind]
        cores = f"{facts.n_host_cores} core{'s' * (facts.n_host_cores > 1)}"
        fields: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "name": name,
            "summary": f"{facts.name}, {show_bytes(usable_bytes)} usable; {facts.host}, {cores} for copies and optimizer, "
            f"{show_bytes(facts.host_bytes)} of free memory",
            "sources": self._sources(facts, numbers, process_bytes),
            "device": {
                "name": facts.name,
                "kind": facts.kind,
                "instructions": facts.instructions,
                "memory_bytes": Timing(usable_bytes, 0.0).quantity("memory"),
                "context_bytes": Timing(context_bytes, 0.0).quantity("copies" if facts.is_cpu else "memory"),
                "workspace_bytes": Timing(0, 0.0).quantity("copies") if facts.is_cpu else workspace,
                "compute_threads": facts.compute_threads,
            },
            "link": {"host_cores_per_copy": Timing(cores_per_copy, 0.0).quantity("copies"), "dram_bytes_per_byte": traffic},
            "host": {
                "memory_bytes": Timing(facts.host_bytes, 0.0).quantity("memory"),
                "runtime_bytes": Timing(process_bytes + BEYOND_TORCH_BYTES, 0.3).quantity("process"),
                "n_cores": facts.n_host_cores,
            },
            "price": {"usd_per_hour": None, "ram_usd_per_gb": None, "date": None},
        }
        numbers.write(fields)
        cliff_rows = list(cliffs(Profile.from_json(fields, "probe"), facts, numbers, total_bytes - free_before_bytes))
        slow = {str(warning.message): None for warning in self.warnings if issubclass(warning.category, SlowKernelWarning)}
        if slow:
            cliff_rows.append(("slow kernels", f"{'; '.join(slow)}; the profile has the rates without them"))
        if cliff_rows:
            fields["summary"] += f"; cliffs: {', '.join(name for name, _ in cliff_rows)}"
            fields["sources"]["probe"]["detail"] += "".join(MARK + line for _, line in cliff_rows)[:MOST_CHARACTERS]
        self.progress("done", 1.0)
        return Profile.from_json(fields, "probe")

    def _memory(self, facts: Facts) -> tuple[int, int]:
        """Return the usable bytes of the device, context included, and its context with all kinds of kernels loaded."""
        small = [kernels.library_calls(facts.is_cpu), kernels.pointwise(MiB), kernels.eager(1024, 1024, 1024)]
        small += kernels.norm(1024, 1024).values()
        for dtype in DTYPES:
            small += [kernels.product(dtype, 512, 512, 512), *kernels.attention(dtype, 1, 2, 512, 64).values()]
        for work in small:
            with self.device.prepared(work) as ready:
                self.device.run(ready, 1)
        free_bytes, total_bytes = self.device.memory()
        for margin in MARGINS:
            n_bytes = int(free_bytes * (1 - margin)) // (2 * MiB) * (2 * MiB)
            with suppress(DeviceOutOfMemory):
                self.device.reserve(n_bytes)
                return total_bytes - free_bytes + n_bytes, total_bytes - free_bytes
        free = show_bytes(free_bytes)
        raise DeviceOutOfMemory(f"{free} of device memory are free, but {MARGINS[-1]:.0%} less cannot be allocated at once")

    def _measure(self, row: Measurement) -> None:
        """Time a benchmark; omit it if it would take too long, or if it is optional and the device fails."""
        self.now, number = row.work.name, (row.field, row.key)
        expected_s = row.work.amount / self.best[number] if number in self.best else 0.0
        if row.field in self.left_out or expected_s > self.effort.longest_s:  # forward and backward are omitted together
            return self._forget(row.field, row.work.point)
        try:
            with ExitStack() as stack:
                ready, *company = (stack.enter_context(self.device.prepared(work)) for work in (row.work, *row.background))
                with self.device.background(company):
                    seconds = self.watch.timing(ready, row.soak_s, is_accompanied=bool(company))
                self.results.append((row, seconds, self.watch.load(ready, seconds.value)))
        except (DeviceError, RuntimeError) as error:  # of a CPU's torch: no FP8 products
            if not row.is_optional:
                raise
            # A device without the kernel fails at the first point; that is not reported.
            self.left_out[row.field] = f"; left out: {row.work.name} ({error})" if number in self.best else ""
            self._forget(row.field, {})
        else:
            self.best[number] = max(self.best.get(number, 0.0), row.work.amount / seconds.value)

    def _forget(self, field: str, point: Mapping[str, int]) -> None:
        """Discard the results of this field, at one point of its grid or at all points."""
        self.results = [row for row in self.results if row[0].field != field or not point.items() <= row[0].work.point.items()]

    def _sources(self, facts: Facts, numbers: ProfileFields, process_bytes: int) -> dict[str, Any]:
        """Return the `sources` of the profile."""
        watch, (least, limit) = self.watch, self.effort.repeats
        slow = ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in sorted(numbers.slowdowns.items()))
        details = {
            "probe": f"penstock probe --device {facts.kind}: medians of {least} to {limit} "
            f"timings on random data, {show_seconds(watch.busy_s)} in all; the same product at {numbers.sustained_fraction:.2f} "
            f"of its first rate at the end; spread widened by the slowdown while the other lanes work: {slow}"
            f"{''.join(self.left_out.values())}",
            HOST: self._host(facts, numbers),
            "memory": MEMORY[facts.kind],
            "process": f"resident memory of this process with torch ({show_bytes(process_bytes)}, measured) and "
            f"{show_bytes(BEYOND_TORCH_BYTES)} for transformers, templates, data and heap fragmentation",
            "copies": COPIES[facts.kind][2],
            "workspace": "memory that the probe's kernels allocated in addition to the context after their first use, and "
            f"{show_bytes(BEYOND_PROBE_BYTES)} for kernels of a run",
        }
        measured_on = facts.host if facts.is_cpu else f"{facts.name}; {facts.host}"
        common = {"date": date.today().isoformat(), "device": measured_on, "driver": facts.driver}
        if facts.is_cpu:
            del details["workspace"]
        kinds = {name: "measured" if name in ("probe", HOST, "memory") else "assumed" for name in details}
        return {name: {"kind": kinds[name], "detail": detail, **common} for name, detail in details.items()}

    def _host(self, facts: Facts, numbers: ProfileFields) -> str:
        """Return the detail of the source HOST: conditions and core usage of every host benchmark."""
        effort, n_bytes = self.effort, host_kernels.slab_bytes(facts.host_bytes, self.effort.host_bytes)
        uses = [
            f"{row.work.name}{''.join(f' during {load.lane}' for load in row.background)} {use.cores:.2f} cores, "
            f"steal {use.steal_fraction:.0%}, {use.last_third:.2f}"
            for row, use in numbers.sustained
            if row.field not in numbers.extra
        ]
        how = (
            f"penstock probe: wall time, nothing subtracted, of {show_seconds(effort.sustained_s)} or more, medians of pieces of "
            f"{show_seconds(effort.piece_s)}, in {show_bytes(n_bytes)} of huge pages, in slots of layers of "
            f"{host_kernels.layer_elements(n_bytes):,} parameters; cores used (processor over wall time), steal time, and rate "
            "of the last third over that of the first: "
        )
        return (how + "; ".join(uses))[:MOST_DETAIL]
