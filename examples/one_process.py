"""The same training in one process, on every rank, to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import megatron_hetero as mh


class Step(NamedTuple):
    """A mean loss, and how far it and the gradients are from those of one process, relatively."""

    loss: float
    loss_apart: float
    gradients_apart: float

    def __str__(self) -> str:
        apart = f"loss {self.loss_apart:.1e}, gradients {self.gradients_apart:.1e}"
        return f"loss {self.loss:.4f}; from one process: {apart}"


class OneProcess:
    """Whole models, of which the modules of a topology are parts with the same weights."""

    def __init__(
        self,
        topology: mh.Topology,
        modules: Mapping[str, nn.Module],
        whole: Mapping[str, nn.Module],
        *,
        layers: int,
        rate: float,
        clip: float,
    ):
        self.topology, self.modules, self.whole, self.layers, self.clip = topology, dict(modules), whole, layers, clip
        self.parameters = [parameter for module in whole.values() for parameter in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.0)
        for parameter in self.parameters:
            dist.broadcast(parameter.data, 0)  # Megatron draws other weights on ranks along tp.
        for own, value in self._counterparts({name: module.state_dict() for name, module in whole.items()}):
            own.data.copy_(value)

    def compare(self, loss: Tensor, expected: Tensor) -> Step:
        """Compute the gradients of `expected`, the loss in one process, and compare."""
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
            found = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
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
        first = groups.pp.rank() * self.layers // groups.pp.size()
        for name, own in self.modules["text"].named_parameters():
            names = name.split(".")
            if "layers" in names:
                at = names.index("layers") + 1
                names[at] = str(int(names[at]) + first)
            value = whole["text"][".".join(names)]
            if getattr(own, "tensor_model_parallel", False):
                value = value.chunk(groups.tp.size(), vars(own)["partition_dim"])[groups.tp.rank()]
            yield own, value
