"""Evaluation: held-out loss, exact match, greedy answers."""
