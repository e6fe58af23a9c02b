"""transformer_engine/pytorch/module/{rmsnorm,layernorm}.py, which extend classes of pytorch/ops/basic."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .recorded import signed


class RMSNorm(torch.nn.Module):
    """`RMSNorm`, with the rounding of ours, so that results can be compared."""

    @signed("module.rmsnorm:RMSNorm.__init__")
    def __init__(
        self,
        normalized_shape: int | None,
        eps: float,
        sequence_parallel: bool | None,
        params_dtype: torch.dtype | None,
        zero_centered_gamma: bool,
        hidden_size: int | None,
        kwargs: dict[str, Any],
    ):
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError("Neither or both of `normalized_shape` and `hidden_size` (deprecated) are provided")
        assert params_dtype is None or "dtype" not in kwargs, "Both `dtype` and `params_dtype` kwargs are provided"
        dtype = {} if params_dtype is None else {"dtype": params_dtype}
        shape = hidden_size if normalized_shape is None else normalized_shape
        self._initialize(shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs, **dtype)
        for parameter in self.parameters() if sequence_parallel is not None else ():
            parameter.sequence_parallel = sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    @signed("ops.basic.rmsnorm:RMSNorm.__init__")
    def _initialize(
        self, normalized_shape: int, eps: float, device: Any, dtype: torch.dtype | None, zero_centered_gamma: bool
    ) -> None:
        self.eps, self.zero_centered_gamma = eps, int(zero_centered_gamma)
        weight = torch.ones(normalized_shape, device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(weight - self.zero_centered_gamma)

    def forward(self, inp: Tensor) -> Tensor:
        """Of the last dim."""
        wide = inp.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.zero_centered_gamma:
            return (normed * (1 + self.weight.float())).to(inp.dtype)
        return self.weight * normed.to(inp.dtype)


class LayerNorm(RMSNorm):
    """`LayerNorm`, which has the arguments of `RMSNorm`."""

    def _initialize(self, *args: Any, **kwargs: Any) -> None:
        super()._initialize(*args, **kwargs)
        self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, inp: Tensor) -> Tensor:
        """Of the last dim."""
        gain = self.weight.float() + self.zero_centered_gamma
        return F.layer_norm(inp.float(), gain.shape, gain, self.bias.float(), self.eps).to(inp.dtype)
