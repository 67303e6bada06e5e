"""Tests of commands, runs and the Python face."""
