"""The inputs of a run, opened and checked on every rank before the first process group is made."""

from __future__ import annotations

import hashlib
import platform as python
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch.distributed as dist

import megatron_hetero
from megatron_hetero.base.errors import VISION, UserError, os_errors_as, reason
from megatron_hetero.checkpoint.record import plain
from megatron_hetero.checkpoint.sources import ModelSources, hashes
from megatron_hetero.config.schema import Config, flat_settings, to_yaml
from megatron_hetero.data.mixture import Mixture, open_held_out, open_mixture
from megatron_hetero.data.processor import Processor, open_processor
from megatron_hetero.data.tokenizer import export_changes
from megatron_hetero.groups.collective import Facts, Working, on_every, require_same
from megatron_hetero.groups.platform import Platform
from megatron_hetero.groups.watchdog import Watchdog
from megatron_hetero.hf.folders import Companions, require_writable
from megatron_hetero.hf.weights import StoredWeights
from megatron_hetero.job import JobSpec
from megatron_hetero.layout.grammar import format_ranks
from megatron_hetero.models.weights import companions_of, open_encoders, open_modules

REPORTER = 0
"""The rank that prints, writes metrics and exports."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of a rank: weights by module, data, and on the rank that exports the files exported with the model.
    Held-out data sets too, so that their errors are reported before training.
    """

    weights: Mapping[str, StoredWeights]
    processor: Processor
    mixture: Mixture
    held_out: Mapping[str, Mixture]
    companions: Mapping[str, Companions]


def open_together(config: Config, platform: Platform, watchdog: Watchdog) -> tuple[JobSpec, Inputs]:
    """The job and this rank's inputs, once all ranks have opened the same ones. Raises `UserError` on every rank."""
    opened: list[tuple[JobSpec, Inputs]] = []
    files: dict[str, str] = {}

    def open_own() -> str:
        try:
            job = JobSpec.of(config, dist.get_world_size())
            inputs = _open(job)
            opened.append((job, inputs))
            mixtures = [inputs.mixture, *inputs.held_out.values()]
            files.update(files_of_model(config, inputs.weights.values()) | data_sets(mixtures))
        except UserError as error:
            return str(error)
        return ""

    with watchdog.waiting(lambda: "the comparison of settings and files, with all other ranks,"):
        _require_same(lambda: settings_and_versions(config, platform), watchdog.working)
        problems = on_every(dist.group.WORLD, open_own, watchdog.working)
        if problem := next(filter(None, problems), ""):
            ranks = [rank for rank, each in enumerate(problems) if each == problem]
            raise UserError(problem if len(ranks) == len(problems) else f"on rank {format_ranks(ranks)}: {problem}")
        _require_same(lambda: files)
    return opened[0]


def _require_same(state: Callable[[], Facts], working: Working = nullcontext) -> None:
    because = "each rank plans the collectives from its own copy (only log.dir may differ)"
    fix = "start all ranks with one command, configuration and environment, on the same files"
    require_same(dist.group.WORLD, "ranks of one run", state, fix, because, working)


def _open(job: JobSpec) -> Inputs:
    """This rank's inputs, checked. Raises `UserError`."""
    config, weights = job.config, _open_weights(job)
    processor = open_processor(config)
    return Inputs(
        weights,
        processor,
        open_mixture(config, processor.fields),
        open_held_out(config, processor.fields),
        _ready_to_export(job) if dist.get_rank() == REPORTER else {},
    )


def _open_weights(job: JobSpec) -> dict[str, StoredWeights]:
    """The stored weights of each module, opened and checked. Raises `UserError`."""
    further = job.config.model.encoder_folders
    return open_modules(job.folders, job.shapes, job.config.train.seed) | open_encoders(
        further, job.shapes, job.config.train.seed
    )


def _ready_to_export(job: JobSpec) -> dict[str, Companions]:
    """The files exported with the model, after checking that the export's folder can be written. Raises `UserError`."""
    config = job.config
    if config.export.hf_dir is not None:
        require_writable(config.export.hf_dir)
    return companions_of({VISION: config.model.hf_path, **config.model.encoder_folders}, export_changes(job.folders))


OWN = ("log.dir",)
"""Settings that may differ between ranks: nobody else reads what a rank writes there."""
PACKAGES = ("torch", "transformers", "tokenizers", "megatron-core", "safetensors", "numpy", "pillow")
"""Packages that affect the numbers of a run, or the data that its ranks exchange."""


def settings_and_versions(config: Config, platform: Platform) -> dict[str, str]:
    """The facts known before any file is opened."""
    settings = {name: value for name, value in flat_settings(config).items() if name not in OWN}
    return settings | {
        "version of python": python.python_version(),
        **{f"version of {name}": _version(name) for name in PACKAGES},
        "source of megatron_hetero": _source(),
        "kind of device": platform.device.type,
    }


def files_of_model(config: Config, weights: Iterable[StoredWeights]) -> dict[str, str]:
    """The facts of the model's folders: hashes of their files, for weights of size, header and samples. Raises
    `UserError` if one cannot be read.
    """
    sources = ModelSources.recorded(plain(to_yaml(config)))
    found = {
        f"{sources.folders[setting] / name} ({setting})": f"SHA-256 {content[:12]}"
        for setting, files in hashes(sources).items()
        for name, content in files.items()
    }
    return found | {str(path): _fingerprint(path) for opened in weights for path in opened.files}


def data_sets(mixtures: Iterable[Mixture]) -> dict[str, str]:
    """The facts of data sets: their records, regardless of the files' formatting."""
    parts = (data for mixture in mixtures for data, _ in mixture.parts)
    return {f"{data.path} (data set {data.name})": f"{len(data)} records, {data.digest[:12]}" for data in parts}


def _fingerprint(path: Path) -> str:
    with os_errors_as(partial(_unreadable, path)):
        return fingerprint(path)


def _unreadable(path: Path, error: OSError) -> UserError:
    fix = "restore the file, or download it again"
    return UserError.at(path, problem=f"cannot be read ({reason(error)})", fix=fix)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


@cache
def _source() -> str:
    """A hash of this package's own code, since many commits share a version."""
    folder, digest = Path(megatron_hetero.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return f"SHA-256 {digest.hexdigest()[:12]}"


_SAMPLES, _SAMPLE_BYTES = 8, 4096
_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of safetensors itself."""


def fingerprint(path: Path) -> str:
    """Size and a hash of the header and of evenly spaced samples of a safetensors file. It changes with the tensors and
    with their values, as after more training. Raises `OSError`.
    """
    size, digest = path.stat().st_size, hashlib.sha256()
    with open(path, "rb") as file:
        length = file.read(8)
        start = 8 + min(int.from_bytes(length, "little"), _LONGEST_HEADER)
        digest.update(length + file.read(start - 8))
        for sample in range(_SAMPLES + 1):
            file.seek(start + max(0, size - start - _SAMPLE_BYTES) * sample // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return f"{size} bytes, {digest.hexdigest()[:12]}"
