"""Names of machines as users write them: one match is taken, several are listed, others get the nearest or a reason."""

from tempfile import gettempdir

import pytest

from penstock.hwprofiles.machine_names import matching, nearest, refusal
from penstock.hwprofiles.schema import read_profile, shipped_profiles
from penstock.runtime.errors import ProfileError

SHIPPED = shipped_profiles()


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("DGX Spark", "gb10"), ("A100 40GB", "a100-40gb"), ("l40s", "l40s-server"), ("NVIDIA L4", "l4"), ("H100_SXM", "h100-sxm"),
        ("RTX PRO 6000", "rtxpro6000-workstation"), ("8 x H100", "8xh100"), ("HGX H200", "8xh200"), ("2x RTX 3090", "2xrtx3090"),
        ("GeForce RTX 4090 Desktop", "rtx4090-desktop"), ("4080", "rtx4080"), ("AMD Instinct MI300X", "mi300x")
    ],
)  # fmt: skip
def test_a_name_of_one_machine_is_taken_with_a_note(name: str, machine: str) -> None:
    notes: list[str] = []
    assert read_profile(name, notes.append).name == machine
    assert notes == [f"machine {name!r} is taken as {machine}"]
    assert read_profile(machine, notes.append).name == machine
    assert len(notes) == 1, "its own name needs no note"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RTX 4090", "may be rtx4090-desktop, rtx4090-server, rtx4090-threadripper, 2xrtx4090, 8xrtx4090; name one"),
        ("H100", "may be h100-16core, h100-nvl, h100-pcie, h100-sxm, 8xh100; name one"),
        ("h800", "the nearest is h100-sxm; adjust it with .* or copy it: penstock machines h100-sxm > mine.json"),
        ("rtx4070", "the nearest is rtx4080"),
        ("L40", "the nearest is l40s-server"),
        ("T4", "no bf16 arithmetic"),
        ("Tesla V100", "no bf16 arithmetic"),
        ("RTX 2080 Ti", "no bf16 arithmetic"),
        ("Mac Studio M3 Ultra", "no CUDA"),
        ("m4-max", "no CUDA"),
        ("Strix Halo", "one memory"),
        ("Ryzen AI Max+ 395", "one memory"),
        ("gaudi3", "no CUDA GPU"),
        ("h200-pcie4", "nearest is h200-pcie5"),
        ("x" * 5000, "too long"),
        *((name, "machines` lists") for name in ("odd", "x\0y", gettempdir(), "", "../gb10", "mine.json")),  # a path is no name
    ],
)
def test_any_other_name_is_answered_in_one_line(name: str, words: str) -> None:
    with pytest.raises(ProfileError, match=words) as caught:
        read_profile(name)
    assert "\n" not in str(caught.value)
    shuffled = SHIPPED[::-1]
    assert (nearest(name, shuffled), matching(name, shuffled)) == (nearest(name, SHIPPED), matching(name, SHIPPED))


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_machine_is_never_refused_and_means_itself(name: str) -> None:
    assert refusal(name) is None
    assert matching(name.upper().replace("-", " "), SHIPPED) == [name]
