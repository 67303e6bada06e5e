"""Does a run do between its steps what it was asked to?"""
