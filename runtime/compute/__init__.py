"""Forward, loss and backward of one block, from weights that are views of a slot."""
