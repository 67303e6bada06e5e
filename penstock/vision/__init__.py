"""Frozen vision towers: features of images, computed once and stored."""
