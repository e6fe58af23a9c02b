"""A tiny Qwen2.5-VL folder in `transformers` format, without weights, and helpers that write data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Record
from megatron_hetero.data.turns import Content, Turn
from megatron_hetero.data.validation import IMAGES
from tests.support import items
from tests.support.runs import MakeFlags
from tests.unit.train.conftest import make_flags, small_data, small_model  # noqa: F401  # fixtures

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CORPUS = [
    "What colour is the disc in the picture?",
    "assistant\n\nuser system You are a helpful assistant.\n",
    "It is red. It is blue, and the square is green.",
    "日本語 naïve café 🎨",
]
# The template of Qwen2.5-VL.
CHAT_TEMPLATE = (
    "{% set image_count = namespace(value=0) %}{% set video_count = namespace(value=0) %}"
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "{% set image_count.value = image_count.value + 1 %}"
    "{% if add_vision_id %}Picture {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "{% set video_count.value = video_count.value + 1 %}"
    "{% if add_vision_id %}Video {{ video_count.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_model_folder(folder: Path) -> Path:
    """Writes config.json, tokenizer files and preprocessor_config.json."""
    tokenizer = _tokenizer()
    ids = tokenizer.get_vocab()
    config = Qwen2_5_VLConfig(
        text_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
        vision_config={"hidden_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 64).save_pretrained(folder)
    return folder


@pytest.fixture
def flags(request: pytest.FixtureRequest, make_flags: MakeFlags) -> list[str]:  # noqa: F811
    """A command line; its parameter are the arguments of `make_flags`."""
    return make_flags(*request.param)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def processor(model_folder: Path) -> Processor:
    return Processor.from_folder(model_folder)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures of several sizes, named WIDTHxHEIGHT.png."""
    folder = tmp_path_factory.mktemp("pictures")
    for width, height in [(56, 56), (100, 40), (33, 90), (200, 140), (3, 64), (640, 480)]:
        gradient = Image.linear_gradient("L").resize((width, height))
        Image.merge("RGB", [gradient, gradient.transpose(Image.Transpose.ROTATE_180), gradient]).save(
            folder / f"{width}x{height}.png"
        )
    return folder


MakeRecord = Callable[..., Record]


@pytest.fixture(scope="session")
def make_record() -> MakeRecord:
    """Builds a record in memory from human and gpt texts in turn."""

    def make(*texts: str, system: str | None = None, images: Sequence[str] = (), folder: Path | None = None) -> Record:
        turns = [Turn("system", system)] if system is not None else []
        turns += [Turn("assistant", text) if k % 2 else Turn("user", shown(text)) for k, text in enumerate(texts)]
        return Record("test", 0, "train.jsonl:1", tuple(turns), items.pictures(*images), folder)

    return make


def shown(text: str) -> Content:
    """A user's text, of which ``<image>`` is a picture."""
    parts = [part for pair in zip(text.split("<image>"), repeat(IMAGES[0])) for part in pair][:-1]
    return text if len(parts) == 1 else tuple(part for part in parts if part != "")


Writer = Callable[[Sequence[Any]], Path]


@pytest.fixture(params=["json", "jsonl"])
def write_annotations(request: pytest.FixtureRequest, tmp_path: Path) -> Writer:
    """Writes records as a JSON list and as JSONL."""

    def write(records: Sequence[Any]) -> Path:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        text = json.dumps(list(records), indent=1) if request.param == "json" else lines
        path = tmp_path / f"train.{request.param}"
        path.write_text(text, encoding="utf-8")
        return path

    return write


class MemoryStore(MemoryFileSystem):
    """An object store in memory."""

    protocol = "s3"
    store: ClassVar[dict[str, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("s3://"))


@pytest.fixture
def memory_store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """An empty store that is read in the place of S3."""
    monkeypatch.setitem(_registry, "s3", MemoryStore)
    MemoryStore.store.clear()
    return MemoryStore()
