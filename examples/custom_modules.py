"""Two modules that know nothing of this library, each in a layout of its own, run by a schedule.

An encoder turns pictures into rows. A decoder, whose tokens attend to the rows of their own sample, predicts a label
for each token; a sample has any number of pictures, or none. The encoder may have replicas (`dp`); the decoder may have
replicas, ranks that share the tokens of a sample (`sp`), and two pipeline stages, on the same ranks or on others:

    torchrun --nproc-per-node 4 examples/custom_modules.py dp:4 sp:2,dp:2
    torchrun --nproc-per-node 4 examples/custom_modules.py dp:4 sp:2,pp:2
    torchrun --nproc-per-node 4 examples/custom_modules.py dp:2@0-1 sp:2@2-3

At the end the weights are compared with those of the same loop in one process.

Shapes of tensors: n pictures, r rows, t tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_hetero as mh

WIDTH = 32
SIDE, ROWS = 8, 4  # Pixels of a picture's side, and rows that it becomes.
LABELS = 8
SAMPLES, MICRO_BATCHES, STEPS, LEARNING_RATE = 8, 4, 10, 1e-2  # Samples of a micro-batch, over all replicas.
TOLERANCE = 1e-4
GRAPH = mh.Graph({"encoder": ["decoder"]}, width=WIDTH, dtype=torch.float32)

# --------------------------------------------------------------------------------- the modules: plain PyTorch


class Encoder(nn.Module):
    """Pictures, [n, 1, 8, 8], to rows, [4 n, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(16, WIDTH, 3, stride=2, padding=1)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(pictures).permute(0, 2, 3, 1).flatten(0, 2)


@dataclass(frozen=True)
class Tokens:
    """Tokens of a rank: their `ids`, `labels` and numbers of their samples, int64 [t]; and the samples of the rows that
    the rank receives, int64 [r].
    """

    ids: Tensor
    labels: Tensor
    samples: Tensor
    row_samples: Tensor


class LowerHalf(nn.Module):
    """Tokens attend to the rows of their sample. Returns hidden states, [t, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LABELS, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.no_picture = nn.Parameter(torch.zeros(1, WIDTH))  # A further row, to which all tokens attend.

    def forward(self, tokens: Tokens, rows: Tensor) -> Tensor:
        embedded, rows = self.embedding(tokens.ids), torch.cat([self.no_picture, rows])
        mask = F.pad(tokens.samples[:, None] == tokens.row_samples, (1, 0), value=True)
        query, key, value = self.query(embedded)[None], self.key(rows)[None], self.value(rows)[None]
        return embedded + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[0]


class UpperHalf(nn.Module):
    """Hidden states to the sum of the tokens' losses."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
        self.head = nn.Linear(4 * WIDTH, LABELS)

    def forward(self, tokens: Tokens, hidden: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mlp(hidden)), tokens.labels, reduction="sum")


class Decoder(nn.Module):
    """Both halves, which are its pipeline stages."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = LowerHalf(), UpperHalf()

    def forward(self, tokens: Tokens, rows: Tensor) -> Tensor:
        return self.upper(tokens, self.lower(tokens, rows))


def build_modules(device: torch.device) -> tuple[Encoder, Decoder]:
    """The same weights on all ranks."""
    torch.manual_seed(0)
    return Encoder().to(device), Decoder().to(device)


# ------------------------------------------------------------------------------- the data, the same on all ranks


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of all replicas: pictures, fp32 [n, 1, 8, 8], and their samples, [n]; ids, labels and samples of
    tokens, [t].
    """

    pictures: Tensor
    picture_samples: Tensor
    ids: Tensor
    labels: Tensor
    samples: Tensor


def draw_micro_batch(step: int, number: int, device: torch.device) -> MicroBatch:
    """Samples of 3 to 8 tokens, with up to two pictures each; none of every fourth micro-batch has any. A token's label
    is its id plus the number of bright pictures in its sample.
    """
    generator = torch.Generator().manual_seed(step * MICRO_BATCHES + number)

    def draw(low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    lengths, pictures = draw(3, 9, SAMPLES), draw(0, 3, SAMPLES) * (number % 4 != 3)
    samples = torch.arange(SAMPLES).repeat_interleave(lengths)
    picture_samples = torch.arange(SAMPLES).repeat_interleave(pictures)
    bright, ids = draw(0, 2, len(picture_samples)), draw(0, LABELS, len(samples))
    noise = 0.1 * torch.randn(len(bright), 1, SIDE, SIDE, generator=generator)
    bright_in_sample = torch.zeros(SAMPLES, dtype=torch.int64).index_add(0, picture_samples, bright)
    labels = (ids + bright_in_sample[samples]) % LABELS
    shaded = noise + 2.0 * bright.view(-1, 1, 1, 1) - 1
    return MicroBatch(*(tensor.to(device) for tensor in (shaded, picture_samples, ids, labels, samples)))


# ------------------------------------------------------------------------------- what a rank holds and needs


def select(topology: mh.Topology, batch: MicroBatch) -> mh.MicroBatchInputs:
    """This rank's inputs, and the ids of the rows that it holds and needs. Any rank may encode any picture; here the
    encoder's replicas take turns.
    """
    pictures = torch.arange(len(batch.pictures), device=batch.pictures.device)
    row_ids = pictures[:, None] * ROWS + torch.arange(ROWS, device=pictures.device)  # [n, ROWS]
    inputs, held, needed = {}, (), ()
    if topology.has("encoder"):
        layout = topology.layouts["encoder"]
        encoded = pictures[layout.replica_of(topology.rank) :: layout.dp]
        inputs["encoder"], held = batch.pictures[encoded], row_ids[encoded].flatten()
    if topology.has("decoder"):
        layout = topology.layouts["decoder"]
        coordinate = layout.coordinate(topology.rank)
        tokens = samples_of(topology, batch.samples).nonzero().flatten().tensor_split(layout.sp)[coordinate.sp]
        seen = samples_of(topology, batch.picture_samples)
        row_samples = batch.picture_samples[seen].repeat_interleave(ROWS)
        inputs["decoder"] = Tokens(batch.ids[tokens], batch.labels[tokens], batch.samples[tokens], row_samples)
        if coordinate.pp == 0:  # Rows enter the first stage.
            needed = row_ids[seen].flatten()
    # Ranks along `sp` need the same rows, each for other tokens: the gradients that they return are partial sums.
    return mh.MicroBatchInputs(inputs, {("encoder", "decoder"): mh.Rows(held, needed, gradient="partial")})


def samples_of(topology: mh.Topology, samples: Tensor) -> Tensor:
    """A mask of those of `samples` that this rank's replica of the decoder reads: each replica reads a range."""
    local = topology.shard("decoder", range(SAMPLES))
    return (samples >= local.start) & (samples < local.stop)


# ------------------------------------------------------------------------------------------------- the loop


def modules_of(topology: mh.Topology, encoder: Encoder, decoder: Decoder) -> dict[str, nn.Module]:
    """This rank's module, or stage, of both."""
    modules: dict[str, nn.Module] = {"encoder": encoder} if topology.has("encoder") else {}
    if topology.has("decoder"):
        layout = topology.layouts["decoder"]
        stages = [decoder] if layout.pp == 1 else [decoder.lower, decoder.upper]
        modules["decoder"] = stages[layout.coordinate(topology.rank).pp]
    return modules


def train(topology: mh.Topology) -> tuple[dict[str, nn.Module], list[float]]:
    """This rank's modules after training, and the loss of each step."""
    device = topology.platform.device
    modules = modules_of(topology, *build_modules(device))
    # A stage after the first says which shape it receives.
    stages = {
        name: mh.Stage(module, lambda tokens: (len(tokens.ids), WIDTH)) if isinstance(module, UpperHalf) else module
        for name, module in modules.items()
    }
    run = mh.Runner(topology, stages)
    optimizer = torch.optim.AdamW((p for module in modules.values() for p in module.parameters()), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        batches = [draw_micro_batch(step, number, device) for number in range(MICRO_BATCHES)]
        tokens = sum(len(batch.ids) for batch in batches)
        optimizer.zero_grad()
        result = run([select(topology, batch) for batch in batches])
        mh.finish_gradients(topology, modules, tokens)
        optimizer.step()
        losses.append(float(mh.total_loss(topology, "decoder", result)) / tokens)
        if topology.rank == 0:
            print(f"step {step + 1}/{STEPS}: loss {losses[-1]:.4f}")
    return modules, losses


def train_alone(device: torch.device) -> tuple[Encoder, Decoder]:
    """The same in one process, without this library."""
    encoder, decoder = build_modules(device)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=LEARNING_RATE)
    for step in range(STEPS):
        batches = [draw_micro_batch(step, number, device) for number in range(MICRO_BATCHES)]
        optimizer.zero_grad()
        for batch in batches:
            row_samples = batch.picture_samples.repeat_interleave(ROWS)
            inputs = Tokens(batch.ids, batch.labels, batch.samples, row_samples)
            loss = decoder(inputs, encoder(batch.pictures))
            (loss / sum(len(each.ids) for each in batches)).backward()
        optimizer.step()
    return encoder, decoder


def difference(topology: mh.Topology, trained: Mapping[str, nn.Module]) -> float:
    """The largest difference of a weight, on any rank, from training in one process."""
    expected = modules_of(topology, *train_alone(topology.platform.device))
    largest = torch.zeros((), device=topology.platform.device)
    for name, module in trained.items():
        for weight, other in zip(module.parameters(), expected[name].parameters(), strict=True):
            largest = torch.maximum(largest, (weight - other).abs().max().detach())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def require_layouts(layouts: Mapping[str, mh.Layout]) -> None:
    """Raise `UserError` unless the modules above can run in these layouts."""
    for name, axes, stages in (("encoder", "dp", 1), ("decoder", "dp, sp and pp:2", 2)):
        layout = layouts[name]
        if layout.size != layout.dp * layout.pp * (layout.sp if name == "decoder" else 1) or layout.pp > stages:
            raise mh.UserError(f"{name} layout `{layout}`: found other axes than this example supports, use {axes}")


def main(argv: Sequence[str]) -> None:
    """Train, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", help="layout: dp")
    parser.add_argument("decoder", help="layout: dp, sp, pp:2")
    options = parser.parse_args(argv)
    with mh.process_group():
        topology = mh.build(GRAPH, encoder=options.encoder, decoder=options.decoder)
        require_layouts(topology.layouts)
        trained, _ = train(topology)
        largest = difference(topology, trained)
        if topology.rank == 0:
            print(f"weights: {largest:.1e} from those of one process")
        if not largest < TOLERANCE:
            raise RuntimeError(f"found a difference of {largest:.1e}, expected less than {TOLERANCE:.0e}")


if __name__ == "__main__":
    mh.guarded(main, sys.argv[1:])
