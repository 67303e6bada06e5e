"""A model as data: bytes, FLOP and saved activations of each block, from config.json."""
