"""Checkpoints that any layout can read: their contents, atomic writes, resumption of runs, and conversion."""
