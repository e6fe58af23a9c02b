"""The tensors of a `transformers` folder of Qwen2.5-VL, and the map from Megatron's parameters to them."""

from __future__ import annotations

from megatron_hetero.hf.weight_map import TensorSlice, WeightMap
from megatron_hetero.layout.stages import LAYERS, Stage
from megatron_hetero.models.common.weights import text
from megatron_hetero.models.common.weights.slices import gate_and_up, split_columns, whole
from megatron_hetero.models.common.weights.vision import (
    KINDS,
    attention_map,
    attention_shapes,
    merger_map,
    merger_shapes,
)
from megatron_hetero.models.family import TensorShapes
from megatron_hetero.models.qwen2_5_vl.shapes import TextShape, VisionShape

_MLP = "mlp.0", "mlp.2"
"""What a merger calls its linear layers."""


def encoder_tensors(v: VisionShape) -> TensorShapes:
    """The tensors of an encoder, without its prefix."""
    stored: TensorShapes = {"patch_embed.proj.weight": (v.hidden, v.channels, v.temporal_patch, v.patch, v.patch)}
    layer = _layer_shapes(v)
    for i in range(v.layers):
        stored |= {f"blocks.{i}.{name}": shape for name, shape in layer.items()}
    merger = {"ln_q.weight": (v.hidden,)} | merger_shapes(v, *_MLP)
    return stored | {f"merger.{name}": shape for name, shape in merger.items()}


def text_tensors(t: TextShape) -> TensorShapes:
    """The tensors of the language model."""
    return text.text_tensors(t, qkv_bias=True, head_norms=False)


def text_map(t: TextShape, tp_rank: int, tp: int, stage: Stage) -> WeightMap:
    """The map of what `stage` of the language model holds on one rank of a tensor-parallel group of `tp`."""
    return text.text_map(t, tp_rank, tp, stage, qkv_bias=True, head_norms=False)


def _layer_shapes(v: VisionShape) -> TensorShapes:
    norms: TensorShapes = {"norm1.weight": (v.hidden,), "norm2.weight": (v.hidden,)}
    return norms | attention_shapes(v) | {
        "mlp.gate_proj.weight": (v.ffn, v.hidden),
        "mlp.gate_proj.bias": (v.ffn,),
        "mlp.up_proj.weight": (v.ffn, v.hidden),
        "mlp.up_proj.bias": (v.ffn,),
        "mlp.down_proj.weight": (v.hidden, v.ffn),
        "mlp.down_proj.bias": (v.hidden,),
    }  # fmt: skip


def encoder_map(prefix: str, v: VisionShape, tp_rank: int, tp: int, stage: Stage) -> WeightMap:
    """The map of what `stage` of an encoder holds on one rank of a tensor-parallel group of `tp`."""
    result: dict[str, tuple[TensorSlice, ...]] = {}
    if stage.is_first:
        result["patch_embed.weight"] = whole(prefix + "patch_embed.proj.weight", v.hidden)
    for i in stage.layers:
        layer = _layer_map(f"{prefix}blocks.{i}.", v, tp_rank, tp)
        result |= {f"{LAYERS}{i}.{name}": slices for name, slices in layer.items()}
    if stage.is_last:
        stored = prefix + "merger."
        result["merger.norm.weight"] = whole(stored + "ln_q.weight", v.hidden)
        linears = merger_map(v, stored + _MLP[0], stored + _MLP[1], tp_rank, tp)
        result |= {f"merger.{name}": slices for name, slices in linears.items()}
    return result


def _layer_map(stored: str, v: VisionShape, tp_rank: int, tp: int) -> dict[str, tuple[TensorSlice, ...]]:
    result = {
        "input_layernorm.weight": whole(stored + "norm1.weight", v.hidden),
        "pre_mlp_layernorm.weight": whole(stored + "norm2.weight", v.hidden),
        **attention_map(stored, v, tp_rank, tp),
        "mlp.linear_fc2.bias": whole(stored + "mlp.down_proj.bias", v.hidden),
        "mlp.linear_fc2.weight": split_columns(stored + "mlp.down_proj.weight", v.hidden, v.ffn, tp_rank, tp),
    }
    for kind in KINDS:
        result[f"mlp.linear_fc1.{kind}"] = gate_and_up(stored + "mlp.", kind, v.ffn, tp_rank, tp)
    return result
