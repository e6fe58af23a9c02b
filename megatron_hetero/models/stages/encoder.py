"""An encoder and its mergers.

    patches of this rank -> embedding -> layers -> merger -> rows
                                          | after some layers
                                          +-> merger of the layer -> rows of another output

whole, or one pipeline stage of it: the embedding is on the first, the merger on the last, the others where their layers
are, and hidden states of patches pass between them.

Everything runs on the patches that this rank's shard holds. With sequence-parallel activations over `tp` the shard is
padded to whole units per rank and each rank embeds its own share; nothing that pads enters attention or leaves the
module.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.architecture import End
from megatron_hetero.models.common.inputs import EncoderInput
from megatron_hetero.models.common.offload.activations import ActivationOffload
from megatron_hetero.models.family import EncoderShape
from megatron_hetero.models.items.types import padded_patches
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.stages.stage import Between, ModuleStage
from megatron_hetero.names import HIDDEN


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
