"""transformer_engine/pytorch/ops/: classes that annotations of Megatron-Core name."""

from .refused import refused

Sequential = refused("Sequential")
FusibleOperation = refused("FusibleOperation")
