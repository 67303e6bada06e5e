"""What can a user ask for?"""
