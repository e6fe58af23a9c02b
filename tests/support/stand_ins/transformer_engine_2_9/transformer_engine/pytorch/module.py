"""transformer_engine/pytorch/module/{base,linear,rmsnorm}.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .refused import refused

LayerNorm = refused("LayerNorm")
LayerNormLinear = refused("LayerNormLinear")
GroupedLinear = refused("GroupedLinear")


class Linear(torch.nn.Module):
    """linear.py, `Linear`: columns gather their input along the sequence, rows scatter their output."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ):
        super().__init__()
        assert parallel_mode in ("row", "column", None), f"parallel_mode {parallel_mode} not supported"
        options = (fuse_wgrad_accumulation, parameters_split, delay_wgrad_compute, symmetric_ar_type)
        assert options == (False, None, False, None), "not what this stands in for"
        self.tp_group, self.parallel_mode = tp_group, parallel_mode
        self.tp_size = tp_size if tp_group is None else dist.get_world_size(group=tp_group)
        divided = out_features if parallel_mode == "column" else in_features
        assert parallel_mode is None or divided % self.tp_size == 0, f"{divided} is not divisible by {self.tp_size}"
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.sequence_parallel = (self.tp_size > 1) and sequence_parallel
        place = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **place))
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **place)) if bias else None
        self._mark_parameters()
        assert init_method is not None
        if get_rng_state_tracker is None:
            init_method(self.weight)
        else:
            with get_rng_state_tracker().fork(*[n for n in (rng_tracker_name,) if n]):
                init_method(self.weight)

    def _mark_parameters(self) -> None:
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes as mark

        mark(self.weight, True, 1 if self.parallel_mode == "row" else 0, 1)
        if self.bias is not None and self.parallel_mode == "column":
            mark(self.bias, True, 0, 1)
        elif self.bias is not None and self.parallel_mode == "row":
            self.bias.sequence_parallel = self.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def get_extra_state(self) -> Tensor:
        """base.py: state of low precision, of which there is none."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """base.py."""

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """The output; with `return_bias` a pair with the bias, which has not been added."""
        from megatron.core.tensor_parallel import mappings

        assert inp.shape[-1] == self.in_features, "GEMM not possible"
        assert inp.dtype == self.weight.dtype, "Data types for parameters must match when outside of autocasted region."
        group = {"group": self.tp_group}
        if self.parallel_mode == "column" and self.tp_size > 1:
            enter = (
                "gather_from_sequence_parallel_region"
                if self.sequence_parallel
                else "copy_to_tensor_model_parallel_region"
            )
            inp = getattr(mappings, enter)(inp, **group)
        out = F.linear(inp, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            scatter = "reduce_scatter_to_sequence_parallel_region"
            leave = scatter if self.sequence_parallel else "reduce_from_tensor_model_parallel_region"
            out = getattr(mappings, leave)(out, **group)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class RMSNorm(torch.nn.Module):
    """rmsnorm.py, `RMSNorm`, with the rounding of ours, so that results can be compared."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int = 0,
    ):
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError("Neither or both of `normalized_shape` and `hidden_size` (deprecated) are provided")
        assert not (params_dtype and dtype) and not zero_centered_gamma
        width: Any = hidden_size if normalized_shape is None else normalized_shape
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(width, device=device, dtype=params_dtype or dtype))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, inp: Tensor) -> Tensor:
        """Of the last dim."""
        wide = inp.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(inp.dtype)
