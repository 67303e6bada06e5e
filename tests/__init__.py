"""Tests and their helper modules (see README.md)."""
