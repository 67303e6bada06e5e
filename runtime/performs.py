"""What of the plan language can the runtime perform today?"""

from .errors import PlanError
from .plan import Policy, Semantics


def not_yet_performed(semantics: Semantics, policy: Policy) -> list[str]:
    """What a plan of these asks for that no machine of ours performs yet: names of fields, as plans have them."""
    asked = {
        "mlp_tile_tokens": semantics.mlp_tile_tokens is not None,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def refuse_not_yet_performed(semantics: Semantics, policy: Policy) -> None:
    """PlanError, in a line, for a plan that can be made and checked but not run."""
    if names := not_yet_performed(semantics, policy):
        raise PlanError(f"the plan uses {', '.join(names)}, which `penstock run` cannot perform yet; plan with --runnable")
