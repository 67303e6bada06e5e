"""How is a machine measured?"""
