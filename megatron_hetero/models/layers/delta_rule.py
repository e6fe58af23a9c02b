"""Gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464) in PyTorch, in chunks (Yang et al.
2024, arXiv 2406.06484, section 3), with a backward pass that recomputes what is inside chunks.

Per token and value head, with the state S [K, V], zero before each sequence, the l2-normed query q and key k:

    S = exp(decay) S        S = S + beta k (v - S^T k)^T        out = K^-0.5 S^T q

In a chunk whose decays sum to g_i up to token i, to g_c in all, and that begins with the state S, with
D_ij = exp(g_i - g_j) where j <= i and 0 elsewhere:

    A = strictly lower part of (k k^T * D * beta_j)      P = q k^T * D * beta_j
    R = (1 + A)^-1 (v - exp(g) k S)                      out = K^-0.5 (exp(g) q S + P R)
    S of the next chunk = exp(g_c) S + (beta exp(g_c - g) k)^T R

R is what each token adds to the state before beta. Only the lines with S run from chunk to chunk. All of it is computed
block by block (`chunks`): between the passes there are the inputs, and the state before each block.

Shape suffixes: n tokens, h key heads, H value heads, K and V elements of a head of keys and of values; inside a block
m chunks, b = m H, C tokens of a chunk, r value heads of a key head, and t = 2 C: queries, then keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hetero.models.layers.sequences import Chunks, Sequences, TokenBlock

EPS = 1e-6
"""Added to the squares of queries and keys."""


def delta_rule(
    q_nhK: Tensor, k_nhK: Tensor, v_nHV: Tensor, decay_nH: Tensor, beta_nH: Tensor, sequences: Sequences
) -> Tensor:
    """Apply the gated delta rule to each sequence by itself: [n, H, V], in the dtype of `v`, computed in fp32.

    Queries and keys are l2-normed here. H is a multiple of h: consecutive value heads share a key head. `decay`: fp32,
    logarithms, at most 0. `beta`: from 0 to 1.
    """
    return _DeltaRule.apply(q_nhK, k_nhK, v_nHV, decay_nH, beta_nH, sequences.chunks)  # pyright: ignore[reportReturnType]


class _Inputs(NamedTuple):
    q_nhK: Tensor
    k_nhK: Tensor
    v_nHV: Tensor
    decay_nH: Tensor
    beta_nH: Tensor


class _Inside(NamedTuple):
    """What the forward pass computes inside a block, and the states of its chunks."""

    qk_mhtK: Tensor
    """Normed queries and keys."""
    inverse_mht: Tensor
    """What the norm multiplied them with; 0 for padding."""
    beta_bC: Tensor
    within_bCC: Tensor
    """D."""
    until_bC: Tensor
    """exp(g)."""
    since_bC: Tensor
    """exp(g_c - g)."""
    whole_b: Tensor
    """exp(g_c)."""
    products_mh2CC: Tensor
    """q k^T and k k^T."""
    read_btK: Tensor
    """exp(g) q and exp(g) k, which meet the state."""
    written_bCK: Tensor
    """beta exp(g_c - g) k, which enter it."""
    scores_bCC: Tensor
    """P."""
    solved_bCC: Tensor
    """(1 + A)^-1."""
    added_bCV: Tensor
    """R."""
    states_bKV: Tensor
    """State before each chunk."""
    after: Tensor | None
    """State before the next block."""


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_nhK: Tensor, k_nhK: Tensor, v_nHV: Tensor, decay_nH: Tensor, beta_nH: Tensor, chunks: Chunks
    ) -> Tensor:
        inputs = _Inputs(q_nhK, k_nhK, v_nHV, decay_nH, beta_nH)
        out, state = _rows_like(v_nHV), None
        states: list[Tensor] = []
        for block in chunks.blocks:
            if state is not None:
                states.append(state)
            inside = _inside(inputs, block, state)
            out_bCV = torch.bmm(inside.read_btK[:, : chunks.length], inside.states_bKV)
            out_bCV.baddbmm_(inside.scores_bCC, inside.added_bCV)
            _write(out, out_bCV, block, q_nhK.shape[-1] ** -0.5)
            state = inside.after
        ctx.save_for_backward(*inputs, *states)
        ctx.chunks = chunks
        return out[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, states = _Inputs(*ctx.saved_tensors[:5]), list(ctx.saved_tensors[5:])
        of_inputs, of_state = _Inputs(*(_rows_like(x) for x in inputs)), None
        for block in reversed(ctx.chunks.blocks):
            inside = _inside(inputs, block, None if block.starts else states.pop())
            of_state = _backward(inputs, inside, block, grad, of_state, of_inputs)
        wanted = zip(of_inputs, ctx.needs_input_grad, strict=False)
        return *(of_input[:-1] if wants else None for of_input, wants in wanted), None


def _inside(inputs: _Inputs, block: TokenBlock, state: Tensor | None) -> _Inside:
    """Compute a block that begins with `state`, or at the start of its sequences."""
    h, H, C = inputs.q_nhK.shape[1], inputs.v_nHV.shape[1], block.length
    mask_mC1 = block.mask
    # In fp64, as the small differences of large sums count.
    g_mHC = (_read(inputs.decay_nH, block) * mask_mC1).transpose(1, 2).cumsum(-1, dtype=torch.float64)
    g_bC = g_mHC.flatten(0, 1)
    beta_bC = (_read(inputs.beta_nH, block) * mask_mC1).transpose(1, 2).flatten(0, 1)
    until_bC, since_bC = g_bC.float().exp_(), (g_bC[:, -1:] - g_bC).float().exp_()
    whole_b = until_bC[:, -1]
    later = torch.ones(C, C, dtype=torch.bool, device=g_bC.device).triu_(1)
    within_bCC = (g_bC[:, :, None] - g_bC[:, None]).float().masked_fill_(later, -torch.inf).exp_()

    qk_mhtK, inverse_mht = _normed(inputs, block)
    keys_mhCK = qk_mhtK[:, :, C:]
    products_mhtC = qk_mhtK @ keys_mhCK.mT
    weighted_bCC = within_bCC * beta_bC[:, None]
    both_mhr2CC = _by_key_head(weighted_bCC, h, H).unsqueeze(3) * products_mhtC.view(-1, h, 1, 2, C, C)
    scores_bCC, of_keys_bCC = both_mhr2CC.flatten(0, 2).unbind(1)
    one = torch.eye(C, device=g_bC.device).expand_as(of_keys_bCC)
    # The solver takes no notice of the diagonal.
    solved_bCC = torch.linalg.solve_triangular(of_keys_bCC, one, upper=False, unitriangular=True)
    read_btK = _times(qk_mhtK, torch.cat((until_bC, until_bC), dim=1))
    written_bCK = _times(keys_mhCK, since_bC * beta_bC)
    v_bCV = _read(inputs.v_nHV, block).transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)

    added_bCV, states_bKV, after = _scan(
        v_bCV.flatten(0, 1),
        read_btK[:, C:],
        written_bCK,
        solved_bCC,
        whole_b,
        state,
        [n * H for n in block.steps],
        block.follows * H,
    )
    return _Inside(
        qk_mhtK,
        inverse_mht,
        beta_bC,
        within_bCC,
        until_bC,
        since_bC,
        whole_b,
        products_mhtC.unflatten(2, (2, C)),
        read_btK,
        written_bCK,
        scores_bCC,
        solved_bCC,
        added_bCV,
        states_bKV,
        after,
    )


def _scan(
    v_bCV: Tensor,
    read_bCK: Tensor,
    written_bCK: Tensor,
    solved_bCC: Tensor,
    whole_b: Tensor,
    state: Tensor | None,
    sizes: list[int],
    follows: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run from step to step: return what each token adds, the state before each chunk, and the one before the next
    block. `v` is overwritten.
    """
    added_bCV = torch.empty_like(v_bCV)
    states_bKV = v_bCV.new_empty(len(v_bCV), read_bCK.shape[-1], v_bCV.shape[-1])
    after = v_bCV.new_empty(follows, *states_bKV.shape[1:]) if follows else None
    each = (x.split(sizes) for x in (v_bCV, read_bCK, written_bCK, solved_bCC, whole_b[:, None, None], added_bCV))
    states = [*states_bKV.split(sizes), after]
    if state is None:
        states_bKV[: sizes[0]].zero_()
    else:
        states_bKV[: sizes[0]].copy_(state)
    if v_bCV.is_meta:  # Steps allocate nothing.
        return added_bCV, states_bKV, after
    for i, (v, read, written, solved, whole, added) in enumerate(zip(*each, strict=True)):
        now, then = states[i], states[i + 1]
        torch.bmm(solved, v.baddbmm_(read, now, alpha=-1), out=added)
        if then is not None:
            count = len(then)
            torch.mul(now[:count], whole[:count], out=then)
            then.baddbmm_(written[:count].mT, added[:count])
    return added_bCV, states_bKV, after


def _backward(
    inputs: _Inputs, inside: _Inside, block: TokenBlock, grad: Tensor, of_after: Tensor | None, of_inputs: _Inputs
) -> Tensor | None:
    """Write a block's gradients, given that of the state after it; return that of the state before it."""
    (h, K), (H, V), C = inputs.q_nhK.shape[1:], inputs.v_nHV.shape[1:], block.length
    r = H // h
    # Of exp(g) q S + P R, and of minus v - exp(g) k S: the two products with S.
    of_both_btV = grad.new_empty(len(inside.added_bCV), 2 * C, V, dtype=torch.float32)
    of_out_bCV, minus_bCV = of_both_btV.split(C, dim=1)
    scale_mC11 = block.mask[..., None] * K**-0.5
    torch.mul(_read(grad, block).transpose(1, 2), scale_mC11.transpose(1, 2), out=of_out_bCV.unflatten(0, (-1, H)))
    of_added_bCV = torch.bmm(inside.scores_bCC.mT, of_out_bCV).neg_()
    of_states_bKV, of_before = _scan_back(
        inside, of_both_btV, of_added_bCV, of_after, [n * H for n in block.steps], block.starts
    )

    of_read_btK = torch.bmm(of_both_btV, inside.states_bKV.mT)
    of_written_bCK = torch.bmm(inside.added_bCV, of_states_bKV.mT)
    of_g_bC = (of_read_btK * inside.read_btK).sum(-1).unflatten(1, (2, C)).sum(1)
    keys_mh1CK = inside.qk_mhtK[:, :, None, C:]
    met_bC = (of_written_bCK.unflatten(0, (-1, h, r)) * keys_mh1CK).sum(-1).flatten(0, 2) * inside.since_bC
    of_beta_bC = met_bC
    met_bC = met_bC * inside.beta_bC
    of_g_bC -= met_bC
    of_g_bC[:, -1] += met_bC.sum(-1)
    of_g_bC[:, -1] += (of_states_bKV * inside.states_bKV).sum((1, 2)) * inside.whole_b

    of_scores_b2CC = torch.bmm(of_both_btV, inside.added_bCV.mT).unflatten(1, (2, C))
    of_scores_b2CC *= inside.within_bCC[:, None]
    of_scores_b2CC[:, 1].diagonal(dim1=1, dim2=2).zero_()
    shares_bCC = (of_scores_b2CC.unflatten(0, (-1, h, r)) * inside.products_mh2CC[:, :, None]).sum(3).flatten(0, 2)
    columns_bC = shares_bCC.sum(1)
    of_beta_bC = of_beta_bC + columns_bC
    of_g_bC += torch.bmm(shares_bCC, inside.beta_bC[:, :, None])[:, :, 0]
    of_g_bC -= columns_bC * inside.beta_bC

    of_scores_b2CC *= inside.beta_bC[:, None, None]
    of_products_mhtC = of_scores_b2CC.unflatten(0, (-1, h, r)).sum(2).flatten(2, 3)
    until_bt = torch.cat((inside.until_bC, inside.until_bC), dim=1)
    of_qk_mhtK = of_read_btK.mul_(until_bt[:, :, None]).unflatten(0, (-1, h, r)).sum(2)
    of_written_bCK *= (inside.since_bC * inside.beta_bC)[:, :, None]
    of_qk_mhtK[:, :, C:] += of_written_bCK.unflatten(0, (-1, h, r)).sum(2)
    of_qk_mhtK += of_products_mhtC @ inside.qk_mhtK[:, :, C:]
    of_qk_mhtK[:, :, C:] += of_products_mhtC.mT @ inside.qk_mhtK
    # Of x / sqrt(x^2 + eps).
    along = (of_qk_mhtK * inside.qk_mhtK).sum(-1, keepdim=True)
    of_qk_mhtK = of_qk_mhtK.addcmul_(inside.qk_mhtK, along, value=-1).mul_(inside.inverse_mht[..., None])

    of_q_mhCK, of_k_mhCK = of_qk_mhtK.split(C, dim=2)
    of_decay_bC = of_g_bC.flip(-1).cumsum(-1).flip(-1)
    _write(of_inputs.q_nhK, of_q_mhCK.flatten(0, 1), block)
    _write(of_inputs.k_nhK, of_k_mhCK.flatten(0, 1), block)
    _write(of_inputs.v_nHV, minus_bCV, block, -1.0)
    _write(of_inputs.decay_nH, of_decay_bC, block)
    _write(of_inputs.beta_nH, of_beta_bC, block)
    return of_before


def _scan_back(
    inside: _Inside,
    of_both_btV: Tensor,
    of_added_bCV: Tensor,
    of_after: Tensor | None,
    sizes: list[int],
    starts: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run from step to step backwards: write the second half of `of_both`, and return the gradients of the state after
    each chunk, and of the state before the block. `of_added` is minus the part of the gradient of R from the output,
    and is overwritten.
    """
    C = of_added_bCV.shape[1]
    of_states_bKV = torch.empty_like(inside.states_bKV)
    before = None if starts else torch.empty_like(of_states_bKV[: sizes[0]])
    whole_b11 = inside.whole_b[:, None, None]
    tensors = (inside.read_btK, inside.written_bCK, inside.solved_bCC, whole_b11, of_both_btV, of_added_bCV)
    each = list(zip(*(x.split(sizes) for x in tensors), strict=True))
    of_states = [before, *of_states_bKV.split(sizes)]
    _fill(of_states[-1], of_after)
    if of_added_bCV.is_meta:
        return of_states_bKV, before
    for i in reversed(range(len(sizes))):
        read, written, solved, whole, of_both, of_added = each[i]
        after, to = of_states[i + 1], of_states[i]
        of_added.baddbmm_(written, after, alpha=-1)
        torch.bmm(solved.mT, of_added, out=of_both[:, C:])
        if to is not None:
            count = len(after)
            torch.mul(after, whole, out=to[:count])
            to[:count].baddbmm_(read.mT, of_both)
            to[count:].zero_()
    return of_states_bKV, before


def _fill(to: Tensor, first: Tensor | None) -> None:
    """Copy `first` to the beginning, and zeros after it."""
    count = 0 if first is None else len(first)
    if first is not None:
        to[:count].copy_(first)
    to[count:].zero_()


def _normed(inputs: _Inputs, block: TokenBlock) -> tuple[Tensor, Tensor]:
    (h, K), C = inputs.q_nhK.shape[1:], block.length
    m = sum(block.steps)
    qk_mhtK = inputs.q_nhK.new_empty(m, h, 2 * C, K, dtype=torch.float32)
    inverse_mht = qk_mhtK.new_empty(m, h, 2 * C)
    for x, to, inverse in zip((inputs.q_nhK, inputs.k_nhK), qk_mhtK.split(C, 2), inverse_mht.split(C, 2), strict=True):
        x_mhCK = _read(x, block).transpose(1, 2)
        length = torch.linalg.vector_norm(x_mhCK, dim=-1, dtype=torch.float32)
        torch.mul(length.square_().add_(EPS).rsqrt_(), block.mask.transpose(1, 2), out=inverse)
        torch.mul(x_mhCK, inverse[..., None], out=to)
    return qk_mhtK, inverse_mht


def _times(x_mhcK: Tensor, factor_bc: Tensor) -> Tensor:
    """Multiply rows of each key head by a factor of each value head: [b, c, K]."""
    m, h = x_mhcK.shape[:2]
    return (x_mhcK[:, :, None] * factor_bc.view(m, h, -1, factor_bc.shape[1], 1)).flatten(0, 2)


def _by_key_head(x_b: Tensor, h: int, H: int) -> Tensor:
    return x_b.unflatten(0, (-1, h, H // h))


def _rows_like(x: Tensor) -> Tensor:
    """Return a row for each token, and one for padding."""
    return x.new_empty(len(x) + 1, *x.shape[1:])


def _read(x: Tensor, block: TokenBlock) -> Tensor:
    """Return the tokens of a block: [m, C, ...]. Padding has those of other tokens."""
    return x.index_select(0, block.read).unflatten(0, (-1, block.length))


def _write(to: Tensor, x_b: Tensor, block: TokenBlock, scale: float = 1.0) -> None:
    """Write `x` [m heads, C, ...] times `scale` to the rows of its tokens."""
    x = x_b.unflatten(0, (-1, to.shape[1])).transpose(1, 2)
    rows = torch.mul(x, scale, out=to.new_empty(x.shape))
    to.index_copy_(0, block.write, rows.flatten(0, 1))
