"""What a model has learned: held-out loss, exact match, greedy answers."""
