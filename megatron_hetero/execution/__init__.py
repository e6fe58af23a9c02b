"""Executes a schedule on a rank, with a watchdog for ranks that wait forever."""
