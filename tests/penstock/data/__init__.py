"""Does every token that is to be learned reach the model, in an order that only the seed and the step decide?"""
