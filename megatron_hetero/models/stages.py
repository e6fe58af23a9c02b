"""Torch modules of encoders and language models, whole or one pipeline stage of them, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron_hetero.groups.megatron import tensor_parallel
from megatron_hetero.layout.names import HIDDEN, ROWS
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.architecture import Architecture, End
from megatron_hetero.models.family import EncoderShape, TextShape
from megatron_hetero.models.items.types import padded_patches
from megatron_hetero.models.language import VocabularyShard, head_loss
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.balance_loss import Balance, BalancedSamples, rows_of
from megatron_hetero.models.layers.offload import ActivationOffload
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.schedule.contract import LOSS, METRICS, Gathered, StageOutput


@dataclass(frozen=True)
class EncoderInput:
    """Input of an encoder on one rank in one micro-batch.

    Attributes:
        patches: [patches of this rank, elements of a patch], padding included; None on pipeline stages after the first.
        positions: int64 [dims, n], coordinates of the shard's n real patches (row and column first).
        attention: attention parameters for the windows of the shard and the sequences of the replica.
        padding: number of padding patches at the end of this rank's patches.
    """

    patches: Tensor | None
    positions: Tensor
    attention: AttentionParams
    padding: int


@dataclass(frozen=True)
class TextInput:
    """Input of a language model on one rank in one micro-batch: S tokens of its replica's pack, padding included; equal
    over a tp group and on all pipeline stages.

    Attributes:
        tokens: int64 [S].
        positions: int64 [dims, n], of the n real tokens.
        supervised: int64 [t], indices of the real tokens that have a target.
        targets: int64 [t], the tokens that they must predict.
        rows_at: by encoder output, int64 [rows], indices of this rank's rows in its shard of hidden states.
        attention: attention parameters for the samples of the pack.
        hits: bool [t] or None, filled by the last stage: whether the most likely token is the target.
        balanced: samples of the pack for the balance loss of experts; None without that loss.
        samples: int64 [n] on the host, the number of each real token's sample in the stream.
    """

    tokens: Tensor
    positions: Tensor
    supervised: Tensor
    targets: Tensor
    rows_at: Mapping[str, Tensor]
    attention: AttentionParams
    hits: Tensor | None = None
    balanced: BalancedSamples | None = None
    samples: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int64))


Between = Callable[[Tensor], Tensor]
"""Function that maps the hidden states after a layer to the input of the next layer."""


class ModuleStage(torch.nn.Module):
    """Torch module of a pipeline `stage`, by default of the whole module. Each end is an attribute with its name,
    unless it shares the weight of another end of the stage. `offload`: offloading of layer activations, if any.
    """

    def __init__(
        self,
        architecture: Architecture,
        site: Site,
        stage: PipelineStage | None = None,
        offload: ActivationOffload | None = None,
    ):
        super().__init__()
        self.architecture = architecture
        self.stage = stage = stage or PipelineStage.whole(len(architecture.layers))
        self.offload, self.config, self.groups = offload, site.config, site.groups
        self.shards, self.itemsize = site.tp if site.splits_activations else 1, site.dtype.itemsize
        ends = [end for end in architecture.ends_of(stage) if not architecture.holds_copy(end, stage)]
        if architecture.entry in ends:
            self.add_module(architecture.entry.name, architecture.build(architecture.entry.name, site))
        whole = site.recompute.whole_layers(len(stage.layers))
        self.layers = torch.nn.ModuleList(
            architecture.build(number, site, whole=place < whole) for place, number in enumerate(stage.layers)
        )
        for end in ends:
            if end is not architecture.entry:
                self.add_module(end.name, architecture.build(end.name, site))

    def units(self) -> tuple[Gathered, ...]:
        """Return the submodules of this stage whose weights are gathered separately, in execution order."""
        return tuple(Gathered(layer) for layer in self.layers)

    def _run(
        self,
        hidden: Tensor,
        table_2nD: Tensor,
        params: AttentionParams,
        after: Mapping[int, Between],
        balance: Balance | None = None,
    ) -> Tensor:
        """Run the layers of this stage, and its final norm if any, on `hidden` [S, 1, hidden]. `after`: functions to
        call after layers, by the layer's number in the whole module.
        """
        norms = [module for name, module in self.named_children() if name == "final_layernorm"]
        saving: AbstractContextManager[None] = nullcontext()
        if self.offload is not None and torch.is_grad_enabled():
            saving = self.offload.saving(list(self.layers), norms, [table_2nD])
        with saving:
            for layer in self.layers:
                each: Any = layer
                hidden = each(hidden, table_2nD, params, balance)
                if each.number in after:
                    hidden = after[each.number](hidden)
            for norm in norms:
                hidden = norm(hidden)
            return hidden


class EncoderModel(ModuleStage):
    """An encoder and its mergers, or one pipeline `stage` of it.

        patches of this rank -> embedding -> layers -> merger -> rows
                                              | after some layers
                                              +-> merger of the layer -> rows of another output

    The embedding is on the first stage, the merger on the last, and each other merger on the stage of its layer. Hidden
    states of patches pass between stages. Each rank computes on its local patches. If activations are split over tp,
    the shard is padded to whole units per rank and each rank embeds its share. Padding neither enters attention nor
    leaves the module.
    """

    def __init__(
        self,
        shape: EncoderShape,
        site: Site,
        stage: PipelineStage | None = None,
        offload: ActivationOffload | None = None,
    ):
        architecture = shape.architecture
        super().__init__(architecture, site, stage, offload)
        self.shape = shape
        self._entry = architecture.entry.name
        ends = list(architecture.ends_of(self.stage))
        self._added = [end.name for end in ends if end.at == "first" and end is not architecture.entry]
        self.outputs = [end for end in ends if end.output]

    def forward(self, batch: EncoderInput, hidden: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Run this stage on a micro-batch.

        The last stage returns the rows of this rank's units [units, out_hidden] without padding, other stages the
        `hidden` of the next stage. A stage with further outputs returns them all by name, after `HIDDEN` or `ROWS`.

        `hidden`: the result of the previous stage, of shape `hidden_shape`; None on the first stage.
        """
        if self.stage.is_first:
            hidden = self.enter(batch)
        assert hidden is not None, "stages after the first need hidden states"
        others: dict[str, Tensor] = {}
        hidden = self.run_layers(batch, hidden, others)
        last = next((end for end in self.outputs if end.at == "last"), None)
        out = hidden if last is None else self._rows(batch, last, hidden)
        return {HIDDEN if last is None else last.output: out} | others if others else out

    def hidden_shape(self, batch: EncoderInput) -> tuple[int, int, int]:
        """Return the shape of hidden states between stages: [patches of this rank, 1, hidden], padding included."""
        patches = padded_patches(batch.positions.shape[1], self.shape.unit, self.shards)
        return patches // self.shards, 1, self.shape.hidden

    def enter(self, batch: EncoderInput) -> Tensor:
        """Embed this rank's patches on the first stage, and add the embeddings of their positions, if any. Returns a
        tensor of `hidden_shape`.
        """
        assert batch.patches is not None, "the first stage embeds patches"
        hidden = self.get_submodule(self._entry)(batch.patches).unsqueeze(1)
        for name in self._added:
            # If activations are split, each tp rank embeds a share of the shard.
            start = len(hidden) * self.groups.tp.rank() if self.shards > 1 else 0
            local = batch.positions[:, start : start + len(hidden)]
            positions = F.pad(local, (0, len(hidden) - local.shape[1]))
            hidden = hidden + self.get_submodule(name)(positions).to(hidden.dtype).unsqueeze(1)
        return hidden

    def run_layers(self, batch: EncoderInput, hidden: Tensor, others: dict[str, Tensor]) -> Tensor:
        """Run the layers of this stage, and add the rows of outputs after inner layers to `others`, by output name."""
        table = self.shape.rotary.table(batch.positions)
        after = {end.at: partial(self._merge, batch, end, others) for end in self.outputs if isinstance(end.at, int)}
        return self._run(hidden, table, batch.attention, after)

    def _merge(self, batch: EncoderInput, end: End, others: dict[str, Tensor], hidden: Tensor) -> Tensor:
        others[end.output] = self._rows(batch, end, hidden)
        return hidden

    def _rows(self, batch: EncoderInput, end: End, hidden: Tensor) -> Tensor:
        rows = self.get_submodule(end.name)(hidden, batch.attention.ids)
        return rows[: len(rows) - batch.padding // self.shape.unit]


class TextModel(ModuleStage):
    """A language model, or one pipeline `stage` of it.

        first stage    tokens -> embed -> enter (with rows) -> layers -> hidden
        others         hidden of the previous stage         -> layers -> hidden
        last stage                                             ... and final norm -> loss of supervised positions

    Rows that enter after a layer are added on the stage of that layer. If head and embedding share their weight but are
    on different stages, the last stage has a copy, `output_layer.weight`, which the training loop keeps equal.
    """

    embedding: Any
    output_layer: Any

    def __init__(
        self, shape: TextShape, site: Site, stage: PipelineStage | None = None, offload: ActivationOffload | None = None
    ):
        super().__init__(shape.architecture, site, stage, offload)
        self.shape = shape
        if shape.tied and (self.stage.is_first or self.stage.is_last):
            # Placeholder gradients of the shared weight must be zeros, see `gradient_of_weight`.
            self._head_weight.zero_out_wgrad = True

    def forward(
        self, batch: TextInput, hidden: Tensor, rows: Tensor | Mapping[str, Tensor] | None = None
    ) -> StageOutput:
        """Run this stage on a micro-batch.

        The last stage returns the sum of the losses of the shard's supervised tokens, fp32 [], equal on all tp ranks;
        other stages return the `hidden` of the next stage. If the loss balances experts, the last stage returns the
        total under `LOSS` and the balance loss under `METRICS` as `balance_loss`.

        Args:
            batch: this rank's tokens.
            hidden: the result of `embed` on the first stage, else of the previous stage, of shape `hidden_shape`.
            rows: rows that enter on this stage, in the order of `batch.rows_at`: rows of `ROWS` on the first stage, or
                of several outputs by name. Missing outputs add nothing.
        """
        by_output = {ROWS: rows} if isinstance(rows, Tensor) else dict(rows or {})
        if self.stage.is_first:
            assert ROWS in by_output, "the first stage needs rows, possibly an empty tensor"
            hidden = self.enter(batch, hidden, by_output.pop(ROWS))
        balance = None if batch.balanced is None else Balance(batch.balanced, self._experts)
        if balance is not None and not self.stage.is_first:
            hidden = balance.arrive(hidden)
        hidden = self.run_layers(batch, hidden, by_output, balance)
        if not self.stage.is_last:
            return hidden if balance is None else balance.leave(hidden)
        loss = self.loss(batch, hidden)
        if balance is None:
            return loss
        added = balance.loss(self.groups)
        return {LOSS: loss + added, METRICS: {"balance_loss": added}}

    def take_loads(self) -> dict[int, Tensor]:
        """Return the loads (`ExpertMLPModule.take_loads`) of each sparse layer of this stage, by layer number."""
        layers: list[Any] = list(self.layers)
        return {each.number: each.mlp.take_loads() for each in layers if hasattr(each.mlp, "take_loads")}

    @property
    def _experts(self) -> int:
        return self.shape.counts["experts"]

    def hidden_shape(self, batch: TextInput) -> tuple[int, int, int]:
        """Return the shape of hidden states between stages: [S, 1, hidden], or [S / tp, 1, hidden] where activations
        are split over tp, with further rows if the loss balances experts (see `Balance.leave`).
        """
        rows, width = len(batch.tokens) // self.shards, self.shape.hidden
        if batch.balanced is not None:
            rows += rows_of(len(batch.balanced.factors), self._experts, width, self.itemsize)
        return rows, 1, width

    def units(self) -> tuple[Gathered, ...]:
        """Return the submodules that are gathered separately: on the first stage the embedding, then the layers."""
        if not self.stage.is_first:
            return super().units()
        return (Gathered(self.embedding, read_again=self._shares_weight, in_backward=False), *super().units())

    @property
    def _shares_weight(self) -> bool:
        """Whether head and embedding of this stage share their weight."""
        return self.shape.tied and self.stage.is_first and self.stage.is_last

    @property
    def _head_weight(self) -> Any:
        tied = self.shape.tied and self.stage.is_first
        return self.embedding.word_embeddings.weight if tied else self.output_layer.weight

    def embed(self, batch: TextInput) -> Tensor:
        """Embed the tokens on the first stage, without rows. Returns a tensor of `hidden_shape`."""
        return self.embedding(batch.tokens)

    def enter(self, batch: TextInput, embedded: Tensor, rows: Tensor) -> Tensor:
        """Put `rows` [rows of this rank, hidden], in the order of `batch.rows_at[ROWS]`, into the result of `embed`."""
        return embedded.squeeze(1).index_copy(0, batch.rows_at[ROWS], rows).unsqueeze(1)

    def run_layers(
        self, batch: TextInput, hidden: Tensor, added: Mapping[str, Tensor], balance: Balance | None = None
    ) -> Tensor:
        """Run the layers of this stage, and the final norm on the last stage. `added`: rows [rows of this rank, hidden]
        to add after layers of this stage, by output. `balance`: collector of the statistics of sparse layers.
        """
        after = {self._entry(name): partial(_add, batch.rows_at[name], rows) for name, rows in added.items()}
        return self._run(hidden, self.shape.rotary.table(batch.positions), batch.attention, after, balance)

    def _entry(self, output: str) -> int:
        layer = self.shape.entry_layer(output)
        assert layer is not None and layer in self.stage.layers, (
            f"{output} enters after layer {layer}, which is not on this stage"
        )
        return layer

    def loss(self, batch: TextInput, hidden: Tensor) -> Tensor:
        """Return the sum of token losses for the output of the last stage's layers. Fills `batch.hits`."""
        tp = self.groups.tp
        if self.shards > 1:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=tp)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=tp)
        if self._shares_weight and isinstance(self.embedding, FSDPModule):
            self.embedding.unshard()
        weight = self._head_weight
        first = len(weight) * tp.rank()
        shard = VocabularyShard(first, max(0, min(len(weight), self.shape.vocab - first)), tp)
        return head_loss(hidden.squeeze(1)[batch.supervised], weight, batch.targets, shard, hits=batch.hits)


def _add(places: Tensor, rows: Tensor, hidden: Tensor) -> Tensor:
    return hidden.squeeze(1).index_add(0, places, rows).unsqueeze(1)
