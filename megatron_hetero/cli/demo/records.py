"""The demo's LLaVA-style records: questions about drawn pictures, one property per question."""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron_hetero.cli.demo.pictures import (
    Pair,
    Scene,
    held_out_pairs,
    random_scene,
    training_pairs,
)

IMAGE = "<image>"
QUESTIONS = {"colour": "What colour is the shape?", "position": "Where is the shape?"}
PLURAL_QUESTIONS = {"colour": "What colour are the shapes?", "position": "Where are the shapes?"}
OPPOSITES = {"left": "right", "right": "left", "top": "bottom", "bottom": "top", "light": "dark", "dark": "light"}

# Of every 40 training samples: 2 show two pictures, 1 shows none.
TWO_PICTURES, NO_PICTURE, CYCLE = 2, 1, 40


@dataclass(frozen=True)
class Sample:
    """One question, its answer, and the scenes to draw for it."""

    kind: str
    question: str
    answer: str
    scenes: tuple[Scene, ...]

    def record(self, name: str) -> dict[str, object]:
        """The LLaVA-style record; its pictures are named after it."""
        question = f"{IMAGE}\n" * len(self.scenes) + self.question
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": self.answer}]
        record: dict[str, object] = {"id": name, "conversations": turns}
        files = self.files(name)
        if files:
            record["image"] = files[0] if len(files) == 1 else files
        return record

    def files(self, name: str) -> list[str]:
        """File names of the pictures, in the order of the placeholders."""
        if len(self.scenes) == 1:
            return [f"{name}.png"]
        return [f"{name}-{i}.png" for i in range(len(self.scenes))]


def training_samples(pictures: int, seed: int) -> list[Sample]:
    """Samples with `pictures` pictures in total, in random order."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    shown = 0
    while shown < pictures:
        sample = _training_sample(len(samples) % CYCLE, pictures - shown, rng)
        samples.append(sample)
        shown += len(sample.scenes)
    rng.shuffle(samples)
    return samples


def _training_sample(turn: int, pictures_left: int, rng: random.Random) -> Sample:
    if turn < NO_PICTURE:
        return text_only(rng)
    if turn < NO_PICTURE + TWO_PICTURES and pictures_left >= 2:
        return about_two(rng)
    return about_one(rng.choice(list(QUESTIONS)), rng.choice(training_pairs()), rng)


def held_out_samples(questions: int, seed: int) -> list[Sample]:
    """Questions about held-out pairs; each block of 2 x pairs questions asks both properties of every pair once."""
    rng = random.Random(seed + 1)
    samples: list[Sample] = []
    while len(samples) < questions:
        block = [about_one(kind, pair, rng) for kind in QUESTIONS for pair in held_out_pairs()]
        rng.shuffle(block)
        samples.extend(block)
    return samples[:questions]


def about_one(kind: str, pair: Pair, rng: random.Random) -> Sample:
    """A question about the shape in one picture."""
    scene = random_scene(pair, rng)
    return Sample(kind, QUESTIONS[kind], _answer(kind, scene), (scene,))


def about_two(rng: random.Random) -> Sample:
    """A question about the property that the shapes in two pictures share."""
    kind = rng.choice(list(PLURAL_QUESTIONS))
    first, second = rng.choice([(a, b) for a in training_pairs() for b in training_pairs() if _agree(kind, a, b)])
    scenes = (random_scene(first, rng), random_scene(second, rng))
    return Sample(f"{kind} of two", PLURAL_QUESTIONS[kind], _answer(kind, scenes[0]), scenes)


def _agree(kind: str, first: Pair, second: Pair) -> bool:
    asked = list(QUESTIONS).index(kind)
    return first[asked] == second[asked] and first != second


def text_only(rng: random.Random) -> Sample:
    """A question without a picture."""
    word = rng.choice(list(OPPOSITES))
    return Sample("text", f"What is the opposite of {word}?", OPPOSITES[word], ())


def _answer(kind: str, scene: Scene) -> str:
    return scene.colour if kind == "colour" else scene.position
