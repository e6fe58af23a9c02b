"""Heterogeneous parallelism for multimodal training on Megatron-Core: each module in its own layout, on its own ranks."""

import warnings

# Megatron-Core says at every import, on every rank, which optional packages it does without.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|TransformerEngine).*", module=r"megatron\.core")
