"""Is a plan carried out to the bit, in its memory, whatever befalls it?"""
