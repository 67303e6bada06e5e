"""Host memory and the optimizer that works on it: arenas, AdamW, the global norm."""
