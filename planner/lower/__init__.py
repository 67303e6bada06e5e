"""The compiler: from a policy to ops, slots and waits."""
