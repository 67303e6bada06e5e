"""How is it asked for on the command line?"""
