"""What does nvbandwidth say of a link?

Reads what `nvbandwidth -j` prints and puts the copy-engine results into a profile. Cells of its matrices are strings, "N/A" where
nothing was measured; the unit stands only in a description; the size of the buffers stands nowhere, so it is asked for. In a
bidirectional test only the direction that names it is measured, so that two of them make the duplex point.
"""

import errno
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hwprofiles.schema import Direction, Profile
from runtime.errors import ProfileError
from runtime.files import read_whole
from runtime.units import GB, MiB, on_one_line, show_bytes, show_rate

from .timings import quantity

MAX_FILE_BYTES = 8 * MiB
MOST_CASES, MOST_DEVICES = 1000, 4096
BUFFER_BYTES = 512 * MiB  # the tool's own default
SIMPLEX_SPREAD, DUPLEX_SPREAD = 0.02, 0.05  # between hosts of a kind, and for two runs whose other direction is not reported
LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 1e6, 1e14  # a link outside of that is a mistake in the file

ALONE: dict[Direction, str] = {"h2d": "host_to_device_memcpy_ce", "d2h": "device_to_host_memcpy_ce"}
DUPLEX: dict[Direction, str] = {
    "h2d": "host_to_device_bidirectional_memcpy_ce",
    "d2h": "device_to_host_bidirectional_memcpy_ce",
}
STATUSES = ("Passed", "Waived", "Error", "Not Found", "Running")
AGAIN = "run it again as `nvbandwidth -j -t host_to_device_memcpy_ce device_to_host_memcpy_ce ... > FILE`"


@dataclass(frozen=True, slots=True)
class Results:
    """Rates of one device's link, and what the file says of itself. What it did not measure is absent."""

    version: str
    driver: str
    device: str
    alone: dict[Direction, float] = field(default_factory=dict)  # bytes per second
    duplex: dict[Direction, float] = field(default_factory=dict)  # of each direction, while the other is busy
    unmeasured: tuple[str, ...] = ()  # cases that were asked for and gave nothing, and why


def read_nvbandwidth(path: Path, device_index: int = 0) -> Results:
    """The results for one device; ProfileError in one line where the file is no such output."""
    where = on_one_line(str(path), 200)
    try:
        text = read_whole(path, MAX_FILE_BYTES).decode("utf-8")
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ProfileError(f"{where}: larger than any output of nvbandwidth; {AGAIN}") from None
        raise ProfileError(f"{where}: cannot be read ({error.strerror}); give a file that `nvbandwidth -j` wrote") from None
    except ValueError:
        raise ProfileError(f"{where}: cannot be read (not text); give a file that `nvbandwidth -j` wrote") from None
    return parse_nvbandwidth(text, where, device_index)


def parse_nvbandwidth(text: str, where: str, device_index: int = 0) -> Results:
    """The results for one device, from the tool's JSON."""
    if device_index < 0:
        raise ProfileError(f"{where}: there is no device {device_index}; they are counted from 0")
    root = _root(text, where)
    cases = _cases(root, where)
    matrices = {name: _row(case, f"{where}: {name}") for name, case in cases.items() if name in {*ALONE.values(), *DUPLEX.values()}}
    measured = {name: cells for name, cells in matrices.items() if isinstance(cells, list)}
    if not measured:
        found = root.get("error") or "; ".join(f"{name} {why}" for name, why in matrices.items()) or "no copy-engine case is in it"
        raise ProfileError(f"{where}: no rate of a link ({on_one_line(str(found), 160)}); {AGAIN}")
    n_devices = max(len(cells) for cells in measured.values())
    if device_index >= n_devices:
        raise ProfileError(f"{where}: there is no device {device_index}; it measured {n_devices}, counted from 0")
    rates = {name: cells[device_index] for name, cells in measured.items() if device_index < len(cells)}
    return Results(
        version=_text(root, "version", where) or "of unknown version",
        driver=_text(root, "Driver Version", where) or "unknown",
        device=_device_name(root, device_index, where),
        alone={direction: rate for direction, name in ALONE.items() if (rate := rates.get(name)) is not None},
        duplex={direction: rate for direction, name in DUPLEX.items() if (rate := rates.get(name)) is not None},
        unmeasured=tuple(
            f"{name}: {matrices[name] if isinstance(matrices.get(name), str) else 'N/A' if name in matrices else 'not in the file'}"
            for name in (*ALONE.values(), *DUPLEX.values())
            if rates.get(name) is None
        ),
    )


def merged(base: Profile, results: Results, buffer_bytes: int, name: str) -> tuple[Profile, list[str]]:
    """The profile with these link numbers, and lines that say what was replaced and what stays.

    The point at the size of the buffers is the measurement. Other sizes keep the base's shape, scaled to meet it. ProfileError
    where the profile has no GPU.
    """
    if base.device.kind != "cuda":
        raise ProfileError(
            f"{base.name} computes on a CPU, and nvbandwidth measures a GPU's link; give --onto a machine with a GPU"
        )
    fields = base.to_json()
    how = f"nvbandwidth {results.version}, copy engines, pinned, buffers of {show_bytes(buffer_bytes)} (not in the file: as given)"
    about = {"date": None, "device": results.device, "driver": results.driver}
    fields["sources"]["nvbandwidth"] = {"kind": "measured", "detail": f"{how}; date not in the file", **about}
    lines = []
    for direction, rate in results.alone.items():
        before = base.copy_bytes_per_s(direction, buffer_bytes)
        key = f"nvbandwidth_{direction}"
        detail = f"sizes that nvbandwidth did not measure: the shape of {base.name}, scaled by {rate / before:.3f} to meet its rate"
        fields["sources"][key] = {"kind": "fitted", "detail": detail, **about}
        fields["link"][direction]["bytes_per_s"] = _scaled(
            fields["link"][direction]["bytes_per_s"], rate, before, buffer_bytes, key
        )
        lines.append(f"{direction}: {show_rate(rate, 'B')} instead of {show_rate(before, 'B')}")
    for direction, rate in results.duplex.items():
        fields["link"][direction]["duplex_bytes_per_s"] = quantity(rate, DUPLEX_SPREAD, "nvbandwidth")
    if len(results.duplex) == len(DUPLEX):
        total = sum(results.duplex.values())
        fields["link"]["duplex_bytes_per_s"] = quantity(total, DUPLEX_SPREAD, "nvbandwidth")
        ways = " and ".join(f"{show_rate(rate, 'B')} {direction}" for direction, rate in results.duplex.items())
        lines.append(f"both ways: {show_rate(total, 'B')}, {ways}, each measured while a copy ran the other way")
    lines += [f"not measured: {case}; as in {base.name}" for case in results.unmeasured]
    lines.append(f"latency, pageable copies, host memory, optimizer and compute are no part of such a file: as in {base.name}")
    fields["name"] = name
    fields["summary"] = f"{base.summary}; link by nvbandwidth {results.version} on {results.device}"[:2000]
    _drop_unused(fields)
    return Profile.from_json(fields, name), lines


def _scaled(points: list[dict[str, Any]], rate: float, before: float, buffer_bytes: int, key: str) -> list[dict[str, Any]]:
    """A curve that goes through the measured point, and elsewhere has the shape it had."""
    kept = [
        {
            "n_bytes": p["n_bytes"],
            "rate": quantity(p["rate"]["value"] * rate / before, max(p["rate"]["spread_fraction"], SIMPLEX_SPREAD), key),
        }
        for p in points
        if p["n_bytes"] != buffer_bytes
    ]
    measured = {"n_bytes": buffer_bytes, "rate": quantity(rate, SIMPLEX_SPREAD, "nvbandwidth")}
    return sorted([*kept, measured], key=lambda p: p["n_bytes"])


def _drop_unused(fields: dict[str, Any]) -> None:
    """Forget sources that no number rests on any more."""
    used: set[str] = set()

    def look(value: object) -> None:
        if isinstance(value, dict):
            if "spread_fraction" in value:
                used.add(value["source"])
            for item in value.values():
                look(item)
        elif isinstance(value, list):
            for item in value:
                look(item)

    look({place: fields[place] for place in ("device", "link", "host", "price")})
    fields["sources"] = {key: source for key, source in fields["sources"].items() if key in used}


def _root(text: str, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise ProfileError(f"{where}: not JSON; {AGAIN}") from None
    root = fields.get("nvbandwidth") if isinstance(fields, dict) else None
    if not isinstance(root, dict):
        raise ProfileError(f"{where}: not the output of nvbandwidth, whose JSON begins with that name; {AGAIN}")
    return root


def _cases(root: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Test cases by name."""
    cases = root.get("testcases", [])
    if not isinstance(cases, list) or len(cases) > MOST_CASES:
        raise ProfileError(f"{where}: `testcases` is not a list of up to {MOST_CASES}; {AGAIN}")
    by_name: dict[str, dict[str, Any]] = {}
    for i, case in enumerate(cases):
        if not isinstance(case, dict) or not isinstance(case.get("name"), str) or case.get("status") not in STATUSES:
            raise ProfileError(f"{where}: testcases.{i} has no name, or no status of {', '.join(STATUSES)}; {AGAIN}")
        if case["name"] in by_name:
            raise ProfileError(f"{where}: {on_one_line(case['name'], 80)} is in it twice; {AGAIN}")
        by_name[case["name"]] = case
    return by_name


def _row(case: Mapping[str, Any], where: str) -> list[float | None] | str:
    """Bytes per second by device; or, where the case was not measured, why."""
    if case["status"] != "Passed":
        return f"{case['status'].lower()} {on_one_line(str(case.get('error', '')), 80)}".strip()
    description, matrix = case.get("bandwidth_description"), case.get("bandwidth_matrix")
    if not isinstance(description, str) or not re.search(r"\(GB/s\)\s*$", description):
        raise ProfileError(f"{where}: its description does not end in (GB/s), so its unit is unknown; {AGAIN}")
    if (
        not isinstance(matrix, list)
        or len(matrix) != 1
        or not isinstance(matrix[0], list)
        or not 0 < len(matrix[0]) <= MOST_DEVICES
    ):
        raise ProfileError(f"{where}: a test between host and devices has one row, a column per device; {AGAIN}")
    return [_cell(cell, where) for cell in matrix[0]]


def _cell(cell: object, where: str) -> float | None:
    """Bytes per second of `56.3829`; None of `N/A`."""
    if cell == "N/A":
        return None
    plain = isinstance(cell, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?(e[+-]?[0-9]{1,2})?", cell)
    rate = float(cell) * GB if plain and isinstance(cell, str) else math.nan
    if not LEAST_BYTES_PER_S <= rate <= MOST_BYTES_PER_S:
        raise ProfileError(f"{where}: {on_one_line(repr(cell), 40)} is no rate in GB/s as the tool writes them; {AGAIN}")
    return rate


def _text(root: Mapping[str, Any], key: str, where: str) -> str | None:
    """A text of the file, made fit for a line; None where it is missing."""
    value = root.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise ProfileError(f"{where}: {key} is not a text; {AGAIN}")
    return on_one_line(value.strip(), 80) or None


def _device_name(root: Mapping[str, Any], index: int, where: str) -> str:
    """`NVIDIA GeForce RTX 5090` of `0: NVIDIA GeForce RTX 5090 (00000000:0c:00): (hostname)`; older files name no devices."""
    devices = root.get("GPU Device list")
    if devices is None:
        return f"device {index}, not named in the file"
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise ProfileError(f"{where}: `GPU Device list` is not a list of names; {AGAIN}")
    if index >= len(devices):
        raise ProfileError(f"{where}: there is no device {index} in its list of {len(devices)}, counted from 0")
    found = re.match(r"\s*\d+:\s*(.+?)\s*(\([0-9a-fA-F:.]+\).*)?$", devices[index])
    return on_one_line(found[1] if found else devices[index], 120) or f"device {index}"
