"""How is the state saved, and found again?"""
