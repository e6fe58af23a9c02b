"""transformer_engine/pytorch/module/{base,linear}.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .recorded import signed


class Linear(torch.nn.Module):
    """linear.py, `Linear`: columns gather their input along the sequence, rows scatter their output."""

    @signed("module.linear:Linear.__init__", "ub_name")
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        tp_size: int,
        get_rng_state_tracker: Callable[[], Any] | None,
        rng_tracker_name: str | None,
        init_method: Callable[[Tensor], Any] | None,
        bias: bool,
        return_bias: bool,
        params_dtype: torch.dtype | None,
        parallel_mode: str | None,
        device: torch.device | str,
    ):
        super().__init__()
        assert parallel_mode in ("row", "column", None), f"parallel_mode {parallel_mode} not supported"
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

    @signed("module.linear:Linear.forward", "is_first_microbatch")
    def forward(self, inp: Tensor) -> Any:
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
