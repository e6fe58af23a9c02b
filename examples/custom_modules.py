"""Two modules that know nothing of megatron_hetero, each in a layout of its own, run by a schedule, piece by piece.

What `Runner` does for a recipe is done here by hand: who holds and who needs which rows, plans without an exchange, the
schedule. `sp` splits the tokens of a decoder, so that gradients of rows come in parts.

A convolutional encoder turns pictures into rows; a decoder, whose tokens look at the rows of their sample, predicts a
label for each token. Any placement will do:

    torchrun --nproc-per-node 4 examples/custom_modules.py --check
    torchrun --nproc-per-node 4 examples/custom_modules.py --encoder-parallel dp:4 --decoder-parallel sp:2,pp:2
    torchrun --nproc-per-node 4 examples/custom_modules.py --encoder-parallel dp:2@0-1 --decoder-parallel sp:2@2-3

Shapes of tensors: n pictures, r rows, t tokens, W the width of a row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hetero import Graph, Layout, Runner, UserError, build, finish_gradients, guarded, process_group
from megatron_hetero.boundary.loaded import load_plan
from megatron_hetero.boundary.ownership import Ownership
from megatron_hetero.boundary.plan import plan_boundary
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.graph import Edge
from megatron_hetero.layout.layout import ModuleShape
from megatron_hetero.layout.modules import resolve
from megatron_hetero.schedule.builders import build_schedule
from megatron_hetero.schedule.check import check_schedule
from megatron_hetero.schedule.contract import MicroBatchInputs
from megatron_hetero.schedule.drawing import timeline
from megatron_hetero.schedule.simulator import simulate

WIDTH = 32
SIDE = 8  # pixels of a picture
ROWS = 4  # that it becomes
LABELS = 8
LEARNING_RATE = 1e-2
TOLERANCE = 1e-5
ENCODER, DECODER = "encoder", "decoder"

# --------------------------------------------------------------------------------- the modules: plain PyTorch


class PictureEncoder(nn.Module):
    """Pictures, [n, 1, 8, 8], to rows, [4 n, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(16, WIDTH, 3, stride=2, padding=1)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures).permute(0, 2, 3, 1).flatten(0, 2)


@dataclass(frozen=True)
class Tokens:
    """What a rank's decoder reads, all int64: `ids`, `targets` and `samples` of its tokens, [t]; the samples that the
    rows which reach it belong to, [r].
    """

    ids: Tensor
    targets: Tensor
    samples: Tensor
    row_samples: Tensor


class Reader(nn.Module):
    """The decoder's first half: tokens look at the rows of their sample. To hidden states, [t, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LABELS, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.nothing = nn.Parameter(torch.zeros(1, WIDTH))  # what tokens without a picture look at

    def forward(self, batch: Tokens, rows: Tensor) -> Tensor:
        tokens_tW = self.embedding(batch.ids)
        seen = torch.cat([self.nothing, rows])
        own = F.pad(batch.samples[:, None] == batch.row_samples, (1, 0), value=True)
        query, key, value = self.query(tokens_tW)[None], self.key(seen)[None], self.value(seen)[None]
        return tokens_tW + F.scaled_dot_product_attention(query, key, value, attn_mask=own)[0]


class Speaker(nn.Module):
    """The decoder's second half: hidden states to the sum of the tokens' losses."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
        self.head = nn.Linear(4 * WIDTH, LABELS)

    def hidden_shape(self, batch: Tokens) -> tuple[int, int]:
        """What a `Runner` asks of a stage after the first: the shape of what it will be given."""
        return len(batch.ids), WIDTH

    def forward(self, batch: Tokens, hidden: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mlp(hidden)), batch.targets, reduction="sum")


class Decoder(nn.Module):
    """Both halves. Its pipeline stages are the halves."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.speaker = Reader(), Speaker()

    def forward(self, batch: Tokens, rows: Tensor) -> Tensor:
        return self.speaker(batch, self.reader(batch, rows))


def build_modules(seed: int, device: torch.device) -> tuple[PictureEncoder, Decoder]:
    """Equal weights wherever they are built."""
    torch.manual_seed(seed)
    return PictureEncoder().to(device), Decoder().to(device)


# ------------------------------------------------------------------------------- the data, the same on all ranks


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """`pictures`, fp32 [n, 1, 8, 8], and their samples; `ids`, `targets` and `samples` of all tokens."""

    size: int
    pictures: np.ndarray
    picture_samples: np.ndarray
    ids: np.ndarray
    targets: np.ndarray
    samples: np.ndarray


def draw_micro_batch(size: int, *seed: int) -> MicroBatch:
    """So many samples of 3 to 8 tokens with up to two pictures each; of every fourth micro-batch, none has any.

    A token's label is its number plus the bright pictures of its sample.
    """
    rng = np.random.default_rng(seed)
    lengths, pictures = rng.integers(3, 9, size), rng.integers(0, 3, size) * (seed[-1] % 4 != 3)
    samples, picture_samples = np.repeat(np.arange(size), lengths), np.repeat(np.arange(size), pictures)
    bright, ids = rng.integers(0, 2, len(picture_samples)), rng.integers(0, LABELS, len(samples))
    noise = rng.normal(0, 0.1, (len(bright), 1, SIDE, SIDE))
    targets = (ids + np.bincount(picture_samples, bright, size).astype(np.int64)[samples]) % LABELS
    return MicroBatch(
        size, (noise + 2.0 * bright[:, None, None, None] - 1).astype(np.float32), picture_samples, ids, targets, samples
    )


# ------------------------------------------------------------------------------------------- who holds what


def pictures_of(layout: Layout, rank: int, pictures: int) -> np.ndarray:
    """Pictures are assigned to the encoder's replicas in turn."""
    return np.arange(layout.replica_of(rank), pictures, layout.dp)


def of_replica(layout: Layout, rank: int, samples: np.ndarray, size: int) -> np.ndarray:
    """Which of `samples` the decoder's replica of a rank reads: a run of them, another cut than the encoder's."""
    return samples * layout.dp // size == layout.replica_of(rank)


def tokens_of(layout: Layout, rank: int, batch: MicroBatch) -> np.ndarray:
    """The ranks along `sp` share the tokens of their replica."""
    tokens = np.flatnonzero(of_replica(layout, rank, batch.samples, batch.size))
    return np.array_split(tokens, layout.sp)[layout.coordinate(rank).sp]


def ownerships(layouts: Mapping[str, Layout], batch: MicroBatch) -> tuple[Ownership, Ownership]:
    """Who holds the rows that the encoder makes, and who needs them.

    The ranks along `sp` all need the rows of their replica, since each token looks at all of its sample's. Each rank
    knows the loss of its own tokens, and so a part of the rows' gradient: `partial`.
    """
    encoder, decoder = layouts[ENCODER], layouts[DECODER].stage(0)
    rows = np.arange(len(batch.pictures) * ROWS)
    row_samples = np.repeat(batch.picture_samples, ROWS)
    source = {(r,): rows.reshape(-1, ROWS)[pictures_of(encoder, r, len(batch.pictures))].ravel() for r in encoder.ranks}
    target = {g: rows[of_replica(decoder, g[0], row_samples, batch.size)] for g in decoder.groups("sp")}
    return Ownership.of(source), Ownership.of(target, "partial")


def to_device(batch: MicroBatch, layouts: Mapping[str, Layout], rank: int, device: torch.device) -> MicroBatchInputs:
    """What a rank needs of a micro-batch. Pictures, tokens and rows may be none."""

    def move(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    inputs: dict[str, Any] = {}
    if rank in layouts[ENCODER]:
        inputs[ENCODER] = move(batch.pictures[pictures_of(layouts[ENCODER], rank, len(batch.pictures))])
    if rank in layouts[DECODER]:
        tokens, row_samples = tokens_of(layouts[DECODER], rank, batch), np.repeat(batch.picture_samples, ROWS)
        row_samples = row_samples[of_replica(layouts[DECODER], rank, row_samples, batch.size)]
        inputs[DECODER] = Tokens(
            *map(move, (batch.ids[tokens], batch.targets[tokens], batch.samples[tokens], row_samples))
        )
    plan = plan_boundary(*ownerships(layouts, batch), row_bytes=4 * WIDTH)
    crosses = {Edge(ENCODER, DECODER): load_plan(plan.rank(rank), device)} if rank in plan.ranks else {}
    return MicroBatchInputs(inputs, crosses)


# ------------------------------------------------------------------------------------------------- a step

Step = Callable[[Sequence[MicroBatch]], Tensor]
"""Accumulates gradients; returns this rank's sum of losses."""


def step_of(topology: Topology, modules: Mapping[str, nn.Module], options: Options, say: Callable[[str], None]) -> Step:
    """All micro-batches, in the order of a schedule."""
    schedule = build_schedule(topology.layouts, options.micro_batches, text=DECODER)
    check_schedule(schedule)
    say(timeline(simulate(schedule, 1.0)))
    runner = Runner(topology, modules, timeout_s=120)

    def step(batches: Sequence[MicroBatch]) -> Tensor:
        def load(number: int) -> MicroBatchInputs:
            return to_device(batches[number], topology.layouts, topology.rank, topology.platform.device)

        return runner.run(schedule, load).loss

    return step


def modules_of(
    layouts: Mapping[str, Layout], rank: int, encoder: PictureEncoder, decoder: Decoder
) -> dict[str, nn.Module]:
    """What a rank holds of both."""
    held: dict[str, nn.Module] = {ENCODER: encoder} if rank in layouts[ENCODER] else {}
    if rank in layouts[DECODER]:
        halves = decoder.reader, decoder.speaker
        held[DECODER] = decoder if layouts[DECODER].pp == 1 else halves[layouts[DECODER].coordinate(rank).pp]
    return held


# ------------------------------------------------------------------------------------------------- the loop


@dataclass(frozen=True)
class Options:
    """What can be said on the command line."""

    encoder_parallel: str | None = None
    decoder_parallel: str | None = None
    steps: int = 5
    micro_batches: int = 4
    samples: int = 8
    seed: int = 0
    check: bool = False


def resolve_layouts(options: Options, world_size: int) -> dict[str, Layout]:
    """Checked layouts of both modules. Raises `UserError`."""
    shapes = {
        ENCODER: ModuleShape(ENCODER, attention_heads=1, kv_heads=1, hidden_size=WIDTH, layers=1, kind="encoder"),
        DECODER: ModuleShape(DECODER, attention_heads=64, kv_heads=64, hidden_size=WIDTH, layers=2, kind="text"),
    }
    default = "sp:2" if world_size % 2 == 0 else None
    given = {ENCODER: options.encoder_parallel, DECODER: options.decoder_parallel or default}
    layouts = resolve({name: text for name, text in given.items() if text is not None}, shapes, world_size, flags=True)
    for name, layout in layouts.items():
        for axis in ("tp", "cp"):
            if layout.degrees[axis] > 1:
                raise UserError.at(
                    f"{name} layout `{layout}` (--{name}-parallel, axis {axis})",
                    found=f"{axis}:{layout.degrees[axis]}",
                    expected=f"{axis}:1",
                    because="the modules of this example are not written for it",
                    fix="use dp, or for the decoder sp and pp",
                )
    return layouts


def train(options: Options, platform: Platform, say: Callable[[str], None]) -> list[float]:
    """The loss of each step.

    Raises:
        UserError: a layout does not fit.
        RuntimeError: with `options.check`, a loss or gradient is not that of one process.
    """
    layouts = resolve_layouts(options, dist.get_world_size())
    graph = Graph([(ENCODER, DECODER)], width=WIDTH, dtype=torch.float32)
    topology = build(graph, layouts, platform=platform, planned=False)  # Every rank plans all rows.
    encoder, decoder = build_modules(options.seed, platform.device)
    modules = modules_of(layouts, topology.rank, encoder, decoder)
    say(f"{ENCODER} {layouts[ENCODER]}, {DECODER} {layouts[DECODER]}")
    step = step_of(topology, modules, options, say)
    optimizer = torch.optim.AdamW((p for m in modules.values() for p in m.parameters()), lr=LEARNING_RATE)
    reference = Reference(options, platform.device) if options.check else None
    losses = []
    for number in range(options.steps):
        batches = [draw_micro_batch(options.samples, options.seed, number, m) for m in range(options.micro_batches)]
        tokens = sum(len(batch.ids) for batch in batches)
        optimizer.zero_grad()
        loss = step(batches)
        finish_gradients(topology, modules, tokens)
        dist.all_reduce(loss)
        losses.append(loss.item() / tokens)
        line = f"step {number + 1}/{options.steps}: loss {losses[-1]:.4f}"
        if reference is not None:
            line += f", {reference.step(batches, losses[-1], encoder, decoder):.1e} from one process"
        say(line)
        optimizer.step()
    return losses


class Reference:
    """The same two modules in one process: whole batches, no boundary."""

    def __init__(self, options: Options, device: torch.device):
        self.device = device
        self.encoder, self.decoder = build_modules(options.seed, device)
        parameters = [*self.encoder.parameters(), *self.decoder.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
        self.alone = {name: Layout.parse("dp:1@0") for name in (ENCODER, DECODER)}

    def step(self, batches: Sequence[MicroBatch], loss: float, encoder: nn.Module, decoder: nn.Module) -> float:
        """The largest relative difference of the loss and of all gradients on any rank.

        Raises:
            RuntimeError: on all ranks, if it is more than `TOLERANCE`.
        """
        self.optimizer.zero_grad()
        expected = self._loss(batches)
        expected.backward()
        worst = [
            abs(loss / expected.item() - 1),
            *_differences(encoder, self.encoder),
            *_differences(decoder, self.decoder),
        ]
        largest = torch.tensor(max(worst), device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        self.optimizer.step()
        if not largest.item() <= TOLERANCE:
            raise RuntimeError(f"check: found a relative difference of {largest.item():.1e}, expected {TOLERANCE:.0e}")
        return largest.item()

    def _loss(self, batches: Sequence[MicroBatch]) -> Tensor:
        given = [to_device(batch, self.alone, 0, self.device).inputs for batch in batches]
        losses = [self.decoder(inputs[DECODER], self.encoder(inputs[ENCODER])) for inputs in given]
        return torch.stack(losses).sum() / sum(len(batch.ids) for batch in batches)


def _differences(found: nn.Module, expected: nn.Module) -> list[float]:
    """Relative differences of the gradients that this rank has."""
    pairs = zip(found.parameters(), expected.parameters(), strict=True)
    return [
        float((a.grad - b.grad).norm() / (b.grad.norm() + 1e-12))
        for a, b in pairs
        if a.grad is not None and b.grad is not None
    ]


# ------------------------------------------------------------------------------------------ the command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """So that it is reported once, not on every rank."""
        raise UserError(f"command line: {message}; see --help")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer of 1 or more")
    return int(text)


def read_options(argv: Sequence[str]) -> Options:
    """Raises `UserError`; ``--help`` prints and exits."""
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layouts = "such as dp:2@0-1; default"
    parser.add_argument("--encoder-parallel", metavar="LAYOUT", help=f"{layouts}: dp over all ranks")
    parser.add_argument(
        "--decoder-parallel", metavar="LAYOUT", help=f"{layouts}: sp:2 on an even number of ranks, else dp"
    )
    parser.add_argument("--steps", type=_count, default=5, metavar="N", help="default: 5")
    parser.add_argument("--micro-batches", type=_count, default=4, metavar="N", help="per step; default: 4")
    parser.add_argument(
        "--samples", type=_count, default=8, metavar="N", help="per micro-batch, of all replicas; default: 8"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data; default: 0")
    parser.add_argument("--check", action="store_true", help="compare with the same modules in one process")
    return Options(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str]) -> None:
    """Train, and say on one rank how it goes."""
    options = read_options(argv)
    with process_group() as platform:
        train(options, platform, print if dist.get_rank() == 0 else lambda _: None)


if __name__ == "__main__":
    guarded(main, sys.argv[1:])
