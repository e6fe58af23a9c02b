"""The parts of modules, described as values.

A part declares which tensors it stores, which slices of them are the parameters of one rank, and how many operations
it needs, and it builds its torch module. A layer consists of an attention part and an MLP part; a module consists of
layers and ends, which are parts too.

A multiplication with an addition counts as two operations. Only matrix products count, with attention under its mask.
Norms, activations, rotary embeddings, padding and recomputation do not, so that utilisation (MFU, arXiv 2204.02311,
appendix B) means the same in every layout.
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

# At run time these modules are imported only where torch modules are built, since that takes seconds.
if TYPE_CHECKING:
    from megatron_hetero.groups.megatron import ModuleGroups, TransformerConfig
    from megatron_hetero.models.layers.balance_loss import Balance
    from megatron_hetero.models.layers.dropout import TokenIds


@dataclass(frozen=True)
class Passes:
    """The gradients that a part computes in the backward pass.

    A frozen part computes the gradient of its input if an earlier part trains, otherwise none.
    """

    inputs: bool = True
    """Whether the part computes gradients of its inputs."""
    weights: bool = True
    """Whether the part computes gradients of its weights."""
    share: float = 1
    """Fraction of the weights that are trained."""

    @property
    def linear(self) -> float:
        """FLOPs of the products with weights in both passes, relative to the forward pass."""
        return 1 + self.inputs + self.weights * self.share

    @property
    def attention(self) -> int:
        """FLOPs of the products of activations in both passes, relative to the forward pass: either both factors need
        gradients or neither does.
        """
        return 3 if self.inputs or self.weights else 1


TRAINED, FORWARD = Passes(), Passes(inputs=False, weights=False)


class Operations(NamedTuple):
    """Floating-point operations of a forward pass: products with weights, and products of activations."""

    linear: int = 0
    attention: int = 0

    def of(self, passes: Passes) -> int:
        """Return the FLOPs of the forward pass and of the backward computations in `passes`."""
        return int(self.linear * passes.linear) + self.attention * passes.attention


class Tokens(NamedTuple):
    """Numbers of tokens that a module computes on."""

    sequences: Sequence[int]
    """Number of tokens of each sequence."""
    windows: Sequence[int] = ()
    """Number of tokens of each window, for window attention."""
    supervised: int = 0
    """Number of supervised tokens."""

    @property
    def total(self) -> int:
        """Number of tokens in all sequences."""
        return sum(self.sequences)


class Backend(NamedTuple):
    """Classes of layers with the constructor signatures of Megatron-Core's layers."""

    column_linear: Any
    row_linear: Any
    rms_norm: Any
    layer_norm: Any
    attention: Any


@dataclass(frozen=True, eq=False)
class Site:
    """Process groups, device and options with which this rank builds the torch modules of a module.

    Attributes:
        groups: process groups of the module.
        platform: device and backend.
        backend: classes of layers.
        dtype: dtype of parameters.
        sequence_parallel: whether activations between layers are split over tp if tp > 1.
        recompute: what the backward pass recomputes.
        compile_layers: whether operations between matrix products and attention are compiled.
        cudnn: whether attention may be computed by cuDNN.
    """

    groups: ModuleGroups
    platform: Platform
    backend: Backend
    dtype: torch.dtype
    sequence_parallel: bool
    recompute: Recompute = NO_RECOMPUTE
    compile_layers: bool = False
    cudnn: bool = True

    @property
    def tp(self) -> int:
        """Size of the tensor-parallel group."""
        return self.groups.tp.size()

    @property
    def splits_activations(self) -> bool:
        """Whether activations between layers are split over tp."""
        return self.sequence_parallel and self.tp > 1

    @cached_property
    def config(self) -> TransformerConfig:
        """Configuration for classes of Megatron that read no width from it."""
        return self.config_of()

    def config_of(self, *, rms_norm: bool = True, **fields: Any) -> TransformerConfig:
        """Return a configuration with `fields` for Megatron's classes, which then leave weights uninitialised."""
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
        """Build a column-parallel linear layer. `name`: name of its communication buffer in Transformer Engine."""
        options = {"bias": bias, "skip_bias_add": False, "gather_output": False}
        return self._linear(self.backend.column_linear, inputs, outputs, name, **options)

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, leaves_bias: bool = False, name: str = "") -> Any:
        """Build a row-parallel linear layer. `leaves_bias`: whether the caller adds the bias."""
        options = {"bias": bias, "skip_bias_add": leaves_bias, "input_is_parallel": True}
        return self._linear(self.backend.row_linear, inputs, outputs, name, **options)

    def _linear(self, kind: Any, inputs: int, outputs: int, name: str, **options: Any) -> Any:
        options |= {"config": self.config, "init_method": None, "is_expert": False, "tp_group": self.groups.tp}
        if name:
            options["tp_comm_buffer_name"] = name
        return kind(inputs, outputs, **options)

    def mark(self, module: torch.nn.Module, *, split: bool | None = None) -> torch.nn.Module:
        """Mark the parameters of `module` for a sum of gradients over tp, and return `module`.

        `split`: whether each tp rank uses the parameters on different tokens or heads; default: where activations are
        split.
        """
        for parameter in module.parameters():
            parameter.sequence_parallel = self.splits_activations if split is None else split  # pyright: ignore[reportAttributeAccessIssue]
        return module


@dataclass(frozen=True, eq=False)
class LayerCall:
    """Information about one call of a layer, for the MLP of the layer.

    Attributes:
        tokens: number of tokens of the shard without padding, over all tp ranks.
        balance: statistics for a loss that balances experts, if there is one.
        trains: whether a backward pass follows.
        ids: token ids of the shard, for dropout; None without dropout.
        memo: results of the first forward pass that a recomputation of the layer reuses, by name.
    """

    tokens: int
    balance: Balance | None = None
    trains: bool = True
    ids: TokenIds | None = None
    memo: dict[str, Any] = field(default_factory=dict[str, Any])


class Part:
    """Base class of parts of a layer and ends of a module. Names of tensors and parameters are relative to the part.

    Parts are frozen dataclasses that implement `tensors` and `build`, and either `slices` or, with parameters in
    several views, `views` and `weight_map`.
    """

    views: tuple[str, ...] = (MAIN,)
    """Views to which the parameters of the part belong."""

    def tensors(self) -> TensorShapes:
        """Return the stored tensors with their shapes, in writing order."""
        raise NotImplementedError

    def weight_map(self, stored: str, share: Share, view: str = MAIN) -> WeightMap:
        """Return the parameters of `view` in the order of the torch module, each as slices of stored tensors for one
        `share` of the view. `stored`: prefix of the names of tensors.
        """
        return self.slices(stored, share) if view == MAIN else {}

    def slices(self, stored: str, share: Share) -> WeightMap:
        """Return the `weight_map` of a part whose parameters all belong to the main view."""
        raise NotImplementedError

    def operations(self, tokens: Tokens) -> Operations:
        """Return the FLOPs of a forward pass, summed over all ranks."""
        return Operations()

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """Build the torch module with uninitialised weights. `number`: number of the layer in the whole module."""
        raise NotImplementedError


class AttentionPart(Part):
    """A part that exchanges information between tokens."""

    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key/value heads, which are copied if tp·sp is larger."""
    windowed: bool
    """Whether each token sees only the tokens of its window, so that nothing is exchanged over any axis."""
    exchanges_over_cp: ClassVar[bool] = False
    """Whether the part exchanges heads for tokens over `cp` too."""

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Limits on layouts: sizes that must be divisible by parallel degrees."""
        return (Limit(("tp", "sp"), self.heads),)


class MLPPart(Part):
    """A part that processes each token independently."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of matrices that are split over tp."""
        return ()

    @property
    def first_product(self) -> int:
        """FLOPs per token that are recomputed if tokens pass in chunks."""
        return 0


def kinds(bias: bool) -> tuple[str, ...]:
    """Return the kinds of tensors that a layer stores: `weight`, and `bias` if it has one."""
    return ("weight", "bias") if bias else ("weight",)


def named(name: str, weights: WeightMap) -> WeightMap:
    """Return `weights` with each parameter's name prefixed by `name`."""
    return {f"{name}.{parameter}": slices for parameter, slices in weights.items()}
