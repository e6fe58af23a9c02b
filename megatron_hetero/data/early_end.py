"""Whether a picture that Pillow decoded without an error has all its pixels.

Pillow refuses truncated files. If the compressed data itself ends early, however, it leaves the remaining pixels
untouched: black in a PNG, grey in a JPEG. No other accepted format has this problem, except JPEG inside TIFF.

Both checks are exact, and free for a picture whose last pixels are not black or grey.
"""

from __future__ import annotations

import io
import re
import zlib
from math import ceil
from typing import IO

import numpy as np
from PIL import Image, ImageChops

# Bits of a pixel over bits of a sample, by PNG's colour type.
_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# First column and row, and their steps, of the passes of an interlaced PNG (Adam7).
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_BLOCK = 1 << 20
_BAND = 256
# Of a JPEG: what begins a segment or ends the picture, and neither a byte 0xff of data nor a restart.
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")
_START_OF_IMAGE, _END_OF_IMAGE = 0xD8, 0xD9
_MORE_DATA = bytes(range(1, 255)) * 8


def ends_early(image: Image.Image, file: IO[bytes]) -> bool:
    """Whether the data of `file` covers fewer pixels than its header declares. `image`: decoded from it, in its
    original mode and orientation.
    """
    if image.format == "PNG":
        return _is_black(image) and _misses_rows(file)
    if image.format in ("JPEG", "MPO"):
        return _is_grey(image) and _takes_more(image, file)
    return False


def _last_row(image: Image.Image) -> Image.Image:
    return image.crop((0, image.height - 1, image.width, image.height))


def _is_black(image: Image.Image) -> bool:
    # The last rows of an interlaced picture are spread over it.
    return bool(image.info.get("interlace")) or not _last_row(image).tobytes().strip(b"\0")


def _misses_rows(file: IO[bytes]) -> bool:
    """Whether a PNG inflates to less than its pixels take."""
    file.seek(8)
    missing, inflater = 0, zlib.decompressobj()
    while len(head := file.read(8)) == 8:
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind == b"IHDR":
            missing = _inflated_bytes(file.read(length))
        elif kind == b"IDAT":
            missing -= _inflate(file, length, inflater, missing)
        elif kind == b"IEND":
            break
        else:
            file.seek(length, io.SEEK_CUR)
        file.seek(4, io.SEEK_CUR)  # The checksum.
    return missing > 0


def _inflate(file: IO[bytes], length: int, inflater: zlib._Decompress, most: int) -> int:
    """Inflate the next `length` bytes of a file. Returns how many bytes they become, which may stop at `most`."""
    found = 0
    while length and (block := file.read(min(length, _BLOCK))):
        length -= len(block)
        while block and found < most and not inflater.eof:
            found += len(inflater.decompress(block, min(_BLOCK, most - found)))
            block = inflater.unconsumed_tail
    return found


def _inflated_bytes(header: bytes) -> int:
    """What the pixels of a PNG take before compression, from its header: each row of each pass has a byte of its own
    before its pixels.
    """
    width, height = int.from_bytes(header[:4], "big"), int.from_bytes(header[4:8], "big")
    bits = header[8] * _SAMPLES[header[9]]
    passes = _PASSES if header[12] else ((0, 0, 1, 1),)
    sizes = [(ceil((width - x) / dx), ceil((height - y) / dy)) for x, y, dx, dy in passes]
    return sum(rows * (1 + ceil(columns * bits / 8)) for columns, rows in sizes if columns > 0)


def _is_grey(image: Image.Image) -> bool:
    """Whether the last pixels are of the mid-grey that libjpeg gives blocks for which it has no data."""
    width, height = image.size
    ends = np.asarray(image.crop((max(0, width - 8), height - 1, width, height)))
    return bool(((ends >= 126) & (ends <= 129)).all())


def _takes_more(image: Image.Image, file: IO[bytes]) -> bool:
    """Whether a JPEG becomes another picture where more data precedes the marker of its end: a decoder that has all
    pixels reads none of it.
    """
    file.seek(0)
    content = file.read()
    end = _end_of_jpeg(content)
    with Image.open(io.BytesIO(content[:end] + _MORE_DATA + content[end:]), formats=["JPEG"]) as longer:
        longer.load()
        return longer.mode != image.mode or _differ(longer, image)


def _differ(one: Image.Image, other: Image.Image) -> bool:
    """Whether a pixel of two pictures of one size differs, looked at band by band: they may be large."""
    bands = ((0, top, one.width, min(top + _BAND, one.height)) for top in range(0, one.height, _BAND))
    return any(ImageChops.difference(one.crop(band), other.crop(band)).getbbox() is not None for band in bands)


def _end_of_jpeg(content: bytes) -> int:
    """Where the marker of the end of the first picture is."""
    position = 0
    while found := _MARKER.search(content, position):
        kind, position = found[1][0], found.end()
        if kind == _END_OF_IMAGE:
            return found.start()
        if kind != _START_OF_IMAGE:
            position += int.from_bytes(content[position : position + 2], "big")
    return len(content)
