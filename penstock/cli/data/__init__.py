"""What is shown of data?"""
