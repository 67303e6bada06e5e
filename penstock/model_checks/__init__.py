"""Checks of a model before its first run: self-test, document isolation, cut-down copies."""
