"""Bytes that a rank keeps of a micro-batch between its forward and its backward pass. Pure.

What autograd saves is listed for the layers in `models/` on plain PyTorch with its fused attention. Where only inputs,
or only weights, need gradients, less is saved. For a layer on `l` tokens between its parts and `s` within them (`l` is
s / tp with sequence-parallel activations), of width h:

    two norms      each: input [l, h], its scale fp32 [l, 1] (a layer norm also the mean), the output [l, h]
    head norms     of queries and keys, each: input, its scale for each head in fp32
    attention      queries, keys and values; under sp what was exchanged, under cp what was gathered, instead; the
                   output, a number for each query in fp32, and the output where it is padded, or exchanged
    MLP            gate and up [s, 2 ffn], their product [s, ffn]. Without a gate what goes into the activation
                   [s, ffn], and what comes out of it [s, ffn]

Layers that are made again as a whole keep their input [l, h]; one at a time keeps all of the above during its backward
pass. What others make again inside (`models.common.recompute`) they do not keep:

    selective      norms: all but their input. Attention: what pads its output; where heads are normed, what
                   that keeps, and queries, keys and values where nothing is exchanged: what the projection gave is kept
                   instead. MLP: all but gate and up, or what goes into the activation
    chunk          all of the MLP, where its tokens are more than one chunk; its input is kept

Where activations are offloaded (`models.common.offload`), all but those of the last layer are on the host between the
two passes; on the device stay the tables of rotary embeddings, what is smaller than is worth a copy, and what a stage
received, which the interpreter holds.

The transient memory of actions (their workspace) peaks where a layer's MLP goes backward (gradients of
gate and up [s, 2 ffn] and of their product [s, ffn]), and in the loss, which forms gradients at once (logits of a chunk
of tokens as the head gives them and once more in fp32 [chunk, vocabulary / tp], and the input of the head [s, h]), or
only those of logits, where tokens are few: then the gradient of the head's weight is made in the backward pass.
Where an MLP keeps little, it peaks in attention, whose kernel adds queries' gradients up in fp32 (`flash_workspace`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megatron_hetero.layout.layout import Layout
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.common.flops import TRAINED, Passes
from megatron_hetero.models.common.language_shape import keeps_logits, tokens_at_a_time
from megatron_hetero.models.common.offload.policy import OffloadSizes
from megatron_hetero.models.common.recompute.policy import EVERYTHING_KEPT, Recompute
from megatron_hetero.models.common.weights.slices import split_length
from megatron_hetero.models.family import EncoderShape, LayerKind, TextShape
from megatron_hetero.names import ROWS
from megatron_hetero.planning.memory.layers import LayerBytes, LayersBytes, layers_bytes
from megatron_hetero.planning.shards import SequenceShard, Spans

FP32 = 4


@dataclass(frozen=True)
class LayerShape:
    """A transformer layer on one rank of its tp group; widths in elements. `itemsize`: bytes of an element.

    `gpu`: whether a GPU computes it, where attention takes segments in any order (in half precision). `compiled`:
    whether what makes heads is.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    sp: int
    cp: int
    causal: bool
    itemsize: int
    passes: Passes
    kind: LayerKind
    gpu: bool = True
    compiled: bool = False


@dataclass(frozen=True)
class StageBytes:
    """What a stage keeps of one micro-batch on one rank.

    `saved`: by autograd, from forward to backward, what came in among it. `left`: hidden states that go out. `rows`: of
    one output of an encoder. `message`: hidden states between stages. `again`: what layers that are made again as a
    whole, or come back from the host, add for the time of their backward pass, when what follows them has been let go
    already.

    `passing`: what layers on their way to the host add in a forward, before what follows them; `host`: what is there.

    `forward`, `backward`: workspace at the end of a forward, and on top of `again` in a backward.
    """

    saved: int
    left: int
    rows: int
    message: int
    again: int
    forward: int
    backward: int
    passing: int = 0
    host: int = 0


def norm_bytes(shape: LayerShape, local: int) -> int:
    """A norm with the product that follows it."""
    of_row, needed = shape.itemsize * shape.hidden, shape.passes.inputs or shape.passes.weights
    # The layer norm of a CPU keeps mean and scale in the type of its input.
    scales = FP32 if shape.kind.rms_norm else 2 * (FP32 if shape.gpu else shape.itemsize)
    kept = (of_row + scales) * needed
    return local * (kept + of_row * shape.passes.weights)


def mlp_bytes(shape: LayerShape, padded: int) -> int:
    """Gate and up as one tensor, and what the second product takes. Without a gate both sides of the activation."""
    return shape.itemsize * padded * shape.ffn * (1 + shape.kind.gated + shape.passes.weights)


def attention_bytes(
    shape: LayerShape, shard: SequenceShard, *, windowed: bool, recompute: Recompute = EVERYTHING_KEPT
) -> int:
    """Attention with the projection that follows it, without that before it."""
    spans = shard.spans(windowed)
    projected = _padded_output(shape, shard, spans, windowed, recompute)
    queries = sum(q for q, _ in spans)
    if not queries:
        return projected
    sp = 1 if windowed else shape.sp
    heads, kv_heads = shape.heads // sp, math.lcm(shape.kv_heads, sp) // sp
    remade = recompute.selective and shape.kind.head_norms and sp == 1 and not _reordered(shape, spans)
    if not windowed and shape.cp > 1:
        own = (heads + 2 * kv_heads) * shard.member if sp > 1 else heads * queries * (not remade)
        operands = own + 2 * kv_heads * sum(k for _, k in spans)
    else:
        operands = (heads + 2 * kv_heads) * queries * (not remade)
    output = heads * queries * (shape.itemsize * shape.head_dim + FP32)
    return projected + operands * shape.head_dim * shape.itemsize + output + _mask_bytes(shape, spans)


def _padded_output(shape: LayerShape, shard: SequenceShard, spans: Spans, windowed: bool, recompute: Recompute) -> int:
    """What the projection after attention takes, if attention itself keeps another: before it was padded, or exchanged,
    or in parts. Where what pads it is made again, the output, likewise.
    """
    of_token, pads = shape.itemsize * shape.heads * shape.head_dim, shard.padded > shard.tokens
    if pads and not recompute.selective:
        return of_token * shard.padded * shape.passes.weights
    exchanged, in_parts = shape.sp > 1 and not windowed, _bucketed(shape) and len(set(spans)) > 1
    return of_token * shard.tokens * (exchanged or in_parts) * (pads or shape.passes.weights)


def _bucketed(shape: LayerShape) -> bool:
    """Whether attention takes segments of one shape at a time."""
    return not (shape.gpu and shape.itemsize < FP32)


def _reordered(shape: LayerShape, spans: Spans) -> bool:
    """Whether attention takes copies of its operands, in which segments of one shape stand side by side."""
    return _bucketed(shape) and len(list(groupby(spans))) > len(set(spans))


def _mask_bytes(shape: LayerShape, spans: Spans) -> int:
    """Masks that align at the last key, which PyTorch needs in memory in fp32."""
    if not shape.causal or shape.itemsize != FP32:
        return 0
    return sum(q * k * shape.itemsize for q, k in Counter(spans) if 1 < q < k)


def layer_bytes(
    shape: LayerShape, shard: SequenceShard, *, windowed: bool = False, recompute: Recompute = EVERYTHING_KEPT
) -> int:
    """One layer that is not made again as a whole."""
    if not shape.passes.inputs:
        return 0
    attention = attention_bytes(shape, shard, windowed=windowed, recompute=recompute)
    attention += _head_norm_bytes(shape, shard, recompute)
    return _norms_bytes(shape, shard, recompute) + attention + _kept_mlp_bytes(shape, shard.padded, recompute)


def _norms_bytes(shape: LayerShape, shard: SequenceShard, recompute: Recompute) -> int:
    """The two norms with the products that follow them."""
    hidden = shape.itemsize * shard.local * shape.hidden
    if recompute.selective:
        return 2 * hidden
    # Frozen weights do not keep what they are multiplied with; but chunks are made again from it.
    into_chunks = hidden * (recompute.chunks(shard.padded) and not shape.passes.weights)
    return 2 * norm_bytes(shape, shard.local) + into_chunks


def _kept_mlp_bytes(shape: LayerShape, padded: int, recompute: Recompute) -> int:
    if recompute.chunks(padded):
        return 0
    if recompute.selective:
        return shape.itemsize * padded * shape.ffn * (2 if shape.kind.gated else 1)
    return mlp_bytes(shape, padded)


def _head_norm_bytes(shape: LayerShape, shard: SequenceShard, recompute: Recompute) -> int:
    """Or what the projection gave, from which they are made again; which compiled ones keep, too."""
    if not shape.kind.head_norms:
        return 0
    projected = shape.itemsize * shard.padded * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if recompute.selective:
        return projected
    normed = (shape.heads + shape.kv_heads) * shard.tokens
    return normed * FP32 + (projected if shape.compiled else normed * shape.itemsize * shape.head_dim)


def _layers(
    shape: LayerShape,
    shard: SequenceShard,
    windowed: Sequence[bool],
    recompute: Recompute,
    offload: bool,
    *,
    held: int,
    mergers: Sequence[int] = (),
) -> LayersBytes:
    """All layers of a stage. `held`: bytes of its input, where the first layer keeps that and others hold it too.
    `mergers`: what each layer has besides.
    """
    whole, hidden = recompute.whole_layers(len(windowed)), shape.itemsize * shard.local * shape.hidden
    sizes = OffloadSizes.of(shape.gpu)
    each = {kind: layer_bytes(shape, shard, windowed=kind, recompute=recompute) for kind in set(windowed)}
    found = []
    for number, kind in enumerate(windowed):
        again = number < whole and shape.passes.inputs
        saved = hidden if again else each[kind]
        parts = [hidden] if again else _parts(shape, shard, kind, recompute)
        stays = min(saved, sum(part for part in parts if part < sizes.least) + held * (number == 0))
        saved += mergers[number] if mergers else 0
        found.append(LayerBytes(saved, stays, (each[kind] - hidden) * again))
    together = layers_bytes(found, sizes if offload else None)
    table = 2 * FP32 * shard.tokens * shape.head_dim * shape.passes.inputs
    return replace(together, kept=together.kept + table)


def _parts(shape: LayerShape, shard: SequenceShard, windowed: bool, recompute: Recompute) -> list[int]:
    """About how large the tensors are that a layer keeps."""
    hidden, queries = shape.itemsize * shard.local * shape.hidden, sum(q for q, _ in shard.spans(windowed))
    of_heads = shape.itemsize * shape.head_dim * queries
    found = [shape.heads * of_heads] * 3 + [shape.kv_heads * of_heads] * 2 + [FP32 * shape.heads * queries]
    found += [hidden] * 2 if recompute.selective else [hidden, hidden, FP32 * shard.local] * 2
    if not recompute.chunks(shard.padded):
        found += [shape.itemsize * shard.padded * shape.ffn * n for n in (1, 1 + shape.kind.gated)]
    return found


def _layer_workspace(shape: LayerShape, shard: SequenceShard, recompute: Recompute) -> int:
    """Of one layer: gradients inside its MLP, what that makes again, and gradients of its output; in chunks, of all of
    its input too.
    """
    chunked = recompute.chunks(shard.padded)
    tokens, hidden = recompute.chunk if chunked else shard.padded, shape.itemsize * shard.local * shape.hidden
    gradients = shape.itemsize * (3 if shape.kind.gated else 2) * tokens * shape.ffn + hidden * (1 + chunked)
    if chunked:
        return gradients + mlp_bytes(replace(shape, passes=TRAINED), tokens)
    return gradients + shape.itemsize * tokens * shape.ffn * recompute.selective


def flash_workspace(queries: int, keys: int, segments: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """What FlashAttention-2 allocates in its backward pass besides the gradients that it returns: sums of queries'
    gradients in fp32, of heads whose dim is a multiple of 32, and a number for each, with room for 128 more queries in
    each segment; and the gradients of half-precision keys and values of each head, where heads share them
    (`mha_varlen_bwd` in flash_api.cpp).
    """
    sums = FP32 * (queries + 128 * segments) * heads * (-(-head_dim // 32) * 32 + 1)
    return sums + 2 * 2 * keys * heads * head_dim * (heads != kv_heads)


def attention_workspace(shape: LayerShape, shard: SequenceShard, *, windowed: bool, recompute: Recompute) -> int:
    """Of one layer where its attention goes backward: its kernel's, and gradients of its output, operands and the
    residual; less what its MLP and the norm before that have let go by then.
    """
    spans = shard.spans(windowed)
    if _bucketed(shape) or not (shape.passes.inputs and spans):
        return 0
    sp = 1 if windowed else shape.sp
    heads, kv_heads = shape.heads // sp, math.lcm(shape.kv_heads, sp) // sp
    queries, keys = map(sum, zip(*spans, strict=True))
    kernel = flash_workspace(queries, keys, len(spans), heads, kv_heads, shape.head_dim)
    of_head = shape.itemsize * shape.head_dim
    gradients = of_head * (2 * heads * queries + 2 * kv_heads * keys) + shape.itemsize * shard.local * shape.hidden
    let_go = _kept_mlp_bytes(shape, shard.padded, recompute) + _norms_bytes(shape, shard, recompute) // 2
    return max(0, kernel + gradients - let_go)


def text_stage(
    shape: TextShape,
    layout: Layout,
    stage: Stage,
    shard: SequenceShard,
    itemsize: int,
    passes: Passes,
    recompute: Recompute,
    gpu: bool,
    *,
    offload: bool = False,
    compiled: bool = False,
) -> StageBytes:
    """A stage of the text module. The rows that its first stage takes are not in it. `offload`: whether activations
    are; `compiled`: whether layers are.
    """
    layer = replace(text_layer(shape, layout, itemsize, passes, gpu), compiled=compiled)
    message = itemsize * shard.local * shape.hidden
    held = 0 if stage.is_first else message  # The first layer keeps it, in any case.
    layers = _layers(layer, shard, [False] * len(stage.layers), recompute, offload, held=held)
    saved = layers.kept
    if stage.is_first:
        saved += 8 * shard.padded
    after = of_head = 0
    if stage.is_last:
        after = norm_bytes(layer, shard.local) - itemsize * shard.local * shape.hidden * passes.weights
        after += _head_bytes(shape, layout, shard.supervised, itemsize, passes)
        if keeps_logits(shard.supervised, shape.hidden):
            of_head = _head_gradient_bytes(shape, layout, itemsize, passes)
    left = 0 if stage.is_last else message
    again, workspace = max(0, layers.again - after), _layer_workspace(layer, shard, recompute)
    attention = attention_workspace(layer, shard, windowed=False, recompute=recompute)
    loss = _loss_workspace(shape, layout, shard, itemsize, passes) if stage.is_last else 0
    return StageBytes(
        saved + after, left, 0, message, again, max(loss, workspace), max(of_head, workspace, attention),
        max(0, layers.passing - after), layers.host,
    )  # fmt: skip


def text_layer(shape: TextShape, layout: Layout, itemsize: int, passes: Passes, gpu: bool) -> LayerShape:
    """A layer of the text module on one rank."""
    groups = shape.kv_heads * shape.kv_copies(layout.tp) // layout.tp
    return LayerShape(
        shape.hidden, shape.heads // layout.tp, groups, shape.head_dim, split_length(shape.ffn, layout.tp),
        layout.sp, layout.cp, True, itemsize, passes, shape.layer_kind, gpu,
    )  # fmt: skip


def _head_bytes(shape: TextShape, layout: Layout, supervised: int, itemsize: int, passes: Passes) -> int:
    """Gradients of the head's weight and of its input, and which positions these are of. Or, for the weight's, what it
    is the product of: gradients of logits, and the input.
    """
    of_input = supervised * (itemsize * shape.hidden + 8) * passes.inputs
    if not keeps_logits(supervised, shape.hidden):
        return of_input + _head_gradient_bytes(shape, layout, itemsize, passes)
    return of_input + itemsize * supervised * (_columns(shape, layout) + shape.hidden) * passes.weights


def _head_gradient_bytes(shape: TextShape, layout: Layout, itemsize: int, passes: Passes) -> int:
    return itemsize * _columns(shape, layout) * shape.hidden * passes.weights


def _columns(shape: TextShape, layout: Layout) -> int:
    return split_length(shape.vocab, layout.tp)


def _loss_workspace(shape: TextShape, layout: Layout, shard: SequenceShard, itemsize: int, passes: Passes) -> int:
    """In the forward, in addition to the gradients: logits of a chunk, as the head gives them (if these are not kept)
    and in fp32, or their gradient as the head takes it next to what the gradients of its weights are added up from; and
    the hidden states of the whole shard and of supervised tokens.
    """
    columns = _columns(shape, layout)
    chunk, gradient = tokens_at_a_time(columns), _head_gradient_bytes(shape, layout, itemsize, passes)
    narrow, many = itemsize < FP32, shard.supervised > chunk
    logits, hidden = min(chunk, shard.supervised) * columns, itemsize * shard.padded * shape.hidden
    if passes.weights and keeps_logits(shard.supervised, shape.hidden):
        return logits * FP32 * narrow + hidden
    total = FP32 // itemsize * gradient if many else 0  # in fp32, from the first chunk on
    products = total + gradient if many and narrow else max(total, gradient)
    peak = max(logits * (FP32 + itemsize * narrow) + total, logits * itemsize + products)
    return max(0, peak - gradient) + hidden + itemsize * shard.supervised * shape.hidden


def encoder_stage(
    shape: EncoderShape, layout: Layout, stage: Stage, shard: SequenceShard, itemsize: int, trains: tuple[bool, bool],
    recompute: Recompute, gpu: bool, *, offload: bool = False,
) -> StageBytes:  # fmt: skip
    """A stage of an encoder. `trains`: whether the encoder does, and whether its projector does. `offload`: whether
    activations are.
    """
    encoder, projector = trains
    layer = encoder_layer(shape, layout, itemsize, Passes(encoder, encoder), gpu)
    message = itemsize * shard.local * shape.hidden
    held = 0 if stage.is_first else message
    of_merger = _merger_bytes(shape, layout, shard, itemsize, Passes(encoder, projector), gpu)
    merging = {layer for output, layer in shape.outputs.items() if output != ROWS} & set(stage.layers)
    # A layer's norm keeps its input, which the merger before it has kept already.
    shared = message if encoder else 0
    mergers = [of_merger * (i in merging) - shared * (i - 1 in merging) for i in stage.layers]
    windowed = [i not in shape.full_layers for i in stage.layers]
    layers = _layers(layer, shard, windowed, recompute, offload, held=held, mergers=mergers)
    saved = layers.kept
    if stage.is_first:
        saved += itemsize * shard.local * shape.patch_elements * encoder
    else:
        saved += message * (not encoder)  # No layer keeps it, but the interpreter does, as it keeps all inputs.
    after = of_merger if stage.is_last else 0
    left, rows = 0 if stage.is_last else message, itemsize * shard.local // shape.unit * shape.out_hidden
    attention = [attention_workspace(layer, shard, windowed=kind, recompute=recompute) for kind in set(windowed)]
    again, workspace = max(0, layers.again - after), _layer_workspace(layer, shard, recompute)
    return StageBytes(
        saved + after, left, rows, message, again, workspace, max([workspace, *attention]),
        max(0, layers.passing - after), layers.host,
    )  # fmt: skip


def encoder_layer(shape: EncoderShape, layout: Layout, itemsize: int, passes: Passes, gpu: bool) -> LayerShape:
    """A layer of an encoder on one rank."""
    heads = shape.heads // layout.tp
    return LayerShape(
        shape.hidden, heads, heads, shape.head_dim, split_length(shape.ffn, layout.tp), layout.sp, layout.cp, False,
        itemsize, passes, shape.layer_kind, gpu,
    )  # fmt: skip


def _merger_bytes(
    shape: EncoderShape, layout: Layout, shard: SequenceShard, itemsize: int, passes: Passes, gpu: bool
) -> int:
    """Norm, what goes into gelu, and what comes out of it."""
    if not (passes.inputs or passes.weights):
        return 0
    layer = encoder_layer(shape, layout, itemsize, passes, gpu)
    inner = itemsize * shard.padded // shape.unit * -(-shape.hidden * shape.unit // layout.tp)
    return norm_bytes(layer, shard.local) + inner * (1 + passes.weights)
