"""Reading of picture files: the size from the header alone, and the pixels as upright RGB.

Files are not trusted, so only formats are read that Pillow decodes in this process: others start programs (EPS
starts Ghostscript) or have obscure decoders. Pillow refuses truncated files and pictures of too many pixels.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError
from PIL.JpegImagePlugin import JpegImageFile

from megatron_hetero.base.contents import Content
from megatron_hetero.base.errors import UserError, in_short, reason

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Accepted formats, by Pillow's names, regardless of a file's suffix."""

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
_MAX_BEHIND = 1 << 20
"""Maximum bytes of a JPEG between its last pixel and its end marker."""


def picture_size(content: Content, where: str) -> tuple[int, int]:
    """Return (width, height) in pixels after EXIF rotation, read from the header without decoding the picture.

    Raises:
        UserError: the file is missing, not a picture, or has more pixels than Pillow opens.
    """
    with _open(content, where) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in _SWAPS_SIDES else (width, height)


def load_picture(content: Content, where: str) -> Image.Image:
    """Decode a picture, upright and in mode RGB; transparent areas become white.

    Raises:
        UserError: as in `picture_size`, or the picture is truncated or damaged.
    """
    with _open(content, where) as image:
        orientation, file = _orientation(image), image.fp
        rgb = _to_rgb(image)
        _require_end(image.format, file)
        return rgb.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else rgb


def _require_end(kind: str | None, file: Any) -> None:
    """Check properties of a decoded `file` that decoders ignore: the checksums of a PNG, and the end of a JPEG. Raises
    Pillow's exceptions.
    """
    if kind == "PNG":
        with Image.open(file, formats=["PNG"]) as again:
            again.verify()
    elif kind in ("JPEG", "MPO"):
        read = file.tell()  # The decoder has read at least the pixels.
        file.seek(0)
        JpegImageFile(file)  # Reads up to the compressed data, which contains neither marker.
        data = file.read(read - file.tell() + _MAX_BEHIND)
        end = data.find(b"\xff\xd9")
        if end < 0 or data.find(b"\xff\xd8", 0, end) >= 0:
            raise OSError("truncated: it has no end marker")


def image_place(where: str, content: Content) -> str:
    """Return the name of a record's image for messages."""
    return f"{where}: image {content}"


@contextmanager
def _open(content: Content, where: str) -> Iterator[ImageFile.ImageFile]:
    """Open a picture as a context manager that converts exceptions to `UserError`. Pillow's plugins raise nearly every
    built-in exception for damaged files.
    """
    try:
        # Pass the open file, since Pillow would open a file name a second time.
        with content.open() as file, Image.open(file, formats=_known_formats()) as image:
            yield image
    except (UserError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise UserError.at(
            image_place(where, content),
            found=f"too many pixels ({error})",
            expected="a picture that fits in memory",
            fix="downscale the picture, or remove the record",
        ) from error
    except Exception as error:
        raise _unreadable(image_place(where, content), error) from error


def _unreadable(place: str, error: Exception) -> UserError:
    if isinstance(error, OSError) and error.errno is not None:
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG, errno.EISDIR, errno.EINVAL):
            fix = "correct the record's 'image', or `images` in data.registry"
            return UserError.at(place, problem=f"cannot be read ({reason(error)})", fix=fix)
        return UserError.at(
            place,
            problem=f"cannot be read ({reason(error)}); the picture itself may be intact",
            fix="check the permissions, the disk, and the limit of open files (ulimit -n)",
        )
    why = "in no known format" if isinstance(error, UnidentifiedImageError) else in_short(error)
    return UserError.at(
        place,
        found=f"a file that cannot be read ({why})",
        expected=f"an intact {', '.join(_known_formats())}",
        fix="replace or convert the picture, or remove the record",
    )


@lru_cache
def _known_formats() -> tuple[str, ...]:
    """Return the formats of `FORMATS` that the installed Pillow can decode."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8, from the data before the pixels.

    Uses the method of the base class, because the method for PNG decodes the picture to find metadata after the pixels.
    Pillow applies the orientation of TIFF pictures itself.
    """
    if image.format == "TIFF":
        return 1
    return Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert a picture to RGB, over white where it is transparent, as in Qwen's preprocessing: the colour of
    transparent pixels is arbitrary.
    """
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow's own conversion clips 16-bit values at 255, which leaves a white picture.
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("floating-point pixels have no defined range")
    if not image.has_transparency_data:
        return image.convert("RGB")
    return over_white(image.convert("RGBA"))


def over_white(rgba: Image.Image) -> Image.Image:
    """Return an RGBA picture over white, as RGB."""
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
