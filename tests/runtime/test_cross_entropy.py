"""Cross entropy by online softmax: the values of fp64, rows that are independent of tiles, and the kernel's bits in C++."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.planner.model.workload import build_workload
from penstock.runtime.compute import cross_entropy
from penstock.runtime.compute.cross_entropy import add_product, launched, loss_kernel, reference_losses, row_losses
from penstock.runtime.cuda.nvrtc import ELEMENT
from penstock.runtime.plan.workload import Model, loss_lanes
from tests.cuda_in_cpp import NEEDS_A_COMPILER, in_cpp
from tests.real_layers import semantics
from tests.tiny import tiny_config
from tests.training import fused

VOCABULARIES = [1, 7, 96, 1003, 9000]  # the last exceeds one step of a thread
SUBSTITUTES = {"EXP(x)": "(1.0f / (1.0f - (x)))", "LOG(x)": "(2.0f * (x))"}  # bitwise identical on any processor


def random_rows(n_rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of all magnitudes, some -inf; targets, a quarter masked; weights of both signs."""
    generator = torch.Generator().manual_seed(vocab)
    logits_NV = torch.randn(n_rows, vocab, generator=generator) * 10.0 ** (torch.arange(n_rows) % 5 - 1.0)[:, None]
    targets_N = torch.randint(vocab, (n_rows,), generator=generator)
    logits_NV[5, torch.arange(vocab) != targets_N[5]] = -torch.inf
    logits_NV[6, (torch.arange(vocab) % 3 == 1) & (torch.arange(vocab) != targets_N[6])] = -torch.inf
    targets_N[3::4] = -100
    return logits_NV.to(dtype), targets_N, torch.randn(n_rows, generator=generator)


def of_rows(logits_NV: Tensor, targets_N: Tensor, each_N: Tensor, compute: Any = reference_losses) -> tuple[Tensor, Tensor]:
    gradient_NV = logits_NV.clone()
    return compute(gradient_NV, targets_N, each_N), gradient_NV


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_losses_and_gradients_are_those_of_cross_entropy_in_fp64(vocab: int) -> None:
    """Compare losses to 1e-6 of the loss or the largest logit, gradients to 1e-6 of the row's weight."""
    logits_NV, targets_N, each_N = random_rows(20, vocab)
    exact_NV = logits_NV.double().requires_grad_()
    exact_N = F.cross_entropy(exact_NV, targets_N, ignore_index=-100, reduction="none")
    (towards_NV,) = torch.autograd.grad((exact_N * each_N).sum(), [exact_NV])
    losses_N, gradient_NV = of_rows(logits_NV, targets_N, each_N)
    torch.testing.assert_close(losses_N.double(), exact_N.detach(), rtol=1e-6, atol=1e-6)
    assert ((gradient_NV - towards_NV).abs() <= 1e-6 * each_N.abs()[:, None]).all()
    assert (losses_N[3::4] == 0).all()
    assert (gradient_NV[3::4] == 0).all(), "a row without a target"
    assert torch.equal(row_losses(logits_NV, targets_N), losses_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_rows_bits_are_the_same_in_any_tile(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = of_rows(*(rows := random_rows(20, vocab, dtype)))
    for n in (1, 7):
        tiles = [of_rows(*tile) for tile in zip(*(tensor.split(n) for tensor in rows), strict=True)]
        assert all(torch.equal(torch.cat(parts), wanted) for parts, wanted in zip(zip(*tiles, strict=True), expected, strict=True))
    monkeypatch.setattr(cross_entropy, "LOSS_SCRATCH_ELEMENTS", 3 * loss_lanes(vocab))
    assert all(map(torch.equal, of_rows(*rows), expected))


def test_a_logit_that_is_no_number_is_seen_in_its_row_alone() -> None:
    logits_NV, targets_N, each_N = random_rows(8, 96)
    logits_NV[0, 5], logits_NV[1, 95], logits_NV[7, 2] = torch.nan, torch.inf, torch.nan
    losses_N, gradient_NV = of_rows(logits_NV, targets_N, each_N)
    assert gradient_NV.isnan().any(dim=1).tolist() == [True, True, *6 * [False]], "the last has no target"
    assert losses_N[:2].isfinite().tolist() == [False, False]


@NEEDS_A_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_adds_in_the_defined_order(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare bitwise at even and odd sizes: rows at any element offset, and partial vectors."""
    libraries: dict[int, Any] = {}

    def kernel(vocab: int, **defined: str) -> Any:
        (folder := tmp_path / f"{vocab}{len(defined)}").mkdir()
        return in_cpp(folder, "loss.cu", "cross_entropy", LOGIT=ELEMENT[dtype], THREADS=loss_lanes(vocab) // 8, **defined)

    for vocab in VOCABULARIES:
        libraries[vocab] = kernel(vocab, **SUBSTITUTES)
        if vocab in (96, 9000):
            assert cross_entropy.is_equal_to_reference(kernel(vocab), torch.device("cpu"), dtype, vocab)
    monkeypatch.setattr(torch.Tensor, "exp_", lambda x: x.copy_(1.0 / (1.0 - x)))
    monkeypatch.setattr(torch.Tensor, "exp", lambda x: 1.0 / (1.0 - x))
    monkeypatch.setattr(torch.Tensor, "log", lambda x: 2.0 * x)
    for vocab, library in libraries.items():
        rows = random_rows(9, vocab, dtype)
        results = of_rows(*rows, compute=lambda *args: launched(library, *args))  # noqa: B023
        for result, defined in zip(results, of_rows(*rows), strict=True):
            assert torch.equal(result.nan_to_num(7.0), defined.nan_to_num(7.0)), vocab
        logits = rows[0].clone()
        assert torch.equal(launched(library, logits, rows[1], None).nan_to_num(7.0), results[0].nan_to_num(7.0))
        assert torch.equal(logits, rows[0]), "losses alone leave logits as they are"


def test_a_kernel_that_differs_or_is_not_compiled_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cross_entropy.is_equal_to_reference(lambda *launch: None, torch.device("cpu"), torch.bfloat16, 96)

    def broken(*args: object, **defined: object) -> None:
        raise RuntimeError("no NVRTC\nhere")

    monkeypatch.setattr(cross_entropy, "compiled_kernel", broken)
    with pytest.warns(RuntimeWarning, match=r"the loss runs call by call on cuda, and moves more than .* \(no NVRTC\\nhere\)"):
        assert loss_kernel(torch.device("cuda"), torch.bfloat16, 96) is None
    loss_kernel.cache_clear()


def test_the_weights_gradient_is_not_rounded_between_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare vocabulary pieces with one product. A sum of bf16 products has a thousand times the error."""
    generator = torch.Generator().manual_seed(0)
    tiles = [tuple(torch.randn(16, n, generator=generator).bfloat16() for n in (50, 24)) for _ in range(8)]
    exact = sum(gradient.double().t() @ rows.double() for gradient, rows in tiles)
    for scratch in (2**20, 160):
        monkeypatch.setattr(cross_entropy, "LOSS_SCRATCH_ELEMENTS", scratch)
        total = torch.zeros(50, 24)
        for tile in tiles:
            add_product(total, *tile)
        torch.testing.assert_close(total.double(), exact, rtol=0, atol=2e-5)


def test_a_plan_counts_six_bytes_a_logit() -> None:
    """Count two reads and one write of bf16; the forward has a third of them."""
    head = build_workload(Model(tiny_config("llama", vocab_size=3000)), semantics(2, 64, "bf16", **fused("llama"))).blocks[-1]
    assert 3 * (head.fused_bytes - head.norm_bytes) == 6 * 2 * 64 * 3000


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [*VOCABULARIES, 151_936, 152_064])
def test_a_gpus_kernel_and_product_are_as_defined(vocab: int) -> None:
    device = torch.device("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        assert loss_kernel(device, dtype, vocab) is not None
        gradient, rows = (torch.randn(64, n, device=device).to(dtype) for n in (vocab, 128))
        total, exact = torch.ones(vocab, 128, device=device), gradient.double().t() @ rows.double() + 1
        add_product(total, gradient, rows)
        torch.testing.assert_close(total.double(), exact, rtol=0, atol=1e-4)
