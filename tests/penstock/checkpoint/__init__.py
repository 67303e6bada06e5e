"""Is what is saved whole, and found again to the bit?"""
