"""Losses of a user's own: a function of twenty lines, looked at on a tiny call before anything is planned or trained with it."""

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
from penstock.runtime.plan.objective import CROSS_ENTROPY, Objective, Of

Function = Callable[..., Any]
GIVEN = {
    Of.TOKENS: ("logits", "targets"),
    Of.SEQUENCES: ("logps", "n_tokens"),
    Of.PAIRS: ("chosen", "rejected", "n_chosen", "n_rejected"),
}
N_ROWS, N_VOCAB = 6, 61  # of the tiny call
_TAKES = "; or ".join(f"{of}: {', '.join(names)}" for of, names in GIVEN.items())


def function_in(text: str) -> Function:
    """The function that `FILE.py:FUNCTION` names, of a file of the user's own, which is executed. PlanError where there is none."""
    path, _, name = text.rpartition(":")
    if not path.endswith(".py"):
        raise PlanError(f"--loss {text[:80]!r}: name a function of your own as FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None, "its name ends with .py"
    module = importlib.util.module_from_spec(spec)
    try:
        linecache.cache.pop(path, None)  # what is hashed is what runs, not what was read before or a loader compiled
        exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except Exception as error:  # the user's own program
        raise PlanError(f"--loss {path}: cannot be read ({type(error).__name__}: {str(error)[:120]}); mend it there") from None
    function = vars(module).get(name)
    if not inspect.isfunction(function):
        raise PlanError(f"--loss {path}: holds no function {name[:60]!r}; say which as FILE.py:FUNCTION")
    return function


def own_loss(function: Function, name: str | None = None) -> LossFunction:
    """A function as a loss, with an objective that names it, its text's SHA-256, and what it asks for. PlanError, in a line, for
    one that is no loss: a mean, another shape, not finite, without a gradient, of positions that depend on each other, or one that
    changes what it is given.

    `name`: FILE.py:FUNCTION, where it comes from a file.
    """
    called = getattr(function, "__name__", type(function).__name__)
    if not inspect.isfunction(function) or not called.isidentifier():
        raise PlanError(f"loss: {called[:60]} is no plain function with a name; define one")
    try:
        text = _text(function, set())
    except OSError:
        raise PlanError(f"loss: the text of {called} cannot be read, by which a plan knows it; define it in a file") from None
    parameters = inspect.signature(function).parameters.values()
    if several := [str(p) for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise PlanError(f"loss: {called} takes {several[0][:60]}, and is given what its parameters name; name each of them")
    asked = [p.name for p in parameters if p.default is p.empty]
    kinds = [of for of, names in GIVEN.items() if names[0] in asked]
    if len(kinds) != 1:
        raise PlanError(f"loss: {called}({', '.join(asked)[:80]}) names not what it is of; its parameters are of {_TAKES}")
    of = kinds[0]
    extras = tuple(dict.fromkeys(_extra(n, of, called) for n in asked if n not in GIVEN[of]))
    place = "python" if name is None else Path(name.rpartition(":")[0]).name
    named = Objective(f"{place}:{called}", {}, of, extras, sha256=hashlib.sha256(text.encode()).hexdigest())
    return LossFunction(replace(named, wide=_looked_at(LossFunction(named, function), called)), function)


def planned_loss(objective: Objective, given: Function | str | None) -> LossFunction | None:
    """What computes a plan's loss: a function that the user gives, held to the plan's; None: what Penstock has. PlanError where the
    plan's is another."""
    if objective.sha256 is None:
        if given is not None:
            raise PlanError(f"the plan's loss is {objective}, which needs no function: leave --loss out, or plan with yours")
        return None
    if given is None:
        where = objective.name.replace("python:", "FILE.py:")
        raise PlanError(f"the plan's loss is a function, {objective.name}: say which file it is in, with --loss {where}")
    loss = own_loss(function_in(given), given) if isinstance(given, str) else own_loss(given)
    if replace(loss.objective, name=objective.name) != objective:
        how = "has another text than the plan's, refers to other constants, or is of something else"
        raise PlanError(f"the function {loss.objective.name} {how}; plan again with it")
    return LossFunction(objective, loss.function)


def _text(function: Function, seen: set[Function]) -> str:
    """The text of a function, and of all that decides what it does: constants that it refers to, and functions of its file."""
    seen.add(function)
    texts, closed = [inspect.getsource(function)], inspect.getclosurevars(function).nonlocals
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values()}
    names = sorted(set(_names(function.__code__)) & function.__globals__.keys())
    for name, of in [*((n, function.__globals__[n]) for n in names), *closed.items(), *defaults.items()]:
        if inspect.isfunction(of) and of.__module__ == function.__module__:
            texts += [] if of in seen else [_text(of, seen)]
        with suppress(TypeError, ValueError):  # what is no constant
            texts.append(f"{name} = {json.dumps(of.tolist() if isinstance(of, Tensor) else of)}")
    return "\n".join(texts)


def _names(code: CodeType) -> Iterator[str]:
    """What a function's code refers to, and that of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        yield from _names(constant) if isinstance(constant, CodeType) else ()


def _extra(parameter: str, of: Of, called: str) -> str:
    """The name by which a batch brings what a parameter is given."""
    if of is not Of.PAIRS:
        return parameter
    extra, _, half = parameter.rpartition("_")
    if half not in ("chosen", "rejected") or not extra:
        raise PlanError(f"loss: {called}: what comes of pairs ends in _chosen or _rejected, and {parameter[:40]} does not")
    return extra


def _looked_at(loss: LossFunction, called: str) -> int:
    """How many fp32 values a logit has at its peak, by a tiny call; PlanError for what is no loss."""
    generator, of = torch.Generator().manual_seed(0), loss.objective.of
    extras = {name: torch.rand(N_ROWS, generator=generator, dtype=torch.float64) for name in loss.objective.extras}
    if of is Of.TOKENS:
        leaf = torch.randn(N_ROWS, N_VOCAB, generator=generator).requires_grad_()
        more = torch.randint(N_VOCAB, (N_ROWS,), generator=generator)
        more[-1] = UNSUPERVISED
    else:
        leaf = (-20 * torch.rand(N_ROWS, generator=generator, dtype=torch.float64)).requires_grad_()
        more = torch.randint(1, 9, (N_ROWS,), generator=generator).double()
    rows_each, kept = loss.objective.rows_each, dict[int, int]()  # bytes by address
    given = {GIVEN[of][0]: leaf, GIVEN[of][1]: more, **extras}
    before = {name: tensor.detach().clone() for name, tensor in given.items()}

    def keep(tensor: Tensor) -> Tensor:
        kept.update({tensor.data_ptr(): tensor.nbytes} if tensor.numel() >= leaf.numel() else ())
        return tensor

    def values(n_rows: int) -> Tensor:
        """Of the first rows."""
        of_rows, n = {name: extra[:n_rows] for name, extra in extras.items()}, n_rows // rows_each
        found = loss.per_item(leaf[:n_rows], more[:n_rows], of_rows)
        if not isinstance(found, Tensor) or tuple(found.shape) != (n,):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise PlanError(f"loss: {called} returns {shape}, not ({n},): one number for each of the {n} {of}, no sum and no mean")
        return found

    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            whole = values(N_ROWS)[: N_ROWS - 1 if of is Of.TOKENS else None]  # without the one that is not supervised
        (gradient,) = torch.autograd.grad(whole.sum(), [leaf], allow_unused=True) if whole.requires_grad else (None,)
        part = values(2)
        if changed := [name for name, tensor in given.items() if not torch.equal(tensor, before[name])]:
            raise PlanError(f"loss: {called} changes what it is given ({changed[0]}); work on a copy")
    except PlanError:
        raise
    except Exception as error:  # the user's own program
        words = (str(error).splitlines() or [""])[0][:120]
        raise PlanError(f"loss: {called} fails on a tiny call ({type(error).__name__}: {words}); mend it") from None
    if gradient is None:
        raise PlanError(f"loss: {called} has no gradient towards its {GIVEN[of][0]}; compute it with torch, without detach")
    if not bool(whole.isfinite().all()) or not bool(gradient.isfinite().all()):
        raise PlanError(f"loss: {called} is not finite, or its gradient is not, on random {GIVEN[of][0]}; mend it")
    if not torch.allclose(part, whole[: len(part)], rtol=1e-4, atol=1e-5):
        raise PlanError(f"loss: {called} of some {of} depends on others of the tile or micro-batch, whose size must not matter")
    n_kept = -(-sum(kept.values()) // (leaf.numel() * leaf.element_size()))  # fp32 values a logit
    return CROSS_ENTROPY.wide + 2 * max(n_kept - 1, 0) if of is Of.TOKENS else CROSS_ENTROPY.wide
