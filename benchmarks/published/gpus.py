"""Datasheet facts of the GPUs with shipped profiles, for the laws of single ops."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """Datasheet facts for a law. For a GPU without rows: the GPU with its law, and its own rate to scale to."""

    architecture: str
    n_processors: int
    like: str | None = None  # measured GPU with the same law
    flop_per_s: float | None = None  # 8192-cubed product in bf16
    spread_fraction: float = 0.0  # of `flop_per_s`
    why: str = ""


MAMF = "maximum achievable matmul, stas00/ml-engineering"
ON_5090 = "224 TFLOP/s over (16384, 1280) @ (1280, 8192), main-horse.github.io/posts/5090-mm-perf"
GPUS: dict[str, Gpu] = {
    "a100-sxm": Gpu("Ampere", 108),
    "a100-pcie": Gpu("Ampere", 108, "a100-sxm", 242e12, 0.06, f"{MAMF}: 252.9 TFLOP/s against 271.2 of the SXM module"),
    "a100-40gb": Gpu("Ampere", 108, "a100-sxm", 250e12, 0.04, "identical chip and power limit"),
    "a10g": Gpu("Ampere", 80, "a100-sxm", 60e12, 0.15, "70 TFLOP/s in bf16 by datasheet, times 0.86"),
    **dict.fromkeys(
        ("rtx3090-desktop", "rtx3090-epyc", "rtx3090-threadripper"),
        Gpu("Ampere", 82, "a100-sxm", 65e12, 0.1, "71 TFLOP/s in bf16 with fp32 sums by datasheet, of which 0.92 is taken"),
    ),
    "rtxa6000-threadripper": Gpu("Ampere", 84, "a100-sxm", 114e12, 0.15, "155 TFLOP/s in bf16 by datasheet, under 300 W"),
    "l40s-server": Gpu("Ada", 142),
    "rtx4090-server": Gpu("Ada", 128),
    "rtx4080": Gpu("Ada", 76, "rtx4090-server", 98e12, 0.1, "97.5 TFLOP/s in bf16 with fp32 sums by datasheet, RTX 4090 165"),
    "l4": Gpu("Ada", 58, "l40s-server", 60e12, 0.25, "121 TFLOP/s in bf16 by datasheet, under 72 W: half is taken"),
    "h100-sxm": Gpu("Hopper", 132),
    "h200-pcie5": Gpu("Hopper", 132),
    "gh200": Gpu("Hopper", 132, "h100-sxm", 755e12, 0.06, f"{MAMF}: 828.6 TFLOP/s at 900 W against 794.5 of H100 SXM"),
    "h100-nvl": Gpu("Hopper", 132, "h100-sxm", 585e12, 0.12, "835 TFLOP/s by datasheet, under 400 W"),
    "h100-pcie": Gpu("Hopper", 114, "h100-sxm", 484e12, 0.12, "114 multiprocessors of 132, and 350 W"),
    "b200": Gpu("Blackwell", 148),
    "gb200": Gpu("Blackwell", 152),
    "gb300": Gpu("Blackwell", 152),
    "rtxpro6000-workstation": Gpu("Blackwell GeForce", 188),
    **dict.fromkeys(
        ("rtx5090-desktop", "rtx5090-server", "rtx5090-threadripper"),
        Gpu("Blackwell GeForce", 170, "rtxpro6000-workstation", 224e12, 0.1, ON_5090),
    ),
    "rtx5080": Gpu(
        "Blackwell GeForce", 84, "rtxpro6000-workstation", 120e12, 0.12, f"112.6 TFLOP/s by datasheet, RTX 5090 209.5 and {ON_5090}"
    ),
    "gb10": Gpu("Blackwell GeForce", 48, "rtxpro6000-workstation", 103e12, 0.15, "from runs, docs/accuracy.md"),
    "mi300x": Gpu("CDNA", 304),
    "mi355x": Gpu("CDNA", 256),
}
