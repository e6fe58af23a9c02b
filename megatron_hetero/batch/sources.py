"""What a configuration reads from: its data sets and its model's processor."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.batch.readers.processes import ReaderProcesses
from megatron_hetero.batch.readers.reader import Reader, SampleReader
from megatron_hetero.config.schema import Config
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.job import JobSpec
from megatron_hetero.processor.processor import Processor


def open_mixture(config: Config) -> Mixture:
    """The data sets of `data.datasets`, loaded. Raises `UserError`."""
    return _mixture(config, config.data.datasets, config.data.shuffle)


def open_held_out(config: Config) -> dict[str, Mixture]:
    """Each of the data sets of `eval.datasets`, loaded, in the order of its records. Raises `UserError`."""
    return {name: _mixture(config, (name,), False) for name in config.eval.datasets}


def _mixture(config: Config, datasets: Sequence[str], shuffle: bool) -> Mixture:
    return Mixture.parse(datasets, config.data.registry, shuffle, config.train.seed, config.model.encoder_names)


def open_processor(config: Config) -> Processor:
    """The tokenizer of `model.hf_path` and the image processor of each encoder. Raises `UserError`."""
    data = config.data
    return Processor.from_folder(
        config.model.hf_path,
        data.min_pixels,
        data.max_pixels,
        encoders=config.model.encoders,
        hf_path_vision=config.model.hf_path_vision,
    )


def reader_of(job: JobSpec, processor: Processor) -> Reader:
    """What reads samples for a job, in this process or in others."""
    data, budget = job.config.data, job.budget
    most_patches = None if budget is None else budget.patches
    here = SampleReader(processor, job.shapes.encoders, data.max_seq_length, data.too_long, most_patches)
    return ReaderProcesses(here, data.workers) if data.worker_type == "process" else here
