"""The language model of Qwen2.5-VL (and Qwen2): biases of queries, keys and values, no norms of heads."""

from __future__ import annotations

from megatron_hetero.models.common.stages import text


class TextModel(text.TextModel):
    """See `megatron_hetero.models.common.stages.text`."""

    qkv_bias, head_norms = True, False
