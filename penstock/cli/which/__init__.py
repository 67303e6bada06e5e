"""Which machine is for which model?"""
