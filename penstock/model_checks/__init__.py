"""Checks before a run: self-test, document isolation, cut-down copies, missing kernels."""
