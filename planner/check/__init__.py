"""Is a plan right, and what is claimed of it true?"""
