"""Checkpoints in Hugging Face form: atomic, written in the background, resumed to the bit."""
