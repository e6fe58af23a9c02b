"""A quick fingerprint of a weight file, from samples of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

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
