"""The tensors of a `transformers` folder of Qwen3-VL, and the map from Megatron's parameters to them."""

from __future__ import annotations

from megatron_hetero.hf.weight_map import TensorSlice, WeightMap
from megatron_hetero.layout.stages import LAYERS, Stage
from megatron_hetero.models.common.weights import text
from megatron_hetero.models.common.weights.slices import split_columns, split_rows, whole
from megatron_hetero.models.common.weights.vision import (
    KINDS,
    attention_map,
    attention_shapes,
    merger_map,
    merger_shapes,
)
from megatron_hetero.models.family import TensorShapes
from megatron_hetero.models.qwen3_vl.shapes import TextShape, VisionShape

_LINEARS = "linear_fc1", "linear_fc2"


def published_name(name: str) -> str:
    """Published folders nest both modules under `model.`; here they have the names of older families."""
    for flat, nested in (("visual.", "model.visual."), ("model.", "model.language_model.")):
        if name.startswith(flat):
            return nested + name.removeprefix(flat)
    return name


def encoder_tensors(v: VisionShape) -> TensorShapes:
    """The tensors of an encoder, without its prefix."""
    stored: TensorShapes = {
        "patch_embed.proj.weight": (v.hidden, v.channels, v.temporal_patch, v.patch, v.patch),
        "patch_embed.proj.bias": (v.hidden,),
        "pos_embed.weight": (v.table_side**2, v.hidden),
    }
    layer = _layer_shapes(v)
    for i in range(v.layers):
        stored |= {f"blocks.{i}.{name}": shape for name, shape in layer.items()}
    stored |= {f"merger.{name}": shape for name, shape in _merger_shapes(v, v.hidden).items()}
    for i in range(len(v.deepstack)):
        merger = _merger_shapes(v, v.hidden * v.unit)
        stored |= {f"deepstack_merger_list.{i}.{name}": shape for name, shape in merger.items()}
    return stored


def text_tensors(t: TextShape) -> TensorShapes:
    """The tensors of the language model."""
    return text.text_tensors(t, qkv_bias=False, head_norms=True)


def text_map(t: TextShape, tp_rank: int, tp: int, stage: Stage) -> WeightMap:
    """The map of what `stage` of the language model holds on one rank of a tensor-parallel group of `tp`."""
    return text.text_map(t, tp_rank, tp, stage, qkv_bias=False, head_norms=True)


def _norm_shapes(name: str, width: int) -> TensorShapes:
    return {f"{name}.{kind}": (width,) for kind in KINDS}


def _merger_shapes(v: VisionShape, normed: int) -> TensorShapes:
    return _norm_shapes("norm", normed) | merger_shapes(v, *_LINEARS)


def _layer_shapes(v: VisionShape) -> TensorShapes:
    return {
        **_norm_shapes("norm1", v.hidden),
        **_norm_shapes("norm2", v.hidden),
        **attention_shapes(v),
        "mlp.linear_fc1.weight": (v.ffn, v.hidden),
        "mlp.linear_fc1.bias": (v.ffn,),
        "mlp.linear_fc2.weight": (v.hidden, v.ffn),
        "mlp.linear_fc2.bias": (v.hidden,),
    }


def encoder_map(prefix: str, v: VisionShape, tp_rank: int, tp: int, stage: Stage) -> WeightMap:
    """The map of what `stage` of an encoder holds on one rank of a tensor-parallel group of `tp`."""
    result: dict[str, tuple[TensorSlice, ...]] = {}
    if stage.is_first:
        result = {f"patch_embed.{kind}": whole(f"{prefix}patch_embed.proj.{kind}", v.hidden) for kind in KINDS}
    for i in stage.layers:
        layer = _layer_map(f"{prefix}blocks.{i}.", v, tp_rank, tp)
        result |= {f"{LAYERS}{i}.{name}": slices for name, slices in layer.items()}
    if stage.is_last:
        result |= _merger_map("merger.", prefix, v, v.hidden, tp_rank, tp)
    if stage.is_first:
        result["pos_embed.weight"] = whole(prefix + "pos_embed.weight", v.table_side**2)
    for i, layer in enumerate(v.deepstack):
        if layer in stage.layers:
            result |= _merger_map(f"deepstack_merger_list.{i}.", prefix, v, v.hidden * v.unit, tp_rank, tp)
    return result


def _norm_map(own: str, stored: str, width: int) -> dict[str, tuple[TensorSlice, ...]]:
    return {f"{own}.{kind}": whole(f"{stored}.{kind}", width) for kind in KINDS}


def _merger_map(
    name: str, prefix: str, v: VisionShape, normed: int, tp_rank: int, tp: int
) -> dict[str, tuple[TensorSlice, ...]]:
    """`normed`: what its norm is over."""
    stored = prefix + name
    fc1, fc2 = (stored + linear for linear in _LINEARS)
    found = _norm_map("norm", stored + "norm", normed) | merger_map(v, fc1, fc2, tp_rank, tp)
    return {name + own: slices for own, slices in found.items()}


def _layer_map(stored: str, v: VisionShape, tp_rank: int, tp: int) -> dict[str, tuple[TensorSlice, ...]]:
    return {
        **_norm_map("input_layernorm", stored + "norm1", v.hidden),
        **_norm_map("pre_mlp_layernorm", stored + "norm2", v.hidden),
        **attention_map(stored, v, tp_rank, tp),
        "mlp.linear_fc1.weight": split_rows(stored + "mlp.linear_fc1.weight", v.ffn, tp_rank, tp),
        "mlp.linear_fc1.bias": split_rows(stored + "mlp.linear_fc1.bias", v.ffn, tp_rank, tp),
        "mlp.linear_fc2.weight": split_columns(stored + "mlp.linear_fc2.weight", v.hidden, v.ffn, tp_rank, tp),
        "mlp.linear_fc2.bias": whole(stored + "mlp.linear_fc2.bias", v.hidden),
    }
