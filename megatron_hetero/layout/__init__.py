"""Layouts: a degree for each axis of parallelism and the ranks of a module. Pure."""
