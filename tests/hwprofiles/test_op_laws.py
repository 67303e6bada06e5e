"""Laws of products, attention and collectives: values, and monotonicity of time in work."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.hwprofiles.components import BACKWARD_ATTENTION, AttentionCall
from penstock.hwprofiles.op_laws import SPLITS, TILES, ProductLaw
from penstock.hwprofiles.schema import read_profile, shipped_profiles

SIZES = st.integers(1, 2**17)
WITH_LAWS = [name for name in shipped_profiles() if isinstance(read_profile(name).device.matmul["bf16"], ProductLaw)]
PRODUCTS = [read_profile(name).device.matmul["bf16"] for name in WITH_LAWS]
KERNELS = [rates for name in WITH_LAWS for by_dtype in read_profile(name).device.attention.values() for rates in by_dtype.values()]
PASSES = [rates.pass_of(backward) for rates in KERNELS if not isinstance(rates, tuple) for backward in (False, True)]
COLLECTIVES = [law for name in WITH_LAWS if (peers := read_profile(name).peers) for law in peers.collectives.values()]


def plain_product_s(law: ProductLaw, m: int, k: int, n: int) -> float:
    """Reference implementation of `ProductLaw.seconds`: minimum over tiles and splits, memory time, and overlap of both."""
    seconds = []
    for rows, columns in TILES:
        for splits in SPLITS:
            blocks = math.ceil(m / rows) * math.ceil(n / columns) * splits
            per_processor = blocks / law.n_processors
            rounded, busy = math.ceil(per_processor), max(per_processor, 1)
            waves = math.exp(law.rounding * math.log(rounded) + (1 - law.rounding) * math.log(busy))
            flop = 2 * rows * columns * (k / splits + law.short_k) * (1 + law.reload * (64 / rows + 64 / columns))
            sums_s = 0.0 if splits == 1 else law.split_s + 4 * m * n * splits / 1e12
            seconds.append(waves * flop * law.n_processors / law.flop_per_s.value + sums_s)
    computing_s = min(seconds) * max(1.0, 2 * m * k * n / 1e11) ** law.heat
    moving_s = 2 * (m * k + k * n + m * n) / (law.memory_fraction * 1e12)
    norm = max(computing_s, moving_s)
    return norm * ((computing_s / norm) ** law.overlap + (moving_s / norm) ** law.overlap) ** (1 / law.overlap)


@given(st.sampled_from(PRODUCTS), SIZES, SIZES, SIZES)
def test_a_product_takes_what_its_tiles_and_bytes_take(law, m, k, n):
    assert law.seconds(m, k, n, 2, 1e12) == pytest.approx(plain_product_s(law, m, k, n))


@given(st.sampled_from(PRODUCTS), SIZES, SIZES, SIZES, st.integers(0, 2), st.floats(1, 4))
def test_a_larger_product_takes_longer(law, m, k, n, index, factor):
    larger = [m, k, n]
    larger[index] = math.ceil(larger[index] * factor)
    assert law.seconds(*larger, 2, 1e12) >= law.seconds(m, k, n, 2, 1e12) * (1 - 1e-9)


@given(st.sampled_from(PASSES), st.integers(1, 2**20), st.integers(1, 2**12), st.sampled_from([64, 128, 256]), st.booleans())
def test_attention_over_longer_sequences_takes_longer(law, seq_len, extra, head_dim, grouped):
    short, long = (law.rate(n, head_dim, grouped) for n in (seq_len, seq_len + extra))
    assert short <= long <= law.flop_per_s.value * max(1, law.grouped) * max(1, law.narrow, 1 / law.narrow)
    assert (seq_len + extra) ** 2 / long > seq_len**2 / short
    assert law.rate(seq_len, head_dim, grouped, causal=False) >= short


@given(st.sampled_from(COLLECTIVES), st.integers(1, 64), st.integers(1, 2**34), st.integers(1, 2**20))
def test_more_bytes_of_a_collective_take_longer(law, n_devices, n_bytes, extra):
    assert law.moving_s(n_devices, n_bytes + extra) >= law.moving_s(n_devices, n_bytes) >= 0
    assert law.latency_of(n_devices + 1) >= law.latency_of(n_devices) > 0


def test_a_profile_asks_its_laws():
    profile = read_profile("h200-pcie5")
    law, flash = profile.device.matmul["bf16"], profile.device.attention["flash"]["bf16"]
    assert isinstance(law, ProductLaw)
    seconds = law.seconds(8192, 8192, 8192, 2, profile.device.memory_bytes_per_s.value)
    rate, spread = profile.matmul_rate("bf16", 8192, 8192, 8192), law.flop_per_s.spread_fraction
    assert rate == (pytest.approx(2 * 8192**3 / seconds), True)
    assert 769e12 / (1 + spread) <= rate.value <= 798e12, "rate measured by its team; others measured less"
    assert not profile.matmul_rate("bf16", 4096, 100, 100).inside_measured
    call = AttentionCall("bf16", 4096, 128, True)
    assert profile.attention_rate(call, False).value == flash.forward.rate(4096, 128, True)
    assert BACKWARD_ATTENTION == 5 / 2, "the usual convention"
