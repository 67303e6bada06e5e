"""Costs, the discrete-event simulator, memory, and intervals."""
