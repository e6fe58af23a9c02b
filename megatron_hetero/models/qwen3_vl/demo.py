"""A small Qwen3-VL folder: random weights, a tokenizer trained on the demo's text, and processor files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.models.common.demo import writing
from megatron_hetero.models.common.demo.template import chat_template
from megatron_hetero.models.common.demo_sizes import DemoSizes
from megatron_hetero.models.qwen3_vl.joining import rope_settings

# transformers and torch are imported where they are used: that takes seconds, which Ctrl-C may interrupt.
if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer, Qwen3VLConfig

CHAT_TEMPLATE = chat_template()


def write_model(folder: Path, corpus: Iterable[str], sizes: DemoSizes, seed: int) -> None:
    """Write config, weights, tokenizer and image processor into `folder` as `save_pretrained` does. `corpus`: all text
    that the tokenizer will meet in addition to what the template writes.
    """
    from transformers import Qwen3VLForConditionalGeneration

    tokenizer = train_tokenizer(["user assistant", *corpus])
    config = model_config(sizes, tokenizer)
    writing.write_folder(
        folder, writing.build_model(Qwen3VLForConditionalGeneration, config, tokenizer, seed), tokenizer
    )
    write_processor(folder)


def train_tokenizer(corpus: Iterable[str], vocab_size: int = 384) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer with the pre-tokenizer of Qwen2 and Qwen3, trained on `corpus`, plus Qwen3-VL's
    special tokens.
    """
    from transformers import Qwen2Tokenizer

    return writing.train_tokenizer(Qwen2Tokenizer, corpus, vocab_size, CHAT_TEMPLATE)


def model_config(sizes: DemoSizes, tokenizer: Qwen2Tokenizer) -> Qwen3VLConfig:
    """The configuration of a model of these sizes with this tokenizer."""
    from transformers import Qwen3VLConfig

    size_of_heads = sizes.text_hidden // sizes.text_heads
    text = writing.text_config(sizes, tokenizer, rope_settings(size_of_heads))
    return Qwen3VLConfig(
        vision_config=_vision_config(sizes),
        text_config=text | {"head_dim": size_of_heads},
        tie_word_embeddings=True,
        **writing.token_ids(tokenizer),
    )


def _vision_config(sizes: DemoSizes) -> dict[str, Any]:
    return {
        "depth": sizes.vision_layers,
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "num_heads": sizes.vision_heads,
        "out_hidden_size": sizes.text_hidden,
        "patch_size": 16,
        "num_position_embeddings": 16**2,
        # As many as the language model has layers for, three at most, as in published models.
        "deepstack_visual_indexes": list(range(min(3, sizes.vision_layers - 1, sizes.text_layers))),
        "initializer_range": sizes.initializer_range,
    }


def write_processor(folder: Path) -> None:
    """Write the settings of the processors of pictures and of videos into `folder`: patches of 16 pixels, and values
    from -1 to 1. Videos are not trained on; `AutoProcessor` asks for the file.
    """
    from transformers import Qwen2VLImageProcessorPil

    halves = [0.5, 0.5, 0.5]
    alike: dict[str, Any] = {"patch_size": 16, "image_mean": halves, "image_std": halves}
    # Published: 64 to 16,384 tokens of 32 x 32 pixels. The demo's pictures are smaller.
    size = {"shortest_edge": 4 * 32**2, "longest_edge": 16384 * 32**2}
    names = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    writing.write_processor(folder, Qwen2VLImageProcessorPil(size=size, **alike), names)
    videos = alike | {
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * 32**2, "longest_edge": 24576 * 32**2},
        "video_processor_type": "Qwen3VLVideoProcessor",
        "processor_class": "Qwen3VLProcessor",
    }
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos, indent=2) + "\n", encoding="utf-8")
