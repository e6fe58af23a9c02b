"""What the encoders of all families store in the same way: attention, and mergers behind a norm."""

from __future__ import annotations

from megatron_hetero.hf.weight_map import TensorSlice, share, stack
from megatron_hetero.models.common.weights.slices import columns, head, whole
from megatron_hetero.models.family import EncoderShape, TensorShapes

KINDS = ("weight", "bias")


def attention_shapes(v: EncoderShape) -> TensorShapes:
    """The tensors of a layer's attention."""
    return {
        "attn.qkv.weight": (3 * v.hidden, v.hidden),
        "attn.qkv.bias": (3 * v.hidden,),
        "attn.proj.weight": (v.hidden, v.hidden),
        "attn.proj.bias": (v.hidden,),
    }


def attention_map(stored: str, v: EncoderShape, tp_rank: int, tp: int) -> dict[str, tuple[TensorSlice, ...]]:
    """The map of a layer's attention, whose tensors begin with `stored`."""
    heads = range(v.heads * tp_rank // tp, v.heads * (tp_rank + 1) // tp)
    result = {
        "self_attention.linear_proj.bias": whole(stored + "attn.proj.bias", v.hidden),
        "self_attention.linear_proj.weight": columns(
            stored + "attn.proj.weight", v.hidden, (heads.start * v.head_dim, heads.stop * v.head_dim)
        ),
    }
    for kind in KINDS:
        name = f"{stored}attn.qkv.{kind}"
        # Megatron keeps q, k and v of a head together; the folder keeps all q, then all k, then all v.
        triples = [(name, head(h + v.heads * part, v.head_dim)) for h in heads for part in range(3)]
        result[f"self_attention.linear_qkv.{kind}"] = stack(*triples)
    return result


def merger_shapes(v: EncoderShape, fc1: str, fc2: str) -> TensorShapes:
    """The tensors of a merger's linear layers, which folders call `fc1` and `fc2`."""
    width = v.hidden * v.unit
    return {
        f"{fc1}.weight": (width, width),
        f"{fc1}.bias": (width,),
        f"{fc2}.weight": (v.out_hidden, width),
        f"{fc2}.bias": (v.out_hidden,),
    }


def merger_map(v: EncoderShape, fc1: str, fc2: str, tp_rank: int, tp: int) -> dict[str, tuple[TensorSlice, ...]]:
    """The map of a merger's linear layers."""
    part, _ = share(v.hidden * v.unit, tp_rank, tp)
    return {
        "linear_fc1.weight": stack((f"{fc1}.weight", part)),
        "linear_fc1.bias": stack((f"{fc1}.bias", part)),
        "linear_fc2.weight": columns(f"{fc2}.weight", v.out_hidden, part),
        "linear_fc2.bias": whole(f"{fc2}.bias", v.out_hidden),
    }
