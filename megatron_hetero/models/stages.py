"""What modules read in a micro-batch, on the device.

A pipeline stage of any module: the torch modules of its layers and ends, and how they run.

An encoder and its mergers.

    patches of this rank -> embedding -> layers -> merger -> rows
                                          | after some layers
                                          +-> merger of the layer -> rows of another output

whole, or one pipeline stage of it: the embedding is on the first, the merger on the last, the others where their layers
are, and hidden states of patches pass between them.

Everything runs on the patches that this rank's shard holds. With sequence-parallel activations over `tp` the shard is
padded to whole units per rank and each rank embeds its own share; nothing that pads enters attention or leaves the
module.

A language model: embedding, layers, final norm and head, with multimodal rotary embedding, rows placed into its
embedding or added to its hidden states, and a loss that looks at supervised positions only. Whole, or one pipeline
stage of it:

    first stage    tokens -> embed -> enter (with rows) -> layers -> hidden
    others         hidden of the stage before           -> layers -> hidden
    last stage                                             ... and final norm -> loss

Rows of outputs that enter after a layer are added there, on the stage that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import make_viewless_tensor
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_hetero.base.errors import HIDDEN, ROWS
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.architecture import Architecture, End
from megatron_hetero.models.family import EncoderShape, TextShape
from megatron_hetero.models.items.types import padded_patches
from megatron_hetero.models.language import VocabularyShard, head_loss
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.offload import ActivationOffload
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.schedule.contract import Gathered


@dataclass(frozen=True)
class EncoderInput:
    """What one rank encodes in one micro-batch.

    `patches`: [patches of this rank, elements of a patch], padding included; None on pipeline stages after the first.
    `positions`: int64 [dims, n], of the shard's n real patches (of pictures: row and column first).
    `attention`: windows of the shard, sequences of the replica. `padding`: how many of this rank's patches, the last
    ones, pad it.
    """

    patches: Tensor | None
    positions: Tensor
    attention: AttentionParams
    padding: int


@dataclass(frozen=True)
class TextInput:
    """What one rank's language model reads in one micro-batch: S tokens of its replica's pack, padding included. The
    ranks of a tp group read the same, and so do all pipeline stages.

    `tokens`: int64 [S]. `positions`: int64 [dims, n] for the n real tokens. `supervised`: int64 [t], which of the n
    tokens predict, and `targets`: int64 [t], what they must predict. `rows_at`: by the output of the encoders, int64
    [rows], where this rank's rows of it go in its shard of the hidden states. `attention`: the samples of the pack.
    `hits`: bool [t], which the last stage fills where it is given: whether the likeliest token is the target.
    """

    tokens: Tensor
    positions: Tensor
    supervised: Tensor
    targets: Tensor
    rows_at: Mapping[str, Tensor]
    attention: AttentionParams
    hits: Tensor | None = None


Between = Callable[[Tensor], Tensor]
"""From the hidden states after a layer to those that the next one takes."""
NOTHING: Mapping[int, Between] = {}


class ModuleStage(torch.nn.Module):
    """The layers and ends of `stage`, the whole module where it is None. Ends are attributes with their names; an end
    whose weight is that of another end of the stage is none.

    `offload`: where layers keep their activations, if not on the device.
    """

    def __init__(
        self,
        architecture: Architecture,
        site: Site,
        stage: Stage | None = None,
        offload: ActivationOffload | None = None,
    ):
        super().__init__()
        self.stage = stage = stage or Stage.whole(len(architecture.layers))
        self.offload, self.config, self.groups = offload, site.config, site.groups
        self.splits_activations = site.splits_activations
        held = [end for end in architecture.ends_of(stage) if not architecture.holds_copy(end, stage)]
        if architecture.entry in held:
            self.add_module(architecture.entry.name, architecture.entry.part.build(site, 0))
        remade = site.recompute.whole_layers(len(stage.layers))
        self.layers = torch.nn.ModuleList(
            architecture.layers[number].build(site, number, whole=place < remade)
            for place, number in enumerate(stage.layers)
        )
        for end in held:
            if end is not architecture.entry:
                self.add_module(end.name, end.part.build(site, 0))

    def units(self) -> tuple[Gathered, ...]:
        """The parts of this stage that are gathered by themselves, in the order in which they run."""
        return tuple(Gathered(layer) for layer in self.layers)

    def _run(
        self, hidden: Tensor, table_2nD: Tensor, plan: AttentionParams, after: Mapping[int, Between] = NOTHING
    ) -> Tensor:
        """`hidden` [S, 1, hidden] after the layers of this stage, and after its final norm where it has one.

        `after`: what is done after a layer, by its number in the whole module.
        """
        with self._saving(table_2nD):
            hidden = _viewless(hidden)
            for layer in self.layers:
                each: Any = layer
                hidden = _viewless(after.get(each.number, _unchanged)(each(hidden, table_2nD, plan)))
            norm = self._final_norm
            return hidden if norm is None else _viewless(norm(hidden))

    @property
    def _final_norm(self) -> Any:
        return getattr(self, "final_layernorm", None)

    def _saving(self, table_2nD: Tensor) -> AbstractContextManager[None]:
        if self.offload is None or not torch.is_grad_enabled():
            return nullcontext()
        norm = self._final_norm
        return self.offload.saving(list(self.layers), [] if norm is None else [norm], [table_2nD])


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden


def _viewless(hidden: Tensor) -> Tensor:
    return make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)


class EncoderModel(ModuleStage):
    """Patches to rows, each rank on its own share; or the part of `stage` in that, the whole where it is None."""

    def __init__(
        self, shape: EncoderShape, site: Site, stage: Stage | None = None, offload: ActivationOffload | None = None
    ):
        architecture = shape.architecture
        super().__init__(architecture, site, stage, offload)
        self.shape = shape
        self._entry = architecture.entry.name
        held = list(architecture.ends_of(self.stage))
        self._added = [end.name for end in held if end.at == "first" and end is not architecture.entry]
        self.outputs = [end for end in held if end.output]
        self._patch_shards = site.tp if site.splits_activations else 1

    def forward(self, batch: EncoderInput, hidden: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """What this stage makes of a micro-batch: on the last stage the rows of this rank's units, [units, out_hidden],
        without those that pad it; on the others what the next stage takes as `hidden`. Where the stage gives the rows
        of other outputs too, all of them by name: `HIDDEN` or `ROWS` first, then theirs.

        `hidden`: what the stage before returned, of shape `hidden_shape`; the first stage takes none.
        """
        if self.stage.is_first:
            hidden = self.enter(batch)
        assert hidden is not None, "stages after the first take hidden states"
        others: dict[str, Tensor] = {}
        hidden = self.run_layers(batch, hidden, others)
        last = next((end for end in self.outputs if end.at == "last"), None)
        out = hidden if last is None else self._rows(batch, last, hidden)
        return {HIDDEN if last is None else last.output: out} | others if others else out

    def hidden_shape(self, batch: EncoderInput) -> tuple[int, int, int]:
        """The shape of what one stage hands to the next on this rank: [patches of this rank, 1, hidden], padding
        included.
        """
        patches = padded_patches(batch.positions.shape[1], self.shape.unit, self._patch_shards)
        return patches // self._patch_shards, 1, self.shape.hidden

    def enter(self, batch: EncoderInput) -> Tensor:
        """The embedding of this rank's patches, of shape `hidden_shape`, on the first stage; with what other ends of
        that stage add for their positions.
        """
        assert batch.patches is not None, "the first stage embeds patches"
        hidden = self.get_submodule(self._entry)(batch.patches).unsqueeze(1)
        for name in self._added:
            positions = self._own_positions(batch, len(hidden))
            hidden = hidden + self.get_submodule(name)(positions).to(hidden.dtype).unsqueeze(1)
        return hidden

    def _own_positions(self, batch: EncoderInput, patches: int) -> Tensor:
        """Positions of the patches that this rank embeds, [dims, patches], zero for patches that pad. With
        sequence-parallel activations the ranks of tp embed the shard's patches in turn.
        """
        start = patches * self.groups.tp.rank() if self.splits_activations else 0
        own = batch.positions[:, start : start + patches]
        return F.pad(own, (0, patches - own.shape[1]))

    def run_layers(self, batch: EncoderInput, hidden: Tensor, others: dict[str, Tensor]) -> Tensor:
        """`hidden` after the layers of this stage, of the same shape. `others` is filled with the rows of the outputs
        that are computed after layers before the last.
        """
        table = self.shape.rotary.table(batch.positions)
        after = {end.at: self._into(others, end, batch) for end in self.outputs if isinstance(end.at, int)}
        return self._run(hidden, table, batch.attention, after)

    def _into(self, others: dict[str, Tensor], end: End, batch: EncoderInput) -> Between:
        def merge(hidden: Tensor) -> Tensor:
            others[end.output] = self._rows(batch, end, hidden)
            return hidden

        return merge

    def _rows(self, batch: EncoderInput, end: End, hidden: Tensor) -> Tensor:
        rows = self.get_submodule(end.name)(hidden)
        return rows[: len(rows) - batch.padding // self.shape.unit]


class TextModel(ModuleStage):
    """Tokens and rows to the sum of token losses; or the part of `stage` in that, the whole where it is None.

    Where head and embedding share their weight but not their stage, the last stage holds a copy of it as
    `output_layer.weight`, which the training loop has to keep equal.
    """

    embedding: Any
    output_layer: Any

    def __init__(
        self, shape: TextShape, site: Site, stage: Stage | None = None, offload: ActivationOffload | None = None
    ):
        super().__init__(shape.architecture, site, stage, offload)
        self.shape = shape
        if shape.tied and (self.stage.is_first or self.stage.is_last):
            # The gradient that autograd adds up is zero where the parameter's own sum has it already.
            self._head_weight.zero_out_wgrad = True

    def forward(self, batch: TextInput, hidden: Tensor, rows: Tensor | Mapping[str, Tensor] | None = None) -> Tensor:
        """What this stage makes of a micro-batch: on the last stage the sum of the losses of all supervised tokens of
        the shard, fp32 scalar, equal on all tp ranks; on the others what the next stage takes as `hidden`.

        `hidden`: on the first stage what `embed` gave, with `rows`, see `enter`; on the others what the stage before
        returned, of shape `hidden_shape`. `rows`: where those of several outputs enter on this stage, or of one on a
        later stage, by the name of the output, each in the order of `batch.rows_at`; an output that is not among them
        adds nothing.
        """
        by_output = {ROWS: rows} if isinstance(rows, Tensor) else dict(rows or {})
        if self.stage.is_first:
            assert ROWS in by_output, "the first stage takes rows, none of them at least"
            hidden = self.enter(batch, hidden, by_output.pop(ROWS))
        hidden = self.run_layers(batch, hidden, by_output)
        return self.loss(batch, hidden) if self.stage.is_last else hidden

    def hidden_shape(self, batch: TextInput) -> tuple[int, int, int]:
        """The shape of what one stage hands to the next on this rank: [S, 1, hidden], or [S / tp, 1, hidden] with
        sequence-parallel activations.
        """
        shards = self.groups.tp.size() if self.splits_activations else 1
        return len(batch.tokens) // shards, 1, self.shape.hidden

    def units(self) -> tuple[Gathered, ...]:
        """The parts of this stage that are gathered by themselves, in the order in which they run."""
        if not self.stage.is_first:
            return super().units()
        return (Gathered(self.embedding, read_again=self._shares_weight, in_backward=False), *super().units())

    @property
    def _shares_weight(self) -> bool:
        """Whether the head of this stage is its embedding."""
        return self.shape.tied and self.stage.is_first and self.stage.is_last

    @property
    def _head_weight(self) -> Any:
        """The weight that a tied model's embedding and head share, or the head's own."""
        tied = self.shape.tied and self.stage.is_first
        return self.embedding.word_embeddings.weight if tied else self.output_layer.weight

    def embed(self, batch: TextInput) -> Tensor:
        """The embedding of the tokens, of shape `hidden_shape`, on the first stage. Rows are not needed yet."""
        return self.embedding(batch.tokens)

    def enter(self, batch: TextInput, embedded: Tensor, rows: Tensor) -> Tensor:
        """What the layers of the first stage take: `embedded` with rows in their places.

        `embedded`: what `embed` gave. `rows`: [rows of this rank, hidden], in the order of `batch.rows_at[ROWS]`.
        """
        return embedded.squeeze(1).index_copy(0, batch.rows_at[ROWS], rows).unsqueeze(1)

    def run_layers(self, batch: TextInput, hidden: Tensor, added: Mapping[str, Tensor]) -> Tensor:
        """`hidden` after the layers of this stage, and after the final norm on the last one; of the same shape.

        `added`: rows that are added after a layer of this stage, by output, each [rows of this rank, hidden].
        """
        after = {self._entry(name): _adding(rows, batch.rows_at[name]) for name, rows in added.items()}
        return self._run(hidden, self.shape.rotary.table(batch.positions), batch.attention, after)

    def _entry(self, output: str) -> int:
        layer = self.shape.entry_layer(output)
        assert layer is not None and layer in self.stage.layers, (
            f"{output} enters after layer {layer}, which is not on this stage"
        )
        return layer

    def loss(self, batch: TextInput, hidden: Tensor) -> Tensor:
        """The sum of token losses (see `forward`), from what the layers of the last stage gave. Fills `batch.hits`."""
        tp = self.groups.tp
        if self.splits_activations:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=tp)
        if self._shares_weight and isinstance(self.embedding, FSDPModule):
            self.embedding.unshard()
        weight = self._head_weight
        first = len(weight) * tp.rank()
        shard = VocabularyShard(first, max(0, min(len(weight), self.shape.vocab - first)), tp)
        return head_loss(hidden.squeeze(1)[batch.supervised], weight, batch.targets, shard, hits=batch.hits)


def _adding(rows: Tensor, places: Tensor) -> Between:
    def add(hidden: Tensor) -> Tensor:
        return hidden.squeeze(1).index_add(0, places, rows).unsqueeze(1)

    return add
