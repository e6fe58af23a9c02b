"""Errors, files, locks, the terminal and the environment: modules that every other package may import."""
