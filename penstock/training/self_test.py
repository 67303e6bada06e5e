"""Self-test of a model: compare one streamed step of a cut-down copy with the forward and backward of transformers.

Loss and gradients must be bitwise identical to `forward(labels=...)`, in fp32 on one CPU thread: once with all layers recomputed,
once with all activations saved. A forward whose result changes under `no_grad`, which evaluations use, fails, too.
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
from penstock.planner.model import kept
from penstock.planner.model.config import key_of, outlines
from penstock.planner.model.sizes import window_of
from penstock.planner.model.workload import build_workload
from penstock.runtime.batch import UNSUPERVISED, Batch
from penstock.runtime.errors import PenstockError, WorkloadError
from penstock.runtime.executor import Execution, OpError, say
from penstock.runtime.host.memory import DTYPE
from penstock.runtime.host.slabs import give_back_freed
from penstock.runtime.layers.cut_down import cut_down
from penstock.runtime.layers.meta_models import model_of, read_config, sees_images
from penstock.runtime.machines.torch_machine import CpuMachine
from penstock.runtime.plan import Plan, Policy, Semantics
from penstock.runtime.plan.optimizer import AdamW
from penstock.runtime.plan.policy import saves
from penstock.runtime.plan.workload import Dtype, Model

SEQUENCES, TOKENS = 2, 16
MOST_PARAMETERS = 100_000_000  # of the copy: 2 GB, and seconds
_REMEMBERED = frozenset({"note"})


def self_test(plan: Plan, report: Report) -> None:
    """WorkloadError for a model whose streamed step differs from transformers, before memory is allocated for a run.

    A pass is cached by configuration, attention, versions, CPU capability, and whether windows hide tokens. If no copy can be made,
    or its step in transformers fails, the run continues with a note.
    """
    of, key, name = plan.semantics, key_of(plan.model), plan.model.name or "the model"
    # Below the window size, layers with a window are equal to those without, and the copy may omit the latter
    window = window_of(plan.model.config)
    hides = window is not None and of.seq_len > window
    asked = f"self-test {of.attention} {of.experts} {torch.backends.cpu.get_cpu_capability()}{' windows' * hides}"
    asked += " routers" * bool(of.router_loss)
    if (known := kept.read(key, asked, _REMEMBERED)) is None:
        report("self-test: a step of a cut-down copy of the model, against transformers' own")
        known = {"note": _tried(key, of, name)}
        if known["note"] is None:  # a failure may be specific to this machine
            kept.write(key, asked, known)
        gc.collect()  # machines have reference cycles
        give_back_freed()
    if known["note"] is not None:
        say(f"{name}: no self-test, as its cut-down copy fails ({str(known['note'])[:160]}); compare its first losses elsewhere")


@lru_cache(maxsize=64)
def _tried(key: str, of: Semantics, name: str) -> str | None:
    """Run the self-test of a configuration (JSON). Return None if it passes, otherwise why it was not possible."""
    config = json.loads(key)
    try:
        tree = outlines(Model(config), of.attention, 1, of.seq_len)
        kinds = [[tree["kinds"][kind][what] for what in ("parameters", "attention")] for kind in tree["layers"]]
        own = own_step(cut_down(config, kinds), of)
    except Exception as error:  # transformers may raise anything for a smaller configuration
        return " ".join(f"{type(error).__name__}: {error}".split())[:160]
    if not own.is_same_without_grad:
        raise WorkloadError(f"{name}: self-test failed: its forward has other bits under no_grad; it cannot be trained here")
    if found := differences(own):
        named = ", ".join(found[:2]) + (f" and {len(found) - 2} more" if len(found) > 2 else "")
        raise WorkloadError(
            f"{name}: self-test failed: a streamed step is not transformers' own ({named}); it cannot be trained here"
        )
    return None


@dataclass(frozen=True, slots=True)
class OwnStep:
    """Result of transformers' forward and backward: a model with gradients, its loss, and the inputs."""

    model: Any
    semantics: Semantics
    config: dict[str, Any]
    batch: Batch
    loss: torch.Tensor
    is_same_without_grad: bool


def own_step(config: dict[str, Any], of: Semantics, compute_dtype: Dtype = "fp32") -> OwnStep:
    """Run a step of a small model with random weights in transformers."""
    semantics = Semantics(
        *(TOKENS, SEQUENCES, SEQUENCES), attention=of.attention, experts=of.experts, compute_dtype=compute_dtype,
        gradient_dtype="fp32", clip_norm=None, loss_tile_tokens=SEQUENCES * TOKENS, router_loss=of.router_loss,
    )  # fmt: skip
    workload = build_workload(Model(config), semantics)
    if workload.n_params > MOST_PARAMETERS:
        raise WorkloadError(f"a test of seconds has no room for {workload.n_params:,} parameters")
    n_vocab = workload.blocks[0].parameters[0].shape[0]
    drawn = torch.Generator().manual_seed(0)
    with _alone():
        as_read = read_config(config)
        model = model_of(as_read, semantics, DTYPE[compute_dtype]).train(not sees_images(as_read))
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=drawn)
                p.copy_(0.5 + 0.2 * noise if p.dim() == 1 else noise * p.shape[-1] ** -0.5)
        tokens_BT = torch.randint(0, n_vocab, (SEQUENCES, TOKENS), generator=drawn)
        labels_BT = tokens_BT.masked_fill(torch.rand(tokens_BT.shape, generator=drawn) < 0.2, UNSUPERVISED)
        targets_BT = torch.cat([labels_BT[:, 1:], torch.full((SEQUENCES, 1), UNSUPERVISED)], dim=1)
        given: dict[str, Any] = {"input_ids": tokens_BT, "labels": labels_BT, "use_cache": False}
        if of.router_loss:
            model.router_aux_loss_coef, given["output_router_logits"] = of.router_loss, True
        out = model(**given)
        out.loss.backward()
        with torch.no_grad():
            is_same = torch.equal(model(**given).logits, out.logits)
    if not out.loss.isfinite():
        raise WorkloadError("random weights have no finite loss")
    return OwnStep(model, semantics, config, Batch(tokens_BT, targets_BT), out.loss.detach(), is_same)


def differences(own: OwnStep, is_same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal) -> list[str]:
    """Return the names that differ between a streamed step and transformers, for two policies: `loss`, or parameters."""
    model, workload = Model(own.config), build_workload(Model(own.config), own.semantics)
    layers = tuple(range(1, workload.n_layers + 1))
    found = dict[str, None]()
    for policy in (Policy(), Policy(save=saves(all=layers))):
        with _alone():
            try:
                found |= dict.fromkeys(_streamed(own, lower(model, workload, own.semantics, policy, {}), is_same))
            except (PenstockError, OpError) as error:
                found[str(error)] = None
    return [*found]


def _streamed(own: OwnStep, plan: Plan, is_same: Callable[[torch.Tensor, torch.Tensor], bool]) -> Iterator[str]:
    """Yield the names that differ in one step of the plan."""
    weights = dict(own.model.named_parameters())
    exactly = AdamW(lr=1e-9, beta1=0.0)  # the first moment is the gradient
    machine = CpuMachine(plan, lambda _: own.batch, lambda _: exactly, cores=([0], [0]))
    for block in range(len(plan.workload.blocks)):
        machine.host.set_weights(block, {p.name: weights[p.name].detach().float() for p in machine.host.owned[block]})
    templates = machine.compute.templates
    for name in templates.constants():
        templates.set_constant(name, own.model.get_buffer(name))
    with Execution(plan, machine, 1) as steps:
        (step,) = steps
    assert step.result is not None, "a step was performed"
    loss = torch.tensor(step.result.loss, dtype=torch.float32)
    # The router loss is added to the token loss in fp64
    if not (torch.allclose(loss, own.loss, rtol=1e-6) if own.semantics.router_loss else is_same(loss, own.loss)):
        yield "loss"
    for p in machine.host.all_owned():
        gradient = machine.host.param_state(p).moments[0].view(p.shape)
        of = weights[p.name].grad
        if not is_same(gradient, torch.zeros_like(gradient) if of is None else of.float()):
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
