"""Layers of this package for recipes of one's own: called by the recipe, or in a layer spec of Megatron-Core.

Shape suffixes: n tokens of this rank.

Megatron-Core is imported when a layer is built, since that takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hetero.base.errors import UserError
from megatron_hetero.groups.platform import Platform, on_device
from megatron_hetero.hf.weight_map import Share, load_slices
from megatron_hetero.layout.context import zigzag_tokens


class GatedDeltaNet(nn.Module):
    """Gated delta net (Yang et al. 2024, arXiv 2412.06464) under `tp`, `sp` and `cp`, as the layers of linear attention
    of Qwen3.5: convolution, gated delta rule, gated norm. It replaces Megatron's class of the same name in a spec,
    `ModuleSpec(GatedDeltaNet)`, or is called by a recipe.

    `tp` divides the value heads; key heads have copies where it does not divide them. `sp` and `cp` exchange tokens for
    heads, of which members may have different numbers. Gradients are parts as those of Megatron's layers, which
    `build_optimizers` and `finish_gradients` sum. Under the names of `transformers`, checkpoints of this package resume
    in any layout.

    Args:
        config: Megatron's `TransformerConfig`: its sizes `linear_*`, `hidden_size`, `layernorm_epsilon`,
            `init_method_std`, `params_dtype`, `sequence_parallel`, and `recompute_granularity` (`selective` computes
            what the delta rule takes again in the backward pass).
        submodules: nothing. Megatron passes those of a spec.
        layer_number: number of the layer in the whole model, which draws weights of its own for each.
        pg_collection: result of `Topology.collection`.
        seed: of the weights, which are the same in every layout.

    Raises:
        UserError: sizes do not fit each other or the layout, or the groups are not those of a topology.
    """

    def __init__(
        self,
        config: Any,
        submodules: None = None,
        layer_number: int = 1,
        *,
        pg_collection: Any,
        seed: int = 0,
        **_: Any,
    ):
        super().__init__()
        from megatron_hetero.models.layers.backend import TORCH
        from megatron_hetero.models.layers.delta_net import DeltaNet
        from megatron_hetero.models.layers.exchange import connect
        from megatron_hetero.models.layers.norms import Norm
        from megatron_hetero.models.layers.parts import Site
        from megatron_hetero.models.layers.recompute import NO_RECOMPUTE, Recompute

        self.config, self.layer_number, self.seed, self.groups = config, layer_number, seed, pg_collection
        self.part = DeltaNet(
            config.hidden_size,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
            Norm(config.linear_value_head_dim, config.layernorm_epsilon),
            stored="",
        )
        _require(self.part, pg_collection)
        device = _device()
        selective = config.recompute_granularity == "selective"
        site = Site(
            pg_collection,
            Platform(device, "nccl" if device.type == "cuda" else "gloo"),
            TORCH,
            config.params_dtype,
            config.sequence_parallel,
            Recompute("selective") if selective else NO_RECOMPUTE,
        )
        self.net: Any = self.part.build(site, layer_number - 1)
        if pg_collection.context.size() > 1:
            connect(pg_collection.context, device)
        self._maps = [self.part.slices("", Share(rank, site.tp)) for rank in range(site.tp)]
        self._mark()
        if config.perform_initialization:
            self.reset_parameters()

    def _mark(self) -> None:
        """Let parameters say what parts of stored tensors they are on each rank along tp."""
        for name, parameter in self.net.named_parameters():
            slices: Any = tuple(of_rank[name] for of_rank in self._maps)
            parameter.stored_as = f"net.{name}", slices
            if any(each != slices[0] for each in slices):  # As of Megatron's layers.
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = int(slices[0][0].columns is not None), 1

    def reset_parameters(self) -> None:
        """Draw weights as `transformers` does: normal with `config.init_method_std`; A uniform in 0.01 to 16, of which
        the logarithm is stored; ones for `dt_bias` and the norm.
        """
        self.load({name: self._drawn(name, shape) for name, shape in self.part.tensors().items()})

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        from megatron_hetero.models.added import generator_of

        generator, new = generator_of(self.seed, f"{self.layer_number}.{name}"), torch.empty(shape, device="cpu")
        if name == "A_log":
            return new.uniform_(0.01, 16, generator=generator).log_()
        return new.fill_(1) if len(shape) == 1 else new.normal_(std=self.config.init_method_std, generator=generator)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Copy this rank's part of whole tensors, which are named as in folders of `transformers`.

        Args:
            tensors: `in_proj_qkv.weight`, `in_proj_z.weight`, `in_proj_b.weight`, `in_proj_a.weight`, `conv1d.weight`,
                `A_log`, `dt_bias`, `norm.weight` and `out_proj.weight`, on any device. Others are ignored.
            prefix: what is before these names, such as `model.language_model.layers.0.linear_attn.`.

        Raises:
            UserError: a tensor is missing or has another shape.
        """
        for name, shape in self.part.tensors().items():
            given = tensors.get(prefix + name)
            if given is None or tuple(given.shape) != shape:
                found = "nothing" if given is None else f"shape {list(given.shape)}"
                fix = "give the tensors of one layer of that size, and the prefix of their names"
                raise UserError.at(f"tensor {prefix}{name}", found=found, expected=f"shape {list(shape)}", fix=fix)
        own = self._maps[self.groups.tp.rank()]
        for name, parameter in self.net.named_parameters():
            parts = [(tensors[prefix + each.name], each.source) for each in own[name]]
            load_slices(parameter, own[name], [(t.flatten(1) if t.dim() > 1 else t)[place] for t, place in parts])

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute states of this rank's tokens. All ranks of a replica call it, also those without tokens.

        Args:
            hidden_states: states [n, 1, hidden] of a pack of samples, of the tokens that `tokens_of` (in
                `megatron_hetero.data.token_shards`) gives this rank; or, without `lengths` and `packed_seq_params`,
                [n, samples, hidden] of whole samples of one length.
            attention_mask: ignored.
            lengths: tokens of each sample of the pack on all ranks of the replica, 0 included.
            packed_seq_params: result of `packed_samples`, or another `PackedSeqParams` of Megatron, whose `cu_seqlens`
                the host then waits for once.
            inference_context: nothing.

        Returns:
            States in the shape of the input, and None for a bias.

        Raises:
            UserError: the number of tokens is not the one of this rank.
        """
        if inference_context is not None:
            fix = "export the weights, and generate with an engine"
            raise UserError.at("GatedDeltaNet", problem="called to generate with states of its own", fix=fix)
        if lengths is None and packed_seq_params is not None:
            lengths = _lengths_of(packed_seq_params)
        if lengths is not None:
            return self._run(hidden_states, tuple(map(int, lengths))), None
        splits = [self.groups.sp, self.groups.context, *([self.groups.tp] if self.config.sequence_parallel else [])]
        whole = (len(hidden_states) * int(np.prod([group.size() for group in splits])),)
        # Activations are split by token, so that a batch is no pack: its samples would alternate in it.
        found = [self._run(sample, whole) for sample in hidden_states.split(1, dim=1)]
        return torch.cat(found, dim=1), None

    def _run(self, hidden: Tensor, lengths: tuple[int, ...]) -> Tensor:
        sp, context, tp = self.groups.sp, self.groups.context, self.groups.tp
        # Tensors of inference mode cannot be saved for a backward pass.
        mode = torch.is_inference_mode_enabled()
        params: Any = _params(lengths, sp.size(), context.size(), context.rank(), hidden.device, mode)
        tokens = own = params.sp_lengths[sp.rank()]
        rows = max(1, tokens)
        if self.config.sequence_parallel:
            rows = max(1, -(-tokens // tp.size()))
            own = min(max(0, tokens - tp.rank() * rows), rows)
        if hidden.shape[:2] != (own, 1):
            raise UserError.at(
                f"GatedDeltaNet of layer {self.layer_number}",
                found=f"states of shape {list(hidden.shape)}",
                expected=f"[{own}, 1, hidden]",
                because=f"samples of {', '.join(map(str, lengths))} tokens are split over cp, sp and tp",
                fix="give the tokens of `tokens_of`, and `lengths` of all samples of the replica",
            )
        padded = F.pad(hidden, (0, 0, 0, 0, 0, rows - own)) if rows > own else hidden
        out, _ = self.net(padded, hidden.new_empty(2, tokens, 0), params)
        return out[:own] if rows > own else out

    def sharded_state_dict(self, *_: Any, **__: Any) -> Any:
        """Raise `UserError`: Megatron's `dist_checkpointing` would have to know how rows of several tensors, and copies
        of key heads, are in one parameter.
        """
        fix = "save by `save_checkpoint` of megatron_hetero, with its `AdamW` or `SGD`"
        raise UserError.at("GatedDeltaNet", problem="Megatron's dist_checkpointing does not know its parts", fix=fix)


def packed_samples(lengths: Sequence[int]) -> Any:
    """Return Megatron's `PackedSeqParams` of samples of `lengths` tokens, one after the other on all ranks of a
    replica, with the attribute `lengths`: a `GatedDeltaNet` needs them on the host.
    """
    from megatron_hetero.groups.megatron import PackedSeqParams

    bounds = on_device(torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)), _device())
    longest = max(lengths, default=0)
    params: Any = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    params.lengths = tuple(map(int, lengths))
    return params


def _lengths_of(params: Any) -> tuple[int, ...]:
    """Return the lengths of samples, padding between them included: it follows the tokens of each."""
    if getattr(params, "lengths", None) is None:
        padded = getattr(params, "cu_seqlens_q_padded", None)
        params.lengths = tuple((params.cu_seqlens_q if padded is None else padded).diff().tolist())
    return params.lengths


@lru_cache(maxsize=16)
def _params(lengths: tuple[int, ...], sp: int, cp: int, member: int, device: torch.device, inference: bool) -> Any:  # noqa: ARG001 (of the cache)
    """Return what a delta net needs of a pack, once for all layers. `inference`: whether it is for inference mode."""
    from megatron_hetero.models.layers.attention import AttentionParams
    from megatron_hetero.models.layers.segments import PackedSegments

    of_members = tuple(map(len, zigzag_tokens(lengths, cp)))
    cuts = np.arange(sp + 1) * of_members[member] // sp
    return AttentionParams(PackedSegments.of(lengths, device), tuple(np.diff(cuts).tolist()), of_members, None, lengths)


def _require(part: Any, groups: Any) -> None:
    """Check that sizes fit each other and the layout. Raises `UserError`."""
    if not hasattr(groups, "context"):
        found, expected = type(groups).__name__, "the result of `Topology.collection`"
        because, fix = "tokens are exchanged over the groups of `sp` and `cp`", 'pass topology.collection("text")'
        raise UserError.at("GatedDeltaNet: pg_collection", found=found, expected=expected, because=because, fix=fix)
    if part.value_heads % part.key_heads:
        found, expected = f"{part.value_heads} value heads", f"a multiple of the {part.key_heads} key heads"
        fix = "set `linear_num_value_heads` and `linear_num_key_heads` to those of the model"
        raise UserError.at("GatedDeltaNet: config", found=found, expected=expected, fix=fix)
    for limit in part.limits:
        if problem := limit.problem({"tp": groups.tp.size()}):
            fix = "use another `tp`, or `sp` or `cp`"
            raise UserError.at(
                "GatedDeltaNet", found=problem.found, expected=problem.expected, because=problem.why, fix=fix
            )


def _device() -> torch.device:
    """Return the device that Megatron-Core builds on."""
    return torch.empty(0, device=torch.cuda.current_device()).device
