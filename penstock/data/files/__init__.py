"""Rows of the files that people have: JSON lines, CSV, Parquet, text."""
