"""How right were the predictions?"""
