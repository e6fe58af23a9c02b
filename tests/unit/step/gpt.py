"""A small `GPTModel` of Megatron, whole or in a layout, with the same weights, and rows in place of some tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_hetero.groups.local_group import LocalGroup
from megatron_hetero.groups.megatron import module_groups
from megatron_hetero.layout.layout import Layout

HIDDEN, VOCABULARY, LENGTH, LAYERS = 32, 64, 8, 2


def configuration(
    layout: Layout | None = None, *, sequence_parallel: bool = False, **options: Any
) -> TransformerConfig:
    degrees: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp if layout else 1,
        "pipeline_model_parallel_size": layout.pp if layout else 1,
        "pipeline_dtype": torch.float32,
        "sequence_parallel": sequence_parallel,
    }
    defaults = {"num_layers": LAYERS, "hidden_dropout": 0.0, "attention_dropout": 0.0, "calculate_per_token_loss": True}
    return TransformerConfig(hidden_size=HIDDEN, num_attention_heads=4, **degrees | defaults | options)


def model(
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    tied: bool = False,
    rows: bool = False,
    virtual: int | None = None,
) -> GPTModel:
    """This rank's part. `rows`: they enter the embedding before it is sharded over `tp`. `virtual`: its stage."""
    # Here, since it warns of what it imports, and in the tests' own process warnings are errors.
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    stage, stages = groups.pp.rank(), groups.pp.size() * (config.virtual_pipeline_model_parallel_size or 1)
    stage += (virtual or 0) * groups.pp.size()
    return GPTModel(
        config,
        get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
        ),
        VOCABULARY,
        LENGTH,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        scatter_embedding_sequence_parallel=not rows,
        pg_collection=groups,
        vp_stage=virtual,
    )


def whole(rank: int, *, tied: bool = False, seed: int = 0, **options: Any) -> GPTModel:
    """The model in this process alone, with weights that are the same on all ranks."""
    alone = LocalGroup((rank,), rank, "this rank")
    built = model(configuration(**options), module_groups(lambda *_: alone, None), tied=tied)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    return built


def name_in_whole(name: str, stage: int, layers_per_stage: int, tied: bool, first_expert: int = 0) -> str:
    """Of a parameter of a stage."""
    if tied and name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + stage * layers_per_stage)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        parts[at] = str(int(parts[at]) + first_expert)
    return ".".join(parts)


def is_of_expert(parameter: Any) -> bool:
    """Whether it is of an expert of some of the ranks that have a part of the dense layers."""
    return not getattr(parameter, "allreduce", True)


def shard(tensor: Tensor, parameter: Any, groups: ProcessGroupCollection) -> Tensor:
    """What this rank holds of a tensor of the whole model."""
    # Megatron marks parts of experts like those of dense layers, although each rank has experts whole.
    if not getattr(parameter, "tensor_model_parallel", False) or is_of_expert(parameter):
        return tensor
    return tensor.chunk(groups.tp.size(), parameter.partition_dim)[groups.tp.rank()]


def counterparts(part: GPTModel, reference: GPTModel, tied: bool = False) -> dict[str, tuple[Any, Any]]:
    """By name, this rank's parameters and those of the whole model."""
    groups, of_whole = part.pg_collection, dict(reference.named_parameters())
    stage = groups.pp.rank() + (part.vp_stage or 0) * groups.pp.size()
    first = groups.ep.rank() * (part.config.num_moe_experts or 0) // groups.ep.size()
    names = {
        name: name_in_whole(name, stage, len(part.decoder.layers), tied, first) for name, _ in part.named_parameters()
    }
    return {name: (p, of_whole[names[name]]) for name, p in part.named_parameters()}


def fill(part: GPTModel, reference: GPTModel, tied: bool = False) -> None:
    """Give this rank's part the weights of the whole."""
    with torch.no_grad():
        for own, theirs in counterparts(part, reference, tied).values():
            own.copy_(shard(theirs, own, part.pg_collection))


@dataclass(frozen=True)
class Sample:
    """Tokens, labels int64 [1, LENGTH]; which labels count, float [1, LENGTH]; `places` of rows."""

    tokens: Tensor
    labels: Tensor
    counts: Tensor
    places: tuple[int, ...] = ()

    @property
    def supervised(self) -> int:
        return int(self.counts.sum())


def samples(number: int, rows: int = 0) -> list[Sample]:
    """Each with another number of labels that count."""
    found = []
    for index in range(number):
        generator = torch.Generator().manual_seed(100 + index)
        tokens, labels = torch.randint(VOCABULARY, (2, 1, LENGTH), generator=generator)
        counts = (torch.arange(LENGTH) <= index % LENGTH).float()[None]
        found.append(Sample(tokens, labels, counts, tuple(range(1, 1 + (index + 1) % (rows + 1)))))
    return found


class WithRows(nn.Module):
    """Puts rows into the embedding in its forward pass, as FSDP2 wants, which gathers weights for that."""

    def __init__(self, module: GPTModel):
        super().__init__()
        self.module = module

    def forward(self, sample: Sample, rows: Tensor | None) -> Tensor:
        return losses_of(self.module, sample, rows)


def losses_of(part: Any, sample: Sample, rows: Tensor | None = None) -> Tensor:
    """Of each label, [1, LENGTH], or the output of another stage than the last. `rows`: [places, HIDDEN], which stand
    in for tokens.
    """
    if isinstance(part, WithRows):
        return part(sample, rows)
    model = part.module if hasattr(part, "module") else part
    positions, hidden = torch.arange(LENGTH)[None], None
    if model.pre_process and rows is not None:
        hidden = model.embedding(sample.tokens, positions)
        hidden = hidden.index_copy(0, torch.tensor(sample.places, dtype=torch.int64), rows[:, None])
        if model.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=model.pg_collection.tp)
    return part(sample.tokens, positions, None, decoder_input=hidden, labels=sample.labels)


def loss_of(part: Any, sample: Sample, rows: Tensor | None = None) -> Tensor:
    """The sum over the labels of a sample."""
    return (losses_of(part, sample, rows) * sample.counts).sum()


def gradients(reference: GPTModel, batch: Sequence[Sample], tokens: int) -> tuple[float, Mapping[str, Tensor]]:
    """Loss and gradients of one process."""
    reference.zero_grad()
    total = torch.stack([loss_of(reference, sample) for sample in batch]).sum() / tokens
    total.backward()
    return total.item(), {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-20))
