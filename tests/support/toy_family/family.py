"""The family, as an installed package names it in its entry point."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

import numpy as np

from megatron_hetero.models.family import Family
from megatron_hetero.models.items.types import RowBlock
from tests.support.toy_family.shapes import EarShape, TextShape, ear_shape, text_shape
from tests.support.toy_family.tones import Tones

if TYPE_CHECKING:
    from examples.demo.model import DemoSizes


_TOKENS = {"tone_start_id": "<|vision_start|>", "tone_id": "<|image_pad|>", "tone_end_id": "<|vision_end|>"}


class Config(SimpleNamespace):
    """A configuration, as transformers would read it."""

    @classmethod
    def from_pretrained(cls, folder: Path, **_: Any) -> Self:
        """Read config.json."""
        return json.loads((folder / "config.json").read_text(), object_hook=lambda found: cls(**found))


class Toy(Family):
    """An encoder of tones and a language model of pairs and slots."""

    model_type, title = "toy", "Toy"
    tokens = _TOKENS
    copied = ("ahead.*",)
    encoders = MappingProxyType({"ear": (Tones(),)})

    def config_class(self, model_type: str) -> Any:
        return Config

    def encoder_shape(self, config: Any, encoder: str, /) -> EarShape:
        return ear_shape(config)

    def text_shape(self, config: Any) -> TextShape:
        return text_shape(config)

    def positions(self, tokens: int, starts: np.ndarray, blocks: Sequence[RowBlock], /) -> np.ndarray:
        return np.arange(tokens)[None]


TOY = Toy()


def write_model(folder: Path, corpus: Iterable[str], sizes: DemoSizes, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    from examples.demo.model import chat_template, train_tokenizer

    template = chat_template().replace("'image'", "'audio'")
    tokenizer = train_tokenizer(corpus, 300, template)
    text = {"layers": sizes.text_layers, "hidden": sizes.text_hidden, "heads": sizes.text_heads}
    text |= {"ffn": 2 * sizes.text_hidden, "vocab_size": len(tokenizer) + 3, "slots": 4}
    ear = {"layers": sizes.vision_layers, "hidden": sizes.vision_hidden, "heads": sizes.vision_heads}
    ear |= {"ffn": 2 * sizes.vision_hidden, "samples": 8, "merged": 2}
    config = {"model_type": "toy", "text_config": text, "vision_config": ear}
    config |= {name: tokenizer.get_vocab()[token] for name, token in _TOKENS.items()}
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    generator, read = torch.Generator().manual_seed(seed), Config.from_pretrained(folder)
    of_ear = {f"ear.{n}": shape for n, shape in ear_shape(read).architecture.tensors.items()}
    stored = {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        + (len(shape) == 1)
        for name, shape in (of_ear | text_shape(read).architecture.tensors).items()
    }
    # Of a part that is not built here.
    stored["ahead.table"] = torch.randn(3, 2, 4, generator=generator).half()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


@contextmanager
def known() -> Iterator[None]:
    """Inside, the family is one of those that are built, as its entry point makes it where the package is installed."""
    from megatron_hetero.models import registry

    with mock.patch.dict(registry.FAMILIES, {TOY.model_type: TOY}):  # pyright: ignore[reportArgumentType]
        yield


def write_data(folder: Path, samples: int, tones: Sequence[int] = (1, 2, 0)) -> Path:
    """`folder/data.jsonl` and `folder/tones`: sample i has `tones[i % len]` tones of several lengths."""
    rng, records = np.random.default_rng(0), []
    (folder / "tones").mkdir()
    for i in range(samples):
        names = [f"{i}-{k}.npy" for k in range(tones[i % len(tones)])]
        for name in names:
            np.save(folder / "tones" / name, rng.standard_normal(rng.integers(5, 90)).astype(np.float32))
        turns = [
            ("human", "<audio>" * len(names) + "what is it"),
            ("gpt", " ".join(rng.choice(["red", "blue"], i + 2))),
        ]
        records.append({"audio": names, "conversations": [{"from": who, "value": text} for who, text in turns]})
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "data.jsonl"
