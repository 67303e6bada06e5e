"""How are bytes, times and rates read and shown?

Inside, everything is in base units (bytes, seconds, FLOP); prefixes exist only here.
"""

import re

from .errors import PenstockError

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_UNITS = {"": 1, "B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB}


def parse_bytes(text: str) -> int:
    """Bytes of `80GB` (10^9), `1.5TB`, `24GiB` (2^30) or a plain count; PenstockError when it is no positive size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise PenstockError(f"{text!r} is not a size; write for example 80GB, 1.5TB or 24GiB")
    value = float(match[1]) * _UNITS[match[2].upper()]
    n_bytes = round(value) if value < 2**63 else 0
    if n_bytes <= 0:
        raise PenstockError(f"{text[:40]!r} is not a size above zero that exists; write for example 80GB, 1.5TB or 24GiB")
    return n_bytes


def on_one_line(text: str, longest: int = 480) -> str:
    """Text for a terminal's line, whatever a file's name holds: control characters are written out, the middle of much is cut."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return plain if len(plain) <= longest else f"{plain[: longest // 2]} ... {plain[-(longest // 2) :]}"


def show_bytes(n_bytes: float) -> str:
    """`1.64 TB`: decimal prefixes, three significant digits."""
    return _show(n_bytes, ((TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "KB")), "B")


def show_count(n: int) -> str:
    """`116.8 G`, `494 M`, `54.59 k`: of parameters, four significant digits."""
    for scale, name in ((GB, "G"), (MB, "M"), (KB, "k")):
        if n >= scale:
            return f"{n / scale:.4g} {name}"
    return str(n)


def show_seconds(seconds: float) -> str:
    """`2.91 s`, `34.1 ms`, `22 µs`."""
    if abs(seconds) >= 1 or seconds == 0:
        return f"{seconds:.3g} s" if abs(seconds) < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def show_rate(per_s: float, unit: str) -> str:
    """`412 TFLOP/s`, `55.9 GB/s`: decimal prefixes of the given unit per second."""
    return _show(per_s, ((TB, f"T{unit}"), (GB, f"G{unit}"), (MB, f"M{unit}"), (KB, f"k{unit}")), unit) + "/s"


def _show(value: float, scales: tuple[tuple[int, str], ...], base: str) -> str:
    for scale, name in scales:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {name}" if abs(value) < 1000 * scale else f"{value / scale:.0f} {name}"
    return f"{value:.3g} {base}"
