"""Tests of images in training."""
