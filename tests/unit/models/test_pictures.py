"""Pictures of every mode and orientation, and a clear message for each that cannot be used."""

from __future__ import annotations

import errno
import io
import os
import re
import struct
import sys
import tracemalloc
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from megatron_hetero.base import contents
from megatron_hetero.base.contents import StoredFile
from megatron_hetero.base.errors import UserError
from megatron_hetero.models.items.image_files import FORMATS, load_picture, picture_size

WHERE = "train.jsonl:7"


def stored(path: Path) -> StoredFile:
    return StoredFile(str(path))


def exif(orientation: int) -> Image.Exif:
    data = Image.Exif()
    data[0x0112] = orientation
    return data


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_to_size_and_pixels(tmp_path: Path, suffix: str, orientation: int) -> None:
    path = tmp_path / f"a.{suffix}"
    pixels = np.arange(20 * 30 * 3, dtype=np.uint8).reshape(20, 30, 3)
    options: dict[str, Any] = {"tiffinfo": {0x0112: orientation}} if suffix == "tiff" else {"exif": exif(orientation)}
    Image.fromarray(pixels).save(path, **options)
    with Image.open(path) as opened:
        expected = ImageOps.exif_transpose(opened).convert("RGB")
    loaded = load_picture(stored(path), WHERE)
    assert loaded.mode == "RGB" and loaded.size == picture_size(stored(path), WHERE) == expected.size
    assert loaded.size == ((20, 30) if orientation >= 5 else (30, 20))
    np.testing.assert_array_equal(np.asarray(loaded), np.asarray(expected))


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff", "gif", "bmp"])
def test_sizes_come_from_the_header(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (30, 20)).save(path)

    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    assert picture_size(stored(path), WHERE) == (30, 20)


# Of TIFFs in YCbCr that are not compressed.
READS_YCBCR = pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="Pillow reads none before 13")
MODES = ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", pytest.param("YCbCr", marks=READS_YCBCR), "I", "I;16"]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.tiff" if mode in ("CMYK", "YCbCr", "I") else "a.png")
    if mode.startswith("I"):
        dtype = np.uint16 if mode == "I;16" else np.int32
        source = Image.fromarray(np.full((20, 30), 40_000, dtype=dtype))
    else:
        source = Image.new("RGB", (30, 20), (200, 200, 200)).convert(mode)
    source.save(path)
    loaded = load_picture(stored(path), WHERE)
    expected = 40_000 >> 8 if mode.startswith("I") else 255 if mode == "1" else 200
    assert loaded.mode == "RGB" and loaded.size == (30, 20)
    assert abs(np.asarray(loaded).mean() - expected) < (60 if mode == "1" else 3)


def test_transparency_becomes_white(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "a.png")
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.save(tmp_path / "b.png", transparency=0)
    for name in ("a.png", "b.png"):
        assert np.asarray(load_picture(stored(tmp_path / name), WHERE)).min() == 255


def assert_refused(path: Path, *parts: str) -> None:
    with pytest.raises(UserError, match=f"^{WHERE}: image {re.escape(str(path))}: ") as caught:
        load_picture(stored(path), WHERE)
    for part in parts:
        assert part in str(caught.value)


def test_missing_files_are_named_and_nothing_waits_on_a_pipe(tmp_path: Path) -> None:
    assert_refused(tmp_path / "a.png", "no such file", "Correct the record's 'image'")
    assert_refused(tmp_path, "is a directory")
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tmp_path / "pipe", "not a regular file")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a"])
def test_files_that_are_no_pictures_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    assert_refused(path, "cannot be read", "Replace or convert")


def test_floating_point_pictures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(path)
    assert_refused(path, "floating-point")


def png_header(width: int, height: int) -> bytes:
    """A PNG without pixels: what a decompression bomb shows before it is decoded."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [14_000, 100_000])
def test_huge_pictures_are_refused_before_decoding(tmp_path: Path, side: int) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png_header(side, side))
    assert_refused(path, "too many pixels")
    with pytest.raises(UserError, match="too many pixels"):
        picture_size(stored(path), WHERE)


@settings(max_examples=150)
@given(data=st.data(), suffix=st.sampled_from(["png", "jpg", "gif", "tiff", "webp"]))
def test_damage_gives_a_user_error_or_a_picture(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged.{suffix}"
    Image.linear_gradient("L").resize((20, 10)).convert("RGB").save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        assert load_picture(stored(path), WHERE).mode == "RGB"
    except UserError as error:
        assert str(error).startswith(f"{WHERE}: image {path}")


# ------------------------------------------------------------------------------------- other programs and files

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 8 8
%%EndComments
showpage
%%EOF
"""
_noted: list[list[str]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], int):  # A descriptor, whose file was noted when it was opened.
        return
    if _noted and (event == "open" or event.partition(".")[0] in ("subprocess", "os", "socket", "ctypes")):
        _noted[-1].append(f"{event} {arguments[0] if event == 'open' else arguments}")


@contextmanager
def noted() -> Iterator[list[str]]:
    """What is opened, and which processes are started, inside."""
    if not getattr(sys, "_noting_pictures", False):  # Hooks cannot be taken away.
        sys.addaudithook(_note)
        sys._noting_pictures = True  # pyright: ignore[reportAttributeAccessIssue]
    _noted.append([])
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_no_program_is_started_for_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would start Ghostscript for a file that is EPS, whatever its name."""
    marker = tmp_path / "started"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {marker}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    path = tmp_path / "a.png"
    path.write_bytes(EPS)
    assert_refused(path, "cannot be read", "an intact JPEG, PNG")  # Once before, which reads all of Pillow's modules.
    with noted() as events:
        assert_refused(path, "cannot be read")
        with pytest.raises(UserError):
            picture_size(stored(path), WHERE)
    assert not marker.exists() and events == [f"open {path}"] * 2


def test_nothing_but_the_picture_is_opened(tmp_path: Path) -> None:
    Image.init()
    for kind in FORMATS:
        if kind not in Image.SAVE:
            continue
        path = tmp_path / "a.any"
        path.write_bytes(encoded(Image.new("RGB", (30, 20), (9, 99, 199)), kind))
        load_picture(stored(path), WHERE)
        with noted() as events:
            assert picture_size(stored(path), WHERE) == load_picture(stored(path), WHERE).size == (30, 20)
        assert events == [f"open {path}"] * 2, kind


def test_other_formats_are_refused(tmp_path: Path) -> None:
    Image.init()
    others = [kind for kind in Image.SAVE if kind not in (*FORMATS, "MPO", "DIB", "GIF", "PDF")]
    assert {"EPS", "ICO", "TGA"} <= set(others)
    for kind in others:
        for mode in ("RGB", "L", "1"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Of Pillow, about formats that it will not write for ever.
                try:
                    content = encoded(Image.new(mode, (32, 32)), kind)
                except (OSError, ValueError, KeyError):
                    continue
            (tmp_path / "a.png").write_bytes(content)
            assert_refused(tmp_path / "a.png", "cannot be read", "AVIF")


NOISE = np.random.default_rng(0).integers(1, 255, (60, 80, 3), dtype=np.uint8)


OPTIONS = [{}, {"progressive": True}, {"restart_marker_blocks": 1}, {"subsampling": 0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_pictures_with_an_end_are_read(tmp_path: Path, mode: str, options: dict[str, Any]) -> None:
    for size in ((1, 1), (8, 8), (17, 16), (33, 21)):
        for value in (0, 128):
            image = Image.fromarray(NOISE).convert(mode).resize((size[0], 2 * size[1]))
            image.paste((value,) * len(image.getbands()) if mode != "L" else value, (0, size[1], *image.size))
            for suffix, kind in (("jpg", "JPEG"), ("png", "PNG"), ("mpo", "MPO")):
                if kind != "JPEG" and mode == "CMYK":
                    continue
                more: dict[str, Any] = {"save_all": True, "append_images": [image]} if kind == "MPO" else {}
                path = tmp_path / f"a.{suffix}"
                path.write_bytes(encoded(image, kind, **(options if kind != "PNG" else {}), **more))
                assert load_picture(stored(path), WHERE).size == image.size


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "PPM", "WEBP", "JPEG2000", "AVIF"])
def test_pictures_that_are_cut_off_are_refused(tmp_path: Path, kind: str) -> None:
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {kind}")
    content = encoded(Image.fromarray(NOISE), kind)
    path = tmp_path / "a.png"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of Pillow, about tags of a TIFF.
        for share in (0.1, 1 / 3, 0.5, 0.9):
            path.write_bytes(content[: int(share * len(content))])
            assert_refused(path, "cannot be read")
        path.write_bytes(content)
        assert load_picture(stored(path), WHERE).size == (80, 60)


def large_jpeg(options: dict[str, Any], kind: str = "JPEG") -> bytes:
    """A JPEG that takes several pages of a disk, with a thumbnail in its EXIF data, which has an end marker."""
    thumbnail = encoded(Image.fromarray(NOISE[:8, :8]), "JPEG")
    metadata = exif(1).tobytes() + thumbnail
    image = Image.fromarray(np.tile(NOISE, (4, 3, 1)))
    more: dict[str, Any] = {"save_all": True, "append_images": [image]} if kind == "MPO" else {}
    content = encoded(image, kind, exif=metadata, **options, **more)
    assert content.index(thumbnail) < len(content) // 4 and len(content) > 1 << 14
    return content


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
def test_a_jpeg_whose_end_was_never_written_is_refused(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """Files have their size before their bytes, where machines crash and disks fill up."""
    content, path = large_jpeg(options, kind), tmp_path / "a.jpg"
    first = content.index(b"\xff\xd9", len(content) // 4 if kind == "JPEG" else 1 << 12)
    for written in (first // 2, first - (1 << 12), first - 64, first):
        path.write_bytes(content[:written] + bytes(len(content) - written))
        assert_refused(path, "cannot be read")
    if kind == "MPO":  # The second picture is there, a part of the first is not.
        path.write_bytes(content[: first // 2] + bytes(first + 2 - first // 2) + content[first + 2 :])
        assert_refused(path, "cannot be read")


@pytest.mark.parametrize("behind", [b"", bytes(1 << 16), b"\xff\xd8 of a camera", b"\n" * 3], ids=len)
def test_what_follows_the_end_of_a_jpeg_does_not_matter(tmp_path: Path, behind: bytes) -> None:
    content, path = large_jpeg({}), tmp_path / "a.jpg"
    for padded in (content, content[:-2] + bytes(100) + content[-2:]):
        path.write_bytes(padded + behind)
        assert load_picture(stored(path), WHERE).size == (240, 240)


def test_what_follows_a_jpeg_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(large_jpeg({}))
    os.truncate(path, 2**30)
    tracemalloc.start()
    try:
        assert load_picture(stored(path), WHERE).size == (240, 240)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("lost", [64, 1 << 12, 1 << 14])
def test_a_png_whose_end_was_never_written_is_refused(tmp_path: Path, lost: int) -> None:
    content, path = encoded(Image.fromarray(np.tile(NOISE, (4, 3, 1))), "PNG", compress_level=0), tmp_path / "a.png"
    for at in (0, 1 << 12):  # At its end, and within.
        end = len(content) - at
        path.write_bytes(content[: end - lost] + bytes(lost) + content[end:])
        assert_refused(path, "cannot be read")


def test_a_name_too_long_for_the_file_system_is_quoted_in_part(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="more characters: .*file name too long.*'image'") as refused:
        picture_size(stored(tmp_path / ("x" * 5000)), WHERE)
    assert len(str(refused.value)) < 2500


@pytest.mark.parametrize(
    "error, fix",
    [(OSError(errno.EMFILE, "Too many open files"), "ulimit -n"), (OSError(errno.EIO, "Input/output error"), "disk"),
     (PermissionError(errno.EACCES, "No access"), "permissions")],
)  # fmt: skip
def test_errors_of_the_system_are_no_fault_of_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, fix: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(contents, "open_regular", fail)
    with pytest.raises(UserError, match=f"cannot be read .*{fix}") as refused:
        picture_size(stored(tmp_path / "a.png"), WHERE)
    assert "replace" not in str(refused.value)
