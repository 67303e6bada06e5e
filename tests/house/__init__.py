"""Are the rules of the house kept, and its pages true?"""
