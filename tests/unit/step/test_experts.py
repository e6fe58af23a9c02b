"""Layers of experts of Megatron-Core in a view of their own, as docs/library.md builds them, against one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_hetero import Graph, Layout, MicroBatchInputs, Runner, Stage, build, prepare_megatron, total_loss
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
CASES: list[tuple[str, dict[str, Any]]] = [
    *((text, {"moe_router_load_balancing_type": "none"}) for text in LAYOUTS),
    ("dp:4,ep:2", BALANCED),
    ("pp:2,dp:2,ep:2", BALANCED),
]


class TextStage(nn.Module):
    """Hidden states, or on the last stage the sum of the losses of a sample."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model: Any = model

    def forward(self, sample: gpt.Sample, hidden: Any = None) -> Any:
        if hidden is not None:
            self.model.module.set_input_tensor(hidden)
        found = gpt.losses_of(self.model, sample)
        return (found * sample.counts).sum() if self.model.module.post_process else found


@pytest.mark.parametrize("text, balance", thinned(CASES, 4))
@on_ranks(4, timeout_s=40)
def test_gradients_losses_and_norms_are_those_of_one_process(text: str, balance: dict) -> None:
    # Here, since they warn of what they import, and in the tests' own process warnings are errors.
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    layout, rank = Layout.parse(text, 4, views=[EXPERTS]), torch.distributed.get_rank()
    batch = gpt.samples(8)
    names: dict[str, Any] = {
        **{each.__name__: each for each in (Graph, Layout, Runner, TransformerConfig, GPTModel, finalize_model_grads)},
        **{each.__name__: each for each in (DistributedDataParallel, DistributedDataParallelConfig)},
        **{each.__name__: each for each in (build, get_gpt_layer_local_spec, prepare_megatron)},
        "EXPERTS": EXPERTS,
        "torch": torch,
        "experts": 4,
        "sizes": {**SIZES, **balance},
        "hidden": gpt.HIDDEN,
        "vocabulary": gpt.VOCABULARY,
        "length": gpt.LENGTH,
        "tokens": sum(sample.supervised for sample in batch),
        "micro_batches": [MicroBatchInputs({"text": own}) for own in batch[layout.replica_of(rank) :: layout.dp]],
    }
    reference: Any = None

    def stage_of(ddp: Any) -> nn.Module:
        nonlocal reference
        own: dict[str, Any] = {**OPTIONS, **balance}
        reference = gpt.whole(rank, num_moe_experts=4, moe_token_dispatcher_type="allgather", **own)
        gpt.fill(ddp.module, reference)
        return Stage(TextStage(ddp), (gpt.LENGTH // layout.tp, 1, gpt.HIDDEN))

    (example,) = re.findall(r"### Experts of Megatron\n.*?```python\n(.*?)```", GUIDE, re.DOTALL)
    assert example.count('"tp:2,dp:2,ep:4"') == 1
    names["stage_of"] = stage_of
    exec(example.replace("tp:2,dp:2,ep:4", text), names)

    # Megatron's balance loss enters as a gradient only, beside a sum of losses: so it is divided as late as theirs.
    expected_loss = torch.stack([gpt.loss_of(reference, sample) for sample in batch]).sum()
    expected_loss.backward()
    expected = {name: p.grad / names["tokens"] for name, p in reference.named_parameters()}
    assert expected["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"].any()
    running.require_gradients(names["topology"], names["ddp"], reference, expected)
    loss = total_loss(names["topology"], "text", names["result"])
    assert abs(loss.item() - expected_loss.item()) < 1e-6 * expected_loss.item()
    optimizer: Any = get_megatron_optimizer(
        OptimizerConfig(lr=1.0, min_lr=1.0, clip_grad=0.0),
        [names["ddp"]],
        use_gloo_process_groups=False,
        pg_collection=names["groups"],
    )
    _, norm, _ = optimizer.step()
    assert norm == pytest.approx(nn.utils.get_total_norm(list(expected.values())).item(), rel=1e-6)
