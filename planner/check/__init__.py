"""Verifier of plans: data races, deadlocks, memory and claims. Shares no code with the compiler."""
