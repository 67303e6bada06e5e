"""User-defined losses: a function, checked on a tiny call before it is planned or trained with."""

import hashlib
import importlib.util
import inspect
import linecache
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.runtime.batch import UNSUPERVISED
from penstock.runtime.compute.losses import LossFunction
from penstock.runtime.errors import PlanError
from penstock.runtime.plan.objective import CROSS_ENTROPY, LossUnit, Objective

Function = Callable[..., Any]
ARGUMENTS = {
    LossUnit.TOKENS: ("logits", "targets"),
    LossUnit.SEQUENCES: ("logps", "n_tokens"),
    LossUnit.PAIRS: ("chosen", "rejected", "n_chosen", "n_rejected"),
}
N_ROWS, N_VOCAB = 6, 61  # shape of the tiny call
_KINDS = "; or ".join(f"{kind}: {', '.join(names)}" for kind, names in ARGUMENTS.items())


def user_loss(loss: Function | str, by_file: bool | None = None) -> LossFunction:
    """Return the loss of a function, or of `FILE.py:FUNCTION`. Its objective holds its name, a SHA-256, and the extras it needs.

    The SHA-256 is that of the source and defaults or, if `by_file`, of the whole file (default: for `FILE.py:FUNCTION`). PlanError,
    in one line, for a function that is no loss: it returns a mean, another shape or non-finite values, has no gradient, computes
    positions that depend on each other, or changes its arguments.
    """
    function, content = _read(loss) if isinstance(loss, str) else (loss, None)
    by_file = content is not None if by_file is None else by_file
    called = getattr(function, "__name__", type(function).__name__)
    if not inspect.isfunction(function) or not called.isidentifier():
        raise PlanError(f"loss: {called[:60]} is no plain function with a name; define one")
    own_parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    unplain = [p.name for p in own_parameters if not isinstance(p.default, (int, float, str, type(None), type))]
    if (content is None or not by_file) and (names := [*function.__code__.co_freevars, *unplain]):
        problem = f"uses {names[0][:40]}, whose value is no part of its source"
        raise PlanError(f"loss: {called} {problem}; put it into a file, and give it as FILE.py:{called}")
    try:
        if by_file:
            content = content or Path(inspect.getsourcefile(function) or "").read_bytes()
        else:
            source = inspect.getsource(function.__code__)  # not of a function that it wraps
            content = f"{source}{function.__defaults__ or ''}{function.__kwdefaults__ or ''}".encode()
    except OSError:
        raise PlanError(f"loss: the source of {called} cannot be read, and a plan needs its hash; define it in a file") from None
    parameters = inspect.signature(function).parameters.values()
    if several := [str(p) for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise PlanError(f"loss: {called} takes {several[0][:60]}, but arguments are passed by parameter name; name each of them")
    required = [p.name for p in parameters if p.default is p.empty]
    kinds = [kind for kind, names in ARGUMENTS.items() if names[0] in required]
    if len(kinds) != 1:
        raise PlanError(f"loss: {called}({', '.join(required)[:80]}) has the parameters of no kind of loss: {_KINDS}")
    kind = kinds[0]
    extras = tuple(dict.fromkeys(_extra(n, kind, called) for n in required if n not in ARGUMENTS[kind]))
    path, _, name = loss.rpartition(":") if isinstance(loss, str) else ("python", "", called)
    named = Objective(f"{Path(path).name}:{name}", {}, kind, extras, sha256=hashlib.sha256(content).hexdigest())
    return LossFunction(replace(named, wide=_checked_width(LossFunction(named, function), called)), function)


def planned_loss(objective: Objective, function: Function | str | None) -> LossFunction | None:
    """Return the user's function for a plan's loss, or None for a built-in loss. PlanError if the plan has another loss."""
    if objective.sha256 is None:
        if function is not None:
            raise PlanError(f"the plan's loss is {objective}, which needs no function: leave --loss out, or plan with yours")
        return None
    if function is None:
        where = objective.name.replace("python:", "FILE.py:")
        raise PlanError(f"the plan's loss is a function, {objective.name}: name its file with --loss {where}")
    by_file = not objective.name.startswith("python:")
    loss = user_loss(function, by_file)
    name, planned_name = (x.name.rpartition(":")[2] for x in (loss.objective, objective))
    if by_file and name != planned_name:  # a file's hash is that of all its functions
        raise PlanError(f"the function {loss.objective.name} is not the plan's, {objective.name}: give that one, or plan again")
    if replace(loss.objective, name=objective.name) != objective:
        raise PlanError(f"the function {loss.objective.name} has another source than the plan's, or is of another kind; plan again")
    return LossFunction(objective, loss.function)


def _read(text: str) -> tuple[Function, bytes]:
    """Execute a user's file. Return the function that `FILE.py:FUNCTION` names, and the file's content."""
    path, _, name = text.rpartition(":")
    if not path.endswith(".py"):
        raise PlanError(f"--loss {text[:80]!r}: name a function of your own as FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None, "its name ends with .py"
    module = importlib.util.module_from_spec(spec)
    try:
        content = Path(path).read_bytes()
        linecache.cache.pop(path, None)  # source of the content that runs, not of a cached one
        exec(compile(content, path, "exec"), vars(module))
    except Exception as error:  # raised by user code
        raise PlanError(f"--loss {path}: cannot be read ({type(error).__name__}: {str(error)[:120]}); correct it there") from None
    function = vars(module).get(name)
    if not inspect.isfunction(function):
        raise PlanError(f"--loss {path}: holds no function {name[:60]!r}; say which as FILE.py:FUNCTION")
    return function, content


def _extra(parameter: str, kind: LossUnit, called: str) -> str:
    """Return the batch extra for a parameter: the parameter's name; for pairs `x` for `x_chosen` and `x_rejected`."""
    if kind is not LossUnit.PAIRS:
        return parameter
    extra, _, half = parameter.rpartition("_")
    if half not in ("chosen", "rejected") or not extra:
        raise PlanError(f"loss: {called}: extras of pairs end in _chosen or _rejected, and {parameter[:40]} does not")
    return extra


def _checked_width(loss: LossFunction, called: str) -> int:
    """Check a loss on a tiny call. Return the peak number of fp32 values per logit. PlanError for a function that is no loss."""
    generator, kind = torch.Generator().manual_seed(0), loss.objective.of
    extras = {name: torch.rand(N_ROWS, generator=generator, dtype=torch.float64) for name in loss.objective.extras}
    if kind is LossUnit.TOKENS:
        leaf = torch.randn(N_ROWS, N_VOCAB, generator=generator).requires_grad_()
        second = torch.randint(N_VOCAB, (N_ROWS,), generator=generator)
        second[-1] = UNSUPERVISED
    else:
        leaf = (-20 * torch.rand(N_ROWS, generator=generator, dtype=torch.float64)).requires_grad_()
        second = torch.randint(1, 9, (N_ROWS,), generator=generator).double()
    rows_each, saved_bytes = loss.objective.rows_each, dict[int, int]()  # size in bytes of saved tensors, by address
    arguments = {ARGUMENTS[kind][0]: leaf, ARGUMENTS[kind][1]: second, **extras}
    copies = {name: tensor.detach().clone() for name, tensor in arguments.items()}

    def keep(tensor: Tensor) -> Tensor:
        saved_bytes.update({tensor.data_ptr(): tensor.nbytes} if tensor.numel() >= leaf.numel() else ())
        return tensor

    def values(n_rows: int) -> Tensor:
        row_extras, n = {name: extra[:n_rows] for name, extra in extras.items()}, n_rows // rows_each
        losses = loss.per_item(leaf[:n_rows], second[:n_rows], row_extras)
        if not isinstance(losses, Tensor) or tuple(losses.shape) != (n,):
            shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            expected = f"({n},): one number for each of the {n} {kind}, no sum and no mean"
            raise PlanError(f"loss: {called} returns {shape}, not {expected}")
        return losses

    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            losses = values(N_ROWS)[: N_ROWS - 1 if kind is LossUnit.TOKENS else None]  # drop the unsupervised row
        (gradient,) = torch.autograd.grad(losses.sum(), [leaf], allow_unused=True) if losses.requires_grad else (None,)
        part = values(2)
        if changed := [name for name, tensor in arguments.items() if not torch.equal(tensor, copies[name])]:
            raise PlanError(f"loss: {called} changes its argument {changed[0]}; work on a copy")
    except PlanError:
        raise
    except Exception as error:  # raised by user code
        cause = error.__cause__ or error
        words = (str(cause).splitlines() or [""])[0][:120]
        raise PlanError(f"loss: {called} fails on a tiny call ({type(cause).__name__}: {words}); correct it") from None
    if gradient is None:
        raise PlanError(f"loss: {called} has no gradient towards its {ARGUMENTS[kind][0]}; compute it with torch, without detach")
    if not bool(losses.isfinite().all()) or not bool(gradient.isfinite().all()):
        raise PlanError(f"loss: {called} is not finite, or its gradient is not, on random {ARGUMENTS[kind][0]}; correct it")
    if not torch.allclose(part, losses[: len(part)], rtol=1e-4, atol=1e-5):
        raise PlanError(f"loss: {called} of some {kind} depends on others of the tile or micro-batch; compute them independently")
    n_kept = -(-sum(saved_bytes.values()) // (leaf.numel() * leaf.element_size()))  # fp32 values per logit
    return CROSS_ENTROPY.wide + 2 * max(n_kept - 1, 0) if kind is LossUnit.TOKENS else CROSS_ENTROPY.wide
