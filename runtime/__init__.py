"""How is a plan carried out?"""
