"""What does a GPU do with penstock, stage by stage, in calls of ten minutes?"""
