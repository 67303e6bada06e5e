"""Other systems as published, and the ledgers of predicted and measured runs and ops."""
