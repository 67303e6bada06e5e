"""Tests of training data."""
