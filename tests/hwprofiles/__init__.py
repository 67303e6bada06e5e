"""Is a machine measured as it is?"""
