"""`penstock compare`, `fits` and `machines`."""
