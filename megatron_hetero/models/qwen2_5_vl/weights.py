"""The tensors of a `transformers` folder of Qwen2.5-VL, and the map from Megatron's parameters to them."""

from __future__ import annotations

from megatron_hetero.hf.weight_map import Interval, Piece, WeightMap, share, stack
from megatron_hetero.models.common.parameters import EMBEDDING, HEAD
from megatron_hetero.models.family import TensorShapes
from megatron_hetero.models.qwen2_5_vl.shapes import TextShape, VisionShape
from megatron_hetero.sharding.stages import LAYERS, Stage


def encoder_tensors(v: VisionShape) -> TensorShapes:
    """The tensors of an encoder, without its prefix."""
    width = v.hidden * v.unit
    stored: TensorShapes = {"patch_embed.proj.weight": (v.hidden, v.channels, v.temporal_patch, v.patch, v.patch)}
    for i in range(v.layers):
        stored |= {f"blocks.{i}.{name}": shape for name, shape in _vision_layer_shapes(v).items()}
    return stored | {
        "merger.ln_q.weight": (v.hidden,),
        "merger.mlp.0.weight": (width, width),
        "merger.mlp.0.bias": (width,),
        "merger.mlp.2.weight": (v.out_hidden, width),
        "merger.mlp.2.bias": (v.out_hidden,),
    }


def text_tensors(t: TextShape) -> TensorShapes:
    """The tensors of the language model."""
    stored: TensorShapes = {"model.embed_tokens.weight": (t.vocab, t.hidden)}
    for i in range(t.layers):
        stored |= {f"model.layers.{i}.{name}": shape for name, shape in _text_layer_shapes(t).items()}
    stored["model.norm.weight"] = (t.hidden,)
    return stored if t.tied else stored | {"lm_head.weight": (t.vocab, t.hidden)}


def _vision_layer_shapes(v: VisionShape) -> dict[str, tuple[int, ...]]:
    return {
        "norm1.weight": (v.hidden,),
        "norm2.weight": (v.hidden,),
        "attn.qkv.weight": (3 * v.hidden, v.hidden),
        "attn.qkv.bias": (3 * v.hidden,),
        "attn.proj.weight": (v.hidden, v.hidden),
        "attn.proj.bias": (v.hidden,),
        "mlp.gate_proj.weight": (v.ffn, v.hidden),
        "mlp.gate_proj.bias": (v.ffn,),
        "mlp.up_proj.weight": (v.ffn, v.hidden),
        "mlp.up_proj.bias": (v.ffn,),
        "mlp.down_proj.weight": (v.hidden, v.ffn),
        "mlp.down_proj.bias": (v.hidden,),
    }


def _text_layer_shapes(t: TextShape) -> dict[str, tuple[int, ...]]:
    kv = t.kv_heads * t.head_dim
    return {
        "input_layernorm.weight": (t.hidden,),
        "post_attention_layernorm.weight": (t.hidden,),
        "self_attn.q_proj.weight": (t.hidden, t.hidden),
        "self_attn.q_proj.bias": (t.hidden,),
        "self_attn.k_proj.weight": (kv, t.hidden),
        "self_attn.k_proj.bias": (kv,),
        "self_attn.v_proj.weight": (kv, t.hidden),
        "self_attn.v_proj.bias": (kv,),
        "self_attn.o_proj.weight": (t.hidden, t.hidden),
        "mlp.gate_proj.weight": (t.ffn, t.hidden),
        "mlp.up_proj.weight": (t.ffn, t.hidden),
        "mlp.down_proj.weight": (t.hidden, t.ffn),
    }


def _whole(name: str, rows: int) -> tuple[Piece, ...]:
    return stack((name, (0, rows)))


def _columns(name: str, rows: int, columns: Interval) -> tuple[Piece, ...]:
    return (Piece(name, (0, rows), columns=columns),)


def _gate_and_up(prefix: str, kind: str, ffn: int, tp_rank: int, tp: int) -> tuple[Piece, ...]:
    """Gate above up, each with its own padding below it."""
    rows, length = share(ffn, tp_rank, tp)
    return Piece(f"{prefix}gate_proj.{kind}", rows), Piece(f"{prefix}up_proj.{kind}", rows, at=length)


def encoder_map(prefix: str, v: VisionShape, tp_rank: int, tp: int, stage: Stage) -> WeightMap:
    """The map of what `stage` of an encoder holds on one rank of a tensor-parallel group of `tp`."""
    result: dict[str, tuple[Piece, ...]] = {}
    if stage.is_first:
        result["patch_embed.weight"] = _whole(prefix + "patch_embed.proj.weight", v.hidden)
    for i in stage.layers:
        own, stored = f"{LAYERS}{i}.", f"{prefix}blocks.{i}."
        result |= {own + name: pieces for name, pieces in _vision_layer_map(stored, v, tp_rank, tp).items()}
    return result | _merger_map(f"{prefix}merger.", v, tp_rank, tp) if stage.is_last else result


def _merger_map(stored: str, v: VisionShape, tp_rank: int, tp: int) -> dict[str, tuple[Piece, ...]]:
    part, _ = share(v.hidden * v.unit, tp_rank, tp)
    return {
        "merger.ln_q.weight": _whole(stored + "ln_q.weight", v.hidden),
        "merger.linear_fc1.weight": stack((stored + "mlp.0.weight", part)),
        "merger.linear_fc1.bias": stack((stored + "mlp.0.bias", part)),
        "merger.linear_fc2.weight": _columns(stored + "mlp.2.weight", v.out_hidden, part),
        "merger.linear_fc2.bias": _whole(stored + "mlp.2.bias", v.out_hidden),
    }


def _vision_layer_map(stored: str, v: VisionShape, tp_rank: int, tp: int) -> WeightMap:
    heads = range(v.heads * tp_rank // tp, v.heads * (tp_rank + 1) // tp)
    result = {
        "input_layernorm.weight": _whole(stored + "norm1.weight", v.hidden),
        "pre_mlp_layernorm.weight": _whole(stored + "norm2.weight", v.hidden),
        "self_attention.linear_proj.bias": _whole(stored + "attn.proj.bias", v.hidden),
        "self_attention.linear_proj.weight": _columns(
            stored + "attn.proj.weight", v.hidden, (heads.start * v.head_dim, heads.stop * v.head_dim)
        ),
        "mlp.linear_fc2.bias": _whole(stored + "mlp.down_proj.bias", v.hidden),
        "mlp.linear_fc2.weight": _columns(stored + "mlp.down_proj.weight", v.hidden, share(v.ffn, tp_rank, tp)[0]),
    }
    for kind in ("weight", "bias"):
        name = f"{stored}attn.qkv.{kind}"
        # Megatron keeps q, k and v of a head together; the folder keeps all q, then all k, then all v.
        triples = [(name, _head(h + v.heads * part, v.head_dim)) for h in heads for part in range(3)]
        result[f"self_attention.linear_qkv.{kind}"] = stack(*triples)
        result[f"mlp.linear_fc1.{kind}"] = _gate_and_up(stored + "mlp.", kind, v.ffn, tp_rank, tp)
    return result


def _head(index: int, head_dim: int, count: int = 1) -> Interval:
    return index * head_dim, (index + count) * head_dim


def text_map(t: TextShape, tp_rank: int, tp: int, stage: Stage) -> WeightMap:
    """The map of what `stage` of the language model holds on one rank of a tensor-parallel group of `tp`."""
    vocabulary, _ = share(t.vocab, tp_rank, tp)
    embedding, result = "model.embed_tokens.weight", {}
    if stage.is_first:
        result[EMBEDDING] = stack((embedding, vocabulary))
    for i in stage.layers:
        own, stored = f"{LAYERS}{i}.", f"model.layers.{i}."
        result |= {own + name: pieces for name, pieces in _text_layer_map(stored, t, tp_rank, tp).items()}
    if stage.is_last:
        result["decoder.final_layernorm.weight"] = _whole("model.norm.weight", t.hidden)
        if not (t.tied and stage.is_first):
            result[HEAD] = stack((embedding if t.tied else "lm_head.weight", vocabulary))
    return result


def _text_layer_map(stored: str, t: TextShape, tp_rank: int, tp: int) -> WeightMap:
    queries = t.heads // tp * t.head_dim
    result = {
        "input_layernorm.weight": _whole(stored + "input_layernorm.weight", t.hidden),
        "pre_mlp_layernorm.weight": _whole(stored + "post_attention_layernorm.weight", t.hidden),
        "self_attention.linear_proj.weight": _columns(
            stored + "self_attn.o_proj.weight", t.hidden, (tp_rank * queries, (tp_rank + 1) * queries)
        ),
        "mlp.linear_fc1.weight": _gate_and_up(stored + "mlp.", "weight", t.ffn, tp_rank, tp),
        "mlp.linear_fc2.weight": _columns(stored + "mlp.down_proj.weight", t.hidden, share(t.ffn, tp_rank, tp)[0]),
    }
    for kind in ("weight", "bias"):
        result[f"self_attention.linear_qkv.{kind}"] = stack(*_query_groups(stored, kind, t, tp_rank, tp))
    return result


def _query_groups(stored: str, kind: str, t: TextShape, tp_rank: int, tp: int) -> list[tuple[str, Interval]]:
    """Megatron's order: for each key/value head (or copy of one) its query heads, then k, then v."""
    copies = t.kv_copies(tp)
    groups = t.kv_heads * copies
    heads = t.heads // groups
    parts = []
    for group in range(groups * tp_rank // tp, groups * (tp_rank + 1) // tp):
        kv = _head(group // copies, t.head_dim)
        parts += [
            (f"{stored}self_attn.q_proj.{kind}", _head(group * heads, t.head_dim, heads)),
            (f"{stored}self_attn.k_proj.{kind}", kv),
            (f"{stored}self_attn.v_proj.{kind}", kv),
        ]
    return parts
