"""Branch and bound over policies, with an integer program as relaxation."""
