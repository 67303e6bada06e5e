"""User-defined losses: a function, checked on a tiny call before it is planned or trained with."""

import hashlib
import importlib.util
import inspect
import json
import linecache
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import CodeType
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


def function_in(text: str) -> Function:
    """Execute a user's file and return the function that `FILE.py:FUNCTION` names. PlanError if it does not exist."""
    path, _, name = text.rpartition(":")
    if not path.endswith(".py"):
        raise PlanError(f"--loss {text[:80]!r}: name a function of your own as FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None, "its name ends with .py"
    module = importlib.util.module_from_spec(spec)
    try:
        linecache.cache.pop(path, None)  # hash the text that runs, not a cached or compiled one
        exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except Exception as error:  # raised by user code
        raise PlanError(f"--loss {path}: cannot be read ({type(error).__name__}: {str(error)[:120]}); correct it there") from None
    function = vars(module).get(name)
    if not inspect.isfunction(function):
        raise PlanError(f"--loss {path}: holds no function {name[:60]!r}; say which as FILE.py:FUNCTION")
    return function


def user_loss(function: Function, name: str | None = None) -> LossFunction:
    """Wrap a function as a loss. Its objective holds its name, the SHA-256 of its source, and the extras that it needs.

    PlanError, in one line, for a function that is no loss: it returns a mean, another shape or non-finite values, has no gradient,
    computes positions that depend on each other, or changes its arguments. `name`: FILE.py:FUNCTION, if loaded from a file.
    """
    called = getattr(function, "__name__", type(function).__name__)
    if not inspect.isfunction(function) or not called.isidentifier():
        raise PlanError(f"loss: {called[:60]} is no plain function with a name; define one")
    try:
        text = _text(function, set())
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
    place = "python" if name is None else Path(name.rpartition(":")[0]).name
    named = Objective(f"{place}:{called}", {}, kind, extras, sha256=hashlib.sha256(text.encode()).hexdigest())
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
    loss = user_loss(function_in(function), function) if isinstance(function, str) else user_loss(function)
    if replace(loss.objective, name=objective.name) != objective:
        problem = "has another source than the plan's, refers to other constants, or is of another kind"
        raise PlanError(f"the function {loss.objective.name} {problem}; plan again with it")
    return LossFunction(objective, loss.function)


def _text(function: Function, visited: set[Function]) -> str:
    """Return the source of a function, and of its dependencies: functions of its file, and constants as `name = value`."""
    visited.add(function)
    texts, closed = [inspect.getsource(function)], inspect.getclosurevars(function).nonlocals
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    names = sorted(set(_names(function.__code__)) & function.__globals__.keys())
    for name, value in [*((n, function.__globals__[n]) for n in names), *closed.items(), *defaults.items()]:
        if inspect.isfunction(value) and value.__module__ == function.__module__:
            texts += [] if value in visited else [_text(value, visited)]
        with suppress(TypeError, ValueError):  # not a constant
            texts.append(f"{name} = {json.dumps(value.tolist() if isinstance(value, Tensor) else value)}")
    return "\n".join(texts)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's bytecode uses, including nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        yield from _names(constant) if isinstance(constant, CodeType) else ()


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
        words = (str(error).splitlines() or [""])[0][:120]
        raise PlanError(f"loss: {called} fails on a tiny call ({type(error).__name__}: {words}); correct it") from None
    if gradient is None:
        raise PlanError(f"loss: {called} has no gradient towards its {ARGUMENTS[kind][0]}; compute it with torch, without detach")
    if not bool(losses.isfinite().all()) or not bool(gradient.isfinite().all()):
        raise PlanError(f"loss: {called} is not finite, or its gradient is not, on random {ARGUMENTS[kind][0]}; correct it")
    if not torch.allclose(part, losses[: len(part)], rtol=1e-4, atol=1e-5):
        raise PlanError(f"loss: {called} of some {kind} depends on others of the tile or micro-batch; compute them independently")
    n_kept = -(-sum(saved_bytes.values()) // (leaf.numel() * leaf.element_size()))  # fp32 values per logit
    return CROSS_ENTROPY.wide + 2 * max(n_kept - 1, 0) if kind is LossUnit.TOKENS else CROSS_ENTROPY.wide
