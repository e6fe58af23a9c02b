"""The tensors of a language model in the layout of Qwen2 and Qwen3, and the map from Megatron's parameters to them."""

from __future__ import annotations

from megatron_hetero.hf.weight_map import Interval, TensorSlice, WeightMap, stack
from megatron_hetero.layout.stages import LAYERS, Stage
from megatron_hetero.models.common.parameters import EMBEDDING, HEAD
from megatron_hetero.models.common.weights.slices import columns, gate_and_up, head, split_columns, split_rows, whole
from megatron_hetero.models.family import TensorShapes, TextShape

HEAD_NORMS = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
"""Megatron's names, and those of stored tensors."""


def text_tensors(t: TextShape, *, qkv_bias: bool, head_norms: bool) -> TensorShapes:
    """The tensors of the language model."""
    stored: TensorShapes = {"model.embed_tokens.weight": (t.vocab, t.hidden)}
    layer = _layer_shapes(t, qkv_bias=qkv_bias, head_norms=head_norms)
    for i in range(t.layers):
        stored |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    stored["model.norm.weight"] = (t.hidden,)
    return stored if t.tied else stored | {"lm_head.weight": (t.vocab, t.hidden)}


def _layer_shapes(t: TextShape, *, qkv_bias: bool, head_norms: bool) -> TensorShapes:
    queries, keys = t.heads * t.head_dim, t.kv_heads * t.head_dim
    shapes: TensorShapes = {"input_layernorm.weight": (t.hidden,), "post_attention_layernorm.weight": (t.hidden,)}
    for name, rows in {"q_proj": queries, "k_proj": keys, "v_proj": keys}.items():
        shapes[f"self_attn.{name}.weight"] = (rows, t.hidden)
        if qkv_bias:
            shapes[f"self_attn.{name}.bias"] = (rows,)
    if head_norms:
        shapes |= {f"self_attn.{name}.weight": (t.head_dim,) for name in HEAD_NORMS.values()}
    return shapes | {
        "self_attn.o_proj.weight": (t.hidden, queries),
        "mlp.gate_proj.weight": (t.ffn, t.hidden),
        "mlp.up_proj.weight": (t.ffn, t.hidden),
        "mlp.down_proj.weight": (t.hidden, t.ffn),
    }


def text_map(t: TextShape, tp_rank: int, tp: int, stage: Stage, *, qkv_bias: bool, head_norms: bool) -> WeightMap:
    """The map of what `stage` of the language model holds on one rank of a tensor-parallel group of `tp`."""
    embedding, result = "model.embed_tokens.weight", {}
    if stage.is_first:
        result[EMBEDDING] = split_rows(embedding, t.vocab, tp_rank, tp)
    for i in stage.layers:
        own, stored = f"{LAYERS}{i}.", f"model.layers.{i}."
        layer = _layer_map(stored, t, tp_rank, tp, qkv_bias=qkv_bias, head_norms=head_norms)
        result |= {own + name: slices for name, slices in layer.items()}
    if stage.is_last:
        result["decoder.final_layernorm.weight"] = whole("model.norm.weight", t.hidden)
        if not (t.tied and stage.is_first):
            result[HEAD] = split_rows(embedding if t.tied else "lm_head.weight", t.vocab, tp_rank, tp)
    return result


def _layer_map(
    stored: str, t: TextShape, tp_rank: int, tp: int, *, qkv_bias: bool, head_norms: bool
) -> dict[str, tuple[TensorSlice, ...]]:
    queries = t.heads // tp * t.head_dim
    result = {
        "input_layernorm.weight": whole(stored + "input_layernorm.weight", t.hidden),
        "pre_mlp_layernorm.weight": whole(stored + "post_attention_layernorm.weight", t.hidden),
        "self_attention.linear_proj.weight": columns(
            stored + "self_attn.o_proj.weight", t.hidden, (tp_rank * queries, (tp_rank + 1) * queries)
        ),
        "mlp.linear_fc1.weight": gate_and_up(stored + "mlp.", "weight", t.ffn, tp_rank, tp),
        "mlp.linear_fc2.weight": split_columns(stored + "mlp.down_proj.weight", t.hidden, t.ffn, tp_rank, tp),
    }
    for kind in ("weight", "bias")[: 1 + qkv_bias]:
        result[f"self_attention.linear_qkv.{kind}"] = stack(*_query_groups(stored, kind, t, tp_rank, tp))
    if head_norms:
        for own, name in HEAD_NORMS.items():
            result[f"self_attention.{own}.weight"] = whole(f"{stored}self_attn.{name}.weight", t.head_dim)
    return result


def _query_groups(stored: str, kind: str, t: TextShape, tp_rank: int, tp: int) -> list[tuple[str, Interval]]:
    """Megatron's order: for each key/value head (or copy of one) its query heads, then k, then v."""
    copies = t.kv_copies(tp)
    groups = t.kv_heads * copies
    heads = t.heads // groups
    parts = []
    for group in range(groups * tp_rank // tp, groups * (tp_rank + 1) // tp):
        kv = head(group // copies, t.head_dim)
        parts += [
            (f"{stored}self_attn.q_proj.{kind}", head(group * heads, t.head_dim, heads)),
            (f"{stored}self_attn.k_proj.{kind}", kv),
            (f"{stored}self_attn.v_proj.{kind}", kv),
        ]
    return parts
