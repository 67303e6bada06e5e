"""Tests of the checks before a model's first run."""
