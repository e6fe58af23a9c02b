"""LLaVA-style records of the demo: questions about drawn pictures, one property per question.

A scene has a colour and a position. One (colour, position) pair in four is held out: training shows every colour and
every position, but never these pairs. A model that answers questions about them has learned the two properties, not the
pictures.

    position       red  green  blue  yellow  ...      x = held out: (colour - position) % 4 == 0
    top left        x                        ...
    top right             x                  ...
    bottom left                  x           ...
    bottom right                       x     ...
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 25, 30),
    "green": (25, 150, 40),
    "blue": (30, 60, 225),
    "yellow": (245, 225, 25),
    "purple": (150, 30, 170),
    "orange": (255, 135, 0),
    "black": (10, 10, 10),
    "cyan": (0, 205, 225),
}
# The centre of the shape as a fraction of (width, height).
POSITIONS: dict[str, tuple[float, float]] = {
    "top left": (0.25, 0.25),
    "top right": (0.75, 0.25),
    "bottom left": (0.25, 0.75),
    "bottom right": (0.75, 0.75),
}
SHAPES = ("disc", "square", "triangle", "ring")
# Multiples of the merged patch (28 pixels): 16 to 64 patches of 14 pixels, flat, tall and square; one is
# longer than an attention window (112 pixels).
SIZES = ((56, 56), (84, 56), (56, 84), (84, 84), (112, 56), (56, 112), (112, 84), (84, 112), (168, 56), (112, 112))

Pair = tuple[str, str]


@dataclass(frozen=True)
class Scene:
    """The content of one picture."""

    colour: str
    position: str
    shape: str
    size: tuple[int, int]
    brightness: int
    radius: float
    shift: tuple[float, float]

    @property
    def pair(self) -> Pair:
        """The (colour, position) pair, which may be held out."""
        return self.colour, self.position


def held_out_pairs() -> tuple[Pair, ...]:
    """The pairs that training never shows: every position equally often, every colour once."""
    colours, positions = list(COLOURS), list(POSITIONS)
    return tuple((colour, positions[i % len(positions)]) for i, colour in enumerate(colours))


def training_pairs() -> tuple[Pair, ...]:
    """All pairs except the held-out ones."""
    held_out = set(held_out_pairs())
    return tuple((c, p) for c in COLOURS for p in POSITIONS if (c, p) not in held_out)


def random_scene(pair: Pair, rng: random.Random) -> Scene:
    """A scene with the given pair, random otherwise."""
    return Scene(
        colour=pair[0],
        position=pair[1],
        shape=rng.choice(SHAPES),
        size=rng.choice(SIZES),
        brightness=rng.randrange(185, 256),
        radius=rng.uniform(0.17, 0.22),
        shift=(rng.uniform(-0.05, 0.05), rng.uniform(-0.05, 0.05)),
    )


def draw(scene: Scene) -> Image.Image:
    """The picture of a scene."""
    width, height = scene.size
    picture = Image.new("RGB", scene.size, (scene.brightness,) * 3)
    x, y = POSITIONS[scene.position]
    centre = ((x + scene.shift[0]) * width, (y + scene.shift[1]) * height)
    # Elongated pictures get a larger shape, limited by the short side; a shape is never smaller than a patch.
    radius = scene.radius * min(max(width, height) / 1.5, min(width, height))
    draw_shape(ImageDraw.Draw(picture), scene.shape, centre, max(radius, 9.0), COLOURS[scene.colour])
    return picture


def draw_shape(
    canvas: ImageDraw.ImageDraw, shape: str, centre: tuple[float, float], radius: float, colour: tuple[int, int, int]
) -> None:
    """Draw one of `SHAPES`. Lengths in pixels."""
    x, y = centre
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "disc":
        canvas.ellipse(box, fill=colour)
    elif shape == "square":
        canvas.rectangle(box, fill=colour)
    elif shape == "triangle":
        canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    else:
        canvas.ellipse(box, outline=colour, width=max(round(radius / 2), 3))


NAMES = dict(zip(COLOURS, [*list(COLOURS)[3:], *list(COLOURS)[:3]], strict=True))
"""Other names of colours: what a trained model does not know, and adapters teach it."""

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

    def save(self, folder: Path, name: str) -> None:
        """Draw the pictures."""
        for file, scene in zip(self.files(name), self.scenes, strict=True):
            draw(scene).save(folder / file)

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


def renamed(samples: list[Sample]) -> list[Sample]:
    """The same samples with the other names of colours."""
    return [replace(sample, answer=NAMES.get(sample.answer, sample.answer)) for sample in samples]


def text_only(rng: random.Random) -> Sample:
    """A question without a picture."""
    word = rng.choice(list(OPPOSITES))
    return Sample("text", f"What is the opposite of {word}?", OPPOSITES[word], ())


def _answer(kind: str, scene: Scene) -> str:
    return scene.colour if kind == "colour" else scene.position
