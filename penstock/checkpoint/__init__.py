"""Checkpoints in Hugging Face form: atomic, written in the background, with bitwise identical resume."""
