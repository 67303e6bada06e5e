"""Planner: compile a model and a hardware profile into a plan with an optimality certificate. Only trace recording needs torch."""
