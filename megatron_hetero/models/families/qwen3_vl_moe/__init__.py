"""The model family Qwen3-VL-MoE."""
