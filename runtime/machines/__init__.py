"""What performs an op?"""
