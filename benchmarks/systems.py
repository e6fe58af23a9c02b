"""The systems that are compared. Each takes the same orders: `step`, `peak_bytes` and `traffic` of a case, by its
number. A case has one or more global batches, which are trained on one after the other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.material import SAMPLES
from benchmarks.measuring.memory import Memory
from benchmarks.measuring.meter import CollectiveMeter, total_bytes, total_seconds
from megatron_hetero.config.schema import load_config
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.data.packing import TokenizedSample
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.validation import IMAGES
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.watchdog import Stopwatch
from megatron_hetero.layout.axes import EXPERTS
from megatron_hetero.layout.layout import Layout
from megatron_hetero.models.items.pictures import PixelLimits
from megatron_hetero.models.items.types import Piece
from megatron_hetero.models.layers import linear as products
from megatron_hetero.step.buffers import BufferedGradients
from pretrain_vlm import build_run

LEARNING_RATE = 1e-4
MAX_PIXELS = 4_000_000


@dataclass(frozen=True)
class StepResult:
    """One rank's steps of a case: seconds of all of it, of the processor's time, and of the vision module's two passes
    (None where they are not measured), the mean loss, and the tokens of all global batches."""

    seconds: float
    cpu_seconds: float
    vision_seconds: float | None
    loss: float
    tokens: int


@dataclass(frozen=True)
class Traffic:
    """One rank's collectives in the steps of a case, and those of the vision module's passes (None: not measured)."""

    bytes: float
    collectives: int
    seconds: float
    vision_bytes: float | None = None
    vision_collectives: int | None = None
    vision_seconds: float | None = None


class PhaseWatch(Stopwatch):
    """The program's stopwatch, which also reports to a meter what is running, and stores its last reading."""

    def __init__(self, platform: Platform):
        super().__init__(platform)
        self.meter: CollectiveMeter | None = None
        self.last: dict[str, float] = {}

    @contextlib.contextmanager
    def lap(self, name: str, label: str = "") -> Iterator[None]:
        if self.meter is not None:
            self.meter.phase = name
        with super().lap(name, label):
            yield
        if self.meter is not None:
            self.meter.phase = ""

    def take(self) -> Callable[[], dict[str, list[float]]]:
        seconds_of = super().take()

        def read() -> dict[str, list[float]]:
            laps = seconds_of()
            self.last = {name: sum(seconds) for name, seconds in laps.items()}
            return laps

        return read


@contextlib.contextmanager
def _sums_apart(meter: CollectiveMeter) -> Iterator[None]:
    """Inside, sums of gradients that begin within a module's backward pass do not count as its own."""
    real = BufferedGradients._start

    def start(sums: BufferedGradients, place: int) -> None:
        before, meter.phase = meter.phase, "gradient sums"
        real(sums, place)
        meter.phase = before

    with mock.patch.object(BufferedGradients, "_start", start):
        yield


class Ours:
    """A run, as `pretrain_vlm.py` builds it; batches are prepared beforehand. Products are computed by the library
    that PyTorch takes for the rivals', too: it is layouts that are compared.
    """

    def __init__(self, platform: Platform, folder: Path, steps: Sequence[int], vision: str, text: str, *more: str):
        # For good: the process has nothing else to do.
        mock.patch.object(products, "has_onednn", _never).start()
        self.memory = Memory(platform)
        log = f"{folder}/log-{vision}-{text}-{'-'.join(more)}"  # One run writes to each.
        flags = (
            f"--model.hf_path {folder}/model --model.dtype float32 --data.registry.d.annotations {folder}/data.jsonl "
        )
        flags += f"--data.registry.d.images {folder}/images --data.datasets d --data.shuffle false --data.workers 0 "
        flags += f"--data.max_seq_length 32768 --data.max_pixels {MAX_PIXELS} --train.iters 100000 "
        replicas = Layout.parse(text, dist.get_world_size(), views=(EXPERTS,)).dp
        flags += f"--train.global_batch_size {SAMPLES} --train.micro_batch_size {SAMPLES // replicas} --log.dir {log} "
        flags += f"--optimizer.lr {LEARNING_RATE} --optimizer.schedule constant "
        flags += f"--vision-parallel {vision} --text-parallel {text} "
        self.run = build_run(load_config([*flags.split(), *more]), platform)
        self.watch = PhaseWatch(platform)
        self.run.trainer.runner.watch = self.watch
        self.batches = [[self.run.loader.load(1 + number, map) for number in case] for case in _numbers(steps)]

    def step(self, case: int) -> StepResult:
        """Train once on a case."""
        losses, tokens, vision_seconds = [], 0, 0.0
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        for batch in self.batches[case]:
            metrics = self.run.trainer.train_step(1, batch)
            losses.append(metrics.loss)
            tokens += metrics.tokens
            vision_seconds += self.watch.last.get("vision", 0.0)
        self.run.trainer.optimizer.wait_for_weights()  # Other steps follow none but after a barrier.
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        return StepResult(seconds, busy, vision_seconds, mean(losses), tokens)

    def peak_bytes(self, case: int) -> int:
        """Train once on a case; the peak memory of that."""
        return self.memory.peak(lambda: self.step(case))

    def traffic(self, case: int) -> Traffic:
        """Train once on a case, with every collective timed."""
        meter = self.watch.meter = CollectiveMeter(timed=True)
        with meter, _sums_apart(meter):
            for batch in self.batches[case]:
                self.run.trainer.train_step(1, batch)
        self.watch.meter = None
        vision = meter.of("vision")
        return Traffic(
            *_totals(meter.records),
            vision_bytes=total_bytes(vision),
            vision_collectives=len(vision),
            vision_seconds=total_seconds(vision),
        )


class Plain:
    """`transformers` with SDPA, data parallel, one sample per rank: `wrap` shards or replicates it.

    A rank whose sample has no picture encodes a dummy of four patches, as data-parallel trainers must: a rank that
    skipped the encoder would miss its collectives.
    """

    def __init__(self, platform: Platform, folder: Path, steps: Sequence[int], wrap: str):
        from transformers import AutoModelForImageTextToText

        self.platform, self.memory = platform, Memory(platform)
        model = AutoModelForImageTextToText.from_pretrained(
            folder / "model", dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model = {"fsdp": _fully_shard, "ddp": _replicate}[wrap](LossOf(model).to(platform.device), platform)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        registry = {"d": DatasetConfig(annotations=folder / "data.jsonl", images=folder / "images")}
        mixture = Mixture.parse(("d",), registry, False, 0)
        processor = Processor.from_folder(folder / "model", PixelLimits(None, MAX_PIXELS))
        self.batches = [
            [plain_batch(mixture, processor, number, platform.device) for number in case] for case in _numbers(steps)
        ]

    def step(self, case: int) -> StepResult:
        """Train once on a case."""
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        loss = self._train(case)
        self.platform.synchronize()
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        return StepResult(seconds, busy, None, loss, sum(batch["tokens"] for batch in self.batches[case]))

    def peak_bytes(self, case: int) -> int:
        """Train once on a case; the peak memory of that."""
        return self.memory.peak(lambda: self.step(case))

    def traffic(self, case: int) -> Traffic:
        """Train once on a case, with every collective timed."""
        meter = CollectiveMeter(timed=True)
        with meter:
            self._train(case)
        return Traffic(*_totals(meter.records))

    def _train(self, case: int) -> float:
        """The mean loss of the case's steps."""
        return mean(self._train_step(batch["inputs"]) for batch in self.batches[case])

    def _train_step(self, inputs: dict[str, Any]) -> float:
        self.optimizer.zero_grad()
        loss = self.model(**inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


class LossOf(torch.nn.Module):
    """A model and its loss in one module, so that wrappers see one forward pass."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, dummy: Tensor | None, dummy_grid: Tensor | None, **inputs: Any) -> Tensor:
        """The loss, scaled so that its mean over ranks is the mean over the supervised tokens of the global batch."""
        if dummy is None:
            return self.model(**inputs).loss
        # Before the text, as on the ranks with a picture: collectives must come in the same order on all.
        nothing = 0.0 * self.model.model.visual(dummy, grid_thw=dummy_grid).pooler_output.sum()
        return self.model(**inputs).loss + nothing


def _numbers(steps: Sequence[int]) -> list[range]:
    """The numbers of the global batches of each case, of which there are `steps`."""
    stops = list(accumulate(steps))
    return [range(stop - count, stop) for stop, count in zip(stops, steps, strict=True)]


def plain_batch(mixture: Mixture, processor: Processor, number: int, device: torch.device) -> dict[str, Any]:
    """This rank's sample of a global batch as `transformers` takes it, and the tokens of the batch."""
    samples = [processor.tokenize(mixture[number * SAMPLES + k]) for k in range(SAMPLES)]
    mine = samples[dist.get_rank()]
    supervised = sum(int(sample.supervised.sum()) for sample in samples)
    inputs = {"dummy": None, "dummy_grid": None, **plain_inputs(mine, processor)}
    inputs["num_items_in_batch"] = torch.tensor(supervised / dist.get_world_size())
    if not mine.sizes:
        reader: Any = processor.readers[IMAGES[0]]
        width = 3 * reader.image_processor.temporal_patch_size * reader.image_processor.patch_size**2
        inputs |= {"dummy": torch.zeros(4, width), "dummy_grid": torch.tensor([[1, 2, 2]])}
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return {"inputs": moved, "tokens": sum(map(len, samples))}


def plain_inputs(sample: TokenizedSample, processor: Processor) -> dict[str, Any]:
    """A sample of at most one image as `transformers` takes it."""
    ids = torch.from_numpy(sample.input_ids)
    inputs = {
        "input_ids": ids[None],
        "attention_mask": torch.ones_like(ids)[None],
        "mm_token_type_ids": (ids == processor.readers[IMAGES[0]].token_id).int()[None],
        "labels": torch.where(torch.from_numpy(sample.supervised), ids, -100)[None],
    }
    if sample.sizes:
        pixels = processor.patches(sample.record, 0, [Piece(0, sample.sizes[0])])
        inputs |= {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": torch.tensor(sample.sizes)}
    return inputs


def _fully_shard(module: LossOf, platform: Platform) -> Any:
    """ZeRO-3: each layer of both modules is a unit, what is left is the root's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(platform.device.type, (dist.get_world_size(),))
    for layer in [*module.model.model.visual.blocks, *module.model.model.language_model.layers]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _replicate(module: LossOf, platform: Platform) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


def _never() -> bool:
    return False


def _totals(records: list[Any]) -> tuple[float, int, float]:
    return total_bytes(records), len(records), total_seconds(records)
