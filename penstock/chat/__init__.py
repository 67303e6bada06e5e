"""Chat with a model, to try the result of a run: weights are streamed, as in training."""
