"""Reports in text and HTML, and comparisons of machines and models."""
