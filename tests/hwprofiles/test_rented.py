"""Rented hosts: rates for fewer cores against two probed virtual machines, the link, and refusals of values that cannot be."""

from itertools import pairwise

import pytest

from penstock.hwprofiles.rented import rented
from penstock.hwprofiles.schema import read_profile, shipped_profiles
from penstock.runtime.errors import ProfileError

H100 = read_profile("h100-sxm")
GPUS = [name for name in shipped_profiles() if read_profile(name).device.kind == "cuda"]


@pytest.mark.parametrize(("name", "probed"), [("h100-sxm", "h100-16core"), ("h200-pcie5", "h200-16core")])
def test_sixteen_cores_of_a_server_are_near_a_probed_virtual_machine(name, probed):
    """Memory bandwidth within 6 %, the optimizer and norms within 25 %; the whole server is 3 to 20 times as fast."""
    expected, result, server = read_profile(probed).host, rented(read_profile(name), host_cores=16).host, read_profile(name).host
    assert result.n_cores == expected.n_cores == 14
    assert result.dram_bytes_per_s.value == pytest.approx(expected.dram_bytes_per_s.value, rel=0.06)
    assert result.reduce_bytes_per_s.value == pytest.approx(expected.reduce_bytes_per_s.value, rel=0.1)
    fastest = [host.optimizer[-1].params_per_s.value for host in (result, expected, server)]
    assert fastest[0] == pytest.approx(fastest[1], rel=0.25)
    assert fastest[2] > 2.5 * fastest[1]


@pytest.mark.parametrize("name", GPUS)
def test_every_machine_can_be_rented_with_another_host(name):
    """Rates do not rise with fewer cores, and the optimizer's traffic is within the memory bandwidth."""
    profile = read_profile(name)
    for n_cores in (2, 9, 26, 1024):
        host = rented(profile, host_cores=n_cores).host
        assert host.n_cores == n_cores - (1 if n_cores <= 8 else 2)
        assert host.dram_bytes_per_s.value <= profile.host.dram_bytes_per_s.value * 1.001
        assert host.optimizer[-1].params_per_s.value * 28 <= host.dram_bytes_per_s.value
        assert all(a.params_per_s.value <= b.params_per_s.value * 1.001 for a, b in pairwise(host.optimizer))
    assert rented(profile) is profile


def test_a_bandwidth_scales_the_optimizer_and_one_thread_stays() -> None:
    twice = rented(H100, host_bandwidth_bytes_per_s=700e9)
    assert twice.host.dram_bytes_per_s.value == pytest.approx(700e9)
    assert [twice.optimizer_params_per_s(n) for n in (1, 16)] == pytest.approx([0.8e9, 2 * H100.optimizer_params_per_s(8)])
    small = rented(read_profile("rtx4090-desktop"), 4, None, 60e9)  # a whole CPU with fewer cores
    assert small.optimizer_params_per_s(2) == pytest.approx(1.5e9)
    assert {small.sources[q.source].kind for place, q in small.quantities() if "host.dram" in place} == {"user"}


def test_a_link_has_its_rate_in_each_direction_and_less_in_both() -> None:
    profile = rented(read_profile("h100-16core"), link_bytes_per_s=12e9)  # this one was also measured under load
    assert max(profile.copy_bytes_per_s(way, 2**24) for way in ("h2d", "d2h")) <= 12e9
    assert max(p.rate.value for p in profile.link.h2d.bytes_per_s) == pytest.approx(12e9)
    ratio = profile.link.duplex_bytes_per_s.value / read_profile("h100-16core").link.duplex_bytes_per_s.value
    assert ratio == pytest.approx(24e9 / (59.436e9 + 61.0048e9), rel=1e-4)
    assert profile.link.h2d.duplex_bytes_per_s.value == pytest.approx(48.5354e9 * 12 / 59.436, rel=1e-4)
    assert profile.copy_s("h2d", 0) == read_profile("h100-16core").copy_s("h2d", 0), "the latency stays"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"host_cores": 1}, "--host-cores 1: is not between 2 and 1024"),
        ({"host_cores": 2000}, "--host-cores 2000: is not between"),
        ({"link_bytes_per_s": 1e13}, "--link 10 TB/s: is not between 100 MB/s and 1 TB/s; .*one GPU's"),
        ({"host_bandwidth_bytes_per_s": -1.0}, "--host-bandwidth -1 B/s: is not between"),
        ({"link_bytes_per_s": float("nan")}, "--link nan"),
    ],
)
def test_values_that_no_host_has_are_refused(values, words):
    with pytest.raises(ProfileError, match=words):
        rented(H100, **values)
    with pytest.raises(ProfileError, match="is for the host of a GPU"):
        rented(read_profile("cpu-2core"), **values)
