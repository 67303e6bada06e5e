"""Training data: formats, chat templates, tokenisation, packing, order."""
