"""Settings, versions and files of a rank, which all ranks compare before their first collective."""

from __future__ import annotations

import hashlib
import platform as python
from collections.abc import Iterable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megatron_hetero
from megatron_hetero.checkpoint.model_files import hashes
from megatron_hetero.checkpoint.model_sources import ModelSources
from megatron_hetero.checkpoint.record import plain
from megatron_hetero.config.schema import Config, flat_settings, to_yaml
from megatron_hetero.data.mixture import Mixture
from megatron_hetero.distributed.platform import Platform
from megatron_hetero.errors import UserError, os_errors_as, reason
from megatron_hetero.hf.stored_weights import StoredWeights

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
