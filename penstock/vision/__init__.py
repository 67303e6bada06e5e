"""Images in training: rows with images, the model's processor, and stored outputs of its frozen vision tower."""
