"""The plan language, and the streaming engine that performs a plan."""
