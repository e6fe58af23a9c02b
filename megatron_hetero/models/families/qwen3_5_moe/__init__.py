"""Qwen3.5-MoE."""
