"""What is a model, in bytes and FLOP?"""
