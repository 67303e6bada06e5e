"""Tests of profiles and the probe."""
