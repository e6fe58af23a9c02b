"""Qwen3-VL with experts."""
