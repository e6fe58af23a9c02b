"""Folders in `transformers` format: weights, read slice by slice and written shard by shard, and their map to
parameters.
"""
