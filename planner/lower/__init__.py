"""Which ops does a policy mean?"""
