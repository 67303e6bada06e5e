"""Self-test of a model: compare one streamed step of a cut-down copy with the forward and backward of transformers.

Loss and gradients must be bitwise identical to `forward(labels=...)`, in fp32 on one CPU thread: once with all layers recomputed,
once with all activations saved. A forward with another result under `no_grad`, as in evaluations, fails, too.
"""

import gc
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from penstock.data.data import Report
from penstock.planner.lower.lower import lower
from penstock.planner.model import trace_cache
from penstock.planner.model.config import key_of, outlines
from penstock.planner.model.sizes import window_of
from penstock.planner.model.workload import build_workload
from penstock.runtime.batch import UNSUPERVISED, Batch
from penstock.runtime.errors import PenstockError, WorkloadError
from penstock.runtime.executor import Execution, OpError, say
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.host.slabs import give_back_freed
from penstock.runtime.layers.meta_models import model_of, read_config, sees_images
from penstock.runtime.machines.lanes import CpuDevice
from penstock.runtime.machines.torch_machine import TorchMachine
from penstock.runtime.plan import Plan, Policy, Semantics
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.policy import saves
from penstock.runtime.plan.workload import Dtype, Model

from .cut_down import cut_down

SEQUENCES, TOKENS = 2, 16
MOST_PARAMETERS = 100_000_000  # larger copies are not tried: 2 GB, and seconds
_REMEMBERED = frozenset({"note"})


def self_test(plan: Plan, report: Report) -> None:
    """WorkloadError if a model's streamed step differs from transformers, before memory is allocated for a run.

    A pass is cached by configuration, attention, versions, CPU capability, and whether windows hide tokens. If no copy can be made,
    or its step in transformers fails, the run continues with a note.
    """
    semantics, key, name = plan.semantics, key_of(plan.model), plan.model.name or "the model"
    # Below the window size, layers with a window are equal to those without, and the copy may omit the latter
    window = window_of(plan.model.config)
    hides = window is not None and semantics.seq_len > window
    test_name = f"self-test {semantics.attention} {semantics.experts} {torch.backends.cpu.get_cpu_capability()}{' windows' * hides}"
    test_name += " routers" * bool(semantics.router_loss)
    if (known := trace_cache.read(key, test_name, _REMEMBERED)) is None:
        report("self-test: a step of a cut-down copy of the model, against transformers' own")
        known = {"note": _tried(key, semantics, name)}
        if known["note"] is None:  # a failure may be specific to this machine
            trace_cache.write(key, test_name, known)
        gc.collect()  # machines have reference cycles
        give_back_freed()
    if known["note"] is not None:
        say(f"{name}: no self-test, as its cut-down copy fails ({str(known['note'])[:160]}); compare its first losses elsewhere")


@lru_cache(maxsize=64)
def _tried(key: str, semantics: Semantics, name: str) -> str | None:
    """Run the self-test of a configuration (JSON). Return None if it passes, otherwise why it was not possible."""
    config = json.loads(key)
    try:
        tree = outlines(Model(config), semantics.attention, 1, semantics.seq_len)
        kinds = [[tree["kinds"][kind][field] for field in ("parameters", "attention")] for kind in tree["layers"]]
        step = reference_step(cut_down(config, kinds), semantics)
    except Exception as error:  # transformers may raise anything for a smaller configuration
        return " ".join(f"{type(error).__name__}: {error}".split())[:160]
    if not step.is_same_without_grad:
        raise WorkloadError(f"{name}: self-test failed: its forward has other bits under no_grad; it cannot be trained here")
    if different := differences(step):
        named = ", ".join(different[:2]) + (f" and {len(different) - 2} more" if len(different) > 2 else "")
        raise WorkloadError(
            f"{name}: self-test failed: a streamed step is not transformers' own ({named}); it cannot be trained here"
        )
    return None


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """Forward and backward of transformers: a model with gradients, loss and inputs."""

    model: Any
    semantics: Semantics
    config: dict[str, Any]
    batch: Batch
    loss: torch.Tensor
    is_same_without_grad: bool


def reference_step(config: dict[str, Any], source: Semantics, compute_dtype: Dtype = "fp32") -> ReferenceStep:
    """Run a step of a small model with random weights in transformers."""
    semantics = Semantics(
        *(TOKENS, SEQUENCES, SEQUENCES), attention=source.attention, experts=source.experts, compute_dtype=compute_dtype,
        gradient_dtype="fp32", clip_norm=None, loss_tile_tokens=SEQUENCES * TOKENS, router_loss=source.router_loss,
    )  # fmt: skip
    workload = build_workload(Model(config), semantics)
    if workload.n_params > MOST_PARAMETERS:
        raise WorkloadError(f"a test of seconds has no room for {workload.n_params:,} parameters")
    n_vocab = workload.blocks[0].parameters[0].shape[0]
    generator = torch.Generator().manual_seed(0)
    with _alone():
        as_read = read_config(config)
        model = model_of(as_read, semantics, DTYPE[compute_dtype]).train(not sees_images(as_read))
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator)
                p.copy_(0.5 + 0.2 * noise if p.dim() == 1 else noise * p.shape[-1] ** -0.5)
        tokens_BT = torch.randint(0, n_vocab, (SEQUENCES, TOKENS), generator=generator)
        labels_BT = tokens_BT.masked_fill(torch.rand(tokens_BT.shape, generator=generator) < 0.2, UNSUPERVISED)
        targets_BT = torch.cat([labels_BT[:, 1:], torch.full((SEQUENCES, 1), UNSUPERVISED)], dim=1)
        arguments: dict[str, Any] = {"input_ids": tokens_BT, "labels": labels_BT, "use_cache": False}
        if source.router_loss:
            model.router_aux_loss_coef, arguments["output_router_logits"] = source.router_loss, True
        out = model(**arguments)
        out.loss.backward()
        with torch.no_grad():
            is_same = torch.equal(model(**arguments).logits, out.logits)
    if not out.loss.isfinite():
        raise WorkloadError("random weights have no finite loss")
    return ReferenceStep(model, semantics, config, Batch(tokens_BT, targets_BT), out.loss.detach(), is_same)


def differences(expected: ReferenceStep, is_same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal) -> list[str]:
    """Return the names that differ between a streamed step and transformers, for two policies: `loss`, or parameters."""
    model, workload = Model(expected.config), build_workload(Model(expected.config), expected.semantics)
    layers = tuple(range(1, workload.n_layers + 1))
    different = dict[str, None]()
    for policy in (Policy(), Policy(save=saves(all=layers))):
        with _alone():
            try:
                different |= dict.fromkeys(_streamed(expected, lower(model, workload, expected.semantics, policy, {}), is_same))
            except (PenstockError, OpError) as error:
                different[str(error)] = None
    return [*different]


def _streamed(expected: ReferenceStep, plan: Plan, is_same: Callable[[torch.Tensor, torch.Tensor], bool]) -> Iterator[str]:
    """Yield the names that differ in one step of the plan."""
    weights = dict(expected.model.named_parameters())
    exactly = AdamW(lr=1e-9, beta1=0.0)  # the first moment is the gradient
    machine = TorchMachine(plan, lambda _: expected.batch, lambda _: exactly, device=CpuDevice(cores=([0], [0])))
    for block in range(len(plan.workload.blocks)):
        machine.host.set_weights(block, {p.name: weights[p.name].detach().float() for p in machine.host.owned[block]})
    templates = machine.compute.templates
    for name in templates.constants():
        templates.set_constant(name, expected.model.get_buffer(name))
    with Execution(plan, machine, 1) as steps:
        (step,) = steps
    assert step.result is not None, "a step was performed"
    loss = torch.tensor(step.result.loss, dtype=torch.float32)
    # The router loss is added to the token loss in fp64
    if not (torch.allclose(loss, expected.loss, rtol=1e-6) if expected.semantics.router_loss else is_same(loss, expected.loss)):
        yield "loss"
    for p in machine.host.all_owned():
        gradient = machine.host.param_state(p).moments[0].view(p.shape)
        wanted = weights[p.name].grad
        if not is_same(gradient, torch.zeros_like(gradient) if wanted is None else wanted.float()):
            yield p.name


@contextmanager
def _alone() -> Iterator[None]:
    """Use one thread, keep the process's random state, and show warnings of the host's optimizer only."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?!.*host's optimizer)")
            yield
    finally:
        torch.set_num_threads(n_threads)
