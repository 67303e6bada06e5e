"""What can this machine do?"""
