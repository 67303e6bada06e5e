"""How does a user change what lies in a model's folder?"""
