"""Shapes of language models, and the head with its loss.

The loss is the cross entropy over a vocabulary that is split over a tensor-parallel group, computed in chunks of
tokens. The method is Megatron-LM's (Shoeybi et al. 2019, arXiv 1909.08053): each rank reduces its shard of the
vocabulary, and the group exchanges three numbers per token. This implementation has an explicit group, computes and
differentiates in fp32, and excludes padding of the vocabulary. The logits of a whole batch would be the largest tensor
of a step (152k ids, 16k tokens: 10 GB in fp32), so gradients are computed with the loss, chunk by chunk, as in Liger
Kernel (Hsu et al. 2024, arXiv 2410.10989). For few tokens, the gradients of the logits are saved instead; the backward
pass then computes the gradient of the head's weight as a single product and accumulates it over micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hetero.groups.platform import Function, compiles_for
from megatron_hetero.models.architecture import Architecture, End
from megatron_hetero.models.family import TextShape
from megatron_hetero.models.layers.attention import SelfAttention
from megatron_hetero.models.layers.compiled import run
from megatron_hetero.models.layers.ends import Head, TokenEmbedding
from megatron_hetero.models.layers.layer import Layer
from megatron_hetero.models.layers.linear import add_product, gradient_of_weight, product, scaled_gradient
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.norms import Norm
from megatron_hetero.models.layers.parts import AttentionPart, MLPPart
from megatron_hetero.models.layers.rotary import MultimodalRotary

MAX_LOGITS = 1 << 28
"""Maximum number of logits in a chunk: 512 MiB in bf16. A quarter without a compiler, which needs fp32 copies."""


@dataclass(frozen=True)
class LanguageModelShape(TextShape):
    """Base of the shapes of language models whose tensors have the names of Qwen2 and Qwen3. Sizes are in elements."""

    qkv_bias: ClassVar[bool]
    """Whether queries, keys and values have a bias."""
    head_norms: ClassVar[bool]
    """Whether queries and keys are normalised head by head."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of an MLP; 0 if all layers have experts."""
    vocab: int
    tied: bool
    rope_theta: float
    mrope_section: tuple[int, ...]
    """Number of rotary frequencies for time, height and width."""
    norm_eps: float

    @classmethod
    def of(cls, config: Any, head_dim: int, sections: Sequence[int], **further: Any) -> Self:
        """Return the shape that a whole model's configuration describes. `sections`: default of `mrope_section`;
        `further`: fields of subclasses.
        """
        text, rope = config.text_config, config.text_config.rope_parameters
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=head_dim,
            ffn=getattr(text, "intermediate_size", 0),
            vocab=text.vocab_size,
            tied=bool(config.tie_word_embeddings),
            rope_theta=float(rope["rope_theta"]),
            mrope_section=tuple(rope.get("mrope_section", sections)),
            norm_eps=text.rms_norm_eps,
            **further,
        )

    @property
    def turns(self) -> tuple[int, ...]:
        """Axis of each rotary frequency: 0 for time, 1 for height, 2 for width. If the frequencies cover only a
        fraction of a head, its last elements are not rotated.
        """
        raise NotImplementedError

    @property
    def rotary(self) -> MultimodalRotary:
        """Multimodal rotary embedding of queries and keys."""
        return MultimodalRotary(self.rope_theta, 2 * len(self.turns), self.turns)

    @property
    def architecture(self) -> Architecture:
        """Embedding, layers, final norm and head."""
        return _architecture(self)

    def norm(self, number: int) -> Norm:
        """Return the norm before each part of layer `number`, or the final norm if `number` is the number of layers."""
        return Norm(self.hidden, self.norm_eps)

    def attention(self, number: int) -> AttentionPart:
        """Return the attention part of layer `number`."""
        return SelfAttention(
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_dim,
            stored=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            causal=True,
            qkv_bias=self.qkv_bias,
            head_norm=Norm(self.head_dim, self.norm_eps) if self.head_norms else None,
            norm_names=("self_attn.q_norm", "self_attn.k_norm"),
        )

    def mlp(self, number: int) -> MLPPart:
        """Return the MLP part of layer `number`."""
        return MLP(self.hidden, self.ffn, stored=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))


@lru_cache
def _architecture(t: LanguageModelShape) -> Architecture:
    def layer(number: int) -> Layer:
        norm, names = t.norm(number), ("input_layernorm", "post_attention_layernorm")
        return Layer(t.attention(number), t.mlp(number), (norm, norm), names)

    table, head = "model.embed_tokens.", Head(t.vocab, t.hidden)
    return Architecture(
        entry=End("embedding", TokenEmbedding(t.vocab, t.hidden), table, "first"),
        layers=tuple(layer(number) for number in range(t.layers)),
        ends=(
            End("final_layernorm", t.norm(t.layers), "model.norm.", "last"),
            End("output_layer", head, table, "last", copies="embedding", copy="lm_head.")
            if t.tied
            else End("output_layer", head, "lm_head.", "last"),
        ),
        stored="model.layers.",
        added=t.added,
    )


class VocabularyShard(NamedTuple):
    """Shard of the vocabulary on a tensor-parallel rank. Columns of logits after the first `valid` are padding."""

    first: int
    """First id of the shard."""
    valid: int
    """Number of ids in the shard."""
    group: dist.ProcessGroup
    """The ranks over which the vocabulary is split."""


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabularyShard,
    *,
    hits: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return the sum of the cross entropies of all tokens, fp32 [], equal on every rank of the group.

    The forward pass computes the gradients, so the loss can be back-propagated only once.

    Args:
        hidden: [tokens, hidden].
        weight: weight [columns, hidden] of the head; the first `shard.valid` rows belong to ids.
        targets: int64 [tokens], global ids, equal on every rank.
        shard: this rank's shard of the vocabulary.
        hits: bool [tokens] to fill, see `vocab_parallel_hits`.
        chunk: number of tokens whose logits exist at a time; default: as many as `MAX_LOGITS` allows.
    """
    limit = MAX_LOGITS if compiles_for(weight) else MAX_LOGITS // 4
    return _HeadLoss.apply(hidden, weight, targets, shard, hits, chunk or max(1, limit // len(weight)))


class _HeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard, hits: Tensor | None,
        chunk: int,
    ) -> Tensor:  # fmt: skip
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_logits = grad_weight = None
        few = len(hidden) <= hidden.shape[1]
        if ctx.needs_input_grad[1] and few:
            grad_logits = hidden.new_empty(len(hidden), len(weight))
        # Products of several chunks are accumulated in fp32.
        dtype = torch.float32 if len(hidden) > chunk and weight.element_size() < 4 else weight.dtype
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            tokens = slice(start, start + chunk)
            logits = torch.mm(hidden[tokens], weight.t(), out=None if grad_logits is None else grad_logits[tokens])
            if hits is not None:
                hits[tokens] = vocab_parallel_hits(logits, targets[tokens], shard)
            losses, grad = _cross_entropy_(logits, targets[tokens], shard)
            loss += losses.sum()
            del logits
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[tokens])
            if ctx.needs_input_grad[1] and not few:
                if grad_weight is None:
                    grad_weight = product(grad.t(), hidden[tokens], dtype=dtype)
                else:
                    add_product(grad_weight, grad.t(), hidden[tokens])
        ctx.parameter, factors = weight, (None, None) if grad_logits is None else (grad_logits, hidden)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *factors)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_hidden, grad_weight, grad_logits, hidden = ctx.saved_tensors
        # Modify the saved tensor in place, so that autograd rejects a second backward pass.
        grad_hidden = None if grad_hidden is None else grad_hidden.copy_(_scaled(grad_hidden, grad))
        if grad_weight is not None:
            grad_weight = scaled_gradient(ctx.parameter, grad_weight, grad)
        if grad_logits is not None:
            grad_weight = gradient_of_weight(ctx.parameter, grad_logits.t(), _scaled(hidden, grad))
        return grad_hidden, grad_weight, None, None, None, None


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Multiply `x` by `scale` [] in fp32. A GPU would otherwise round `scale` to the dtype of `x` first."""
    return x.float().mul_(scale).to(x.dtype) if x.element_size() < 4 else x * scale


def _cross_entropy_(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of each token, fp32 [tokens], and its gradients in the memory of `logits`."""
    logits[:, shard.valid :] = -torch.inf
    highest = logits.amax(dim=-1).float()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=shard.group)
    local = targets - shard.first
    mine = (local >= 0) & (local < shard.valid)
    local = local.clamp_(0, logits.shape[1] - 1)
    target_logit = torch.where(mine, logits.gather(1, local[:, None]).squeeze(1) - highest, 0.0)
    in_kernels = compiles_for(logits)
    exponentials = logits if in_kernels else logits.float().sub_(highest[:, None]).exp_()
    local_sum = run(_sum_of_exponentials, logits, highest) if in_kernels else exponentials.sum(dim=-1)
    sums = torch.stack([local_sum, target_logit])
    dist.all_reduce(sums, group=shard.group)
    losses, total = sums[0].log() - sums[1], sums[0]
    if in_kernels:
        return losses, run(_gradients_, logits, highest, total, torch.where(mine, local, -1))
    # Subtract before the division, which rounds to fewer bits: the probability of a likely target is close to 1.
    exponentials.scatter_add_(1, local[:, None], -torch.where(mine, total, 0.0)[:, None])
    return losses, torch.div(exponentials, total[:, None], out=logits)


# `_sum_of_exponentials` and `_gradients_` are compiled to kernels that make no fp32 copy of bf16 logits.
def _sum_of_exponentials(logits: Tensor, highest: Tensor) -> Tensor:
    return (logits.float() - highest[:, None]).exp().sum(dim=-1)


def _gradients_(logits: Tensor, highest: Tensor, total: Tensor, columns: Tensor) -> Tensor:
    """Overwrite `logits` with their gradients. `columns`: column of each target, -1 for targets on other ranks."""
    exponentials = (logits.float() - highest[:, None]).exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == columns[:, None]
    return logits.copy_((exponentials - torch.where(is_target, total[:, None], 0.0)) / total[:, None])


def vocab_parallel_hits(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> Tensor:
    """Return whether greedy decoding would choose each token's target (the lowest id among equally likely ones): bool
    [tokens], equal on every rank of the group. `logits`: [tokens, columns]. The group exchanges two numbers per token.
    """
    if shard.valid < logits.shape[1]:
        logits = logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= shard.valid, -torch.inf)
    highest, column = logits.max(dim=-1)
    best = highest.to(torch.float32, copy=True)
    dist.all_reduce(best, dist.ReduceOp.MAX, group=shard.group)
    chosen = torch.where(highest == best, column + shard.first, torch.iinfo(column.dtype).max)
    dist.all_reduce(chosen, dist.ReduceOp.MIN, group=shard.group)
    return chosen == targets
