"""Heterogeneous parallelism for multimodal training on Megatron-Core: each module in its own layout, on its own
ranks.
"""

import warnings

# What Megatron-Core says on every rank, at import and from inside its own calls, is not for our users.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings(
    "ignore", message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
)
