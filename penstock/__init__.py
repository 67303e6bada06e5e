"""The Python interface of Penstock, and its command.

    import penstock

    planned = penstock.plan("my-model", "rtx4090-server", seq_len=4096, batch_size=16)  # a folder written by `hf download`
    print(planned)
    penstock.train(planned, "chats.jsonl", steps=100, lr=1e-5, out="run")

Heavy libraries are imported on first use: torch by training, scipy by planning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.data.user_batches import Batches
    from penstock.hwprofiles.schema import Profile
    from penstock.runtime.batch import Batch
    from penstock.runtime.errors import PenstockError
    from penstock.runtime.executor import Stop
    from penstock.runtime.plan import Plan, Policy, Semantics

    from .api import check, forward, plan, predict, probe, stream, train
    from .version import __version__ as __version__

_HOMES = {
    **dict.fromkeys(("plan", "check", "predict", "probe", "train", "stream", "forward"), "penstock.api"),
    **dict.fromkeys(("Plan", "Semantics", "Policy"), "penstock.runtime.plan"),
    "Profile": "penstock.hwprofiles.schema",
    "PenstockError": "penstock.runtime.errors",
    "Batch": "penstock.runtime.batch",
    "Batches": "penstock.data.user_batches",
    "Stop": "penstock.runtime.executor",
    "__version__": "penstock.version",
}

__all__ = ["Batch", "Batches", "PenstockError", "Plan", "Policy", "Profile", "Semantics", "Stop"]
__all__ += ["check", "forward", "plan", "predict", "probe", "stream", "train"]


def __getattr__(name: str) -> Any:
    """Import a name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
