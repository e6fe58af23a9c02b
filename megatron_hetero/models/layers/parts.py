"""What modules are made of: parts, as values.

A *part* says which tensors it stores, which slices of them the parameters of one rank are, how many operations it
takes, and how its torch module is built. Layers are made of an attention and an MLP part, modules of layers and ends,
which are parts too.

Operations: a multiplication with an addition counts as two. Only what the model asks for counts: matrix products, with
attention under its mask. Norms, activations, rotary embeddings, padding and recomputation do not, so that the
utilisation (MFU, arXiv 2204.02311, appendix B) means the same in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from megatron_hetero.groups.platform import Platform
from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, WeightMap
from megatron_hetero.models.layers.recompute import EVERYTHING_KEPT, Recompute

# Megatron-Core is imported where modules are built: estimates need the values alone.
if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_hetero.groups.topology import ModuleGroups


@dataclass(frozen=True)
class Passes:
    """Which gradients a part computes, in addition to its forward pass: of its input, of its weights.

    Both for a part that trains behind others that train; `inputs` only for a frozen part behind others that
    train; neither for a frozen part with nothing that trains before it. `share`: how much of the weights trains, where
    not all do.
    """

    inputs: bool = True
    weights: bool = True
    share: float = 1

    @property
    def linear(self) -> float:
        """The cost of products with weights, where a forward pass is 1."""
        return 1 + self.inputs + self.weights * self.share

    @property
    def attention(self) -> int:
        """The cost of products of activations, where a forward pass is 1: both operands need gradients or none."""
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
    """What a module computes on: tokens of each sequence, of each window of local attention, and how many of the tokens
    are supervised.
    """

    sequences: Sequence[int]
    windows: Sequence[int] = ()
    supervised: int = 0

    @property
    def total(self) -> int:
        """Tokens of all sequences."""
        return sum(self.sequences)


class Backend(Protocol):
    """Which classes build linear layers, norms and attention. They are called as Megatron-Core calls its own."""

    def column_parallel_linear(self) -> Any:
        """Linear layer that is split by column over tp."""
        ...

    def row_parallel_linear(self) -> Any:
        """Linear layer that is split by row over tp."""
        ...

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> Any:
        """Root-mean-square norm, or layer norm."""
        ...

    def core_attention(self) -> Any:
        """Attention without its projections."""
        ...


@dataclass(frozen=True, eq=False)
class Site:
    """Where and how a module is built: its groups of this rank, the device, the classes of its linear layers.

    `sequence_parallel`: whether activations between layers are split over tp, if tp > 1. `compile_layers`: what lies
    between matrix products and attention is compiled.
    """

    groups: ModuleGroups
    platform: Platform
    backend: Backend
    dtype: torch.dtype
    sequence_parallel: bool
    recompute: Recompute = EVERYTHING_KEPT
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
        """Configuration for Megatron's classes that ask for no width of it."""
        return self.config_of()

    def config_of(self, *, rms_norm: bool = True, **fields: Any) -> TransformerConfig:
        """Configuration for Megatron's classes, with these fields: weights will be loaded, and nothing is drawn."""
        from megatron.core.transformer.transformer_config import TransformerConfig

        bf16 = self.dtype == torch.bfloat16
        dtype = torch.bfloat16 if bf16 else torch.float32
        fields = {"num_attention_heads": self.tp, "hidden_size": self.tp} | fields
        return TransformerConfig(
            num_layers=1,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=bf16,
            normalization="RMSNorm" if rms_norm else "LayerNorm",
            tensor_model_parallel_size=self.tp,
            sequence_parallel=self.splits_activations,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            calculate_per_token_loss=True,
            use_cpu_initialization=not self.platform.is_cuda,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            **fields,
        )

    def column_linear(self, inputs: int, outputs: int, *, bias: bool, leaves_bias: bool = False, name: str = "") -> Any:
        """Linear layer that is split by column. `leaves_bias`: to its caller, which may add it with something else.
        `name`: of its exchanges, for Transformer Engine.
        """
        named = {"tp_comm_buffer_name": name} if name else {}
        return self.backend.column_parallel_linear()(
            inputs, outputs, config=self.config, init_method=None, gather_output=False, bias=bias,
            skip_bias_add=leaves_bias, is_expert=False, tp_group=self.groups.tp, **named,
        )  # fmt: skip

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, leaves_bias: bool = False, name: str = "") -> Any:
        """Linear layer that is split by row, see `column_linear`."""
        named = {"tp_comm_buffer_name": name} if name else {}
        return self.backend.row_parallel_linear()(
            inputs, outputs, config=self.config, init_method=None, input_is_parallel=True, bias=bias,
            skip_bias_add=leaves_bias, is_expert=False, tp_group=self.groups.tp, **named,
        )  # fmt: skip

    def mark(self, module: torch.nn.Module) -> torch.nn.Module:
        """Mark parameters that each tp rank uses on its own tokens where activations are split: their gradients are
        added over tp. Returns `module`.
        """
        for parameter in module.parameters():
            parameter.sequence_parallel = self.splits_activations  # pyright: ignore[reportAttributeAccessIssue]
        return module


@dataclass(frozen=True)
class Drawn:
    """A tensor that is in checkpoints, and in no folder.

    Attributes:
        draw: its first values, fp32, for a shape and a generator. The whole tensor is drawn, by its name and the seed
            of the run, and then cut: so they are the same in every layout.
        exported: whether an exported folder has it.
    """

    draw: Callable[[tuple[int, ...], torch.Generator], torch.Tensor]
    exported: bool = False


class Part(Protocol):
    """A part of a layer, or an end of a module. Names of tensors and parameters are relative to where the part is."""

    @property
    def views(self) -> tuple[str, ...]:
        """The views that its parameters belong to."""
        ...

    def tensors(self) -> TensorShapes:
        """The stored tensors with their shapes, in the order in which they are written."""
        ...

    def drawn(self) -> Mapping[str, Drawn]:
        """The tensors among them that no folder stores."""
        ...

    def weight_map(self, stored: str, share: Share, view: str = MAIN) -> WeightMap:
        """The parameters of `view` in the order of the torch module, and the slices that they are for one `share` of
        it. `stored`: what the names of tensors begin with.
        """
        ...

    def operations(self, tokens: Tokens) -> Operations:
        """Operations of the forward pass over all ranks."""
        ...

    def build(self, site: Site, number: int) -> torch.nn.Module:
        """The torch module, without values of weights. `number`: of the layer in the whole module."""
        ...


class MainPart:
    """A part whose parameters are all of the main view, and which computes no products unless it says so."""

    views = (MAIN,)

    def weight_map(self, stored: str, share: Share, view: str = MAIN) -> WeightMap:
        """See `Part.weight_map`."""
        return self.slices(stored, share) if view == MAIN else {}

    def slices(self, stored: str, share: Share) -> WeightMap:
        """The map of all parameters."""
        raise NotImplementedError

    def drawn(self) -> Mapping[str, Drawn]:
        """None."""
        return {}

    def operations(self, tokens: Tokens) -> Operations:
        """None."""
        return Operations()


class AttentionPart(Part, Protocol):
    """Exchanges information between tokens."""

    @property
    def heads(self) -> int:
        """Heads of queries, which tp and sp divide."""
        ...

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, which are repeated where tp and sp are more."""
        ...

    @property
    def windowed(self) -> bool:
        """Whether tokens see their window only, so that no axis that splits tokens exchanges anything."""
        ...


class MLPPart(Part, Protocol):
    """Works on each token by itself."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths that are split over tp, with padding."""
        ...

    @property
    def first_product(self) -> int:
        """Operations per token up to what is computed again where tokens pass in chunks."""
        ...


def named(name: str, weights: WeightMap) -> WeightMap:
    """`weights` of a part that is called `name`."""
    return {f"{name}.{own}": slices for own, slices in weights.items()}
