"""Parts of modules, as values.

A part says which tensors it stores, which slices of them are the parameters of one rank, how many operations it takes,
and builds its torch module. A layer consists of an attention and an MLP part, a module of layers and ends, which are
parts too.

Operations: a multiplication with an addition counts as two. Only what the model asks for counts: matrix products, with
attention under its mask. Norms, activations, rotary embeddings, padding and recomputation do not, so that the
utilisation (MFU, arXiv 2204.02311, appendix B) means the same in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from megatron_hetero.groups.platform import Platform
from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, WeightMap
from megatron_hetero.layout.axes import Limit
from megatron_hetero.models.layers.recompute import NO_RECOMPUTE, Recompute

# Imported where modules are built, as it takes seconds.
if TYPE_CHECKING:
    from megatron_hetero.groups.megatron import ModuleGroups, TransformerConfig
    from megatron_hetero.models.layers.balance_loss import Balance
    from megatron_hetero.models.layers.dropout import TokenIds


@dataclass(frozen=True)
class Passes:
    """Which gradients a part computes: of its `inputs`, of its `weights`, a `share` of which trains.

    A frozen part behind others that train computes those of inputs alone, a frozen part with nothing that trains before
    it none.
    """

    inputs: bool = True
    weights: bool = True
    share: float = 1

    @property
    def linear(self) -> float:
        """Cost of products with weights, relative to a forward pass."""
        return 1 + self.inputs + self.weights * self.share

    @property
    def attention(self) -> int:
        """Cost of products of activations, relative to a forward pass: both operands need gradients or none."""
        return 3 if self.inputs or self.weights else 1


TRAINED, FORWARD = Passes(), Passes(inputs=False, weights=False)


class Operations(NamedTuple):
    """Floating-point operations of a forward pass: products with weights, and products of activations."""

    linear: int = 0
    attention: int = 0

    def of(self, passes: Passes) -> int:
        """Operations with the gradients of `passes`."""
        return int(self.linear * passes.linear) + self.attention * passes.attention


class Tokens(NamedTuple):
    """Tokens that a module computes on: of each sequence, of each window of local attention, and how many of them are
    supervised.
    """

    sequences: Sequence[int]
    windows: Sequence[int] = ()
    supervised: int = 0

    @property
    def total(self) -> int:
        """Number of tokens of all sequences."""
        return sum(self.sequences)


class Backend(NamedTuple):
    """Classes of layers, which are called as Megatron-Core calls its own."""

    column_linear: Any
    row_linear: Any
    rms_norm: Any
    layer_norm: Any
    attention: Any


@dataclass(frozen=True, eq=False)
class Site:
    """Groups, device and classes of layers with which this rank builds a module.

    `sequence_parallel`: whether activations between layers are split over tp, if tp > 1. `compile_layers`: whether
    operations between matrix products and attention are compiled.
    """

    groups: ModuleGroups
    platform: Platform
    backend: Backend
    dtype: torch.dtype
    sequence_parallel: bool
    recompute: Recompute = NO_RECOMPUTE
    compile_layers: bool = False

    @property
    def tp(self) -> int:
        """Ranks of the tensor-parallel group."""
        return self.groups.tp.size()

    @property
    def splits_activations(self) -> bool:
        """Whether activations between layers are split over tp."""
        return self.sequence_parallel and self.tp > 1

    @cached_property
    def config(self) -> TransformerConfig:
        """Configuration for those of Megatron's classes that take no width from it."""
        return self.config_of()

    def config_of(self, *, rms_norm: bool = True, **fields: Any) -> TransformerConfig:
        """Return a configuration for Megatron's classes with these fields. Weights are not initialised."""
        from megatron_hetero.groups.megatron import TransformerConfig

        bf16 = self.dtype == torch.bfloat16
        dtype = torch.bfloat16 if bf16 else torch.float32
        fields = {"num_attention_heads": self.tp, "hidden_size": self.tp} | fields
        return TransformerConfig(
            num_layers=1,
            params_dtype=dtype,
            bf16=bf16,
            normalization="RMSNorm" if rms_norm else "LayerNorm",
            tensor_model_parallel_size=self.tp,
            sequence_parallel=self.splits_activations,
            attention_dropout=0.0,
            use_cpu_initialization=not self.platform.is_cuda,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
            **fields,
        )

    def column_linear(self, inputs: int, outputs: int, *, bias: bool, name: str = "") -> Any:
        """Build a linear layer that is split by column. `name`: of its exchanges, for Transformer Engine."""
        own = {"bias": bias, "skip_bias_add": False, "gather_output": False}
        return self._linear(self.backend.column_linear, inputs, outputs, name, **own)

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, leaves_bias: bool = False, name: str = "") -> Any:
        """Build a linear layer that is split by row. `leaves_bias`: its caller adds the bias."""
        own = {"bias": bias, "skip_bias_add": leaves_bias, "input_is_parallel": True}
        return self._linear(self.backend.row_linear, inputs, outputs, name, **own)

    def _linear(self, kind: Any, inputs: int, outputs: int, name: str, **own: Any) -> Any:
        named = {"tp_comm_buffer_name": name} if name else {}
        shared = {"config": self.config, "init_method": None, "is_expert": False, "tp_group": self.groups.tp}
        return kind(inputs, outputs, **shared, **own, **named)

    def mark(self, module: torch.nn.Module, *, split: bool | None = None) -> torch.nn.Module:
        """Mark the parameters of `module`, and return it: if `split`, by default where activations are, each tp rank
        uses them on its own tokens or heads, and gradients are summed over tp.
        """
        for parameter in module.parameters():
            parameter.sequence_parallel = self.splits_activations if split is None else split  # pyright: ignore[reportAttributeAccessIssue]
        return module


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer, for its MLP.

    Attributes:
        tokens: tokens of the shard without padding, which its tp ranks have parts or copies of.
        balance: statistics for a loss that balances experts, if there is one.
        trains: whether a backward pass follows.
        ids: of the shard, for dropout; None without any.
        memo: what a recomputation of the layer takes from its first forward pass, by name.
    """

    tokens: int
    balance: Balance | None = None
    trains: bool = True
    ids: TokenIds | None = None
    memo: dict[str, Any] = field(default_factory=dict[str, Any])


class Part:
    """A part of a layer, or an end of a module. Names of tensors and parameters are relative to where the part is.

    Parts are frozen dataclasses that implement `tensors` and `build`, and either `slices` or, with parameters of
    further views, `views` and `weight_map`.
    """

    views: tuple[str, ...] = (MAIN,)
    """Views that its parameters belong to."""

    def tensors(self) -> TensorShapes:
        """Return the stored tensors with their shapes, in the order in which they are written."""
        raise NotImplementedError

    def weight_map(self, stored: str, share: Share, view: str = MAIN) -> WeightMap:
        """Return the parameters of `view` in the order of the torch module, and the slices of stored tensors that they
        are for one `share` of it. `stored`: prefix of the names of tensors.
        """
        return self.slices(stored, share) if view == MAIN else {}

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return the `weight_map` of a part whose parameters are all of the main view."""
        raise NotImplementedError

    def operations(self, tokens: Tokens) -> Operations:
        """Return the operations of the forward pass over all ranks."""
        return Operations()

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the torch module, without values of weights. `number`: of the layer in the whole module."""
        raise NotImplementedError


class AttentionPart(Part):
    """Exchanges information between tokens. `heads`: of queries. `kv_heads`: of keys and values, repeated if tp·sp is
    larger. `windowed`: whether tokens see only their window, so that no axis exchanges anything.
    """

    heads: int
    kv_heads: int
    windowed: bool
    exchanges_over_cp: ClassVar[bool] = False
    """Whether it exchanges tokens for heads along `cp` too."""

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What degrees of layouts have to divide."""
        return (Limit(("tp", "sp"), self.heads),)


class MLPPart(Part):
    """Works on each token by itself."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that are split over tp, with padding."""
        return ()

    @property
    def first_product(self) -> int:
        """Operations per token up to what is recomputed where tokens pass in chunks."""
        return 0


def kinds(bias: bool) -> tuple[str, ...]:
    """Return the kinds of tensors of a layer with or without a bias."""
    return ("weight", "bias") if bias else ("weight",)


def named(name: str, weights: WeightMap) -> WeightMap:
    """Return `weights` with `name` before each parameter."""
    return {f"{name}.{own}": slices for own, slices in weights.items()}
