"""How is a plan, or a run, told?"""
