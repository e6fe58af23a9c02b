"""The language model of Qwen3-VL (and Qwen3): no biases, norms of the heads of queries and keys."""

from __future__ import annotations

from megatron_hetero.models.common.stages import text


class TextModel(text.TextModel):
    """See `megatron_hetero.models.common.stages.text`."""

    qkv_bias, head_norms = False, True
