"""`penstock merge`."""
