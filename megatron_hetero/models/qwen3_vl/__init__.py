"""Qwen3-VL: shapes, geometry of images, vision and text modules, and the map to its `transformers` weights."""
