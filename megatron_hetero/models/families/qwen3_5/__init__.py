"""The model family Qwen3.5."""
