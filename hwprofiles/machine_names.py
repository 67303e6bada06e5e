"""Names of machines as users write them: aliases, GPUs, near names, and machines that cannot be planned for.

Case, blanks and punctuation are ignored: `RTX 4090`, `rtx-4090` and `4090` are one name. The name of a GPU means all machines with
one of it: `h100` is `h100-16core`, `h100-nvl`, `h100-pcie` and `h100-sxm`.
"""

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

NAMES_OF = {  # other names -> shipped machines
    "dgxspark": ("gb10",), "spark": ("gb10",), "dgxstation": ("gb300",), "gracehopper": ("gh200",), "graceblackwell": ("gb200",),
    **{f"{box}{gpu}": (f"8x{gpu}",) for box in ("dgx", "hgx") for gpu in ("h100", "h200", "b200")},
    "a10080gb": ("a100-pcie", "a100-sxm"), "a100sxm480gb": ("a100-sxm",),
    "a100sxm4": ("a100-sxm",), "h10080gb": ("h100-16core", "h100-pcie", "h100-sxm"), "h100sxm5": ("h100-sxm", "h100-16core"),
    "h200sxm": ("h200-16core", "h200-pcie5"), "rtxpro6000blackwell": ("rtxpro6000-workstation",),
}  # fmt: skip
MAKERS = re.compile(r"nvidia|geforce|tesla|quadro|^amd|instinct|radeon|intel|apple")
NO_BF16 = "has no bf16 arithmetic, and training steps run in bf16"
NOT_CUDA = "is no CUDA GPU; plans are for NVIDIA GPUs of 2020 and later, MI300X and MI355X, and CPUs"
APPLE = "has no CUDA, and training runs on CUDA devices"
SHARED = "is a CPU and a GPU with one memory, and neither its link nor its kernels were measured"
REFUSED = (  # patterns of whole names, and the reason
    (r"i?mac(?:book)?(?:studio|mini|pro|air)*(?:m[1-9])?(?:pro|max|ultra)?", APPLE),
    (r"m[1-9](?:pro|max|ultra)?(?:[0-9]+gb)?|mps", APPLE),
    (r"strixhalo|(?:ryzen)?ai(?:max)+[0-9a-z]*|ryzen.*|gfx1151|8060s|780m|890m", SHARED),
    (r"t4g?|v100.*|p100.*|p40|p4|k80|m40|m60|titan.*|gtx.*|(?:rtx)?20[0-9]0.*|gtx16.*|rtx[458]000|[0-9]+xv100|[0-9]+xt4", NO_BF16),
    (r"gaudi[0-9]?|tpu.*|v[2-6][ep]|trainium[0-9]?|arc.*|b580|rx[0-9].*|mi(?:50|60|100|2[0-9]{2}x?)|ascend.*", NOT_CUDA),
)  # fmt: skip
LEAST_ALIKE = 0.6  # ratio of matching letters


def squashed(name: str) -> str:
    """`NVIDIA RTX 4090` -> `rtx4090`; empty for the path of a file."""
    plain = "" if re.search(r"/|\.json$", name) else re.sub(r"[^a-z0-9]", "", name.lower())
    return MAKERS.sub("", plain) or plain


def matching(name: str, shipped: Sequence[str]) -> list[str]:
    """Return the shipped machines that a name means, sorted; empty without a match."""
    wanted = squashed(name)
    exact = [machine for machine in shipped if squashed(machine) == wanted]
    by_gpu = [machine for machine in shipped if wanted in _spellings(machine)]
    return exact or sorted(set(NAMES_OF.get(wanted, ())) & set(shipped)) or sorted(by_gpu)


def _spellings(machine: str) -> set[str]:
    """`rtx4090-desktop` -> rtx4090, 4090, rtx4090desktop, 4090desktop."""
    gpu, _, rest = machine.partition("-")
    return {stem + ending for stem in (gpu, gpu.removeprefix("rtx")) for ending in ("", rest)}


def refusal(name: str) -> str | None:
    """Return the reason to refuse this machine; None without a reason."""
    return next((why for pattern, why in REFUSED if re.fullmatch(pattern, squashed(name))), None)


def nearest(name: str, shipped: Sequence[str]) -> str | None:
    """Return the shipped machine with the most similar name; None if none is similar."""

    def unlike(machine: str) -> tuple[float, bool, bool, str]:
        gpu, _, rest = machine.partition("-")
        ratio = max(SequenceMatcher(None, squashed(name), stem, autojunk=False).ratio() for stem in (gpu, gpu + rest))
        return -ratio, rest not in ("", "sxm"), rest[:1].isdigit(), machine

    best = min(shipped, key=unlike)
    return best if -unlike(best)[0] >= LEAST_ALIKE else None


def unknown(name: str, where: str, shipped: Sequence[str]) -> str:
    """Return one line for a name that means no shipped machine, or several. `where`: the name as it may be printed."""
    if several := matching(name, shipped):
        gpus = {machine.partition("-")[0] for machine in several}
        groups = [machine for machine in shipped if machine[0].isdigit() and machine.partition("x")[2] in gpus]
        return f"machine {where!r} may be {', '.join([*several, *groups])}; name one of them"
    if (why := refusal(name)) is not None:
        return f"no machine {where!r}: it {why}; choose another of `penstock machines`"
    if (near := nearest(name, shipped)) is None:
        return f"no machine or file {where!r}: `penstock machines` lists shipped ones, and `penstock probe -o FILE` writes one"
    adjust = "adjust it with --device-memory, --host-memory, --host-cores and --link"
    return f"no machine {where!r}: the nearest is {near}; {adjust}, or copy it: penstock machines {near} > mine.json"
