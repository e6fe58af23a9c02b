"""Rotary embedding of queries and keys (Su et al. 2021, arXiv 2104.09864) in the half-split form of GPT-NeoX, computed
in fp32 and rounded once: by one kernel per pass on GPUs with a compiler, by several kernels otherwise.

Shape suffixes:
    n  tokens without padding
    S  tokens with padding
    G  groups of heads of this rank: a key/value head with its query heads
    H  heads of this rank
    D  elements per head

A table [2, n, width] has the cosines and sines of each token. If its width is below D, only the first elements of each
head are rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.groups.platform import Function, compiles_for, on_device
from megatron_hetero.models.layers.compiled import NormWeights, run, turned, turned_back


class Rotary(Protocol):
    """Rotary embedding of the first `width` elements of each head of queries and keys."""

    @property
    def width(self) -> int: ...  # noqa: D102 (above)

    def table(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines at `positions` [dims, n]: fp32 [2, n, width]."""
        ...


@dataclass(frozen=True)
class AxialRotary:
    """2-D rotary embedding: half of the angles depend on the row of a patch, half on its column."""

    theta: float
    width: int

    def table(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines for rows and columns, the first two dims of `positions`: fp32 [2, n, width]."""
        frequencies = _frequencies(self.theta, self.width // 2, positions.device)
        return _cosines_and_sines((positions[:2, :, None].float() * frequencies).transpose(0, 1).flatten(1))


@dataclass(frozen=True)
class MultimodalRotary:
    """Rotary embedding of time, height and width (Wang et al. 2024, arXiv 2409.12191). `turns`: the position that each
    frequency uses: 0 for time, 1 for height, 2 for width.
    """

    theta: float
    width: int
    turns: tuple[int, ...]

    def table(self, positions: Tensor) -> Tensor:
        """Return the cosines and sines for `positions` [3, n]: fp32 [2, n, width]."""
        device = positions.device
        frequencies = _frequencies(self.theta, self.width, device)
        return _cosines_and_sines(positions[_index(self.turns, device)].transpose(0, 1).float() * frequencies)


@lru_cache(maxsize=16)
def _frequencies(theta: float, dim: int, device: torch.device) -> Tensor:
    """Return theta^(-2i / dim) for i below dim / 2, fp32, computed on the host as in `transformers`."""
    return on_device(1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), device)


@lru_cache(maxsize=16)
def _index(turns: tuple[int, ...], device: torch.device) -> Tensor:
    return on_device(torch.tensor(turns), device)


def _cosines_and_sines(angles: Tensor) -> Tensor:
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_nHD: Tensor, table_2nD: Tensor) -> Tensor:
    """Rotate each pair of elements of `x` [n, H, D] by its angle."""
    return _Rotate.apply(x_nHD, table_2nD)  # pyright: ignore[reportReturnType]


def rotated_heads(
    mixed: Tensor, table_2nD: Tensor, dim: int, *, members: int = 1, norms: Sequence[NormWeights] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, rotated keys, and values, each [n, H, D].

    Args:
        mixed: projection [S, 1, G, heads of a group * D] with the queries, the key and the value of each group.
        table_2nD: cosines and sines.
        dim: D.
        members: size of the group that exchanges heads for tokens. If it is larger than 1, the results are
            [n, members, H / members, D]: in this shape the exchange returns gradients as views.
        norms: root-mean-square norms of the heads of queries and of keys before they are rotated, if any. Only
            possible `in_one_pass`. The projection is saved, and values are a view of it.
    """
    weights = (norm.weight for norm in norms)
    return _RotatedHeads.apply(mixed, table_2nD, dim, members, norms, *weights)  # pyright: ignore[reportReturnType]


def split_heads(mixed: Tensor, tokens: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [n, G, heads of a group, D] of the queries, keys and values in a projection, see `rotated_heads`."""
    heads = _token_heads(mixed, tokens, dim)
    q, k, v = heads.split_with_sizes((heads.shape[2] - 2, 1, 1), dim=2)
    return q, k, v


def _token_heads(mixed: Tensor, tokens: int, dim: int) -> Tensor:
    heads = mixed.view(len(mixed), mixed.shape[-2], mixed.shape[-1] // dim, dim)
    return heads if tokens == len(mixed) else heads[:tokens]


def _turn(x: Tensor, table: _Table, out: Tensor, *, along: Tensor | None = None, back: bool = False) -> None:
    """Rotate `x` [n, ..., D] into `out`: halves (a, b) become (a cos - b sin, b cos + a sin). `back`: apply the
    adjoint. `along`: the result of `_along`, if already computed.
    """
    along = _along(x, table) if along is None else along
    width = table.cosines.shape[-1]
    if width < x.shape[-1]:
        out[..., width:].copy_(x[..., width:])
        x, out = x[..., :width], out[..., :width]
    (along_a, along_b), (a, b), (out_a, out_b) = along.chunk(2, dim=-1), x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    sine_a, sine_b, sign = (table.sine_b, table.sine_a, 1) if back else (table.sine_a, table.sine_b, -1)
    torch.addcmul(along_a, b, sine_a, value=sign, out=out_a)
    torch.addcmul(along_b, a, sine_b, value=-sign, out=out_b)


def _along(x: Tensor, table: _Table) -> Tensor:
    """Return each rotated element of `x` times its cosine, in fp32."""
    width = table.cosines.shape[-1]
    return (x if width == x.shape[-1] else x[..., :width]) * table.cosines


class _Table(NamedTuple):
    """Views of the cosines, and of both halves of the sines, that broadcast over the heads of a tensor [n, ..., D]."""

    cosines: Tensor
    sine_a: Tensor
    sine_b: Tensor

    @classmethod
    def of(cls, table_2nD: Tensor, dims: int) -> Self:
        """Return the views for tensors of `dims` dims. All layers share them: they are stored with the table."""
        views = _stored_views(table_2nD)
        if dims not in views:
            _, tokens, width = table_2nD.shape
            cosines, sines = table_2nD.data.view(2, tokens, *[1] * (dims - 2), width).unbind()
            views[dims] = cls(cosines, *sines.chunk(2, dim=-1))
        return views[dims]


def unbound(table_2nD: Tensor) -> tuple[Tensor, ...]:
    """Return the cosines and the sines [n, D], always the same views of the same table."""
    views = _stored_views(table_2nD)
    if "unbound" not in views:
        views["unbound"] = tuple(table_2nD.data.unbind())
    return views["unbound"]


def _stored_views(table_2nD: Any) -> dict[Any, Any]:
    """Return the views of the table that are stored with it. They must be views of its `data`: views of the table
    itself would keep it alive, in a cycle that Python's garbage collector cannot see.
    """
    if not hasattr(table_2nD, "stored_views"):
        table_2nD.stored_views = {}
    return table_2nD.stored_views


def in_one_pass(x: Tensor, table_2nD: Tensor) -> bool:
    """Return whether to use kernels for whole passes, which are not worthwhile for fewer than two tokens."""
    return compiles_for(x) and table_2nD.shape[1] > 1


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table_2nD: Tensor) -> Tensor:
        ctx.save_for_backward(table_2nD)
        return _rotated(x, table_2nD, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _rotated(grad, *ctx.saved_tensors, back=True), None


def _rotated(x: Tensor, table_2nD: Tensor, *, back: bool) -> Tensor:
    if in_one_pass(x, table_2nD):
        return run(turned_back if back else turned, x, *unbound(table_2nD))
    out = torch.empty_like(x)
    _turn(x, _Table.of(table_2nD, x.dim()), out, back=back)
    return out


class _RotatedHeads(Function):
    """Autograd function of `rotated_heads`. Outputs are views of the projection only where it is saved for norms."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, table_2nD: Tensor, dim: int, members: int, norms: Sequence[Any], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(table_2nD, *((mixed, *weights) if norms else ()))
        ctx.shape, ctx.dim, ctx.norms = mixed.shape, dim, norms
        if norms and not mixed.is_meta:
            out = _kernels().forward(mixed, *unbound(table_2nD), dim, *norms)
        elif in_one_pass(mixed, table_2nD):
            out = run(heads_turned, mixed, *unbound(table_2nD), dim)
        else:
            out = _heads_turned_in_passes(mixed, table_2nD, dim)
        if norms:
            out = *out[:2], split_heads(mixed, table_2nD.shape[1], dim)[2].flatten(1, 2)
        return out if members == 1 else tuple(x.unflatten(1, (members, -1)) for x in out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        table_2nD, *saved = ctx.saved_tensors
        of_weights = list(map(torch.empty_like, saved[1:]))
        if saved and not saved[0].is_meta:  # On `meta` only shapes count, and norms change none.
            norms = (norm._replace(weight=weight) for norm, weight in zip(ctx.norms, saved[1:], strict=True))
            out, *of_weights = _kernels().backward(*grads, saved[0], *unbound(table_2nD), ctx.dim, *norms)
            out = out.view(ctx.shape)
        else:
            one_pass = in_one_pass(grads[0], table_2nD)
            out = (_heads_turned_back if one_pass else _heads_turned_back_in_passes)(ctx, table_2nD, grads)
        return out, None, None, None, None, *of_weights


def _kernels() -> Any:
    from megatron_hetero.models.layers import head_kernels  # Triton comes with PyTorch for GPUs.

    return head_kernels


def _heads_turned_in_passes(mixed: Tensor, table_2nD: Tensor, dim: int) -> tuple[Tensor, ...]:
    heads = _token_heads(mixed, table_2nD.shape[1], dim)
    tokens, groups, width, _ = heads.shape
    # Queries and keys are adjacent, so one product with the cosines computes both.
    both, table, sizes = heads.narrow(2, 0, width - 1), _Table.of(table_2nD, 4), (width - 2, 1)
    alongs = _along(both, table).split_with_sizes(sizes, dim=2)
    # Allocated in their final shapes: autograd copies outputs that are views into new tensors.
    outs = tuple(heads.new_empty(tokens, groups * size, dim) for size in sizes)
    for x, along, out, size in zip(both.split_with_sizes(sizes, dim=2), alongs, outs, sizes, strict=True):
        _turn(x, table, out.view(tokens, groups, size, dim), along=along)
    return *outs, heads.select(2, width - 1).contiguous()


def _heads_turned_back(ctx: Any, table_2nD: Tensor, grads: Sequence[Tensor]) -> Tensor:
    # The length of the projection is that of an empty tensor, since compiled functions are dynamic in tensors only.
    like = grads[0].new_empty(ctx.shape[0], 0)
    return run(heads_turned_back, *grads, *unbound(table_2nD), like).view(ctx.shape)


def _heads_turned_back_in_passes(ctx: Any, table_2nD: Tensor, grads: Sequence[Tensor]) -> Tensor:
    grad_mixed, tokens = grads[0].new_empty(ctx.shape), table_2nD.shape[1]
    if tokens < len(grad_mixed):
        grad_mixed[tokens:].zero_()
    places = split_heads(grad_mixed, tokens, ctx.dim)
    (grad_q, q), (grad_k, k), (grad_v, v) = map(_same_shape, grads, places)
    _turn(grad_q, _Table.of(table_2nD, q.dim()), q, back=True)
    _turn(grad_k, _Table.of(table_2nD, k.dim()), k, back=True)
    v.copy_(grad_v)
    return grad_mixed


def _same_shape(grad: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """View a gradient [n, H, D] or [n, members, H / members, D] and its place [n, G, heads, D] in a common shape: by
    group, or by member and group if the gradient has a dim for members, which cannot be merged in a view.
    """
    groups, heads = place.shape[1:3]
    if grad.dim() == 3:
        return grad.reshape(place.shape), place
    members = grad.shape[1]
    return grad.unflatten(2, (groups // members, heads)), place.unflatten(1, (members, -1))


# ---------------------------------------------------------------------------------- functions that are compiled


def heads_turned(mixed: Tensor, cosines_nD: Tensor, sines_nD: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the forward pass of `rotated_heads`."""
    heads = mixed.view(len(mixed), mixed.shape[-2], mixed.shape[-1] // dim, dim)
    qkv = heads.split((heads.shape[2] - 2, 1, 1), dim=2)
    q, k, v = (x[: len(cosines_nD)] for x in qkv)
    q, k = (turned(x, cosines_nD, sines_nD) for x in (q, k))
    return q.flatten(1, 2), k.flatten(1, 2), v.clone(memory_format=torch.contiguous_format).flatten(1, 2)


def heads_turned_back(
    grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cosines_nD: Tensor, sines_nD: Tensor, like: Tensor
) -> Tensor:
    """Compute the backward pass of `rotated_heads`: [S, G, heads of a group, D]. `like`: an empty tensor [S, 0], whose
    length is that of the projection.
    """
    count = len(grad_v)
    groups, dim = grad_v.shape[1:-1].numel(), grad_v.shape[-1]
    q, k, v = (x.reshape(count, groups, -1, dim) for x in (grad_q, grad_k, grad_v))
    out = torch.cat((*(turned_back(x, cosines_nD, sines_nD) for x in (q, k)), v), dim=2)
    return F.pad(out, (0, 0, 0, 0, 0, 0, 0, len(like) - count)) if len(like) > count else out
