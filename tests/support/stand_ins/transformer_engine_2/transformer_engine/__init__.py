"""Stand-in for Transformer Engine 2: what Megatron-Core takes from it and what our modules call, on plain PyTorch.

Names and signatures are those of the version that is installed by its metadata, see `recorded`. Checks are those of the
files that classes name, in github.com/NVIDIA/TransformerEngine, without those that ask for CUDA tensors. What is
imported and never called raises when called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .attention import DotProductAttention
from .linear import Linear
from .norms import LayerNorm, RMSNorm
from .recorded import PLACES, VERSION, refused

__version__ = VERSION
_CLASSES: dict[str, Any] = {
    f"{__name__}.pytorch:{kind.__name__}": kind for kind in (DotProductAttention, LayerNorm, Linear, RMSNorm)
}


def _module(name: str) -> Any:
    if name not in sys.modules:
        sys.modules[name] = module = ModuleType(name)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        setattr(_module(parent), child, module)
    return sys.modules[name]


for _place in PLACES:
    _name, _, _thing = _place.partition(":")
    if "." not in _thing:
        _owner = _module(_name)
        if _thing and not hasattr(_owner, _thing):
            setattr(_owner, _thing, _CLASSES.get(_place) or refused(_thing))
