"""Modules built from Megatron-Core layers: what families share, and one folder per model family."""
