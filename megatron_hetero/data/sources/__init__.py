"""Files of records, each format in a file of its own: found by a pattern, indexed once, and then read at any place."""
