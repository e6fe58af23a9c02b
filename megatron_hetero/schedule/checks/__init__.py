"""Checks that a schedule ends: every send has its receive, and no ranks wait in a cycle. Pure."""
