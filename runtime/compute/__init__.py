"""What does a block compute?"""
