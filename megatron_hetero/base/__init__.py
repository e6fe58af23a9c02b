"""Errors, files, locks, the terminal and the environment: what any room may use."""
