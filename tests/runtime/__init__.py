"""Tests of the engine: exactness, memory, failures."""
