"""Where do batches come from?"""
