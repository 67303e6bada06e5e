"""Are predictions held honestly against what others have published?"""
