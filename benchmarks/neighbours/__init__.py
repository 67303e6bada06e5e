"""Neighbours of ten kinds of silent errors."""
