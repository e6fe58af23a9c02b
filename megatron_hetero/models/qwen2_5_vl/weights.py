"""The map between Megatron parameters and the tensors of a `transformers` folder of Qwen2.5-VL."""

from __future__ import annotations

from math import prod

from megatron_hetero.hf.weight_map import Interval, Piece, WeightMap, share, stack
from megatron_hetero.models.qwen2_5_vl.shapes import Qwen25VLShapes, TextShape, VisionShape
from megatron_hetero.names import TEXT, VISION, parts_of
from megatron_hetero.sharding.stages import LAYERS, Stage

TIED_COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
"""What a folder of a tied model may store a second time, and the tensor that it must equal."""

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
"""What Megatron calls the weights that a tied model has in common."""


def canonical_name(stored: str) -> str:
    """The name that published folders use. Newer versions of transformers may nest both modules under `model.`."""
    for nested, flat in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if stored.startswith(nested):
            return flat + stored.removeprefix(nested)
    return stored


def prefix_of(encoder: str) -> str:
    """What names of an encoder's tensors begin with, here: those of further encoders lie in folders of their own, where
    they begin as the first one's do.
    """
    return "visual." if encoder == VISION else f"{encoder}.visual."


def canonical_name_of(encoder: str, stored: str) -> str:
    """The name here of a tensor in the folder of a further encoder."""
    name = canonical_name(stored)
    return prefix_of(encoder) + name.removeprefix("visual.") if name.startswith("visual.") else name


def group_of(module: str, parameter: str) -> str:
    """The parameter group of a parameter, one of `parts_of` the module."""
    return parts_of(module)[-1] if parameter.startswith("merger.") else module


def stored_shapes(shapes: Qwen25VLShapes) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model with its shape, in the order in which it is written: first those of further encoders,
    then what a folder of Qwen2.5-VL must hold.
    """
    further = [encoder_shapes(name, shape) for name, shape in shapes.encoders.items() if name != VISION]
    return {name: shape for of_encoder in further for name, shape in of_encoder.items()} | folder_shapes(shapes)


def folder_shapes(shapes: Qwen25VLShapes) -> dict[str, tuple[int, ...]]:
    """The tensors of a Qwen2.5-VL folder: those of the encoder `vision` and of the text module."""
    return encoder_shapes(VISION, shapes.vision) | _text_shapes(shapes.text)


def encoder_shapes(encoder: str, v: VisionShape) -> dict[str, tuple[int, ...]]:
    """The tensors of one encoder."""
    prefix, width = prefix_of(encoder), v.hidden * v.unit
    stored: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (v.hidden, v.channels, v.temporal_patch, v.patch, v.patch)
    }
    for i in range(v.layers):
        stored |= {f"blocks.{i}.{name}": shape for name, shape in _vision_layer_shapes(v).items()}
    stored |= {
        "merger.ln_q.weight": (v.hidden,),
        "merger.mlp.0.weight": (width, width),
        "merger.mlp.0.bias": (width,),
        "merger.mlp.2.weight": (v.out_hidden, width),
        "merger.mlp.2.bias": (v.out_hidden,),
    }
    return {prefix + name: shape for name, shape in stored.items()}


def _text_shapes(t: TextShape) -> dict[str, tuple[int, ...]]:
    stored: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (t.vocab, t.hidden)}
    for i in range(t.layers):
        stored |= {f"model.layers.{i}.{name}": shape for name, shape in _text_layer_shapes(t).items()}
    stored["model.norm.weight"] = (t.hidden,)
    return stored if t.tied else stored | {"lm_head.weight": (t.vocab, t.hidden)}


def parameter_count(shapes: Qwen25VLShapes) -> int:
    """Parameters of the whole model."""
    return sum(prod(shape) for shape in stored_shapes(shapes).values())


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


def weight_map(module: str, shapes: Qwen25VLShapes, tp_rank: int, tp: int, stage: Stage | None = None) -> WeightMap:
    """The map of `module` (an encoder or "text") for one rank of a tensor-parallel group of `tp`; only what `stage`
    holds where one is given. Layers are numbered over the whole module.
    """
    if module != TEXT:
        v = shapes.encoders[module]
        return _vision_map(prefix_of(module), v, tp_rank, tp, stage or Stage.whole(v.layers))
    return _text_map(shapes.text, tp_rank, tp, stage or Stage.whole(shapes.text.layers))


def tied_parameter(module: str, shapes: Qwen25VLShapes, stage: Stage) -> str | None:
    """The parameter of `stage` of which another stage holds a copy: the embedding of a tied model, which is on the
    first stage, and the head on the last. None where there is none.
    """
    if module != TEXT or not shapes.text.tied or stage.is_first == stage.is_last:
        return None
    return EMBEDDING if stage.is_first else HEAD


def _whole(name: str, rows: int) -> tuple[Piece, ...]:
    return stack((name, (0, rows)))


def _columns(name: str, rows: int, columns: Interval) -> tuple[Piece, ...]:
    return (Piece(name, (0, rows), columns=columns),)


def _gate_and_up(prefix: str, kind: str, ffn: int, tp_rank: int, tp: int) -> tuple[Piece, ...]:
    """Gate above up, each with its own padding below it."""
    rows, length = share(ffn, tp_rank, tp)
    return Piece(f"{prefix}gate_proj.{kind}", rows), Piece(f"{prefix}up_proj.{kind}", rows, at=length)


def _vision_map(prefix: str, v: VisionShape, tp_rank: int, tp: int, stage: Stage) -> WeightMap:
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


def _text_map(t: TextShape, tp_rank: int, tp: int, stage: Stage) -> WeightMap:
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
