"""The plan language: ops, policy and semantics, arenas, and the memory they ask for."""

from .ops import LANE_OF, MAX_REPETITIONS, OPS, Kind, Lane, Op, Repeat, Slot, Wait
from .plan import Plan, PlanFile
from .policy import AttentionKernel, Kernel, LibraryKernel, Policy, Semantics, Update, saves
from .setup import Arena, Place, Setup
