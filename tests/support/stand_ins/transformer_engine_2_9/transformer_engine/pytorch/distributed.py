"""transformer_engine/pytorch/distributed.py."""

from .refused import refused

CudaRNGStatesTracker = refused("CudaRNGStatesTracker")
checkpoint = refused("checkpoint")
activation_recompute_forward = refused("activation_recompute_forward")
