"""Reader of measurements of single ops, copies and collectives.

A CSV with one row per measurement, in the columns of `benchmarks/published_ops.csv`. A hash of the measured quantity assigns rows
to fit or test, so that nobody chooses.
"""

import csv
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Literal, NoReturn

from penstock.runtime.errors import PenstockError
from penstock.runtime.files import read_whole
from penstock.runtime.units import on_one_line

COLUMNS = (
    *("machine", "device", "kind", "kernel", "dtype", "shape", "value", "unit"),
    *("low", "high", "n", "set", "where", "conditions", "trust"),
)
MAX_OPS_FILE_BYTES = 64 * 2**20
SECONDS, RATE = "s", "B/s"
ATTENTION = ("batch", "seq", "heads", "kv_heads", "head_dim")
HEADS = ("tokens", "heads", "kv_heads", "head_dim")
IN_A_MODEL = ("model", "batch", "seq")


@dataclass(frozen=True, slots=True)
class KindOfRow:
    """Shape keys of a kind of row, required and optional, and its units."""

    keys: tuple[str, ...]
    units: tuple[str, ...] = (SECONDS,)
    optional: tuple[str, ...] = ()


KINDS: Mapping[str, KindOfRow] = {
    "matmul": KindOfRow(("m", "k", "n")),
    **{f"attention_{way}": KindOfRow(ATTENTION, optional=("causal",)) for way in ("forward", "backward")},
    **{f"rms_norm_{way}": KindOfRow(("tokens", "width")) for way in ("forward", "backward")},
    **{f"rope_{way}": KindOfRow(HEADS) for way in ("forward", "backward")},
    **{f"swiglu_{way}": KindOfRow(("tokens", "inner")) for way in ("forward", "backward")},
    **{f"mlp_{way}": KindOfRow(("tokens", "width", "inner")) for way in ("forward", "backward")},
    **{f"cross_entropy_{way}": KindOfRow(("tokens", "vocab")) for way in ("forward", "backward")},
    "add_forward": KindOfRow(("tokens", "width")),
    "head_forward_backward": KindOfRow(("tokens", "width", "vocab")),
    "collective": KindOfRow(("gpus", "bytes")),
    **{kind: KindOfRow(("bytes",), (RATE, SECONDS)) for kind in ("copy_h2d", "copy_d2h", "copy_duplex", "device_copy")},
    "host_dram": KindOfRow(("threads",), (RATE,)),
    **{
        f"layer_{way}{part}": KindOfRow(IN_A_MODEL)
        for way in ("forward", "backward")
        for part in ("", "_products", "_attention", "_pointwise")
    },
    **{kind: KindOfRow(IN_A_MODEL) for kind in ("step_compute", "model_attention_step", "model_rest_step")},
}
DTYPES = ("bf16", "fp16", "fp32", "fp64", "fp8", "bytes")
CLASS_WITHOUT = {
    "matmul": ("m",),
    "attention_forward": ("batch", "heads", "kv_heads"),
    "attention_backward": ("batch", "heads", "kv_heads"),
}
LARGEST_SIZE = 2**53
A_SET = r"\w[\w.+/-]{0,99}"
ONE_IN = 4  # one in this many shape classes is in the test


@dataclass(frozen=True, slots=True)
class OpRow:
    """One measurement."""

    machine: str
    kind: str
    kernel: str
    dtype: str
    shape: str
    sizes: Mapping[str, int]
    model: str | None
    value: float
    unit: str
    low: float | None  # over software versions
    high: float | None
    set: str
    is_paged: bool  # attention that also fills a serving engine's paged cache
    trust: int  # 1: a vendor's or a careful author's; 3: partly unknown, and never counted

    @property
    def shape_class(self) -> str:
        """Part of the shape that assigns the row to fit or test."""
        left_out = CLASS_WITHOUT.get(self.kind, ("tokens",))
        sizes = (f"{key}={self.sizes[key]}" for key in KINDS[self.kind].keys if key in self.sizes and key not in left_out)
        return ";".join(filter(None, (self.model, *sizes)))

    @property
    def share(self) -> Literal["fit", "test"]:
        """`fit` if profiles may use the row. Tokens of a product, and heads and batch of attention are ignored, so that the test
        has other widths and other lengths."""
        digest = hashlib.sha256(f"{self.machine} {self.kind} {self.shape_class}".encode()).digest()
        return "test" if int.from_bytes(digest, "big") % ONE_IN == 0 else "fit"


def read_ops(path: str, machines: frozenset[str]) -> list[OpRow]:
    """Read the rows of a file. PenstockError names the wrong row and the expected value. `machines`: known machine names."""
    where = on_one_line(path, 200)
    try:
        text = read_whole(Path(path), MAX_OPS_FILE_BYTES).decode("utf-8-sig")
        reader = csv.DictReader(StringIO(text, newline=""), strict=True)
        names = list(reader.fieldnames or ())
        rows = [(reader.line_num, fields) for fields in reader]
    except OSError as error:
        raise PenstockError(f"{where}: cannot be read ({error.strerror}); give a CSV file of measurements") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise PenstockError(
            f"{where}: not CSV ({on_one_line(str(error), 100)}); write a header and a row for each measurement"
        ) from None
    wrong = [f"no column {name!r}" for name in COLUMNS if name not in names]
    odd = (name for name in names if name not in COLUMNS or names.count(name) > 1)
    wrong += [f"column {on_one_line(name, 60)!r} is not known, or there twice" for name in odd]
    if wrong:
        raise PenstockError(f"{where}: {wrong[0]}; the first line is {','.join(COLUMNS)}")
    if not rows:
        raise PenstockError(f"{where}: no measurement in it; write a row for each below the header")
    return [_Reading(fields, f"{where}: row {i} (line {line})", machines).row() for i, (line, fields) in enumerate(rows, 1)]


@dataclass(frozen=True, slots=True)
class _Reading:
    """Parser of a row's fields."""

    fields: Mapping[str, str | None]
    where: str
    machines: frozenset[str]

    def row(self) -> OpRow:
        if any(value is None for value in self.fields.values()) or None in self.fields:
            self.fail("differs from the header in its number of fields", "give each its own")
        kind, machine = self.text("kind"), self.text("machine")
        if kind not in KINDS:
            self.unknown("kind", kind, KINDS)
        if machine not in self.machines:
            self.unknown("machine", machine, sorted(self.machines))
        unit, dtype, trust = self.text("unit"), self.text("dtype"), self.text("trust")
        for name, text, legal in (("unit", unit, KINDS[kind].units), ("dtype", dtype, DTYPES), ("trust", trust, ("1", "2", "3"))):
            if text not in legal:
                self.unknown(name, text, legal)
        if not re.fullmatch(A_SET, self.text("set")):
            self.fail(f"set {on_one_line(self.text('set'), 60)!r} is no name of a source", "write one word, as `aiconfigurator`")
        if not self.text("where").strip():
            self.fail("`where` is empty: nobody could find the measurement", "say where in its set it was published")
        if not re.fullmatch("([1-9][0-9]{0,8})?", self.text("n")):
            self.fail(f"n is {on_one_line(self.text('n'), 40)!r}", "say how many measurements were taken together, or nothing")
        sizes, model = self.shape(kind)
        value, low, high = self.number("value"), self.optional("low"), self.optional("high")
        if low is not None and high is not None and not low <= high:
            self.fail(f"low {low:g} is above high {high:g}", "give the least and the most of several versions")
        named = {name: self.text(name) for name in ("machine", "kind", "kernel", "dtype", "shape", "unit", "set")}
        is_paged = "paged cache" in self.text("conditions")
        return OpRow(**named, sizes=sizes, model=model, value=value, low=low, high=high, is_paged=is_paged, trust=int(trust))

    def text(self, name: str) -> str:
        return self.fields[name] or ""

    def shape(self, kind: str) -> tuple[dict[str, int], str | None]:
        """Parse sizes by name, and the model's name if it is a key."""
        expected, sizes, model = KINDS[kind], dict[str, int](), None
        for part in filter(None, self.text("shape").split(";")):
            key, sign, value = part.partition("=")
            if key not in (*expected.keys, *expected.optional) or not sign:
                self.unknown("shape key", key, (*expected.keys, *expected.optional))
            if key == "model":
                model = value
                if Path(value).name != value:
                    self.fail(f"model {value!r} is a path", "name a shipped one")
            elif not re.fullmatch(r"[0-9]{1,16}", value) or not int(key not in ("causal", "threads")) <= int(value) < LARGEST_SIZE:
                self.fail(f"{key} is {on_one_line(value, 40)!r}", "give a whole number, above zero where it is a size")
            elif key in sizes:
                self.fail(f"{key} is there twice", "give it once")
            else:
                sizes[key] = int(value)
        if sizes.get("causal", 1) > 1:
            self.fail(f"causal is {sizes['causal']}", "write 1, or 0 where nothing is masked")
        missing = [key for key in expected.keys if key not in sizes and not (key == "model" and model)]
        if missing:
            self.fail(f"the shape has no {missing[0]}", f"write {';'.join(f'{key}=...' for key in expected.keys)}")
        return sizes, model

    def number(self, name: str) -> float:
        try:
            value = float(self.text(name))
        except ValueError:
            value = float("nan")
        if not 0 < value < 1e30:
            self.fail(f"{name} is {on_one_line(self.text(name), 40)!r}", f"give a number above zero, in {self.text('unit')}")
        return value

    def optional(self, name: str) -> float | None:
        return self.number(name) if self.text(name) else None

    def unknown(self, name: str, value: str, legal: object) -> NoReturn:
        known = list(legal) if isinstance(legal, Mapping | tuple | list) else []
        self.fail(f"{name} {on_one_line(value, 60)!r} is not known", f"write {' or '.join(known)}")

    def fail(self, problem: str, do: str) -> NoReturn:
        raise PenstockError(f"{self.where}: {problem}; {do}")
