"""Layers of experts of Megatron-Core in a view of their own, as docs/library.md builds them, against one process."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_hetero import (
    AdamW,
    Graph,
    Layout,
    MicroBatchInputs,
    Runner,
    Stage,
    build,
    build_optimizers,
    prepare_megatron,
    total_loss,
)
from megatron_hetero.layout.axes import EXPERTS
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks
from tests.unit.step import gpt, running

GUIDE = (Path(__file__).parents[3] / "docs/library.md").read_text(encoding="utf-8")
OPTIONS = {
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "gated_linear_unit": True,
    "add_bias_linear": False,
}
SIZES = {
    "num_layers": gpt.LAYERS,
    "hidden_size": gpt.HIDDEN,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "pipeline_dtype": torch.float32,
    **OPTIONS,
}
LAYOUTS = [
    "dp:4,ep:2",
    "dp:4,ep:4",
    "tp:2,dp:2,ep:2",
    "pp:2,dp:2,ep:2",
    "tp:2,dp:2,ep:4",
    "tp:4,ep:2",
    "tp:2,pp:2,ep:2",
]
BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
ALGORITHMS = ["plain", "megatron", "zero1", "adamw"]
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((text, each, {"moe_router_load_balancing_type": "none"}) for text in LAYOUTS for each in ALGORITHMS),
    ("dp:4,ep:2", "adamw", BALANCED),
    ("pp:2,dp:2,ep:2", "plain", BALANCED),
]


class TextStage(nn.Module):
    """Hidden states, or on the last stage the sum of the losses of a sample."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model: Any = model

    def forward(self, sample: gpt.Sample, hidden: Any = None) -> Any:
        part: Any = getattr(self.model, "module", self.model)
        if hidden is not None:
            part.set_input_tensor(hidden)
        found = gpt.losses_of(self.model, sample)
        return (found * sample.counts).sum() if part.post_process else found


@pytest.mark.parametrize("text, algorithm, balance", thinned(CASES, 5))
@on_ranks(4, timeout_s=40)
def test_norms_losses_and_updates_are_those_of_one_process(text: str, algorithm: str, balance: dict) -> None:
    # Here, since they warn of what they import, and in the tests' own process warnings are errors.
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    layout, rank = Layout.parse(text, 4, views=[EXPERTS]), torch.distributed.get_rank()
    batch, kinds = gpt.samples(8), {"plain": partial(torch.optim.SGD, lr=0.1), "adamw": AdamW(lr=1e-2)}
    settings: dict[str, Any] = {"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-2, "weight_decay": 0.0, "clip_grad": 0.0}
    names: dict[str, Any] = {
        **{each.__name__: each for each in (Graph, Layout, Runner, TransformerConfig, GPTModel)},
        **{each.__name__: each for each in (build, build_optimizers, get_gpt_layer_local_spec, prepare_megatron)},
        "EXPERTS": EXPERTS,
        "torch": torch,
        "experts": 4,
        "sizes": {**SIZES, **balance},
        "hidden": gpt.HIDDEN,
        "vocabulary": gpt.VOCABULARY,
        "length": gpt.LENGTH,
        "tokens": sum(sample.supervised for sample in batch),
        "micro_batches": [MicroBatchInputs({"text": own}) for own in batch[layout.replica_of(rank) :: layout.dp]],
        "algorithm": kinds.get(algorithm)
        or OptimizerConfig(**settings, use_distributed_optimizer=algorithm == "zero1"),
    }
    reference: Any = None

    def stage_of(model: Any) -> nn.Module:
        nonlocal reference
        own: dict[str, Any] = {**OPTIONS, **balance}
        reference = gpt.whole(rank, num_moe_experts=4, moe_token_dispatcher_type="allgather", **own)
        gpt.fill(model, reference)
        wrapped = running.wrapped(model, algorithm, names["topology"])
        return Stage(TextStage(wrapped), (gpt.LENGTH // layout.tp, 1, gpt.HIDDEN))

    names["stage_of"] = stage_of
    (example,) = re.findall(r"### Experts of Megatron\n.*?```python\n(.*?)```", GUIDE, re.DOTALL)
    assert example.count('"tp:2,dp:2,ep:4"') == 1
    exec(example.replace("tp:2,dp:2,ep:4", text), names)

    def expect(result: Any) -> None:
        """Compare the loss, and compute the gradients of one process."""
        # Megatron's balance loss enters as a gradient only, beside a sum of losses: so it is divided as late as theirs.
        expected = torch.stack([gpt.loss_of(reference, sample) for sample in batch]).sum()
        expected.backward()
        assert total_loss(names["topology"], "text", result).item() == pytest.approx(expected.item(), rel=1e-5)
        for parameter in reference.parameters():
            parameter.grad /= names["tokens"]

    expect(names["result"])
    found = nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item()
    assert names["norm"].item() == pytest.approx(found, rel=1e-5)
    of_one = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
    (kinds["plain"] if algorithm == "plain" else of_one)(reference.parameters()).step()
    names["optimizer"].zero_grad()
    reference.zero_grad()
    expect(Runner(names["topology"], names["stages"], optimizer=names["optimizer"])(names["micro_batches"]))
    for name, (own, theirs) in gpt.counterparts(names["model"], reference).items() if algorithm == "plain" else ():
        assert gpt.apart(own.detach(), gpt.shard(theirs.detach(), own, names["groups"])) < 1e-5, name
