"""Machines that perform ops: CPU, CUDA streams, emulation, and the collectives of several ranks."""
