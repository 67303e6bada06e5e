"""The training loop: sessions, evaluation, generation, logs, ranks that follow."""
