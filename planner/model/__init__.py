"""Workload of a model: parameters, FLOP, memory traffic and saved tensors of each block, from its configuration."""
