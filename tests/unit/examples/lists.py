"""Examples that train adapters."""

from __future__ import annotations

WITH_ADAPTERS = {
    "qwen2_5_vl_7b_lora": 1, "qwen2_5_vl_32b_lora": 2, "qwen3_vl_30b_a3b_lora": 4, "qwen3_5_27b_lora": 2,
}  # fmt: skip
"""The ranks that each example is for."""
