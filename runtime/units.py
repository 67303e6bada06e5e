"""Units: parse and format bytes, counts, times and rates. Other modules use base units only (bytes, seconds, FLOP)."""

import re
import shlex

from .errors import PenstockError

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_UNITS = {"B": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KIB": KiB, "MIB": MiB, "GIB": GiB, "TIB": TiB}
_UNITS |= {"K": KB, "M": MB, "G": GB, "T": TB}

LEAST_PLAIN_BYTES = MB  # smallest number without a unit: 128 is ambiguous


def parse_bytes(text: str) -> int:
    """Parse `80GB` or `80G` (10^9), `1.5TB`, `24GiB` (2^30), or plain bytes from 10^6. Raise PenstockError for others."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is not None and not match[2] and float(match[1]) < LEAST_PLAIN_BYTES:
        raise PenstockError(f"{text.strip()[:40]!r} is not a size: it has no unit; write for example 80GB, 1.5TB or 24GiB")
    value = 0.0 if match is None else float(match[1]) * _UNITS.get(match[2].upper() or "B", 0)
    if not 0.5 < value < 2**63:
        raise PenstockError(f"{text[:40]!r} is not a size above zero; write for example 80GB, 1.5TB or 24GiB")
    return round(value)


def parse_count(text: str) -> int:
    """Parse a positive count such as `100M`, `1.5B`, `2T` or 250000; raise PenstockError for other texts."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([KkMmGgBbTt]?)\s*", text)
    n = 0 if match is None else round(float(match[1]) * {"": 1, "K": KB, "M": MB, "G": GB, "B": GB, "T": TB}[match[2].upper()])
    if not 0 < n < 10**18:
        raise PenstockError(f"{text[:40]!r} is not a count above zero; write for example 250000, 100M or 1.5B")
    return n


def on_one_line(text: str, longest: int = 480) -> str:
    """Return text for one line of a terminal: control characters escaped, the middle of long text cut."""
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return plain if len(plain) <= longest else f"{plain[: longest // 2]} ... {plain[-(longest // 2) :]}"


def in_shell(path: object) -> str:
    """Return a path for a command to copy: quoted for a POSIX shell if needed, on one line."""
    return on_one_line(shlex.quote(str(path)))


def show_bytes(n_bytes: float) -> str:
    """`1.64 TB`: decimal prefixes, three significant digits."""
    return _show(n_bytes, ((TB, "TB"), (GB, "GB"), (MB, "MB"), (KB, "KB")), "B")


def show_count(n: int) -> str:
    """`116.8 G`, `494 M`, `54.59 k`: parameters, four significant digits."""
    for scale, name in ((GB, "G"), (MB, "M"), (KB, "k")):
        if n >= scale:
            return f"{n / scale:.4g} {name}"
    return str(n)


def show_seconds(seconds: float) -> str:
    """`2.91 s`, `34.1 ms`, `22 µs`."""
    if abs(seconds) >= 1 or seconds == 0:
        return f"{seconds:.3g} s" if abs(seconds) < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def show_duration(seconds: float) -> str:
    """`22.4 ms`, `45 s`, `12 min`, `3 h 20 min`, `2 d 4 h`: time to wait."""
    if seconds < 1:
        return show_seconds(seconds)
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def show_rate(per_s: float, unit: str) -> str:
    """`412 TFLOP/s`, `55.9 GB/s`."""
    return _show(per_s, ((TB, f"T{unit}"), (GB, f"G{unit}"), (MB, f"M{unit}"), (KB, f"k{unit}")), unit) + "/s"


def _show(value: float, scales: tuple[tuple[int, str], ...], base: str) -> str:
    for scale, name in scales:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {name}" if abs(value) < 1000 * scale else f"{value / scale:.0f} {name}"
    return f"{value:.3g} {base}"
