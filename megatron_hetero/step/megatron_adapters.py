"""Low-rank adapters (LoRA) for the linear layers of Megatron-Core models, in any parallel layout.

A Megatron layer may fuse several projections: `linear_qkv` computes queries, keys and values, and the `linear_fc1` of a
gated MLP computes the gate and up projections. Each projection has a separate A and B, as in PEFT checkpoints.

Megatron-Core is imported only when `lora` is called, since the import takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import inf, sqrt
from typing import Any

from torch import Tensor, nn

from megatron_hetero.base.errors import UserError, listed
from megatron_hetero.config.lora import matches
from megatron_hetero.groups.platform import Platform
from megatron_hetero.hf.weight_map import Interval, TensorSlice, load_slices
from megatron_hetero.models.added import generator_of
from megatron_hetero.step.library_modules import global_names

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
Pieces = tuple[tuple[str, Interval], ...]
"""Consecutive pieces of a layer's output rows: the projection of each piece, and the rows of the projection in it."""


def lora(
    model: nn.Module,
    *,
    r: int,
    alpha: float | None = None,
    rslora: bool = False,
    targets: Sequence[str] = TARGETS,
    seed: int = 0,
) -> list[str]:
    """Add low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) to linear layers of a Megatron-Core model, and
    freeze all other parameters.

    `build_optimizers` and `finish_gradients` sum the partial gradients of adapters over `tp`. Checkpoints of this
    package can be resumed in any layout. There is no dropout. Call this function after loading weights, and before
    `build_optimizers` and any wrapper; afterwards, unfreeze other parameters to train with `requires_grad_()`.

    Args:
        model: a `GPTModel`, or another model with `config` and `pg_collection`, with Megatron's linear layers. For
            virtual stages, call this function for the model of each stage.
        r: rank of the adapters.
        alpha: adapters are scaled by alpha / r. The default is `r`.
        rslora: whether to scale by alpha / sqrt(r) instead (Kalajdzievski 2023, arXiv 2312.03732).
        targets: last components of linear layers' names, or patterns of full names with layers counted over all stages,
            such as `decoder.layers.[0-3].self_attention.*`.
        seed: seed of the initial values, which are equal in all layouts: A is uniform within ±1 / sqrt(in), B is zero.

    Returns:
        The names of the layers with adapters, on this rank.

    Raises:
        UserError: a number is out of range; a target matches no layer, or a layer that cannot have adapters, such as a
            Transformer Engine layer. The model is then unchanged.
    """
    _require_values(r, alpha, targets)
    groups, config = (getattr(model, name, None) for name in ("pg_collection", "config"))
    embedding: Any = getattr(model, "embedding", None)
    if groups is None or config is None:
        expected = "Megatron's, with `config` and `pg_collection`"
        fix = "pass the `GPTModel` itself, before any wrapper; for other modules use `peft` (docs/library.md)"
        raise UserError.at("lora: model", found=type(model).__name__, expected=expected, fix=fix)
    layers = _targeted(model, config, targets)
    pieces = {
        name: [_pieces(each, name, rank, groups.tp.size()) for rank in range(groups.tp.size())]
        for name, each in layers.items()
    }
    for name, layer in layers.items():
        _require_low(r, name, layer, pieces[name])
    scale = (r if alpha is None else alpha) / (sqrt(r) if rslora else r)
    model.requires_grad_(False)
    for name, layer in layers.items():
        _attach(layer, name, pieces[name], groups, r, scale, seed)
    if config.recompute_granularity and embedding is not None:
        # Megatron's activation recomputation computes no parameter gradients unless an input requires grad.
        embedding.register_forward_hook(lambda _module, _inputs, out: out.requires_grad_() if out.is_leaf else out)
    return list(layers)


def _require_values(r: object, alpha: object, targets: object) -> None:
    """Check the values of `lora`'s arguments, without the model. Raises `UserError`."""
    if not isinstance(r, int) or isinstance(r, bool) or r < 1:
        raise UserError.at("lora: r", found=repr(r), expected="an integer ≥ 1", fix="give the rank of the adapters")
    if alpha is not None and not (isinstance(alpha, int | float) and 0 < alpha < inf):
        fix = "correct it, or leave it out for a scale of 1"
        raise UserError.at("lora: alpha", found=repr(alpha), expected="a number > 0", fix=fix)
    names = targets if isinstance(targets, Sequence) and not isinstance(targets, str) else ()
    if not names or not all(isinstance(each, str) for each in names):
        fix = f"write targets=[{targets!r}]" if isinstance(targets, str) else "name some, or leave it out"
        raise UserError.at("lora: targets", found=repr(targets), expected="a list of names or patterns", fix=fix)


def _require_low(r: int, name: str, layer: Any, by_rank: Sequence[Pieces]) -> None:
    """Check that the rank `r` is no larger than the dimensions of a layer's projections. Raises `UserError`."""
    for kind in dict.fromkeys(kind for pieces in by_rank for kind, _ in pieces):
        size = [_rows_of(by_rank, _stored(kind, "B")), layer.input_size]
        if r > min(size):
            because = f"the weight of {f'{name} ({kind})' if kind else name} is {size}"
            fix = "lower it, or name other `targets`"
            raise UserError.at("lora: r", found=str(r), expected=f"≤ {min(size)}", because=because, fix=fix)


def _targeted(model: nn.Module, config: Any, targets: Sequence[str]) -> dict[str, Any]:
    """Return the layers that `targets` match, by name in the whole model. Raises `UserError`."""
    names = global_names(model)
    linear = dict[str, Any]()
    for path, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        name = names.get(f"{path}.weight", f"{path}.weight").removesuffix(".weight")
        if isinstance(weight, Tensor) and weight.dim() == 2 and "embedding" not in name:
            linear[name] = layer
    anywhere = {re.sub(r"layers\.\d+", f"layers.{n}", name) for name in linear for n in range(config.num_layers)}
    for entry in targets:
        if not any(matches(entry, name) for name in anywhere):
            kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in linear))
            because, fix = "it matches none of the model", "correct or remove it"
            raise UserError.at(
                "lora: targets", found=f"`{entry}`", expected=listed(kinds, 12), because=because, fix=fix
            )
    targeted = {name: layer for name, layer in linear.items() if any(matches(entry, name) for entry in targets)}
    for name, layer in targeted.items():
        _require_dense(name, layer)
    return targeted


def _require_dense(name: str, layer: Any) -> None:
    """Check that a layer is a dense Megatron linear layer, which can have adapters. Raises `UserError`."""
    from megatron_hetero.groups.megatron import tensor_parallel

    by_input, where = isinstance(layer, tensor_parallel.RowParallelLinear), f"lora: {name}"
    expected = "Megatron's ColumnParallelLinear or RowParallelLinear of a dense layer"
    if not by_input and not isinstance(layer, tensor_parallel.ColumnParallelLinear):
        because = "its norm, exchanges or number format are inside" if "TE" in type(layer).__name__ else ""
        fix = "build the model with `get_gpt_layer_local_spec`, or name other `targets`"
        raise UserError.at(where, found=type(layer).__name__, expected=expected, because=because, fix=fix)
    if getattr(layer, "is_expert", False):
        fix = 'name other layers, such as `targets=("linear_qkv", "linear_proj")`'
        raise UserError.at(where, found="a layer of an expert", expected=expected, fix=fix)
    if getattr(layer, "lora", None) is not None:
        raise UserError.at(where, problem="has adapters already", fix="call `lora` once, with all targets")
    gathers = not layer.input_is_parallel if by_input else layer.gather_output
    if gathers:
        found, expected = "a layer with its whole input or output on every rank", "one whose features tp splits"
        raise UserError.at(where, found=found, expected=expected, fix="name other `targets`")


def _attach(layer: Any, name: str, by_rank: Sequence[Pieces], groups: Any, r: int, scale: float, seed: int) -> None:
    """Add adapters to a layer. `by_rank`: the layer's projections on each rank along `tp`."""
    from megatron_hetero.groups.megatron import tensor_parallel
    from megatron_hetero.models.adapters import Lora
    from megatron_hetero.models.layers.backend import TORCH
    from megatron_hetero.models.layers.low_rank import BRows, LowRank, LowRankShape
    from megatron_hetero.models.layers.parts import Site

    by_input, config = isinstance(layer, tensor_parallel.RowParallelLinear), layer.config
    tp, weight = groups.tp, layer.weight
    kinds = list(dict.fromkeys(kind for pieces in by_rank for kind, _ in pieces))
    slices = [
        _slices(pieces, kinds, r, _columns(weight, rank) if by_input else None) for rank, pieces in enumerate(by_rank)
    ]
    rows, at = list[BRows](), 0
    for kind, (start, stop) in by_rank[tp.rank()]:
        rows.append(BRows((at, at + stop - start), kinds.index(kind)))
        at += stop - start
    shape = LowRankShape(
        inputs=weight.shape[1],
        outputs=len(weight),
        r=r,
        scales=(scale,) * len(kinds),
        rows=tuple(rows),
        by_input=by_input,
    )
    platform = Platform(weight.device, "nccl" if weight.device.type == "cuda" else "gloo")
    beside: Any = LowRank(shape, Site(groups, platform, TORCH, weight.dtype, config.sequence_parallel))
    beside.B.sequence_parallel = by_input and config.sequence_parallel  # A replicated B is used on sharded tokens.
    for path, parameter, is_split in (("lora.A", beside.A, by_input), ("lora.B", beside.B, not by_input)):
        parameter.stored_as = path, tuple(slices_of_rank[path] for slices_of_rank in slices)
        if is_split and tp.size() > 1:  # Megatron's layers set these attributes of their parameters.
            parameter.tensor_model_parallel = True
            parameter.partition_dim = int(by_input)
            parameter.partition_stride = 1
        local_slices, initial = slices[tp.rank()][path], dict[str, Tensor]()
        for each in local_slices:
            size = (r, layer.input_size) if path == "lora.A" else (_rows_of(by_rank, each.name), r)
            generator = generator_of(seed, f"{name}.{each.name}")
            initial[each.name] = Lora((), frozenset()).initial(f"{name}.{each.name}", size, generator)
        load_slices(parameter, local_slices, [initial[each.name][each.source].to(parameter) for each in local_slices])
    layer.lora = beside
    layer.register_forward_hook(_add)
    layer.sharded_state_dict = _unknown_to_megatron


def _add(layer: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Return a layer's output plus the output of the layer's adapters, and the bias, as a forward hook."""
    out, bias = output
    tokens = min(len(inputs[0]), len(out))  # This rank's tokens: with sequence parallelism, the larger has all tokens.
    return layer.lora.add(out, inputs[0], (tokens,)), bias


def _unknown_to_megatron(*_: Any, **__: Any) -> Any:
    fix = "save by `save_checkpoint` of megatron_hetero, with its `AdamW` or `SGD`"
    raise UserError.at("lora", problem="Megatron's dist_checkpointing does not know adapters", fix=fix)


def _pieces(layer: Any, name: str, rank: int, tp: int) -> Pieces:
    """Return the pieces of a layer's output on a rank along `tp`, in the order of the output rows."""
    config, rows = layer.config, len(layer.weight)
    kind = name.rpartition(".")[2]
    if kind == "linear_qkv":
        return tuple(_between(_heads(config, name, rows * tp), rank * rows, rank * rows + rows))
    if kind == "linear_fc1" and config.gated_linear_unit:
        interval = rank * rows // 2, (rank + 1) * rows // 2
        return ("gate_proj", interval), ("up_proj", interval)
    return (("", (rank * rows, rank * rows + rows) if _is_split(layer) else (0, rows)),)


def _is_split(layer: Any) -> bool:
    return getattr(layer, "output_size_per_partition", layer.output_size) != layer.output_size


def _heads(config: Any, name: str, rows: int) -> Iterator[tuple[str, Interval]]:
    """Yield the rows of queries, keys and values in Megatron's order, by query group. Raises `UserError`."""
    width, groups = config.kv_channels, config.num_query_groups
    queries = config.num_attention_heads // groups * width
    if rows != groups * (queries + 2 * width):
        found, expected = f"{rows} rows", f"{groups * (queries + 2 * width)}, queries, keys and values"
        raise UserError.at(f"lora: {name}", found=found, expected=expected, fix="name other `targets`")
    for group in range(groups):
        yield "q_proj", (group * queries, group * queries + queries)
        yield "k_proj", (group * width, group * width + width)
        yield "v_proj", (group * width, group * width + width)


def _between(pieces: Iterator[tuple[str, Interval]], start: int, stop: int) -> Iterator[tuple[str, Interval]]:
    """Yield the pieces in rows [start, stop). Pieces are cut at both ends, as tensor parallelism may split a group."""
    at = 0
    for kind, (first, last) in pieces:
        low, high = max(start, at), min(stop, at + last - first)
        if low < high:
            yield kind, (first + low - at, first + high - at)
        at += last - first


def _slices(
    pieces: Pieces, kinds: Sequence[str], r: int, columns: Interval | None
) -> Mapping[str, tuple[TensorSlice, ...]]:
    """Return the slices of stored tensors in a rank's parameters `lora.A` and `lora.B`."""
    slices_a = [TensorSlice(_stored(kind, "A"), (0, r), number * r, columns) for number, kind in enumerate(kinds)]
    slices_b, at = list[TensorSlice](), 0
    for kind, rows in pieces:
        slices_b.append(TensorSlice(_stored(kind, "B"), rows, at))
        at += rows[1] - rows[0]
    return {"lora.A": tuple(slices_a), "lora.B": tuple(slices_b)}


def _stored(kind: str, matrix: str) -> str:
    """Return the name of a stored A or B within its layer."""
    return f"{kind}.lora_{matrix}.weight" if kind else f"lora_{matrix}.weight"


def _columns(weight: Tensor, rank: int) -> Interval:
    return rank * weight.shape[1], (rank + 1) * weight.shape[1]


def _rows_of(by_rank: Sequence[Pieces], stored: str) -> int:
    """Return the number of rows of the stored tensor B with the name `stored`, over all ranks."""
    return max(stop for pieces in by_rank for kind, (_, stop) in pieces if _stored(kind, "B") == stored)
