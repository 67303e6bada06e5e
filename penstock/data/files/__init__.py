"""Which rows do files hold?"""
