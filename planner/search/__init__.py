"""Which policy is best?"""
