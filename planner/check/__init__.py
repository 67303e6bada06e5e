"""The verifier: races, deadlocks, memory and claims of a plan, sharing no code with the compiler."""
