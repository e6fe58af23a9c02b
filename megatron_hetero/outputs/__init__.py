"""The files and folders that a run writes: their reserved names, and which are complete and whose."""
