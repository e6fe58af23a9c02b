"""Opens the inputs of a run on every rank and checks that they agree, before the first process group is created."""

from __future__ import annotations

import hashlib
import platform as python
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch.distributed as dist
import yaml

from megatron_hetero.base.environment import prepare_traces
from megatron_hetero.base.errors import UserError, os_errors_as, reason
from megatron_hetero.base.files import open_regular, read_bytes
from megatron_hetero.checkpoint.record import ModelSources, hashes
from megatron_hetero.config.schema import Config, flat_settings, to_yaml
from megatron_hetero.data.mixture import Mixture, open_held_out, open_mixture
from megatron_hetero.data.processor import Processor, open_processor
from megatron_hetero.data.tokenizer import export_changes
from megatron_hetero.groups.collective import FIRST, Facts, on_every, require_same
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.hf.model_files import Companions, require_writable
from megatron_hetero.hf.peft_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.grammar import format_ranks
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.adapters import lora_of
from megatron_hetero.models.layers.kernels import cudnn_support
from megatron_hetero.models.layers.packages import package_facts
from megatron_hetero.models.weights import companions_of, open_encoders, open_modules
from megatron_hetero.train.hf_export import require_exportable
from megatron_hetero.train.log import unwritable

PACKAGES = (
    "megatron_hetero",
    "torch",
    "transformers",
    "tokenizers",
    "megatron-core",
    "safetensors",
    "numpy",
    "pillow",
    "av",
)
"""Packages that affect numerical results or the data that ranks exchange; versions must agree on all ranks."""
_SAMPLES, _SAMPLE_BYTES = 8, 4096


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a run, as opened on one rank.

    `weights`: initial weights by module. `mixture`: training data. `held_out`: evaluation data, opened early to report
    errors before training. `companions`: files exported with the model, read early on the first rank, since their
    folders may be gone at the end. `transposed`: whether expert weights are transposed in the language model's folder.
    `source`: stored weights of the original model, see `model_writer`.
    """

    weights: Mapping[str, StoredWeights]
    processor: Processor
    mixture: Mixture
    held_out: Mapping[str, Mixture]
    companions: Mapping[str, Companions]
    transposed: bool
    source: StoredWeights | None = None

    @classmethod
    def open(cls, job: JobSpec) -> Inputs:
        """Open and check the inputs of a job on this rank. Raises `UserError`."""
        config, encoders, seed = job.config, job.config.further_folders, job.config.train.seed
        weights = open_modules(job.folders, job.shapes, seed) | open_encoders(encoders, job.shapes, seed)
        transposed, processor = weights[TEXT].transposed, open_processor(config)
        mixture, held_out = open_mixture(config, processor), open_held_out(config, processor)
        if dist.get_rank() != FIRST:
            return cls(weights, processor, mixture, held_out, {}, transposed)
        if config.export.hf_dir is not None:
            require_writable(config.export.hf_dir)
            require_exportable(job)
        changes = export_changes(job.folders, asdict(config), encoders)
        companions = companions_of({TEXT: config.model.hf_path, **encoders}, changes)
        source = weights[TEXT] if weights[TEXT].unchanged else None
        return cls(weights, processor, mixture, held_out, companions, transposed, source)


def open_inputs(config: Config, platform: Platform, watchdog: Watchdog) -> tuple[JobSpec, Inputs]:
    """Return the job and this rank's inputs after checking that all ranks agree. Raises `UserError` on all ranks."""
    if platform.is_cuda:  # NCCL traces must be set up before the first collective.
        with os_errors_as(partial(unwritable, config.log.dir)):
            prepare_traces(config.log.dir / "nccl")
    opened: list[tuple[JobSpec, Inputs]] = []
    files: dict[str, str] = {}

    def open_here() -> str:
        try:
            job = JobSpec.of(_resolved(config), dist.get_world_size())
            inputs = Inputs.open(job)
            opened.append((job, inputs))
            files.update(_files(job, inputs))
        except UserError as error:
            return str(error)
        return ""

    with watchdog.waiting(lambda: "the comparison of settings and files, with all other ranks,"):
        with watchdog.working():
            settings = _settings_and_versions(config, platform)
        _require_same(settings)
        problems = on_every(dist.group.WORLD, open_here, watchdog.working)
        if problem := next(filter(None, problems), ""):
            ranks = [rank for rank, each in enumerate(problems) if each == problem]
            raise UserError(problem if len(ranks) == len(problems) else f"on rank {format_ranks(ranks)}: {problem}")
        _require_same(files)
    return opened[0]


def _resolved(config: Config) -> Config:
    """Return the configuration with `schedule.waves` resolved. Raises `UserError`."""
    if config.schedule.waves != "auto":
        return config
    from megatron_hetero.estimate.estimate import with_waves  # Other runs need no plan, which takes time to import.

    return with_waves(config, dist.get_world_size())


def _require_same(facts: Facts) -> None:
    because = "each rank plans the collectives from its own copy (only log.dir may differ)"
    fix = "start all ranks with one command, configuration and environment, on the same files"
    require_same(dist.group.WORLD, "ranks of one run", facts, fix, because)


def _settings_and_versions(config: Config, platform: Platform) -> dict[str, str]:
    """Return the facts to compare between ranks that need no files: settings and versions of packages."""
    # log.dir may differ between ranks, since no other rank reads it.
    settings = {name: value for name, value in flat_settings(config).items() if name != "log.dir"}
    return settings | {
        "version of python": python.python_version(),
        **{f"version of {name}": _version(name) for name in PACKAGES},
        **package_facts(platform),
        "attention by cuDNN (model.attention)": str(config.may_use_cudnn and cudnn_support(platform.device)[0]),
        "kind of device": platform.device.type,
    }


def _files(job: JobSpec, inputs: Inputs) -> Iterator[tuple[str, str]]:
    """Yield the facts of files to compare between ranks: hashes of model and adapter files (of weights: size, header
    and samples), and hashes of data sets' records, which ignore formatting except for shuffled blocks. Raises
    `UserError` if a file cannot be read.
    """
    sources = ModelSources.recorded(yaml.safe_load(to_yaml(job.config)))
    for setting, folder_hashes in hashes(sources).items():
        for name, content in folder_hashes.items():
            yield f"{sources.folders[setting] / name} ({setting})", f"SHA-256 {content[:12]}"
    for path in dict.fromkeys(path for weights in inputs.weights.values() for path in weights.files):
        with os_errors_as(partial(_unreadable, path)):
            yield str(path), sampled(path)
    adapters = (lora_of(module, job.shapes) for module in job.shapes.modules)
    for folder in dict.fromkeys(each.folder for each in adapters if each is not None and each.folder is not None):
        with os_errors_as(partial(_unreadable, folder)):
            content = read_bytes(folder / ADAPTER_CONFIG)
            yield str(folder / ADAPTER_CONFIG), f"SHA-256 {hashlib.sha256(content).hexdigest()[:12]}"
            yield str(folder / ADAPTER_WEIGHTS), sampled(folder / ADAPTER_WEIGHTS)
    for mixture in (*inputs.held_out.values(), inputs.mixture):
        for data, _, blocks in mixture.hashed():
            shown = f" in blocks {blocks[:12]}" if blocks else ""
            yield f"{data.path} (data set {data.name})", f"{len(data)} records, {data.digest[:12]}{shown}"


def _unreadable(path: Path, error: OSError) -> UserError:
    fix = "restore the file, or download it again"
    return UserError.at(path, problem=f"cannot be read ({reason(error)})", fix=fix)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def sampled(path: Path) -> str:
    """Return a text with the size of a safetensors file and a hash of its header and of evenly spaced samples. The text
    changes with the tensors and their values, such as after more training. Raises `OSError`.
    """
    size, digest = path.stat().st_size, hashlib.sha256()
    with open_regular(path) as file:
        length = file.read(8)
        digest.update(length + file.read(min(int.from_bytes(length, "little"), size)))
        start = file.tell()
        for sample in range(_SAMPLES + 1):
            file.seek(start + max(0, size - start - _SAMPLE_BYTES) * sample // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size} bytes, {digest.hexdigest()[:12]}"
