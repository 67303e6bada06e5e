"""Masters and moments that stay on the device: they are updated there to the host's bits."""

from ctypes import CDLL, c_float, c_long, c_void_p
from dataclasses import replace
from shutil import which
from subprocess import run

import pytest
import torch

from runtime.host.adamw import PROBE_ELEMENTS, SOURCE, gives_the_hosts_bits, in_one_call, on_device
from runtime.host.chunks import Scratch, update_loop
from runtime.host.optimizer import Step, summed
from runtime.plan import Kind, Policy, Update
from runtime.plan.optimizer import AdamW
from tests.tiny import tiny_config
from tests.training import differences, semantics_of, streamed
from tests.updating import update_

from .test_optimizer import KINDS, copied, random_state

CPU = torch.device("cpu")
EVERYWHERE = Policy(accumulation_group=4, device_blocks=(0, 1, 2, 3), update=Update.DEFERRED)


@pytest.mark.parametrize(
    ("fields", "n_sequences"),
    [({"compute_dtype": "fp32"}, 4), ({}, 1), ({"master_dtype": "bf16"}, 4), ({"gradient_dtype": "fp32"}, 1)],
)
def test_a_state_all_on_the_device_trains_the_plain_loops_bits(fields: dict, n_sequences: int) -> None:
    """Parts of it are there in plans of the law in test_exactness."""
    config = tiny_config("qwen3", tie_word_embeddings=False)
    policy = replace(EVERYWHERE, accumulation_group=n_sequences)
    machine = streamed(config, semantics_of("qwen3", **fields, batch_size=n_sequences), policy)
    assert machine.plan.arena("state").n_bytes == machine.plan.arena("host_gradients").n_bytes == 0
    assert not {Kind.UPDATE, Kind.OFFLOAD_GRADIENT} & {op.kind for op in machine.plan.ops}
    assert differences(machine) == []


ROUNDING = """
#include <cmath>
static float __fmaf_rn(float a, float b, float c) { return FUSED ? std::fma(a, b, c) : a * b + c; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return std::sqrt(a); }
"""
LOOP = """
extern "C" void update(long n, float* m, const float* g, float* a, float* s, const float* by) {
    for (long i = 0; i < n; i++)
        adamw<float>(m[i], g[i], a[i], s[i], by[0], by[1], by[2], by[3], by[4], by[5], by[6], m[i], a[i], s[i]);
}
"""


@pytest.mark.skipif(which("g++") is None, reason="no compiler")
@pytest.mark.parametrize("fused", [1, 0])
def test_the_kernel_of_a_gpu_gives_the_hosts_bits_in_cpp_too(fused: int, tmp_path) -> None:
    """And not if its multiply-adds round twice."""
    (tmp_path / "adamw.cpp").write_text(ROUNDING + SOURCE + LOOP)
    library = tmp_path / "adamw.so"
    flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-DFUSED={fused}"]
    run(["g++", *flags, tmp_path / "adamw.cpp", "-o", library], check=True)
    update = CDLL(library).update

    def updated(*tensors: torch.Tensor, **by: float) -> list[torch.Tensor]:
        made = [tensor.clone() for tensor in tensors]
        update(c_long(len(made[0])), *(c_void_p(tensor.data_ptr()) for tensor in made), (c_float * len(by))(*by.values()))
        return [made[0], *made[2:]]

    assert gives_the_hosts_bits(in_one_call(updated), CPU) == bool(fused)


@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize("kind", KINDS)
def test_masters_of_every_sort_are_updated_as_on_the_host(kind: str, factor: float) -> None:
    """Chunks of another length than the host's, and one that is cut off."""
    host, settings = random_state(kind, PROBE_ELEMENTS, seed=0), AdamW(lr=1e-2, weight_decay=0.1)
    device = copied(host)
    gradient = torch.randn(PROBE_ELEMENTS, generator=torch.Generator().manual_seed(1))
    gradient = gradient.to(torch.float32 if kind == "fp32" else torch.bfloat16)
    for n_updates in (1, 2):
        update_(host, gradient, factor, n_updates, settings)
        step = Step(device, summed(gradient), factor, n_updates, settings)
        step.run(update_loop(on_device(CPU)), 0, PROBE_ELEMENTS, 1000, Scratch(1000))
    assert all(torch.equal(a, b) for a, b in zip(host.tensors, device.tensors, strict=True))
