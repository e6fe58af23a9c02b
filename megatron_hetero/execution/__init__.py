"""Executes a schedule on a rank."""
