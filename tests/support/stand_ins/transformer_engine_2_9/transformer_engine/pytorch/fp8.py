"""transformer_engine/pytorch/fp8.py, deprecated in 2.9 in favour of quantization.py."""

from .refused import refused

FP8GlobalStateManager = refused("FP8GlobalStateManager")
fp8_autocast = refused("fp8_autocast")
fp8_model_init = refused("fp8_model_init")
