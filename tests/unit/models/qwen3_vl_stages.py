"""Modules of Qwen3-VL on workers: all stages of a module in turn, on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_hetero.data.device import encoder_input
from megatron_hetero.data.encoder_shards import EncoderShards
from megatron_hetero.data.token_shards import TokenShards
from megatron_hetero.groups.platform import CPU
from megatron_hetero.layout.names import HIDDEN, ROWS
from megatron_hetero.layout.pipeline import PipelineStage, cut_stages
from megatron_hetero.models.items.pictures import ImageSize
from megatron_hetero.models.layers.attention import AttentionParams
from megatron_hetero.models.layers.segments import PackedSegments
from megatron_hetero.models.stages import TextInput
from tests.support.stages import Case, Trainee

Arrays = dict[str, np.ndarray]


class AllStagesHere(Trainee):
    """As `Trainee`, with the stages of `case.split` on each rank, whatever the layout's pp."""

    def _stages(self, name: str) -> tuple[PipelineStage, ...]:
        split = self.case.split or (self.shapes[name].layers,)
        return cut_stages(self.shapes[name].layers, len(split), split=split, module=name)


def vision(case: Case, sizes: tuple[ImageSize, ...]) -> dict[str, Any]:
    """Rows of each output by number, and on rank 0 the gradients of `weighted` rows."""
    trainee = AllStagesHere(case)
    shape: Any = trainee.shapes.encoders["vision"]
    [module], [layout] = trainee.modules, trainee.layouts.values()
    sharded = case.sequence_parallel and layout.tp > 1
    shards = EncoderShards(shape, layout, sharded, sizes, (tuple(range(len(sizes))),))
    own, share = shards.ownership().held_by(dist.get_rank()), shards.shards(dist.get_rank())[0]
    units = pixels_of(shape, sizes).view(-1, shape.unit, shape.patch_elements)[torch.from_numpy(own)].flatten(0, 1)
    batch = encoder_input(share, F.pad(units, (0, 0, 0, share.padding)))
    rows: dict[str, Tensor] = {}
    hidden = None
    for model, stage in ((chunk, chunk.stage) for chunk in module.chunks):
        out: Any = model(batch, hidden)
        assert isinstance(out, Tensor) == (not any(layer in stage.layers for layer in shape.deepstack))
        given = {ROWS if stage.is_last else HIDDEN: out} if isinstance(out, Tensor) else out
        hidden = given.pop(HIDDEN, None)
        assert stage.is_last or (hidden is not None and hidden.shape == model.hidden_shape(batch))
        rows |= given
    assert rows.keys() == shape.outputs.keys()
    loss = torch.stack([weighted(name, of_output, own) for name, of_output in rows.items()]).sum()
    loss.backward()
    trainee.reduce(loss.detach(), counts=dist.get_rank() == 0)
    numbered = {name: (own, of_output.detach().numpy().copy()) for name, of_output in rows.items()}
    return {"rows": numbered, "gradients": trainee.gradients()}


def pixels_of(shape: Any, sizes: tuple[ImageSize, ...]) -> Tensor:
    """Of all patches of images of these sizes, [patches, patch_elements]."""
    patches = sum(int(np.prod(size)) for size in sizes)
    return torch.randn(patches, shape.patch_elements, generator=torch.Generator().manual_seed(patches))


def weighted(output: str, rows: Tensor, numbers: np.ndarray) -> Tensor:
    """A sum of the elements of rows with these numbers, in which each counts differently."""
    across = torch.arange(rows.shape[1]) + float(sum(map(ord, output)) % 97)
    return (rows * torch.sin(across[None, :] * (1.0 + torch.from_numpy(numbers)[:, None]))).sum()


@dataclass(frozen=True)
class Pack:
    """Two samples, with rows in the first one: what all ranks know."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    places: np.ndarray
    rows: dict[str, Tensor]
    lengths: tuple[int, ...] = (14, 7)

    @classmethod
    def of(cls, vocab: int, hidden: int, outputs: tuple[str, ...]) -> Pack:
        """With rows of these outputs."""
        generator = torch.Generator().manual_seed(11)
        total, places = 21, np.array([2, 3, 4, 5, 9, 10], np.int64)
        labels = torch.randint(0, vocab, (total,), generator=generator)
        labels[torch.rand(total, generator=generator) < 0.4] = -100
        return cls(
            torch.randint(0, vocab, (total,), generator=generator),
            torch.randint(0, 40, (3, total), generator=generator),
            labels,
            places,
            {name: torch.randn(len(places), hidden, generator=generator) for name in outputs},
        )


def text(case: Case, outputs: tuple[str, ...]) -> dict[str, Any]:
    """The loss with rows of these outputs, on rank 0 the gradients, and those of the rows that each rank takes."""
    trainee = AllStagesHere(case)
    shape: Any = trainee.shapes.text
    [module], [layout] = trainee.modules, trainee.layouts.values()
    pack, rank = Pack.of(shape.vocab, shape.hidden, outputs), dist.get_rank()
    shards = TokenShards(layout, case.sequence_parallel and layout.tp > 1, (pack.lengths,), {"vision": (pack.places,)})
    share, ids = shards.shard(rank), shards.ownership("vision").held_by(rank)
    own = pack.labels[torch.from_numpy(share.positions)]
    supervised = torch.nonzero(own != -100)[:, 0]
    places = torch.from_numpy(share.rows_at["vision"])
    tokens = pack.tokens[torch.from_numpy(share.positions)]
    batch = TextInput(
        tokens=F.pad(tokens, (0, share.padded - len(tokens))),
        positions=pack.positions[:, torch.from_numpy(share.positions)],
        supervised=supervised,
        targets=own[supervised],
        rows_at=dict.fromkeys(outputs, places),
        attention=AttentionParams(
            PackedSegments.of_segments(share.segments, CPU, share.cp_lengths), share.sp_lengths, share.cp_lengths
        ),
    )
    rows = {name: pack.rows[name][torch.from_numpy(ids)].requires_grad_() for name in outputs}
    hidden = module.chunks[0].embed(batch)
    for model, stage in ((chunk, chunk.stage) for chunk in module.chunks):
        mine = {name: of_output for name, of_output in rows.items() if shape.entry_layer(name) in stage.layers}
        if mine.keys() == {ROWS}:
            hidden = model(batch, hidden, mine[ROWS])
        else:
            hidden = model(batch, hidden, mine) if mine else model(batch, hidden)
    hidden.backward()
    found = trainee.reduce(hidden.detach(), counts=layout.coordinate(rank).tp == 0)
    of_rows = {
        name: (ids, of_output.grad.numpy().copy()) for name, of_output in rows.items() if of_output.grad is not None
    }
    return {"loss": found["loss"], "rows": of_rows, "gradients": trainee.gradients()}
