"""Tests: what Penstock promises."""
