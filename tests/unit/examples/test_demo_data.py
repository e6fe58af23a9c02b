"""The drawn pictures and the questions about them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.demo.records import (
    COLOURS,
    POSITIONS,
    draw,
    held_out_pairs,
    held_out_samples,
    training_pairs,
    training_samples,
)


def records(demo: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (demo / "data" / f"{split}.jsonl").read_text().splitlines()]


def images(record: dict) -> list[str]:
    image = record.get("image", [])
    return [image] if isinstance(image, str) else image


def test_the_pairs_are_divided_and_both_sides_show_every_position():
    assert set(held_out_pairs()) | set(training_pairs()) == {(c, p) for c in COLOURS for p in POSITIONS}
    assert not set(held_out_pairs()) & set(training_pairs())
    assert {p for _, p in held_out_pairs()} == {p for _, p in training_pairs()} == set(POSITIONS)
    assert {c for c, _ in training_pairs()} == set(COLOURS)


def test_training_never_shows_a_held_out_combination():
    shown = {scene.pair for sample in training_samples(2000, seed=0) for scene in sample.scenes}
    asked = {scene.pair for sample in held_out_samples(64, seed=0) for scene in sample.scenes}
    assert shown == set(training_pairs())
    assert asked == set(held_out_pairs())


@pytest.mark.parametrize("questions", [64, 128, 320])
def test_held_out_answers_are_equally_likely_and_at_least_four(questions: int):
    answers: dict[str, Counter[str]] = {}
    for sample in held_out_samples(questions, seed=0):
        answers.setdefault(sample.question, Counter())[sample.answer] += 1
    for counts in answers.values():
        assert len(counts) >= 4
        assert len(set(counts.values())) == 1


def test_training_answers_are_balanced():
    samples = training_samples(4000, seed=0)
    for kind, values in {"colour": COLOURS, "position": POSITIONS}.items():
        counts = Counter(sample.answer for sample in samples if sample.kind == kind)
        assert set(counts) == set(values)
        assert max(counts.values()) < 1.25 * min(counts.values()) + 40


def test_training_has_so_many_pictures_as_asked_for():
    for pictures in (1, 2, 7, 100):
        assert sum(len(sample.scenes) for sample in training_samples(pictures, seed=0)) == pictures


def test_samples_show_one_two_or_no_picture(demo: Path):
    train = records(demo, "train")
    assert {len(images(record)) for record in train} == {0, 1, 2}
    assert {len(images(record)) for record in records(demo, "heldout")} == {1}
    for record in train:
        assert record["conversations"][0]["value"].count("<image>") == len(images(record))


def test_every_picture_is_there_once_and_sizes_vary(demo: Path):
    named = [name for split in ("train", "heldout") for record in records(demo, split) for name in images(record)]
    files = list((demo / "data" / "images").iterdir())
    assert sorted(named) == sorted(file.name for file in files)
    sizes = set()
    for file in files:
        with Image.open(file) as picture:
            sizes.add(picture.size)
    assert len(sizes) >= 6
    patches = {width * height // 14**2 for width, height in sizes}
    assert min(patches) == 16 and max(patches) == 64
    assert all(side % 28 == 0 for size in sizes for side in size)


def test_the_shape_has_its_colour_at_its_position():
    for sample in held_out_samples(64, seed=5):
        (scene,) = sample.scenes
        pixels = np.asarray(draw(scene))
        rows, columns = np.nonzero((pixels == COLOURS[scene.colour]).all(axis=-1))
        x, y = POSITIONS[scene.position]
        assert abs((columns.mean() + 0.5) / pixels.shape[1] - x) < 0.13
        assert abs((rows.mean() + 0.5) / pixels.shape[0] - y) < 0.13
