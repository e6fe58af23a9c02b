"""Stand-in for Transformer Engine 2.9: what megatron-core 0.16.1 imports and what our modules call, on plain PyTorch.

Signatures and checks are those of github.com/NVIDIA/TransformerEngine at tag v2.9, in the files of the same names under
transformer_engine/, without those that ask for CUDA tensors. What is imported and never called raises when called.
"""

from . import common as common
from . import pytorch as pytorch

__version__ = "2.9.0+stand.in"
