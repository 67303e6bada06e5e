"""Which plan should we run?"""
