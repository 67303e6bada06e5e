"""The planner: from a model and a hardware profile to a plan with a certificate. Never imports torch."""
