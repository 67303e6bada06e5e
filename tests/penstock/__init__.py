"""Does a user get what was asked for, or one line that says why not?"""
