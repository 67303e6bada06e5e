"""CUDA sources, compiled by NVRTC for several architectures without a GPU; widths of loads and stores, read from PTX and SASS."""

import ctypes
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from shutil import which
from subprocess import run

import pytest
from torch.utils import cpp_extension

from penstock.runtime.cuda import nvrtc
from tests.lanes import diagonal, mostly_slow

BF16, FP32, BYTE = "unsigned short", "float", "unsigned char"
ARCHITECTURES = (80, 89, 90, 100)
_LEAN = {"WEIGHT": BF16, "GRADIENT": BF16, "REMAINDER": "short", "IS_SPLIT": 1, "IS_LION": 0, "IS_STOCHASTIC": 0}
# Definitions for each file: the first for every architecture, the others for one
SOURCES: dict[str, list[dict[str, str | int]]] = {
    "pointwise.cu": [
        *({"ELEMENT": t, "ACTIVATION": gate} for gate in range(3) for t in (BF16, FP32)), {"ELEMENT": BF16}, {"ELEMENT": FP32},
    ],
    "unpack.cu": [{"OUT": t, "BASE": base} for base in range(4) for t in (BF16, FP32)],
    "adamw.cu": [{"WEIGHT": t, "GRADIENT": t, "IS_SPLIT": split} for t, split in ((BF16, 1), (BF16, 0), (FP32, 0))],
    "low_bit_optim.cu": [_LEAN | {"MOMENT": moment} for moment in (BF16, BYTE)],
    "squares.cu": [{"ELEMENT": t, "CHUNK": nvrtc.THREADS**2, "THREADS": nvrtc.THREADS} for t in (BF16, FP32)],
    "loss.cu": [{"LOGIT": t, "THREADS": 512} for t in (BF16, FP32)],
    "quantise.cu": [{"ELEMENT": t, "FACTORS": n} for t in (BF16, FP32) for n in (0, 1)],
}  # fmt: skip
INCLUDED = {"vectors.cu"}
# (loads, stores) of 16 bytes a thread; kernels of pointwise.cu have an equal number of one element, for partial vectors
WIDE = {"gated": (2, 1), "gated_gradients": (3, 2), "rotate": (6, 2), "rotate_back": (6, 2)}


@cache
def library() -> ctypes.CDLL:
    try:
        files = metadata.files("nvidia-cuda-nvrtc") or []
    except metadata.PackageNotFoundError:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    paths = {path.name: str(path.locate()) for path in files if path.name.startswith("libnvrtc") and ".alt." not in path.name}
    builtins, main = sorted(paths, key=lambda name: "builtins" not in name)
    ctypes.CDLL(paths[builtins], mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(paths[main])


@cache
def compiled(file: str, n: int, architecture: int) -> tuple[str, bytes]:
    """Return (PTX, binary) of a file with its n-th definitions."""
    source, program = nvrtc.source(file, **SOURCES[file][n]), ctypes.c_void_p()
    assert library().nvrtcCreateProgram(ctypes.byref(program), source.encode(), file.encode(), 0, None, None) == 0
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=sm_{architecture}".encode())
    failed = library().nvrtcCompileProgram(program, 1, options)
    assert not failed, _read(program, "ProgramLog").decode()
    result = _read(program, "PTX").decode(), _read(program, "CUBIN")
    library().nvrtcDestroyProgram(ctypes.byref(program))
    return result


def _read(program: ctypes.c_void_p, part: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library(), f"nvrtcGet{part}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library(), f"nvrtcGet{part}")(program, buffer)
    return buffer.raw


def accesses(ptx: str) -> Iterator[tuple[str, Counter[tuple[str, int]]]]:
    """Return accesses of global memory by kernel name: (ld or st, bytes)."""
    for kernel in ptx.split(".visible .entry ")[1:]:
        matches = re.findall(r"(ld|st)\.global(?:\.nc)?(?:\.L\w+)*(?:\.v(\d))?\.[usfb](\d+)", kernel)
        yield kernel[: kernel.index("(")], Counter((way, int(n or 1) * int(bits) // 8) for way, n, bits in matches)


def test_every_source_is_compiled_here() -> None:
    files = {path.name for path in Path(nvrtc.__file__).parent.glob("*.cu")}
    assert files == SOURCES.keys() | INCLUDED
    assert all(f'#include "{name}"' not in nvrtc.source(file) for file in SOURCES for name in INCLUDED)


@diagonal(("file", SOURCES), ("architecture", ARCHITECTURES))
def test_a_source_compiles_for_each_architecture(file: str, architecture: int) -> None:
    ptx, binary = compiled(file, 0, architecture)
    assert f".target sm_{architecture}" in ptx
    assert binary[:4] == b"\x7fELF"


@mostly_slow("n", range(len(SOURCES["pointwise.cu"])), fast=(0, 3, 6))
def test_pointwise_kernels_load_and_store_16_bytes(n: int) -> None:
    """Only the loop over the rest accesses single elements. Split vectors multiply the count by four or eight."""
    item = 2 if SOURCES["pointwise.cu"][n]["ELEMENT"] == BF16 else 4
    kernels = dict(accesses(compiled("pointwise.cu", n, 90)[0]))
    is_gate = "ACTIVATION" in SOURCES["pointwise.cu"][n]
    assert kernels.keys() == ({"gated", "gated_gradients"} if is_gate else {"rotate", "rotate_back"})
    for name, counts in kernels.items():
        loads, stores = WIDE[name]
        assert counts == {("ld", 16): loads, ("st", 16): stores, ("ld", item): loads, ("st", item): stores}, name


@mostly_slow("n", range(len(SOURCES["unpack.cu"])), fast=(0, 3, 6))
def test_unpacking_loads_the_codes_of_8_numbers_and_stores_16_bytes(n: int) -> None:
    defined, ((_, counts),) = SOURCES["unpack.cu"][n], accesses(compiled("unpack.cu", n, 90)[0])
    item, codes = 2 if defined["OUT"] == BF16 else 4, 4 if defined["BASE"] in (0, 3) else 8
    assert (counts["st", 16], counts["st", item], counts["ld", 1]) == (item // 2, 1, 1 + (defined["BASE"] == 3))
    expected = Counter({("ld", codes): 1})
    if defined["BASE"] == 3:
        expected["ld", 8] += 1  # scales
    else:
        expected["ld", 4] += 2 + (defined["BASE"] == 0)  # scales in both loops, and the table
    assert {key: k for key, k in counts.items() if key[0] == "ld" and key[1] > 1} == expected


@mostly_slow("n", range(len(SOURCES["adamw.cu"])))
def test_adamw_loads_and_stores_8_and_16_bytes(n: int) -> None:
    """The compiler can emit a loop twice: for either form of the first moment's interpolation."""
    defined, ((_, counts),) = SOURCES["adamw.cu"][n], accesses(compiled("adamw.cu", n, 90)[0])
    is_split, is_bf16 = int(defined["IS_SPLIT"]), defined["WEIGHT"] == BF16
    n_short = {"ld": 2 + is_split, "st": 1 + is_split} if is_bf16 else {"ld": 0, "st": 0}
    n_wide = {"ld": 2, "st": 2} if is_bf16 else {"ld": 4, "st": 3}
    by_vectors, one_by_one = counts["st", 16] // n_wide["st"], counts["st", 4] // n_wide["st"]
    assert {by_vectors, one_by_one} <= {1, 2}
    for way in ("ld", "st"):
        assert (counts[way, 16], counts[way, 8]) == (by_vectors * n_wide[way], by_vectors * n_short[way])
        assert (counts[way, 4], counts[way, 2]) == (one_by_one * n_wide[way], one_by_one * n_short[way])


@pytest.mark.parametrize("n", range(len(SOURCES["loss.cu"])))
def test_the_loss_loads_and_stores_16_bytes(n: int) -> None:
    ((_, counts),) = accesses(compiled("loss.cu", n, 90)[0])
    assert counts["ld", 16] > 0
    assert counts["st", 16] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("file", "n"), [(f, n) for f in ("low_bit_optim.cu", "squares.cu") for n in range(1, len(SOURCES[f]))])
def test_other_definitions_compile(file: str, n: int) -> None:
    """Compile definitions of files without an access count."""
    assert compiled(file, n, 90)[1][:4] == b"\x7fELF"


@pytest.mark.skipif(which("cuobjdump") is None, reason="no cuobjdump")
@pytest.mark.parametrize("file", ["pointwise.cu", "unpack.cu", "adamw.cu"])
def test_machine_code_keeps_the_wide_accesses(file: str, tmp_path: Path) -> None:
    ptx, binary = compiled(file, 0, 90)
    (tmp_path / "kernel.cubin").write_bytes(binary)
    sass = run(["cuobjdump", "-sass", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    for name, counts in accesses(ptx):
        (function,) = (part for part in sass.split("Function : ")[1:] if part.split()[0] == name)
        assert len(re.findall(r"\bLDG\.E\.128", function)) >= counts["ld", 16] > 0 or file == "unpack.cu", name
        assert len(re.findall(r"\bSTG\.E\.128", function)) >= counts["st", 16] > 0, name


def test_a_machine_without_a_toolkit_compiles(monkeypatch):
    """Emulate a pip installation of torch alone: torch looks for the toolkit's folder, and our sources include no header."""
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with pytest.raises(OSError, match="CUDA_HOME"):
        cpp_extension.include_paths("cuda")
    with nvrtc.without_toolkit():
        assert not [path for path in cpp_extension.include_paths("cuda") if path.startswith("/usr")]
    assert cpp_extension.CUDA_HOME is None
