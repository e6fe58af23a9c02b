"""Pictures: their size from the header alone, and their pixels as upright RGB.

Files come from anywhere, so only formats are read that Pillow decodes in this process: others start programs (EPS
starts Ghostscript) or have obscure decoders.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np
from PIL import ExifTags, Image, ImageFile

from megatron_hetero.base.errors import UserError, in_short, reason, truncated

# 2 × PIL's own warning threshold: where PIL itself refuses to open a picture.
MAX_IMAGE_PIXELS = 178_956_970

BAND = 256
"""Rows of a transparent picture that are converted at a time."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Accepted formats, by Pillow's names, regardless of a file's suffix."""

_SEGMENT, _SCAN = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])"), b"\xda"
"""Begins a segment of a JPEG; the kind of segment that compressed data follows."""

_MOST_BEHIND = 1 << 20
"""Bytes of a JPEG between its last pixel and its end marker."""

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPS_SIDES = {5, 6, 7, 8}
_MORE_FILES = "raise the limit of open files (ulimit -n), or lower data.workers"
_NAME = "correct the record's 'image', or `images` in data.registry"
_RIGHTS = "grant this user read access to the file and its folders"
_ADVICE = {
    errno.EMFILE: _MORE_FILES,
    errno.ENFILE: _MORE_FILES,
    errno.EACCES: _RIGHTS,
    errno.ENAMETOOLONG: _NAME,
    errno.EPERM: _RIGHTS,
    errno.ENOMEM: "raise the memory limit (ulimit -v), free memory, or lower data.workers",
    errno.EIO: "check the disk or mount that it is on, and restart",
}
"""What to do about a system error, by number; `EIO` for all others."""
_MOST_OF_A_NAME = 1000
"""Characters."""


def picture_size(path: Path, where: str, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
    """(width, height) in pixels after EXIF rotation, read from the header: nothing is decoded.

    Raises:
        UserError: the file is missing, not a picture, or has more than ``max_pixels`` pixels.
    """
    with _open(path, where, max_pixels) as (image, _):
        width, height = image.size
        return (height, width) if _orientation(image) in _SWAPS_SIDES else (width, height)


def load_picture(path: Path, where: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """The decoded picture, upright and in mode RGB; transparent parts become white.

    Raises:
        UserError: as `picture_size`, and for pictures that are cut off or damaged.
    """
    with _open(path, where, max_pixels) as (image, file):
        orientation = _orientation(image)
        if ImageFile.LOAD_TRUNCATED_IMAGES:
            raise ValueError(
                "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is on, so a truncated image would be padded: leave it off"
            )
        image.load()
        _require_end(image, file)
        rgb = _to_rgb(image)
        if orientation not in _UPRIGHT:
            return rgb
        image.close()  # Large pictures would be in memory three times.
        return rgb.transpose(_UPRIGHT[orientation])


def _require_end(image: Image.Image, file: IO[bytes]) -> None:
    """Check what Pillow's decoders ignore: the checksums of a PNG, and that a JPEG has an end. Raises what they do."""
    if image.format == "PNG":
        with Image.open(file, formats=["PNG"]) as again:
            again.verify()
    elif image.format in ("JPEG", "MPO"):
        end = file.tell()  # The decoder has read at least the pixels.
        file.seek(0)
        if not _jpeg_ends(file.read(end + _MOST_BEHIND)):
            raise OSError("truncated: it has no end marker")


def _jpeg_ends(content: bytes) -> bool:
    """Whether the first picture of a JPEG has an end marker: cameras add data after it, and further pictures."""
    position = 2
    while (found := _SEGMENT.search(content, position)) and found[1] != _SCAN:
        position = found.end() + int.from_bytes(content[found.end() : found.end() + 2], "big")
    # Compressed data has neither of these.
    end = content.find(b"\xff\xd9", found.end()) if found else -1
    return found is not None and end >= 0 and content.find(b"\xff\xd8", found.end(), end) < 0


def image_place(where: str, path: Path) -> str:
    """A record's image as messages name it, truncated: a damaged record's name may be as long as its file."""
    return f"{where}: image {truncated(str(path), _MOST_OF_A_NAME)}"


@contextmanager
def _open(path: Path, where: str, max_pixels: int) -> Iterator[tuple[Image.Image, IO[bytes]]]:
    with _as_user_errors(path, where):
        # Opening a named pipe or a device would block.
        if not path.is_file():
            raise UserError.at(
                image_place(where, path),
                problem="not a file" if path.exists() else "no such file",
                fix=_NAME,
            )
        # Opened here: of a file that it opens itself, Pillow takes the name, to open it once more.
        with path.open("rb") as file, Image.open(file, formats=_known_formats()) as image:
            _check_pixels(image.width, image.height, image_place(where, path), max_pixels)
            yield image, file


@lru_cache
def _known_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow has a decoder for."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@contextmanager
def _as_user_errors(path: Path, where: str) -> Iterator[None]:
    """PIL's plugins raise nearly every built-in exception on damaged files."""
    place = image_place(where, path)
    try:
        yield
    except UserError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError.at(
            place,
            found=f"too many pixels ({error})",
            expected="a picture that fits in memory",
            fix="downscale the picture, or remove the record",
        ) from error
    except (MemoryError, OSError) as error:
        if isinstance(error, MemoryError):
            error = OSError(errno.ENOMEM, "out of memory")
        number = error.errno
        if number is None:  # Of Pillow, for a damaged file.
            raise _damaged(place, error) from error
        raise UserError.at(
            place,
            problem=f"cannot be read ({reason(error)}); the picture itself may be intact",
            fix=_ADVICE.get(number, _ADVICE[errno.EIO]),
        ) from error
    except Exception as error:
        raise _damaged(place, error) from error


def _damaged(place: str, error: Exception) -> UserError:
    return UserError.at(
        place,
        found=f"a file that cannot be read ({in_short(error)})",
        expected=f"an intact {', '.join(_known_formats())}",
        fix="replace or convert the picture, or remove the record",
    )


def _check_pixels(width: int, height: int, place: str, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise UserError.at(
            place,
            found=f"too many pixels ({width} x {height})",
            expected=f"at most {max_pixels} pixels",
            because="decoding more could exhaust memory",
            fix="downscale the picture, or remove the record",
        )


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8, from what precedes the pixels.

    The method of the base class, because the one for PNG decodes the picture to find metadata behind the pixels. TIFF
    pictures turn themselves: their size is the upright one already.
    """
    if image.format == "TIFF":
        return 1
    return Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        # PIL's own conversion clips 16-bit values at 255, which leaves a white picture.
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    if not image.has_transparency_data:
        return image.convert("RGB")
    return _on_white(image)


def _on_white(image: Image.Image) -> Image.Image:
    """Over white, as in Qwen's own preprocessing: the colour under transparent pixels is arbitrary. Band by band: whole
    layers of a large picture would take gigabytes.
    """
    page = Image.new("RGB", image.size)
    for top in range(0, image.height, BAND):
        band = image.crop((0, top, image.width, min(top + BAND, image.height))).convert("RGBA")
        page.paste(Image.alpha_composite(Image.new("RGBA", band.size, "white"), band).convert("RGB"), (0, top))
    return page
