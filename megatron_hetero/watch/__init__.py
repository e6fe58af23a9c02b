"""Looks after what a rank does: how long parts of a step take, and whether it waits forever."""
