"""Cross entropy, and which tokens are predicted right, over a vocabulary that is split over a tensor-parallel group.

The method of the cross entropy is Megatron-LM's (Shoeybi et al. 2019, arXiv 1909.08053): each rank reduces its own part
of the vocabulary, and only three numbers per token cross the group. Ours takes its group explicitly, computes and
differentiates in fp32, and leaves out rows that pad the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, valid: int, group: dist.ProcessGroup) -> Tensor:
        logits32 = _without_padding(logits.float(), valid)
        highest = logits32.amax(dim=-1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        local = targets - first
        mine = (local >= 0) & (local < valid)
        local = local.clamp(0, logits.shape[1] - 1)
        exponentials = (logits32 - highest[:, None]).exp_()
        target_logit = torch.where(mine, logits32.gather(1, local[:, None]).squeeze(1) - highest, 0.0)
        sums = torch.stack([exponentials.sum(dim=-1), target_logit])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), local, mine)
        ctx.dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, local, mine = ctx.saved_tensors
        grad = softmax.clone()
        grad[torch.arange(len(grad), device=grad.device), local] -= mine.to(grad.dtype)
        return grad.mul_(grads[0][:, None]).to(ctx.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, first: int, valid: int, group: dist.ProcessGroup
) -> Tensor:
    """Cross entropy per token, fp32 [tokens], whole on every rank of `group`.

    `logits`: [tokens, local vocabulary], of which the first `valid` columns stand for the vocabulary ids from `first`
    on and the rest is padding. `targets`: int64 [tokens], global ids, the same on every rank.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, first, valid, group)


def vocab_parallel_hits(logits: Tensor, targets: Tensor, first: int, valid: int, group: dist.ProcessGroup) -> Tensor:
    """Whether each token's target is what greedy decoding chooses: the likeliest id, the lowest of several as likely.
    Bool [tokens], whole on every rank of `group`. Arguments as for `vocab_parallel_cross_entropy`; two numbers per
    token cross the group.
    """
    highest, column = _without_padding(logits, valid).max(dim=-1)
    best = highest.to(torch.float32, copy=True)
    dist.all_reduce(best, dist.ReduceOp.MAX, group=group)
    chosen = torch.where(highest == best, column + first, torch.iinfo(column.dtype).max)
    dist.all_reduce(chosen, dist.ReduceOp.MIN, group=group)
    return chosen == targets


def _without_padding(logits: Tensor, valid: int) -> Tensor:
    """`logits` with all columns from `valid` on at minus infinity."""
    if valid == logits.shape[1]:
        return logits
    return logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= valid, -torch.inf)
