"""Executes a schedule on a rank, and watches that no rank waits for ever."""
