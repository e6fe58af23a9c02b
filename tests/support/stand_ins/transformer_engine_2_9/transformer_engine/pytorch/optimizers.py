"""transformer_engine/pytorch/optimizers/: Megatron-Core prefers them to PyTorch's wherever it finds them."""

from .refused import refused

FusedAdam = refused("FusedAdam")
FusedSGD = refused("FusedSGD")
multi_tensor_applier = refused("multi_tensor_applier")
multi_tensor_l2norm = refused("multi_tensor_l2norm")
multi_tensor_scale = refused("multi_tensor_scale")
