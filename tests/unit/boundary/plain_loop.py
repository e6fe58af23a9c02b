"""The loop of docs/library.md with modules of plain PyTorch, in a placement and in one process.

Samples have zero to two rows; the second micro-batch of a step has so few that some ranks have none. The text replica
that reads a sample is another than the vision replica that makes its rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megatron_hetero.boundary.boundary import Boundary, micro_batch
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.layout import Layout
from tests.support.pool import platform

SIDE, WIDTH, LABELS, VOCABULARY = 6, 8, 5, 11
PLACEMENTS = {
    "colocated": {"vision": "dp:4", "text": "dp:4"},
    "disjoint": {"vision": "dp:2@0-1", "text": "dp:2@2-3"},
    "mixed": {"vision": "dp:3@0-2", "text": "dp:3@1-3"},
}
STEPS = [[range(7), range(7, 9)], [range(9, 14), range(14, 17)], [range(17, 24), range(24, 26)]]
"""The samples of each micro-batch of each step."""


class Block(nn.Module):
    """An MLP with dropout, checkpointed or not."""

    def __init__(self, dropout: float):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Vision(nn.Module):
    """Pictures, [rows, SIDE], to rows, [rows, WIDTH]."""

    def __init__(self, dropout: float):
        super().__init__()
        self.embed, self.block, self.out = nn.Linear(SIDE, WIDTH), Block(dropout), nn.Linear(WIDTH, WIDTH)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.out(self.block(self.embed(pictures)))


class Text(nn.Module):
    """Tokens, [n], with rows at some `places`, to the loss of each token, [n]."""

    def __init__(self, dropout: float):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(VOCABULARY, WIDTH), Block(dropout), nn.Linear(WIDTH, LABELS)

    def forward(self, tokens: Tensor, places: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        embedded = self.embed(tokens)
        embedded = embedded.index_put((places,), rows.to(embedded.dtype))
        return F.cross_entropy(self.head(self.block(embedded)), labels, reduction="none")


def count(sample: int) -> int:
    """Rows of a sample."""
    return sample % 3


def ids_of(samples: Sequence[int]) -> list[int]:
    return [10 * sample + row for sample in samples for row in range(count(sample))]


def pictures_of(samples: Sequence[int]) -> Tensor:
    noise = [torch.randn(count(n), SIDE, generator=torch.Generator().manual_seed(n)) for n in samples]
    return torch.cat([torch.zeros(0, SIDE), *noise])


def tokens_of(samples: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the places of rows, labels."""
    tokens, places, labels = [], [], []
    for n in samples:
        places += range(len(tokens), len(tokens) + count(n))
        labels += [(n + t) % LABELS for t in range(count(n) + 2)]
        tokens += [(7 * n + t) % VOCABULARY for t in range(count(n) + 2)]
    return tuple(torch.tensor(x, dtype=torch.int64) for x in (tokens, places, labels))  # pyright: ignore[reportReturnType]


Backward = Callable[[Tensor, Tensor, nn.Module], None]
Modules = dict[str, nn.Module]


def sum_backward(losses: Tensor, rows: Tensor, text: nn.Module) -> None:
    losses.sum().backward()


@dataclass(frozen=True)
class Case:
    """How a loop differs from the plainest.

    `wrap`: by module, what is done to it in the placement, given the module, the topology and its name; `alike`: what
    is done to both modules, also in one process. `scale`: by module that reduces gradients by itself, what they are
    multiplied with, given the replicas. `by_sample`: modules run sample by sample, with random numbers of their own, so
    that rounding and `dropout` are the same wherever a sample is. `evaluate`: before each step.
    """

    backward: Backward = sum_backward
    alike: Callable[[Modules], None] = lambda _: None
    wrap: dict[str, Callable[[nn.Module, Topology, str], nn.Module]] = field(default_factory=dict)
    scale: dict[str, Callable[[int], float]] = field(default_factory=dict)
    dropout: float = 0.0
    by_sample: bool = False
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    evaluate: Callable[[], AbstractContextManager[Any]] | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1)
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    most_norm: float | None = None
    dtype: torch.dtype = torch.float32


def build(case: Case) -> Modules:
    torch.manual_seed(0)
    modules: Modules = {"vision": Vision(case.dropout), "text": Text(case.dropout)}
    case.alike(modules)
    return modules


def replicated(module: nn.Module, topology: Topology, name: str) -> nn.Module:
    return DistributedDataParallel(module, process_group=topology.group(name, "sp", "cp", "dp"))


def encode(case: Case, vision: nn.Module, samples: Sequence[int]) -> Tensor | None:
    """Rows of all samples; by `by_sample` one by one."""
    if not case.by_sample:
        return vision(pictures_of(samples)) if samples or "vision" in case.wrap else None
    parts = [(torch.manual_seed(n), vision(pictures_of([n])))[1] for n in samples]
    return torch.cat(parts) if parts else None


def read(case: Case, text: nn.Module, samples: Sequence[int], rows: Tensor) -> Tensor | None:
    """Losses of all tokens of samples."""
    if not case.by_sample:
        tokens, places, labels = tokens_of(samples)
        return text(tokens, places, rows, labels) if samples or "text" in case.wrap else None
    losses = []
    for n, mine in zip(samples, rows.split([count(n) for n in samples]), strict=True):
        tokens, places, labels = tokens_of([n])
        torch.manual_seed(1000 + n)
        losses.append(text(tokens, places, mine, labels))
    return torch.cat(losses) if losses else None


def tokens_in(step: Sequence[Sequence[int]]) -> int:
    return sum(count(n) + 2 for batch in step for n in batch)


Records = list[dict[str, Tensor]]
"""For each step the loss and the gradients of all parameters, by module and name."""


def alone(case: Case) -> Records:
    """In one process, without this library."""
    modules, records = build(case), []
    parameters = [p for module in modules.values() for p in module.parameters()]
    optimizer = case.optimizer(parameters)
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    for step in STEPS:
        total = torch.zeros(())
        for batch in step:
            with case.forward():
                rows = encode(case, modules["vision"], batch)
                assert rows is not None
                losses = read(case, modules["text"], batch, rows)
            assert losses is not None
            case.backward(losses, rows, modules["text"])
            total += losses.detach().sum()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= tokens_in(step)
        records.append({"loss": total / tokens_in(step), **gradients(modules)})
        if case.most_norm is not None:
            records[-1]["norm"] = nn.utils.clip_grad_norm_(parameters, case.most_norm)
        step_and_clear(optimizer, scheduler)
    return records


def step_and_clear(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()


def gradients(modules: Modules) -> dict[str, Tensor]:
    """By name; zeros where there are none."""
    found = {}
    for module, model in modules.items():
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            plain = name.replace("module.", "").replace("_orig_mod.", "")
            found[f"{module}.{plain}"] = whole(grad).detach().clone()
    return found


def whole(tensor: Tensor) -> Tensor:
    """Of a DTensor its value; a collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore[reportAttributeAccessIssue]


class Loop:
    """The loop on one rank of a placement."""

    def __init__(self, case: Case, placement: str, **options: Any):
        self.case = case
        layouts = {name: Layout.parse(text, 4) for name, text in PLACEMENTS[placement].items()}
        edges = [("vision", "text")]
        self.topology = Topology.build(layouts, platform(), edges=edges, planned=edges)
        self.link = Boundary.open(self.topology, "vision", "text", width=WIDTH, dtype=case.dtype, **options)
        self.modules = {name: module for name, module in build(case).items() if self.topology.rank in layouts[name]}
        self.plain = dict(self.modules)
        for name, wrap in case.wrap.items():
            if name in self.modules:
                self.modules[name] = wrap(self.modules[name], self.topology, name)

    def mine(self, name: str, batch: Sequence[int]) -> list[int]:
        """The samples that this rank's replica of a module works on."""
        layout, shift = self.topology.layouts[name], name == "text"
        if name not in self.modules:
            return []
        return [n for n in batch if (n + shift) % layout.dp == layout.replica_of(self.topology.rank)]

    @contextlib.contextmanager
    def forward(self, batch: Sequence[int]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Inside a micro-batch: the rows that arrived, and the losses of the tokens of this rank."""
        seen, mine = self.mine("vision", batch), self.mine("text", batch)
        with self.case.forward(), micro_batch(self.link):
            plan = self.link.plan(held=ids_of(seen), needed=ids_of(mine))
            rows = self.link(
                plan, encode(self.case, self.modules["vision"], seen) if "vision" in self.modules else None
            )
            yield rows, read(self.case, self.modules["text"], mine, rows) if "text" in self.modules else None

    def run(self) -> Records:
        case, records = self.case, []
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        optimizer = case.optimizer(parameters)
        scheduler = case.scheduler(optimizer) if case.scheduler else None
        for step in STEPS:
            total = self.evaluated(step)
            trained = torch.zeros(())
            for batch in step:
                with self.forward(batch) as (rows, losses):
                    if losses is not None:
                        with torch.autocast("cpu", enabled=False):
                            case.backward(losses, rows, self.modules["text"])
                        trained += losses.detach().sum()
            dist.all_reduce(trained)
            assert total is None or torch.equal(total, trained)
            self.finish(tokens_in(step))
            records.append({"loss": trained / tokens_in(step), **gradients(self.modules)})
            if case.most_norm is not None:
                records[-1]["norm"] = self.clip(case.most_norm)
            step_and_clear(optimizer, scheduler)
        return records

    def evaluated(self, step: Sequence[Sequence[int]]) -> Tensor | None:
        """The loss of all ranks, without gradients: in a micro-batch."""
        if self.case.evaluate is None:
            return None
        total = torch.zeros(())
        for batch in step:
            with self.case.evaluate(), self.forward(batch) as (rows, losses):
                assert not rows.requires_grad
                total += 0 if losses is None else losses.sum()
        dist.all_reduce(total)
        return total

    def finish(self, tokens: int) -> None:
        """Turn what the backward passes left into gradients of the mean loss."""
        for name, module in self.modules.items():
            dp = self.topology.layouts[name].dp
            for parameter in module.parameters():
                if not parameter.requires_grad:
                    continue
                if name not in self.case.scale:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(parameter.grad, group=self.topology.group(name, "sp", "cp", "dp"))
                assert parameter.grad is not None
                parameter.grad *= self.case.scale.get(name, lambda _: 1.0)(dp) / tokens

    def clip(self, most: float) -> Tensor:
        """Clip by the norm over all modules, as docs/library.md has it."""
        square = torch.zeros(())
        for name, module in self.modules.items():
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            square += whole(nn.utils.get_total_norm(grads)) ** 2 / self.topology.layouts[name].size
        dist.all_reduce(square)
        for module in self.modules.values():
            nn.utils.clip_grads_with_norm_(module.parameters(), most, square.sqrt())
        return square.sqrt()


def compare(found: Records, expected: Records) -> None:
    """Losses within 1e-6, gradients within 1e-5 of the largest element."""
    assert len(found) == len(expected) == len(STEPS)
    for mine, theirs in zip(found, expected, strict=True):
        assert abs(mine["loss"] - theirs["loss"]) <= 1e-6 * theirs["loss"]
        assert len(mine) > 1
        for name, value in mine.items():
            largest = theirs[name].abs().max()
            assert (value - theirs[name]).abs().max() <= 1e-5 * largest, (name, value, theirs[name])
