"""The model family Qwen2.5-VL."""
