"""What is a plan, and what is it about?"""

from .ops import LANE_OF, MAX_REPETITIONS, Kind, Lane, Op, Repeat, Slot, Wait
from .plan import Arena, Place, Plan, PlanFile
from .policy import AttentionKernel, Kernel, Policy, Semantics, Update

__all__ = [
    "LANE_OF",
    "MAX_REPETITIONS",
    "Arena",
    "AttentionKernel",
    "Kernel",
    "Kind",
    "Lane",
    "Op",
    "Place",
    "Plan",
    "PlanFile",
    "Policy",
    "Repeat",
    "Semantics",
    "Slot",
    "Update",
    "Wait",
]
