"""A small Qwen2.5-VL folder: random weights, a tokenizer trained on the demo's text, and processor files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.models.common.demo import writing
from megatron_hetero.models.common.demo.template import chat_template
from megatron_hetero.models.common.demo_sizes import DemoSizes
from megatron_hetero.models.qwen2_5_vl.joining import mrope_section

# transformers and torch are imported where they are used: that takes seconds, which Ctrl-C may interrupt.
if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig, Qwen2Tokenizer

SYSTEM_PROMPT = "You are a helpful assistant."
CHAT_TEMPLATE = chat_template(SYSTEM_PROMPT)


def write_model(folder: Path, corpus: Iterable[str], shape: DemoSizes, seed: int) -> None:
    """Write config, weights, tokenizer and image processor into `folder` as `save_pretrained` does. `corpus`: all text
    that the tokenizer will meet besides what the template writes.
    """
    from transformers import Qwen2_5_VLForConditionalGeneration

    tokenizer = train_tokenizer([SYSTEM_PROMPT, "system user assistant", *corpus])
    config = model_config(shape, tokenizer)
    writing.write_folder(
        folder, writing.build_model(Qwen2_5_VLForConditionalGeneration, config, tokenizer, seed), tokenizer
    )
    write_processor(folder)


def train_tokenizer(corpus: Iterable[str], vocab_size: int = 384) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer with Qwen2's pre-tokenizer, trained on `corpus`, plus Qwen2.5-VL's special tokens."""
    from transformers import Qwen2Tokenizer

    return writing.train_tokenizer(Qwen2Tokenizer, corpus, vocab_size, CHAT_TEMPLATE)


def model_config(shape: DemoSizes, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """The configuration of a model of this shape with this tokenizer."""
    from transformers import Qwen2_5_VLConfig

    sections = {"mrope_section": mrope_section(shape.text_hidden // shape.text_heads)}
    return Qwen2_5_VLConfig(
        vision_config=_vision_config(shape),
        text_config=writing.text_config(shape, tokenizer, sections),
        tie_word_embeddings=True,
        **writing.token_ids(tokenizer),
    )


def _vision_config(shape: DemoSizes) -> dict[str, Any]:
    return {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": 2 * shape.vision_hidden,
        "num_heads": shape.vision_heads,
        "out_hidden_size": shape.text_hidden,
        "patch_size": 14,
        "window_size": 112,
        # Full attention in every second layer, the last one included.
        "fullatt_block_indexes": list(range(shape.vision_layers - 1, -1, -2))[::-1],
        "initializer_range": shape.initializer_range,
    }


def write_processor(folder: Path) -> None:
    """Write the image processor's settings into `folder`."""
    from transformers import Qwen2VLImageProcessorPil

    names = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    writing.write_processor(folder, Qwen2VLImageProcessorPil(), names)
