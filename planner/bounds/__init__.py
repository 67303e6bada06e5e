"""Lower bounds on the time of a step."""
