"""Instruction sets of CPUs that decide the rate of bf16 products, from the flags in /proc/cpuinfo.

Without bf16 instructions oneDNN converts operands to fp32; without AVX-512 it has no bf16 kernel at all, and torch computes with a
loop. Slowdowns are the time of a training step in bf16 over its time in fp32 (docs/log.md, 2026-11-29).
"""

from contextlib import suppress
from pathlib import Path

from .schema import Profile

CPUINFO = Path("/proc/cpuinfo")
# Instruction set, a flag of it, and the slowdown of bf16; the best first
X86: tuple[tuple[str, str, float], ...] = (
    ("AVX-512 with bf16", "avx512_bf16", 1.0),
    ("AVX2 with bf16", "avx_ne_convert", 1.0),
    ("AVX-512 without bf16", "avx512dq", 3.0),
    ("no AVX-512", "avx", 17.0),
)
ADVICE = "plan with --compute fp32"


def instruction_set(cpuinfo: Path = CPUINFO) -> tuple[str, float] | None:
    """Return the name of this CPU's instruction set, and the slowdown of bf16; None for other processors than x86."""
    with suppress(OSError):
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")]
        flags = set(lines[0].split()) if lines else set()
        return next(((name, slowdown) for name, flag, slowdown in X86 if flag in flags), None)
    return None


def run_advice(cpuinfo: Path = CPUINFO) -> str | None:
    """Return a line for a run in bf16 on this CPU if fp32 is faster, else None."""
    name, slowdown = instruction_set(cpuinfo) or ("", 1.0)
    if slowdown <= 1:
        return None
    return f"this CPU has {name}: steps in fp32 are about {slowdown:.0f} times as fast as in bf16; {ADVICE}"


def plan_advice(profile: Profile, cpuinfo: Path = CPUINFO) -> str | None:
    """Return a line for a plan in bf16 on a CPU: if its rates are slower than those of fp32, or if this CPU lacks the instructions
    of the profile. None if bf16 is faster."""
    if profile.device.kind != "cpu":
        return None
    size = (1024, 1024, 1024)
    bf16, fp32 = (profile.matmul_rate(dtype, *size).value for dtype in ("bf16", "fp32"))
    if fp32 > bf16:
        return f"{profile.name}: fp32 products are {fp32 / bf16:.2g} times as fast as bf16 ones; {ADVICE}"
    advice, profiled = run_advice(cpuinfo), profile.device.instructions
    return None if advice is None or profiled is None else f"{profile.name} was measured with {profiled}, but {advice}"
