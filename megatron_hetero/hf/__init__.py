"""Folders in `transformers` format: their weights, read by slices and written by shards, and the map to parameters."""
