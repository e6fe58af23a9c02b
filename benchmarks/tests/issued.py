"""`python -m benchmarks.tests.issued QUEUES`: the order in which the program issues collectives and products, on a
timeline of a GPU with so many hardware queues. Prints when the stream that computes has ended, by what is run, as JSON.

Of four ranks, and without a device: gathers and sums of a part take 1, products of it 1.5. In a process of its own, as
the default group is of the backend `fake`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.roofline.costs import ask_of
from benchmarks.roofline.timeline import Timeline, works_noted
from megatron_hetero.models.layers.linear import _Linear
from megatron_hetero.step.buffers import Bucket, BufferedGradients, BufferedWeights

RANKS, PARTS, ROWS, WIDTH = 4, 4, 6, 8
"""Parts of a layer's tokens, or buckets; rows that a rank has of each, of so many elements."""
GATHERED, MULTIPLIED = (RANKS - 1) * ROWS * WIDTH * 4, 2 * RANKS * ROWS * WIDTH * WIDTH
"""Bytes that a rank sends, and operations, of a part."""


class Recorder(TorchDispatchMode):
    """Puts what is dispatched inside on a timeline."""

    def __init__(self, queues: int):
        super().__init__()
        self.timeline, self._seconds = Timeline(queues), 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("aten", "c10d"):
            ask = ask_of(func.overloadpacket, args, kwargs or {}, out)
            if ask.flops:
                self.timeline.compute(1.5 * ask.flops / MULTIPLIED)
            self._seconds = ask.wire / GATHERED
        return out

    def issued(self, communicator: str) -> int:
        """See `works_noted`."""
        return self.timeline.issue(self._seconds, communicator=communicator)


def ended(queues: int, work: Callable[[], object]) -> float:
    """When the stream that computes has done what `work` gives it."""
    with Recorder(queues) as recorder, works_noted(recorder.issued, recorder.timeline.wait):
        work()
    return recorder.timeline.now


def main(queues: int) -> None:
    """See above."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    found = {"weight gathers": _gathers(queues), "gradient sums": _sums(queues)}
    x, run = _column()
    outs = list[Tensor]()
    found["column forward"] = ended(queues, lambda: outs.append(run()))
    found["column backward"] = ended(queues, lambda: outs[0].backward(torch.ones_like(outs[0])))
    assert x.grad is not None
    print(json.dumps(found))


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _column() -> tuple[Tensor, Callable[[], Tensor]]:
    weight, x = nn.Parameter(torch.ones(WIDTH, WIDTH)), torch.ones(PARTS * ROWS, 1, WIDTH, requires_grad=True)
    return x, lambda: _Linear.apply(x, weight, None, "split", _world(), None)  # pyright: ignore[reportReturnType]


def _model() -> tuple[nn.Sequential, Tensor]:
    """Layers of which each takes as long as a part above."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PARTS))), torch.ones(RANKS * ROWS, WIDTH)


def _gathers(queues: int) -> float:
    """Weights are gathered in 1, bucket by bucket, beside the forward pass."""
    model, x = _model()
    flats = [torch.ones(RANKS * ROWS * WIDTH) for _ in model]
    both = list(zip(flats, model, strict=True))
    buckets = [Bucket(flat, flat, flat, flat[: ROWS * WIDTH], tuple(of.parameters())) for flat, of in both]
    parameters = dict(model.named_parameters())
    weights = BufferedWeights(
        parameters=parameters, group=_world(), owned={}, sharded=True, name="text", buckets=buckets
    )
    weights.hold_back([(layer, list(layer.parameters())) for layer in model])

    def step() -> None:
        weights.publish()
        model(x)

    return ended(queues, step)


def _sums(queues: int) -> float:
    """Gradients are summed in 5, bucket by bucket, within a backward pass of products of 1.5."""
    model, x = _model()
    parameters = list(model.parameters())[::-1]
    flats = [torch.ones(5 * RANKS * ROWS * WIDTH) for _ in parameters]
    buckets = [
        Bucket(flat, flat[: 5 * ROWS * WIDTH], None, None, (p,)) for flat, p in zip(flats, parameters, strict=True)
    ]
    accumulators = [(p, p.view_as(p).grad_fn.next_functions[0][0]) for p in parameters]  # pyright: ignore[reportOptionalMemberAccess]
    sums = BufferedGradients("text", dict(model.named_parameters()), buckets, _world(), accumulators)  # pyright: ignore[reportArgumentType]
    out = model(x).sum()
    sums.expect(parameters)
    return ended(queues, out.backward)


if __name__ == "__main__":
    main(int(sys.argv[1]))
