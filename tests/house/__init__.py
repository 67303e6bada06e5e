"""Tests of the rules of the house, and of its pages."""
