"""Where a run puts what it writes: the names that it keeps to itself, and what in a folder is whole, or its own."""
