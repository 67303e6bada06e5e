"""How fast could a step be at best?"""
