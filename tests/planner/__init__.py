"""Is the plan that we make the right one, and what is said of it true?"""
