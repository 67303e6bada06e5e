"""What do we promise?"""
