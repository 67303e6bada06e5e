"""The Python interface of Penstock, and its command.

    import penstock

    found = penstock.plan("my-model", "rtx4090-server", seq_len=4096, batch_size=16)  # a folder, as `hf download` leaves it
    print(found)
    penstock.train(found, "chats.jsonl", steps=100, lr=1e-5, out="run")

Heavy libraries are imported when they are needed: torch by training, scipy by planning.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.data.user_batches import Batches
    from penstock.hwprofiles.schema import Profile
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
    "Batches": "penstock.data.user_batches",
    "Stop": "penstock.runtime.executor",
    "__version__": "penstock.version",
}

__all__ = ["Batches", "PenstockError", "Plan", "Policy", "Profile", "Semantics", "Stop"]
__all__ += ["check", "forward", "plan", "predict", "probe", "stream", "train"]


def __getattr__(name: str) -> Any:
    """Import a name from its module when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
