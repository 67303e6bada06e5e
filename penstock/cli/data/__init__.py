"""`penstock data`."""
