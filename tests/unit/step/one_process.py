"""SigLIP and a `GPTModel` trained in one process, on every rank, to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_hetero import build
from megatron_hetero.groups.topology import Topology


class Step(NamedTuple):
    """A mean loss, and how far it and the gradients are from those of one process, relatively."""

    loss: float
    loss_apart: float
    gradients_apart: float


class OneProcess:
    """Whole models, of which the modules of a topology are parts with the same weights."""

    def __init__(self, recipe: Any, topology: Topology, modules: Mapping[str, nn.Module], words: int, rate: float):
        everywhere = f"dp:{dist.get_world_size()}"
        whole = recipe.build_models(build(recipe.graph_of(topology), vision=everywhere, text=everywhere), words)
        self.topology, self.modules, self.whole, self.clip = topology, dict(modules), whole, recipe.CLIP
        self.parameters = [parameter for module in whole.values() for parameter in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.0)
        for parameter in self.parameters:
            dist.broadcast(parameter.data, 0)  # Megatron draws other weights on ranks along tp.
        for own, value in self._counterparts({name: module.state_dict() for name, module in whole.items()}):
            own.data.copy_(value)

    def compare(self, batch: Sequence[Any], loss: Tensor) -> Step:
        """Compute the loss of a batch and its gradients, and compare."""
        rows = self.whole["vision"](torch.cat([sample.pictures for sample in batch]))
        expected = self.whole["text"](batch, rows) / torch.stack([sample.answers for sample in batch]).sum()
        expected.backward()
        return Step(loss.item(), abs(loss.item() / expected.item() - 1), self.gradients_apart())

    def update(self) -> None:
        """Clip and update the weights."""
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients_apart(self) -> float:
        """The largest difference of a gradient on any rank, relative to the largest element of its tensor."""
        apart = [torch.zeros((), device=self.topology.platform.device)]
        grads = {
            name: {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            for name, module in self.whole.items()
        }
        largest = torch.stack([grad.abs().max() for of_module in grads.values() for grad in of_module.values()]).max()
        for own, other in self._counterparts(grads):
            found: Any = own.main_grad if hasattr(own, "main_grad") else own.grad
            if found is None and isinstance(own, DTensor):
                continue  # In shards of the optimizer's own; the next loss says whether they were right.
            found = found.full_tensor() if isinstance(found, DTensor) else found
            # Gradients of biases of keys are rounding errors.
            apart.append((found - other).abs().max() / other.abs().max().clamp(min=1e-3 * largest))
        worst = torch.stack(apart).max()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.item()

    def _counterparts(self, whole: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[Any, Tensor]]:
        """Each parameter of a rank, with its stage and shard of what `whole` has by module and name."""
        if "vision" in self.modules:
            yield from ((own, whole["vision"][name]) for name, own in self.modules["vision"].named_parameters())
        if "text" not in self.modules:
            return
        groups = self.topology.collection("text")
        first = groups.pp.rank() * len(self.whole["text"].model.decoder.layers) // groups.pp.size()
        for name, own in self.modules["text"].named_parameters():
            names = name.split(".")
            if "layers" in names:
                at = names.index("layers") + 1
                names[at] = str(int(names[at]) + first)
            value = whole["text"][".".join(names)]
            if getattr(own, "tensor_model_parallel", False):
                value = value.chunk(groups.tp.size(), vars(own)["partition_dim"])[groups.tp.rank()]
            yield own, value
