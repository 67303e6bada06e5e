"""Hardware profiles: their schema, and the shipped ones."""
