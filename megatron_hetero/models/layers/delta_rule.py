"""Gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464) in PyTorch, in chunks (Yang et al.
2024, arXiv 2406.06484, section 3), with a backward pass that recomputes everything inside chunks.

Per token and value head, with the state S [K, V], zero before each sequence, and the l2-normalised query q and key k:

    S = exp(decay) S        S = S + beta k (v - S^T k)^T        out = K^-0.5 S^T q

In a chunk that starts with the state S, let g_i be the sum of decays up to token i, g_c the sum of all, and
D_ij = exp(g_i - g_j) if j <= i, else 0:

    A = strictly lower part of (k k^T * D * beta_j)      P = q k^T * D * beta_j
    R = (1 + A)^-1 (v - exp(g) k S)                      out = K^-0.5 (exp(g) q S + P R)
    S of the next chunk = exp(g_c) S + (beta exp(g_c - g) k)^T R

R is each token's update of the state, before beta. Only the lines with S are sequential over chunks. Everything is
computed block by block (see `chunks`); the inputs and the state before each block are saved for the backward pass.

Shape suffixes:
    n  tokens
    h  key heads, each with K elements
    H  value heads, each with V elements
    m  chunks of a block, and b = m H
    C  tokens of a chunk, and t = 2 C: queries, then keys
    r  value heads per key head
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_hetero.groups.platform import Function
from megatron_hetero.models.layers.chunks import Chunks, TokenBlock
from megatron_hetero.models.layers.sequences import Sequences

EPS = 1e-6
"""Constant added to the squared norms of queries and keys."""
LEAST = -80.0
"""Logarithm of a decay below which the decay counts as 0."""


def delta_rule(
    q_nhK: Tensor, k_nhK: Tensor, v_nHV: Tensor, decay_nH: Tensor, beta_nH: Tensor, sequences: Sequences
) -> Tensor:
    """Apply the gated delta rule along each sequence. Return [n, H, V] in the dtype of `v_nHV`, computed in fp32.

    Queries and keys are l2-normalised here. H is a multiple of h: consecutive value heads share a key head.
    `decay_nH`: logarithms of the decays, fp32, at most 0. `beta_nH`: strengths of the updates, from 0 to 1.
    """
    return _DeltaRule.apply(q_nhK, k_nhK, v_nHV, decay_nH, beta_nH, sequences.chunks)  # pyright: ignore[reportReturnType]


class _Inputs(NamedTuple):
    q_nhK: Tensor
    k_nhK: Tensor
    v_nHV: Tensor
    decay_nH: Tensor
    beta_nH: Tensor


class _Decays(NamedTuple):
    """Decays inside the chunks of a block, in the notation of the module docstring, and beta."""

    until_bC: Tensor
    """exp(g), the decay from the start of the chunk to each token."""
    since_bC: Tensor
    """exp(g_c - g), the decay from each token to the end of the chunk."""
    whole_b: Tensor
    """exp(g_c), the decay over the whole chunk."""
    within_bCC: Tensor
    """D, the decay from each token to each later token."""
    beta_bC: Tensor


class _Inside(NamedTuple):
    """Intermediate results of the forward pass in a block, and the states of its chunks."""

    qk_mhtK: Tensor
    """Normalised queries and keys."""
    inverse_mht: Tensor
    """Inverse norms of queries and keys; 0 for padding."""
    decays: _Decays
    products_mhtC: Tensor
    """Products q k^T and k k^T."""
    read_btK: Tensor
    """exp(g) q and exp(g) k, which multiply the state."""
    written_bCK: Tensor
    """beta exp(g_c - g) k, which is added to the state."""
    scores_bCC: Tensor
    """Weighted scores P of the module docstring."""
    solved_bCC: Tensor
    """Inverse (1 + A)^-1 of the module docstring."""
    added_bCV: Tensor
    """Updates R of the module docstring."""
    states_bKV: Tensor
    """State before each chunk."""
    after: Tensor | None
    """State before the next block of the same sequences; None if no such block follows."""

    def by_key_head(self, x_b: Tensor) -> Tensor:
        """View `x_b` [b, ...] as [m, h, r, ...], grouped by key head."""
        return x_b.unflatten(0, (*self.qk_mhtK.shape[:2], -1))


class _DeltaRule(Function):
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
            state = _forward(inputs, block, state, out)
        ctx.save_for_backward(*inputs, *states)
        ctx.chunks = chunks
        return out[:-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors  # Read once, since each access unpacks all saved tensors.
        inputs, states = _Inputs(*saved[:5]), list(saved[5:])
        grad_inputs, grad_state = _Inputs(*(_rows_like(x) for x in inputs)), None
        for block in reversed(ctx.chunks.blocks):
            inside = _inside(inputs, block, None if block.starts else states.pop())
            grad_state = _backward(inputs, inside, block, grad, grad_state, grad_inputs)
        wanted = zip(grad_inputs, ctx.needs_input_grad, strict=False)
        return *(grad_input[:-1] if wants else None for grad_input, wants in wanted), None


def _forward(inputs: _Inputs, block: TokenBlock, state: Tensor | None, out: Tensor) -> Tensor | None:
    """Write a block's output to `out`, starting with `state`. Return the state for the next block, if one follows."""
    inside = _inside(inputs, block, state)
    out_bCV = torch.bmm(inside.read_btK[:, : block.length], inside.states_bKV)
    out_bCV.baddbmm_(inside.scores_bCC, inside.added_bCV)
    _write(out, out_bCV, block, inputs.q_nhK.shape[-1] ** -0.5)
    return inside.after


def _inside(inputs: _Inputs, block: TokenBlock, state: Tensor | None) -> _Inside:
    """Compute the intermediate results of a block that starts with `state`, which is None at the start of sequences."""
    C, H = block.length, inputs.v_nHV.shape[1]
    qk_mhtK, inverse_mht = _normed(inputs, block)
    keys_mhCK = qk_mhtK[:, :, C:]
    decays = _decays(inputs, block)
    read_btK = _times(qk_mhtK, decays.until_bC.repeat(1, 2))
    written_bCK = _times(keys_mhCK, decays.since_bC * decays.beta_bC)

    products_mhtC = qk_mhtK @ keys_mhCK.mT
    weights_bCC = decays.within_bCC * decays.beta_bC[:, None]
    both_btC = _times(products_mhtC, weights_bCC.repeat(1, 2, 1))
    scores_bCC, among_keys_bCC = both_btC.split(C, dim=1)
    one = torch.eye(C, device=both_btC.device).expand_as(among_keys_bCC)
    # The solver ignores the diagonal and everything above it.
    solved_bCC = torch.linalg.solve_triangular(among_keys_bCC, one, upper=False, unitriangular=True)

    v_bCV = _read(inputs.v_nHV, block).transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    added_bCV, states_bKV, after = _scan(
        *(v_bCV.flatten(0, 1), read_btK[:, C:], written_bCK, solved_bCC, decays.whole_b, state),
        [chunks * H for chunks in block.steps],
        block.follows * H,
    )
    chunks = scores_bCC, solved_bCC, added_bCV, states_bKV, after
    return _Inside(qk_mhtK, inverse_mht, decays, products_mhtC, read_btK, written_bCK, *chunks)


def _normed(inputs: _Inputs, block: TokenBlock) -> tuple[Tensor, Tensor]:
    """Return l2-normalised queries and keys, and their inverse norms."""
    (h, K), C, m = inputs.q_nhK.shape[1:], block.length, sum(block.steps)
    qk_mhtK = inputs.q_nhK.new_empty(m, h, 2 * C, K, dtype=torch.float32)
    inverse_mht = qk_mhtK.new_empty(m, h, 2 * C)
    for x, to, inverse in zip((inputs.q_nhK, inputs.k_nhK), qk_mhtK.split(C, 2), inverse_mht.split(C, 2), strict=True):
        x_mhCK = _read(x, block).transpose(1, 2)
        length = torch.linalg.vector_norm(x_mhCK, dim=-1, dtype=torch.float32)
        torch.mul(length.square_().add_(EPS).rsqrt_(), block.mask.transpose(1, 2), out=inverse)
        torch.mul(x_mhCK, inverse[..., None], out=to)
    return qk_mhtK, inverse_mht


def _decays(inputs: _Inputs, block: TokenBlock) -> _Decays:
    beta_bC, decay_bC = (
        (_read(x, block) * block.mask).transpose(1, 2).flatten(0, 1) for x in (inputs.beta_nH, inputs.decay_nH)
    )
    # Sum in fp64, since small differences of large sums matter.
    g_bC = decay_bC.cumsum(-1, dtype=torch.float64)
    until_bC, since_bC = _exp(g_bC.float()), _exp((g_bC[:, -1:] - g_bC).float())
    # Mask before exp, which could overflow above the diagonal, and again after, since exp(0) is 1.
    within_bCC = _exp((g_bC[:, :, None] - g_bC[:, None]).float().tril_()).tril_()
    return _Decays(until_bC, since_bC, until_bC[:, -1], within_bCC, beta_bC)


def _exp(x: Tensor) -> Tensor:
    """Exponentiate `x` in place. Results below 2 exp(`LEAST`) become 0, since CPUs are slow with denormal numbers."""
    return torch.threshold_(x.clamp_(min=LEAST).exp_(), 2 * math.exp(LEAST), 0.0)


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
    """Compute the steps of a block one after the other. Return the updates R, the state before each chunk, and the
    state before the next block. `v_bCV` is overwritten.
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
    if v_bCV.is_meta:  # Skip the steps, which allocate no memory.
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
    inputs: _Inputs, inside: _Inside, block: TokenBlock, grad: Tensor, grad_after: Tensor | None, grad_inputs: _Inputs
) -> Tensor | None:
    """Write the gradients of a block's inputs to `grad_inputs`, given the gradient `grad_after` of the state after the
    block. Return the gradient of the state before the block.
    """
    C, (H, V), K = block.length, grad.shape[1:], inputs.q_nhK.shape[2]
    # Gradients of the two products with the state, exp(g) q S and exp(g) k S; the second is minus the gradient of v.
    grad_both_btV = inside.added_bCV.new_empty(len(inside.added_bCV), 2 * C, V)
    grad_out_bCV, minus_bCV = grad_both_btV.split(C, dim=1)
    factors = (block.mask * K**-0.5)[:, None]
    torch.mul(_read(grad, block).transpose(1, 2), factors, out=grad_out_bCV.unflatten(0, (-1, H)))
    grad_states_bKV, grad_before = _scan_back(
        inside, grad_both_btV, grad_after, [n * H for n in block.steps], block.starts
    )

    grad_qk_mhtK, grad_g_bC = _back_from_read(inside, torch.bmm(grad_both_btV, inside.states_bKV.mT))
    grad_keys_mhCK = grad_qk_mhtK[:, :, C:]
    grad_keys_term_mhCK, grad_g_term_bC, grad_beta_bC = _back_from_state(inside, grad_states_bKV)
    grad_keys_mhCK += grad_keys_term_mhCK
    grad_g_bC += grad_g_term_bC
    grad_products_mhtC, grad_g_term_bC, grad_beta_term_bC = _back_from_scores(
        inside, torch.bmm(grad_both_btV, inside.added_bCV.mT)
    )
    grad_qk_mhtK += grad_products_mhtC @ inside.qk_mhtK[:, :, C:]
    grad_keys_mhCK += grad_products_mhtC.mT @ inside.qk_mhtK
    grad_g_bC += grad_g_term_bC
    grad_beta_bC += grad_beta_term_bC
    # Compute the backward pass of the normalisation, x / sqrt(|x|^2 + eps).
    along_mht1 = (grad_qk_mhtK * inside.qk_mhtK).sum(-1, keepdim=True)
    grad_qk_mhtK.addcmul_(inside.qk_mhtK, along_mht1, value=-1).mul_(inside.inverse_mht[..., None])

    grad_q_mhCK, grad_k_mhCK = grad_qk_mhtK.split(C, dim=2)
    _write(grad_inputs.q_nhK, grad_q_mhCK.flatten(0, 1), block)
    _write(grad_inputs.k_nhK, grad_k_mhCK.flatten(0, 1), block)
    _write(grad_inputs.v_nHV, minus_bCV, block, -1.0)
    _write(grad_inputs.decay_nH, grad_g_bC.flip(-1).cumsum(-1).flip(-1), block)
    _write(grad_inputs.beta_nH, grad_beta_bC, block)
    return grad_before


def _back_from_read(inside: _Inside, grad_read_btK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and k, and of g, given the gradient of `inside.read_btK`, which is overwritten."""
    grad_g_bt = (grad_read_btK * inside.read_btK).sum(-1)
    grad_read_btK.mul_(inside.decays.until_bC.repeat(1, 2)[:, :, None])
    return inside.by_key_head(grad_read_btK).sum(2), grad_g_bt.unflatten(1, (2, -1)).sum(1)


def _back_from_state(inside: _Inside, grad_states_bKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of k, g and beta, given the gradient of the state after each chunk."""
    grad_written_bCK = torch.bmm(inside.added_bCV, grad_states_bKV.mT)
    keys_mh1CK = inside.qk_mhtK[:, :, None, grad_written_bCK.shape[1] :]
    grad_beta_bC = (inside.by_key_head(grad_written_bCK) * keys_mh1CK).sum(-1).flatten(0, 2) * inside.decays.since_bC
    grad_written_bCK.mul_((inside.decays.since_bC * inside.decays.beta_bC)[:, :, None])
    # The gradient of g through g_c - g, which is 0 for the last token.
    grad_g_bC = (grad_beta_bC * inside.decays.beta_bC).neg_()
    grad_whole_b = (grad_states_bKV * inside.states_bKV).sum((1, 2)) * inside.decays.whole_b
    grad_g_bC[:, -1] = grad_whole_b - grad_g_bC[:, :-1].sum(1)
    return inside.by_key_head(grad_written_bCK).sum(2), grad_g_bC, grad_beta_bC


def _back_from_scores(inside: _Inside, grad_both_btC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q k^T and k k^T, of g, and of beta, given the gradient of P and A (overwritten)."""
    grad_both_b2CC, beta_bC = grad_both_btC.unflatten(1, (2, -1)), inside.decays.beta_bC
    grad_both_b2CC.mul_(inside.decays.within_bCC[:, None])
    grad_both_b2CC[:, 1].diagonal(dim1=1, dim2=2).zero_()
    terms_bCC = (inside.by_key_head(grad_both_btC) * inside.products_mhtC[:, :, None]).flatten(0, 2)
    terms_bCC = terms_bCC.unflatten(1, (2, -1)).sum(1)
    diagonal_bC = terms_bCC.diagonal(dim1=1, dim2=2)
    grad_beta_bC = diagonal_bC.clone()
    diagonal_bC.zero_()  # A token does not decay relative to itself.
    columns_bC = terms_bCC.sum(1)
    grad_g_bC = torch.bmm(terms_bCC, beta_bC[:, :, None])[:, :, 0] - columns_bC * beta_bC
    grad_both_b2CC.mul_(beta_bC[:, None, None])
    return inside.by_key_head(grad_both_btC).sum(2), grad_g_bC, grad_beta_bC + columns_bC


def _scan_back(
    inside: _Inside,
    grad_both_btV: Tensor,
    grad_after: Tensor | None,
    sizes: list[int],
    starts: bool,
) -> tuple[Tensor, Tensor | None]:
    """Propagate gradients backward through the steps of a block: write the second half of `grad_both_btV`, given the
    first. Return the gradients of the state after each chunk and of the state before the block.
    """
    C = inside.added_bCV.shape[1]
    minus_bCV = torch.bmm(inside.scores_bCC.mT, grad_both_btV[:, :C]).neg_()
    grad_states_bKV = torch.empty_like(inside.states_bKV)
    before = None if starts else torch.empty_like(grad_states_bKV[: sizes[0]])
    whole_b11 = inside.decays.whole_b[:, None, None]
    tensors = (inside.read_btK, inside.written_bCK, inside.solved_bCC, whole_b11, grad_both_btV, minus_bCV)
    each = list(zip(*(x.split(sizes) for x in tensors), strict=True))
    grad_states = [before, *grad_states_bKV.split(sizes)]
    _fill(grad_states[-1], grad_after)
    if minus_bCV.is_meta:
        return grad_states_bKV, before
    for i in reversed(range(len(sizes))):
        read, written, solved, whole, grad_both, minus = each[i]
        after, to = grad_states[i + 1], grad_states[i]
        torch.bmm(solved.mT, minus.baddbmm_(written, after, alpha=-1), out=grad_both[:, C:])
        if to is not None:
            count = len(after)
            torch.mul(after, whole, out=to[:count])
            to[:count].baddbmm_(read.mT, grad_both)
            to[count:].zero_()
    return grad_states_bKV, before


def _fill(to: Tensor, first: Tensor | None) -> None:
    """Copy `first` to the beginning of `to`, and fill the rest with zeros."""
    count = 0 if first is None else len(first)
    if first is not None:
        to[:count].copy_(first)
    to[count:].zero_()


def _times(x_mhtK: Tensor, factors_bt: Tensor) -> Tensor:
    """Multiply the rows (or elements) of each key head by the factors of each of its value heads. Return [b, t, K]."""
    factors = factors_bt if factors_bt.dim() == 3 else factors_bt[:, :, None]
    return (x_mhtK[:, :, None] * factors.unflatten(0, (*x_mhtK.shape[:2], -1))).flatten(0, 2)


def _rows_like(x: Tensor) -> Tensor:
    """Return an uninitialised tensor with one row per token of `x`, and one row for padding."""
    return x.new_empty(len(x) + 1, *x.shape[1:])


def _read(x: Tensor, block: TokenBlock) -> Tensor:
    """Return the rows of `x` for the tokens of a block, [m, C, ...]. Padding reads the row of another token."""
    return x.index_select(0, block.read).unflatten(0, (-1, block.length))


def _write(to: Tensor, x_b: Tensor, block: TokenBlock, scale: float = 1.0) -> None:
    """Write `x_b` [m * heads, C, ...] times `scale` to the rows of `to` for the tokens of a block."""
    x = x_b.unflatten(0, (-1, to.shape[1])).transpose(1, 2)
    rows = torch.mul(x, scale, out=to.new_empty(x.shape))
    to.index_copy_(0, block.write, rows.flatten(0, 1))
