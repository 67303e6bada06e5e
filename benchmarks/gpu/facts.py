"""Stage that records hardware and software of the machine."""

import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from penstock.hwprofiles.probe.cpu import cpu_name

from .stages import ROOT, Note, Request

PACKAGES = ("torch", "transformers", "pydantic", "numpy", "triton", "flash-attn", "deepspeed", "pytest-xdist", "datasets")
QUERY = (
    "name", "driver_version", "memory.total", "memory.used", "power.limit", "clocks.max.sm", "clocks.sm",
    "temperature.gpu", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "ecc.mode.current",
    "mig.mode.current", "persistence_mode",
)  # fmt: skip
_CACHES = "/sys/devices/system/cpu/cpu0/cache"
FILES = (
    "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/transparent_hugepage/defrag", "/proc/sys/vm/overcommit_memory",
    "/proc/sys/vm/max_map_count", f"{_CACHES}/index2/size", f"{_CACHES}/index3/size", f"{_CACHES}/index3/shared_cpu_list",
    "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/cpu.max", "/proc/loadavg",
)  # fmt: skip
COMMANDS = (("lscpu",), ("lscpu", "-e"), ("nvidia-smi",), ("nvidia-smi", "topo", "-m"), ("free", "-b"), ("df", "-h", "/tmp"))
COMMAND_S = 5.0


def facts(request: Request, note: Note) -> None:
    note("system", platform=platform.platform(), python=platform.python_version(), commit=commit(), command=sys.argv[1:])
    note("versions", **{name: _version(name) for name in PACKAGES})
    note("cores", n_usable=len(os.sched_getaffinity(0)), n_there=os.cpu_count(), model=cpu_name(), siblings=siblings())
    note("memory", **meminfo(), locked_limit_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    note("settings", **{path: _text(Path(path)) for path in FILES})
    if shutil.which("nvidia-smi"):
        note("gpu", **(_asked_of_driver(QUERY) or _asked_of_driver(QUERY[:3])))
    for words in COMMANDS:
        if shutil.which(words[0]):
            print("$", *words, "\n" + _output(words), flush=True)
    _of_torch(request, note)


def _asked_of_driver(names: tuple[str, ...]) -> dict[str, str]:
    """Return nvidia-smi's fields of the first GPU, or nothing if a name is unknown."""
    values = _output(("nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader")).partition("\n")[0].split(", ")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def _of_torch(request: Request, note: Note) -> None:
    import torch

    note("torch", cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), is_cuda_there=torch.cuda.is_available())
    if request.device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        device = torch.cuda.get_device_properties(0)
        note(
            "device", name=device.name, capability=f"{device.major}.{device.minor}", n_multiprocessors=device.multi_processor_count,
            total_bytes=total_bytes, free_bytes=free_bytes, context_bytes=total_bytes - free_bytes,
            is_cudnn_attention_allowed=torch.backends.cuda.cudnn_sdp_enabled(),
        )  # fmt: skip


def meminfo() -> dict[str, int]:
    """Return the system's memory sizes. They may grow on demand."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    wanted = {"total": "MemTotal", "available": "MemAvailable", "swap": "SwapTotal", "commit_limit": "CommitLimit"}
    return {f"{name}_bytes": int(lines[key].split()[0]) * 1024 for name, key in wanted.items() if key in lines}


def commit() -> str:
    return _output(("git", "rev-parse", "--short", "HEAD")).strip() or "unknown"


def _output(words: tuple[str, ...]) -> str:
    try:
        return subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True, timeout=COMMAND_S).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def siblings() -> list[str]:
    """Return the groups of sibling threads."""
    paths = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return sorted({text for path in paths if (text := _text(path))})
