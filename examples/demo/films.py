"""The demo's data with videos: questions whose answers need time.

A film shows a shape that moves to the left or to the right, and changes its colour half-way. One in four pairs of
colours is held out. A film that is played backwards has the other answers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from PIL import Image, ImageDraw

from examples.demo.records import COLOURS, SHAPES, draw_shape
from megatron_hetero.base.errors import UserError

RATE, FRAMES = 4, 8
"""Frames per second, and of a film."""
SIZES = ((112, 56), (84, 56), (112, 84), (140, 56))
DIRECTIONS = ("left", "right")
QUESTIONS = {"first": "Which colour came first?", "last": "Which colour came last?", "move": "Where did it move?"}


@dataclass(frozen=True)
class Film:
    """The content of one video. `height`: of the shape's path, as a fraction."""

    colours: tuple[str, str]
    direction: str
    shape: str
    size: tuple[int, int]
    brightness: int
    radius: float
    height: float

    @property
    def is_held_out(self) -> bool:
        """Whether training never shows these colours one after the other."""
        first, last = (list(COLOURS).index(colour) for colour in self.colours)
        return (first - last) % 4 == 1

    def reversed(self) -> Film:
        """The film played backwards."""
        other = DIRECTIONS[1 - DIRECTIONS.index(self.direction)]
        return replace(self, colours=self.colours[::-1], direction=other)

    def answer(self, kind: str) -> str:
        """The answer to one of `QUESTIONS`."""
        return {"first": self.colours[0], "last": self.colours[1], "move": self.direction}[kind]

    def frames(self) -> list[Image.Image]:
        """The pictures of the film."""
        width, height = self.size
        pictures = []
        for k in range(FRAMES):
            along = 0.2 + 0.6 * k / (FRAMES - 1)
            x = along if self.direction == "right" else 1 - along
            picture = Image.new("RGB", self.size, (self.brightness,) * 3)
            radius = max(self.radius * min(width, height), 9.0)
            colour = COLOURS[self.colours[2 * k // FRAMES]]
            draw_shape(ImageDraw.Draw(picture), self.shape, (x * width, self.height * height), radius, colour)
            pictures.append(picture)
        return pictures


def random_film(rng: random.Random, held_out: bool) -> Film:
    """A film that is held out or not, random otherwise."""
    while True:
        first, last = rng.sample(list(COLOURS), 2)
        film = Film(
            colours=(first, last),
            direction=rng.choice(DIRECTIONS),
            shape=rng.choice(SHAPES),
            size=rng.choice(SIZES),
            brightness=rng.randrange(185, 256),
            radius=rng.uniform(0.2, 0.28),
            height=rng.uniform(0.35, 0.65),
        )
        if film.is_held_out == held_out:
            return film


@dataclass(frozen=True)
class FilmSample:
    """One film with one question."""

    kind: str
    film: Film

    @property
    def question(self) -> str:
        return QUESTIONS[self.kind]

    @property
    def answer(self) -> str:
        return self.film.answer(self.kind)

    def record(self, name: str) -> dict[str, object]:
        """The LLaVA-style record; the video is named after it."""
        turns = [{"from": "human", "value": f"<video>\n{self.question}"}, {"from": "gpt", "value": self.answer}]
        return {"id": name, "conversations": turns, "video": f"{name}.mp4"}

    def save(self, folder: Path, name: str) -> None:
        """Write the video. Raises `UserError` without PyAV."""
        write_video(folder / f"{name}.mp4", self.film.frames())


def film_samples(number: int, seed: int, held_out: bool) -> list[FilmSample]:
    """Samples with a film each."""
    rng = random.Random(2 * seed + held_out)
    return [FilmSample(rng.choice(list(QUESTIONS)), random_film(rng, held_out)) for _ in range(number)]


def write_video(path: Path, frames: list[Image.Image]) -> None:
    """Write an MP4 file. Raises `UserError` without PyAV."""
    try:
        import av
    except ImportError as error:
        raise UserError.at(
            "--data video", problem="PyAV, which writes the videos, is not installed", fix="pip install av"
        ) from error
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=Fraction(RATE))
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        stream.options = {"crf": "12", "preset": "veryfast", "threads": "1"}
        for picture in frames:
            file.mux(stream.encode(av.VideoFrame.from_image(picture)))
        file.mux(stream.encode())
