"""File formats of data sets: files are found by a pattern, indexed once, and then read in any order."""
