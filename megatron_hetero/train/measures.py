"""Measurements of a step: model FLOPs utilisation, loads of experts, and profiler traces of chosen steps."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron_hetero.base.files import replacing
from megatron_hetero.config.schema import Config
from megatron_hetero.data.loader import StepBatch
from megatron_hetero.groups.topology import Topology
from megatron_hetero.layout.axes import MAIN
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.layers.parts import Tokens
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.train.log import unwritable


def step_flops(shapes: ModelShapes, frozen: Frozen, batch: StepBatch) -> int:
    """Return the model FLOPs of a step. FLOPs of encoders are counted per patch, not per row, since patches are merged
    before the language model.
    """
    tokens = {name: encoder.tokens(batch.sizes[name]) for name, encoder in shapes.encoders.items()}
    tokens[TEXT] = Tokens(batch.sample_lengths, supervised=batch.supervised)
    return sum(frozen.operations(name, shapes, module_tokens) for name, module_tokens in tokens.items())


# Peak dense bfloat16 FLOP/s, from the vendors' data sheets. The first entry whose words are all in the
# device's name is used, so longer names come first.
_PEAKS = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("B100", 1.75e15),
    ("GH200", 989.4e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.4e12),
    ("H800", 989.4e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364.2e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of a device, given the name that its driver reports; None if unknown, as
    for CPUs and slices of a device.
    """
    words = device_name.replace("-", " ").upper().split()
    if "MIG" in words:
        return None
    return next((peak for name, peak in _PEAKS if set(name.upper().split()) <= set(words)), None)


def take_loads(modules: Iterable[TrainedModule], topology: Topology) -> tuple[list[int], torch.Tensor]:
    """Return the numbers of this rank's layers with experts and, for each, the ratio of maximum to mean tokens per
    expert since the last call, fp64 [layers] on the device; 0 without tokens. Collective over each stage of the text
    module.
    """
    chunks = next((module.chunks for module in modules if module.name == TEXT), ())
    loads = {number: load for chunk in chunks for number, load in chunk.take_loads().items()}
    if not loads:
        return [], torch.zeros(0)
    total = torch.stack(list(loads.values()))
    for axes in (("tp",), MAIN.sum_axes):
        group = topology.group(TEXT, *axes)
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return list(loads), total.amax(dim=1) / total.double().mean(dim=1).clamp(min=1e-9)


class StepProfiler:
    """Profiler of the steps in `train.profile`; writes `trace-rankN.json` to `log.dir` after the last of these steps,
    for Perfetto (ui.perfetto.dev). Ranges are named after schedule actions, such as ``text.0.F3``. `settle`: function
    that waits for collectives still in flight after a step.
    """

    def __init__(self, config: Config, topology: Topology, settle: Callable[[], None]):
        chosen, is_cuda = config.train.profile, topology.platform.is_cuda
        self._first, self._last = chosen.start, chosen.start + chosen.steps - 1
        self._file = config.log.dir / f"trace-rank{topology.rank}.json"
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        self._profile: profile | None = None
        self._settle = settle

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Return a context that traces step `number` if it is one of the chosen steps."""
        if self._first and number == self._first:
            self._profile = profile(activities=self._activities)
            self._profile.start()
        yield
        if self._profile is not None and number == self._last:
            self._settle()  # Stopping a trace while gloo's threads record events can crash the process.
            self._profile.stop()
            self._write(self._profile)
            self._profile = None

    def _write(self, trace: profile) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._file) as new:  # The exporter does not report write errors.
                trace.export_chrome_trace(str(new))
        except OSError as error:
            with contextlib.suppress(OSError):  # The terminal may be closed.
                print(f"warning: {unwritable(self._file, error, 'train.profile')}", file=sys.stderr, flush=True)
