"""What happens between steps?"""
