"""What does a layer consist of, where are its tensors, and what of it is kept?"""
