"""A SigLIP tower of `transformers`, and a stage of a `GPTModel` of Megatron-Core that takes its rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# `python -m` has the current folder on its path, not this file's.
sys.path.append(str(Path(__file__).parent))

import torch
from demo_data import LENGTH, PATCH, SIDE, Sample
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel

import megatron_hetero as mh

HIDDEN, HEADS, LAYERS = 64, 4, 6


class Tower(nn.Module):
    """Pictures to rows, [ROWS * n, HIDDEN]."""

    def __init__(self) -> None:
        super().__init__()
        config = SiglipVisionConfig(
            hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS,
            image_size=SIDE, patch_size=PATCH, vision_use_head=False,
        )  # fmt: skip
        self.tower, self.projector = SiglipVisionModel(config), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, pictures: Tensor) -> Tensor:
        # A rank without a picture runs all layers too, which communicate under FSDP2. SigLIP takes no empty batch.
        shown = pictures if len(pictures) else pictures.new_zeros(1, 3, SIDE, SIDE)
        rows = self.projector(self.tower(shown).last_hidden_state)
        return rows[: len(pictures)].flatten(0, 1)


class TextStage(nn.Module):
    """This rank's stage of the text model, as `mh.Runner` calls it."""

    def __init__(self, topology: mh.Topology, words: int):
        super().__init__()
        layout, groups = topology.layouts["text"], topology.collection("text")
        self.stage, self.tp = layout.coordinate(topology.rank).pp, layout.tp
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0,
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp, pipeline_dtype=torch.float32,
            sequence_parallel=layout.tp > 1, calculate_per_token_loss=True,
        )  # fmt: skip
        self.model = GPTModel(
            config, get_gpt_layer_local_spec(), words, LENGTH, position_embedding_type="rope", pg_collection=groups,
            pre_process=self.stage == 0, post_process=self.stage == layout.pp - 1,
            share_embeddings_and_output_weights=False, scatter_embedding_sequence_parallel=False,
        )  # fmt: skip

    def units(self) -> list[nn.Module]:
        """The modules whose weights are gathered one by one, in the order in which they run."""
        return [*([self.model.embedding] if self.stage == 0 else []), *self.model.decoder.layers]

    def hidden_shape(self, batch: Sequence[Sample]) -> tuple[int, int, int]:
        return LENGTH // self.tp, len(batch), HIDDEN

    def forward(self, batch: Sequence[Sample], arrived: Tensor) -> Tensor:
        """Hidden states, or on the last stage the sum of losses. `arrived`: rows, or the previous stage's states."""
        tokens = torch.stack([sample.tokens for sample in batch])
        positions, embedded = torch.arange(LENGTH, device=tokens.device).expand_as(tokens), None
        if self.stage == 0:
            embedded = mh.place_rows(self.model.embedding(tokens, positions), arrived, tokens == 0, length_first=True)
            if self.tp > 1:
                embedded = scatter_to_sequence_parallel_region(embedded, group=self.model.pg_collection.tp)
        else:
            self.model.set_input_tensor(arrived)
        if not self.model.post_process:
            return self.model(tokens, positions, None, decoder_input=embedded)
        losses = self.model(tokens, positions, None, decoder_input=embedded, labels=tokens.roll(-1, 1))
        return (losses * torch.stack([sample.answers for sample in batch]).roll(-1, 1)).sum()
