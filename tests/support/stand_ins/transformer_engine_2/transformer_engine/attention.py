"""transformer_engine/pytorch/attention/dot_product_attention/{dot_product_attention,utils}.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .recorded import signed

MASKS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)


class DotProductAttention(torch.nn.Module):
    """`DotProductAttention`, for packed sequences in half precision on Hopper."""

    @signed(
        "attention.dot_product_attention.dot_product_attention:DotProductAttention.__init__",
        "layer_number", "sequence_parallel", "get_rng_state_tracker",
    )  # fmt: skip
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None,
        qkv_format: str,
        attn_mask_type: str,
        tp_size: int,
        tp_group: dist.ProcessGroup | None,
        attention_type: str,
        softmax_scale: float | None,
    ):
        super().__init__()
        assert attention_type in ("self", "cross"), f"attention_type {attention_type} not supported"
        tp = tp_size if tp_group is None else dist.get_world_size(group=tp_group)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.num_gqa_groups_per_partition = int(groups // tp)
        assert num_attention_heads % groups == 0, (
            "The number of attention heads must be divisible by the number of GQA groups!"
        )
        assert isinstance(kv_channels, int)
        self.channels, self.qkv_format, self.attn_mask_type = kv_channels, qkv_format, attn_mask_type
        self.softmax_scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    @signed(
        "attention.dot_product_attention.dot_product_attention:DotProductAttention.forward",
        "max_seqlen_q", "max_seqlen_kv",
    )  # fmt: skip
    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        qkv_format: str | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_kv: Tensor | None,
        attn_mask_type: str | None,
    ) -> Tensor:
        """[tokens, heads * channels]."""
        q, k, v = query_layer, key_layer, value_layer
        assert q.dtype == k.dtype == v.dtype, "Queries, keys and values must have the same data type!"
        assert k.shape[:-1] == v.shape[:-1], (
            "Keys and values must have the same batch size, sequence length and number of heads!"
        )
        assert q.shape[-1] == k.shape[-1] == self.channels, f"Keys have head_dim = {k.shape[-1]}"
        expected = self.num_gqa_groups_per_partition
        assert k.shape[-2] == expected, (
            f"Keys and values must have num_gqa_group = {expected} heads! Found {k.shape[-2]}."
        )
        mask = attn_mask_type or self.attn_mask_type
        assert mask in MASKS, f"Attention mask type {mask} is not supported!"
        assert (qkv_format or self.qkv_format) == "thd", "not what this stands in for"
        assert all(x.dim() == 3 for x in (q, k, v)), (
            "Queries, keys and values must be 3D tensors when qkv_format = thd!"
        )
        assert "padding" in mask, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
        assert cu_seqlens_q is not None and cu_seqlens_kv is not None, (
            "cu_seqlens_q and cu_seqlens_kv can not be None when qkv_format = thd!"
        )
        assert cu_seqlens_q.shape == cu_seqlens_kv.shape and cu_seqlens_q.dim() == 1, (
            "cu_seqlens_q and cu_seqlens_q must both have shape [batch_size + 1]!"
        )
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32, (
            "cu_seqlens_q and cu_seqlens_q must both be in dtype torch.int32!"
        )
        # utils.py, `get_attention_backend`: FlashAttention and FusedAttention take half precision alone, and
        # UnfusedDotProductAttention is disabled for qkv_format = thd up to 2.10. From 2.11 on it would be very slow.
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError("No dot product attention support for the provided inputs!")
        return self._packed(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_kv.tolist(), mask)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, starts_q: list[int], starts_kv: list[int], mask: str) -> Tensor:
        assert "bottom_right" not in mask, "not what this stands in for"
        pieces = zip(starts_q, starts_q[1:], starts_kv, starts_kv[1:], strict=False)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        outs = [
            F.scaled_dot_product_attention(
                q[None, :, q0:q1],
                k[None, :, k0:k1],
                v[None, :, k0:k1],
                is_causal="causal" in mask,  # which aligns at the first query and key, as padding_causal does
                scale=self.softmax_scale,
                enable_gqa=len(q) != len(k),
            )[0].transpose(0, 1)
            for q0, q1, k0, k1 in pieces
        ]
        return torch.cat(outs).flatten(1)
