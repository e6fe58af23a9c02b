"""Layers of this package for custom recipes, which call them or use them in a layer spec of Megatron-Core.

In shapes, n is the number of tokens of this rank. Megatron-Core is imported only when a layer is built, since the
import takes seconds.
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
    """Gated delta net (Yang et al. 2024, arXiv 2412.06464) under `tp`, `sp` and `cp`, like the linear attention layers
    of Qwen3.5: convolution, gated delta rule, gated norm. It replaces Megatron's class of the same name in a spec,
    `ModuleSpec(GatedDeltaNet)`, or is called by a recipe.

    `tp` has to divide the value heads; key heads are copied if it does not divide them. `sp` and `cp` exchange heads
    for tokens, and ranks may have different numbers of heads. As in Megatron's layers, gradients are partial sums,
    which `build_optimizers` and `finish_gradients` reduce. Weights have the names of `transformers` in checkpoints of
    this package, which resume in any layout.

    Args:
        config: Megatron's `TransformerConfig`. It provides the sizes `linear_*`, `hidden_size`, `layernorm_epsilon`,
            `init_method_std`, `params_dtype`, `sequence_parallel`, and `recompute_granularity` (with `selective` the
            backward pass recomputes the inputs of the delta rule).
        submodules: must be None; Megatron passes the submodules of a spec.
        layer_number: number of the layer in the whole model; each layer draws different weights.
        pg_collection: result of `Topology.collection`.
        seed: seed of the weights, which are equal in every layout.

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
        """Record on each parameter its slices of stored tensors on every tp rank."""
        for name, parameter in self.net.named_parameters():
            slices: Any = tuple(weights[name] for weights in self._maps)
            parameter.stored_as = f"net.{name}", slices
            if any(each != slices[0] for each in slices):  # Set the attributes of Megatron's layers.
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = int(slices[0][0].columns is not None), 1

    def reset_parameters(self) -> None:
        """Initialise the weights like `transformers`: matrices are normal with `config.init_method_std`, `A_log` is the
        logarithm of a uniform value from 0.01 to 16, and `dt_bias` and the norm are ones.
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
        """Copy this rank's slices of whole tensors, named as in `transformers`, into the parameters.

        Args:
            tensors: `in_proj_qkv.weight`, `in_proj_z.weight`, `in_proj_b.weight`, `in_proj_a.weight`, `conv1d.weight`,
                `A_log`, `dt_bias`, `norm.weight` and `out_proj.weight`, on any device. Other tensors are ignored.
            prefix: prefix of these names, such as `model.language_model.layers.0.linear_attn.`.

        Raises:
            UserError: a tensor is missing or has another shape.
        """
        for name, shape in self.part.tensors().items():
            given = tensors.get(prefix + name)
            if given is None or tuple(given.shape) != shape:
                found = "nothing" if given is None else f"shape {list(given.shape)}"
                fix = "give the tensors of one layer of that size, and the prefix of their names"
                raise UserError.at(f"tensor {prefix}{name}", found=found, expected=f"shape {list(shape)}", fix=fix)
        weights = self._maps[self.groups.tp.rank()]
        for name, parameter in self.net.named_parameters():
            values = list[Tensor]()
            for each in weights[name]:
                tensor = tensors[prefix + each.name]
                values.append((tensor.flatten(1) if tensor.dim() > 1 else tensor)[each.source])
            load_slices(parameter, weights[name], values)

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
        """Apply the layer to this rank's tokens. All ranks of a replica must call it, even without tokens.

        Args:
            hidden_states: [n, 1, hidden], a pack of samples with the tokens that `tokens_of` (in
                `megatron_hetero.data.token_shards`) assigns to this rank; or, without `lengths` and
                `packed_seq_params`, [n, samples, hidden] with samples of equal length.
            attention_mask: ignored.
            lengths: tokens of each sample of the pack over all ranks of the replica, possibly 0.
            packed_seq_params: result of `packed_samples`, or another `PackedSeqParams` of Megatron, for whose
                `cu_seqlens` the host then waits once.
            inference_context: must be None.

        Returns:
            Hidden states in the shape of the input, and None for a bias.

        Raises:
            UserError: the number of tokens differs from this rank's share.
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
        # Activations are split by token, so a flattened batch would interleave its samples.
        outs = [self._run(sample, whole) for sample in hidden_states.split(1, dim=1)]
        return torch.cat(outs, dim=1), None

    def _run(self, hidden: Tensor, lengths: tuple[int, ...]) -> Tensor:
        sp, context, tp = self.groups.sp, self.groups.context, self.groups.tp
        # Cached parameters depend on the mode: inference tensors cannot be saved for a backward pass.
        mode = torch.is_inference_mode_enabled()
        params: Any = _params(lengths, sp.size(), context.size(), context.rank(), hidden.device, mode)
        tokens = local = params.sp_lengths[sp.rank()]
        rows = max(1, tokens)
        if self.config.sequence_parallel:
            rows = max(1, -(-tokens // tp.size()))
            local = min(max(0, tokens - tp.rank() * rows), rows)
        if hidden.shape[:2] != (local, 1):
            raise UserError.at(
                f"GatedDeltaNet of layer {self.layer_number}",
                found=f"states of shape {list(hidden.shape)}",
                expected=f"[{local}, 1, hidden]",
                because=f"samples of {', '.join(map(str, lengths))} tokens are split over cp, sp and tp",
                fix="give the tokens of `tokens_of`, and `lengths` of all samples of the replica",
            )
        padded = F.pad(hidden, (0, 0, 0, 0, 0, rows - local)) if rows > local else hidden
        out, _ = self.net(padded, hidden.new_empty(2, tokens, 0), params)
        return out[:local] if rows > local else out

    def sharded_state_dict(self, *_: Any, **__: Any) -> Any:
        """Raise `UserError`: Megatron's `dist_checkpointing` cannot describe a parameter with rows of several tensors
        and copies of key heads.
        """
        fix = "save by `save_checkpoint` of megatron_hetero, with its `AdamW` or `SGD`"
        raise UserError.at(
            "GatedDeltaNet", problem="Megatron's dist_checkpointing cannot describe its parameters", fix=fix
        )


def packed_samples(lengths: Sequence[int]) -> Any:
    """Return Megatron's `PackedSeqParams` for consecutive samples of `lengths` tokens over all ranks of a replica, with
    the attribute `lengths`, which `GatedDeltaNet` needs on the host.
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
    """Return the lengths of samples, each including the padding after it."""
    if getattr(params, "lengths", None) is None:
        padded = getattr(params, "cu_seqlens_q_padded", None)
        params.lengths = tuple((params.cu_seqlens_q if padded is None else padded).diff().tolist())
    return params.lengths


@lru_cache(maxsize=16)
def _params(lengths: tuple[int, ...], sp: int, cp: int, member: int, device: torch.device, inference: bool) -> Any:  # noqa: ARG001 (of the cache)
    """Return the cached attention parameters of a pack. `inference`: whether inference mode is enabled."""
    from megatron_hetero.models.layers.attention import AttentionParams
    from megatron_hetero.models.layers.segments import PackedSegments

    cp_lengths = tuple(map(len, zigzag_tokens(lengths, cp)))
    cuts = np.arange(sp + 1) * cp_lengths[member] // sp
    return AttentionParams(PackedSegments.of(lengths, device), tuple(np.diff(cuts).tolist()), cp_lengths, None, lengths)


def _require(part: Any, groups: Any) -> None:
    """Check the groups, and that the layer's sizes match each other and the layout. Raises `UserError`."""
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
    """Return the device on which Megatron-Core builds layers."""
    return torch.empty(0, device=torch.cuda.current_device()).device
