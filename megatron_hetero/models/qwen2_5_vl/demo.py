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


def write_model(folder: Path, corpus: Iterable[str], sizes: DemoSizes, seed: int) -> None:
    """Write config, weights, tokenizer and image processor into `folder` as `save_pretrained` does. `corpus`: all text
    that the tokenizer will meet in addition to what the template writes.
    """
    from transformers import Qwen2_5_VLForConditionalGeneration

    tokenizer = train_tokenizer([SYSTEM_PROMPT, "system user assistant", *corpus])
    config = model_config(sizes, tokenizer)
    writing.write_folder(
        folder, writing.build_model(Qwen2_5_VLForConditionalGeneration, config, tokenizer, seed), tokenizer
    )
    write_processor(folder)


def train_tokenizer(corpus: Iterable[str], vocab_size: int = 384) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer with Qwen2's pre-tokenizer, trained on `corpus`, plus Qwen2.5-VL's special tokens."""
    from transformers import Qwen2Tokenizer

    return writing.train_tokenizer(Qwen2Tokenizer, corpus, vocab_size, CHAT_TEMPLATE)


def model_config(sizes: DemoSizes, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """The configuration of a model of these sizes with this tokenizer."""
    from transformers import Qwen2_5_VLConfig

    sections = {"mrope_section": mrope_section(sizes.text_hidden // sizes.text_heads)}
    return Qwen2_5_VLConfig(
        vision_config=_vision_config(sizes),
        text_config=writing.text_config(sizes, tokenizer, sections),
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
        "patch_size": 14,
        "window_size": 112,
        # Full attention in every second layer, the last one included.
        "fullatt_block_indexes": list(range(sizes.vision_layers - 1, -1, -2))[::-1],
        "initializer_range": sizes.initializer_range,
    }


def write_processor(folder: Path) -> None:
    """Write the image processor's settings into `folder`."""
    from transformers import Qwen2VLImageProcessorPil

    names = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    writing.write_processor(folder, Qwen2VLImageProcessorPil(), names)
