"""Compiler: lower a policy to ops, slots and waits."""
