"""Fingerprints of weights: hashes of names, dtypes, shapes and samples of tensors. Only a small sample is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from megatron_hetero.base.errors import UserError, in_short, os_errors_as, reason
from megatron_hetero.base.files import open_regular

_SAMPLES, _SAMPLE_BYTES = 4, 1024
"""Maximum samples of a tensor, and bytes of each. Samples are evenly spaced from the first to the last byte."""
_MAX_SAMPLES = 1 << 12
"""Maximum samples of all tensors together, unless one sample per tensor is more."""
_MAX_HEADER_BYTES = 100_000_000
"""Maximum bytes of the JSON header of a file, as in safetensors."""


class _Stored(NamedTuple):
    """A tensor in a file: its entry in the header, and the range of its bytes."""

    name: str
    entry: str
    path: Path
    start: int
    stop: int


def fingerprint(paths: Sequence[Path]) -> str:
    """Return a SHA-256 of the tensors in safetensors files: of names, dtypes and shapes, and of samples of values.

    It does not depend on names of files, or on how tensors are distributed over files. It changes with a tensor's dtype
    and with the values of any tensor, as after more training: 4 KiB of each are read, or 1 KiB if there are very many.
    Raises `UserError` if a file cannot be read.
    """
    stored = [each for path in paths for each in _tensors(path)]
    count = max(1, min(_SAMPLES, _MAX_SAMPLES // max(1, len(stored))))
    by_file = groupby(stored, lambda each: each.path)
    digests = [digest for path, tensors in by_file for digest in _digests(path, tensors, count)]
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _tensors(path: Path) -> Iterator[_Stored]:
    with os_errors_as(partial(_unreadable, path)), open_regular(path) as file:
        length = min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)
        try:
            header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    start, stop = (8 + length + int(offset) for offset in entry["data_offsets"])
                    yield _Stored(name, f"{name} {entry['dtype']} {entry['shape']}", path, start, stop)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            problem, fix = f"not a safetensors file ({in_short(error)})", "restore the file, or download it again"
            raise UserError.at(path, problem=problem, fix=fix) from None


def _digests(path: Path, stored: Iterable[_Stored], count: int) -> Iterator[bytes]:
    with os_errors_as(partial(_unreadable, path)), open_regular(path) as file:
        for each in sorted(stored, key=lambda one: one.start):
            digest = hashlib.sha256(each.entry.encode())
            last = max(each.start, each.stop - _SAMPLE_BYTES)
            places = [each.start + (last - each.start) * sample // max(1, count - 1) for sample in range(count)]
            for place in dict.fromkeys(places):
                file.seek(place)
                digest.update(file.read(min(_SAMPLE_BYTES, each.stop - place)))
            yield digest.digest()


def _unreadable(path: Path, error: OSError) -> UserError:
    fix = "restore the file, or download it again"
    return UserError.at(path, problem=f"cannot be read ({reason(error)})", fix=fix)
