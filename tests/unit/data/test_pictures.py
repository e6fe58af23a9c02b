"""Pictures of every mode and orientation, and a clear message for each that cannot be used."""

from __future__ import annotations

import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from megatron_hetero.data.pictures import load_picture, picture_size
from megatron_hetero.errors import UserError

WHERE = "train.jsonl:7"


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
    loaded = load_picture(path, WHERE)
    assert loaded.mode == "RGB" and loaded.size == picture_size(path, WHERE) == expected.size
    assert loaded.size == ((20, 30) if orientation >= 5 else (30, 20))
    np.testing.assert_array_equal(np.asarray(loaded), np.asarray(expected))


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff", "gif", "bmp"])
def test_sizes_come_from_the_header(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (30, 20)).save(path)

    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    assert picture_size(path, WHERE) == (30, 20)


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
    loaded = load_picture(path, WHERE)
    expected = 40_000 >> 8 if mode.startswith("I") else 255 if mode == "1" else 200
    assert loaded.mode == "RGB" and loaded.size == (30, 20)
    assert abs(np.asarray(loaded).mean() - expected) < (60 if mode == "1" else 3)


def test_transparency_becomes_white(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "a.png")
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    palette.save(tmp_path / "b.png", transparency=0)
    for name in ("a.png", "b.png"):
        assert np.asarray(load_picture(tmp_path / name, WHERE)).min() == 255


def assert_refused(path: Path, *parts: str, **options: int) -> None:
    with pytest.raises(UserError, match=f"^{WHERE}: image {re.escape(str(path))}: found ") as caught:
        load_picture(path, WHERE, **options)
    for part in parts:
        assert part in str(caught.value)


def test_missing_files_are_named_and_nothing_waits_on_a_pipe(tmp_path: Path) -> None:
    assert_refused(tmp_path / "a.png", "no such file", "Correct the record's 'image'")
    assert_refused(tmp_path, "not a file")
    os.mkfifo(tmp_path / "pipe")
    assert_refused(tmp_path / "pipe", "not a file")


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a"])
def test_files_that_are_no_pictures_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    assert_refused(path, "cannot be read", "Replace or convert the picture")


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_truncated_pictures_are_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.effect_noise((200, 200), 50).save(path)
    path.write_bytes(path.read_bytes()[:-2000])
    assert picture_size(path, WHERE) == (200, 200)
    assert_refused(path, "cannot be read", "truncated")


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


@pytest.mark.parametrize("side", [10_000, 100_000])
def test_huge_pictures_are_refused_before_decoding(tmp_path: Path, side: int) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png_header(side, side))
    assert_refused(path, "too many pixels", max_pixels=50_000_000)
    with pytest.raises(UserError, match="too many pixels"):
        picture_size(path, WHERE, 50_000_000)


def test_the_limit_is_the_callers(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("L", (30, 20)).save(path)
    assert picture_size(path, WHERE, 600) == (30, 20)
    assert_refused(path, "30 x 20", "at most 599 pixels", max_pixels=599)


@settings(deadline=None, max_examples=150)
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
        assert load_picture(path, WHERE, 10**6).mode == "RGB"
    except UserError as error:
        assert str(error).startswith(f"{WHERE}: image {path}")
