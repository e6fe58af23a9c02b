"""Bad input ends on every rank with the same message, which names the file or field and says what to do."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.functional.refusals import flags, refusal, unreadable_image
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.ranks import on_ranks
from tests.support.videos import noise, write_video

Damage = Callable[[Path], list[str]]
"""Damages a copy of a good folder; returns more flags."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_model(folder / "model", ModelChoice(vision_layers=2, text_layers=1))
    write_data(folder, 8)
    return folder


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "run")
    return tmp_path / "run"


# ---------------------------------------------------------------------------------------------------------
# Damages
# ---------------------------------------------------------------------------------------------------------


def missing_folder(folder: Path) -> list[str]:
    shutil.rmtree(folder / "model")
    return []


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> list[str]:
        path = folder / "model/model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})
        return []

    return damage


def with_video(change: Callable[[bytes], bytes] | None) -> Damage:
    """Let a record show a video, of which `change` damages the file; None: there is none."""

    def damage(folder: Path) -> list[str]:
        name = "film.mp4" if change is None else "film.mkv"
        if change is not None:
            path = write_video(folder / "images" / name, noise(40, (64, 48), 0), rate=4)
            path.write_bytes(change(path.read_bytes()))

        def show(record: dict) -> None:
            record.update(video=name)
            record["conversations"][0]["value"] += "<video>"

        return change_line(3, show)(folder)

    return damage


def slow_video(folder: Path) -> list[str]:
    return [*with_video(lambda content: content)(folder), "--data.video.timeout_s", "1e-9"]


def truncated(folder: Path) -> list[str]:
    path = folder / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return []


def change_line(number: int, change: Callable[[dict], object]) -> Damage:
    def damage(folder: Path) -> list[str]:
        path = folder / "data.jsonl"
        lines = path.read_text().splitlines()
        record = json.loads(lines[number - 1])
        change(record)
        lines[number - 1] = json.dumps(record)
        path.write_text("\n".join(lines) + "\n")
        return []

    return damage


def broken_json(folder: Path) -> list[str]:
    path = folder / "data.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = lines[4][:-7]
    path.write_text("\n".join(lines) + "\n")
    return []


def missing_image(folder: Path) -> list[str]:
    (folder / "images/0_0.png").unlink()
    return []


def huge_image(folder: Path) -> list[str]:
    """A valid header of 100,000 x 100,000 pixels in a file of a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    (folder / "images/0_0.png").write_bytes(image)
    return []


def empty_data(folder: Path) -> list[str]:
    (folder / "data.jsonl").write_text("")
    return []


def nan_weights(weights: dict[str, torch.Tensor]) -> None:
    weights["visual.merger.mlp.2.bias"][0] = float("nan")


def nan_of_one_rank(weights: dict[str, torch.Tensor]) -> None:
    """In the last rows of the head, which only the last rank of `tp` reads."""
    weights["lm_head.weight"][-1, :2] = float("inf")


def also(*more: str) -> Damage:
    return lambda folder: list(more)


CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "missing folder": (missing_folder, ("model.hf_path", "/run/model", "config.json")),
    "missing weight": (
        change_weights(lambda w: w.pop("model.norm.weight")),
        ("/run/model", "1 missing", "model.norm.weight"),
    ),
    "extra weight": (
        change_weights(lambda w: w.update({"visual.extra.weight": torch.zeros(3)})),
        ("/run/model", "1 unexpected", "visual.extra.weight"),
    ),
    "misshaped weight": (
        change_weights(lambda w: w.update({"model.norm.weight": torch.zeros(5)})),
        ("/run/model", "1 of another shape", "model.norm.weight is (5,), not (48,)"),
    ),
    "truncated safetensors": (truncated, ("model.safetensors", "truncated", "again")),
    "broken JSON": (broken_json, ("data.jsonl:5",)),
    "missing image": (missing_image, ("data.jsonl:1", "0_0.png")),
    "unreadable image": (unreadable_image, ("data.jsonl:5", "4_0.png")),
    "one <image> too many": (
        change_line(2, lambda r: r["conversations"][0].update(value="<image><image><image> what?")),
        ("data.jsonl:2", "<image>"),
    ),
    "path that leaves the folder": (
        change_line(1, lambda r: r.update(image="../data.jsonl")),
        ("data.jsonl:1", "../data.jsonl"),
    ),
    "huge image": (huge_image, ("data.jsonl:1", "0_0.png", "100000")),
    "empty data set": (empty_data, ("data.jsonl",)),
    "video that is not shown": (change_line(3, lambda r: r.update(video="film.mp4")), ("data.jsonl:3", "<video>")),
    "missing video": (with_video(None), ("data.jsonl:3", "film.mp4", "no such file")),
    "video that takes too long": (slow_video, ("data.jsonl:3", "film.mkv", "not read within", "data.video.timeout_s")),
    "truncated video": (
        with_video(lambda content: content[: len(content) // 2]),
        ("data.jsonl:3", "film.mkv", "truncated"),
    ),
    "batch not divisible": (
        also("--text-parallel", "dp:2", "--train.global_batch_size", "6"),
        ("train.global_batch_size", "multiple of 4", "--train.global_batch_size 8"),
    ),
    "bad layout": (also("--vision-parallel", "sp:3"), ("--vision-parallel", "Try `--vision-parallel sp:2`")),
    "layout of a later version": (also("--text-parallel", "pp:2"), ("--text-parallel", "pp:2", "Try `--text-par")),
    "unknown field": (also("--train.itres", "3"), ("--train.itres", "did you mean", "iters")),
    "wrong type": (also("--train.iters", "many"), ("train.iters", "many", "integer")),
    "too long a sample": (also("--data.max_seq_length", "8"), ("data.jsonl:1", "max_seq_length")),
    "NaN": (
        change_weights(nan_weights),
        ("/run/model/model.safetensors: tensor", "merger.mlp.2.bias: found values"),
    ),
    "NaN in the share of one rank": (
        change_weights(nan_of_one_rank),
        ("tensor lm_head.weight: found values",),
    ),
    "random projector for ever": (
        also("--model.freeze", "projector", "--model.fresh_projector", "true"),
        ("model.freeze", "projector is frozen", "random weights"),
    ),
    "random projector in part": (
        also("--model.freeze", "visual.merger.mlp.0.*", "--model.fresh_projector", "true"),
        ("model.freeze", "projector (visual.merger.mlp.0.", "is frozen", "random weights"),
    ),
    "Transformer Engine without CUDA": (also("--model.backend", "te"), ("model.backend", "--model.backend torch")),
}


@pytest.fixture
def damaged(name: str, copy: Path) -> list[str]:
    """The flags of a run on a damaged copy."""
    damage, _ = CASES[name]
    return flags(copy, *damage(copy))


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, timeout_s=30)
def test_bad_input(name: str, damaged: list[str]) -> None:
    message = refusal(damaged)
    assert message is not None, "the run trained to its end"
    for part in CASES[name][1]:
        assert part in message


@on_ranks(2)
def test_good_input_trains(good: Path) -> None:
    assert refusal(flags(good)) is None
