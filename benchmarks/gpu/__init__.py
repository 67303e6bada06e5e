"""GPU benchmark, in stages of at most ten minutes."""
