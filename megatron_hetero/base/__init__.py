"""Errors, files, locks, the terminal and the environment: modules that every room may import."""
