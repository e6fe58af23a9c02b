"""Configurations bound to a world of ranks: single modules, and the job with its graph, batch and schedule."""
