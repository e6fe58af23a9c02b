"""A small Qwen2.5-VL folder: random weights, a tokenizer trained on the demo's text, and processor files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.models.common.demo_sizes import DemoSizes
from megatron_hetero.models.qwen2_5_vl.joining import mrope_section

# transformers and torch are imported where they are used: that takes seconds, which Ctrl-C may interrupt.
if TYPE_CHECKING:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
SYSTEM_PROMPT = "You are a helpful assistant."

CHAT_TEMPLATE = (
    """\
{%- for message in messages -%}
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\n"""
    + SYSTEM_PROMPT
    + """<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
)


def write_model(folder: Path, corpus: Iterable[str], shape: DemoSizes, seed: int) -> None:
    """Write config, weights, tokenizer and image processor into `folder` as `save_pretrained` does. `corpus`: all text
    that the tokenizer will meet besides what the template writes.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = train_tokenizer([SYSTEM_PROMPT, "system user assistant", *corpus])
    model = build_model(model_config(shape, tokenizer), tokenizer, seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(folder)


def train_tokenizer(corpus: Iterable[str], vocab_size: int = 384) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer with Qwen2's pre-tokenizer, trained on `corpus`, plus Qwen2.5-VL's special tokens."""
    from tokenizers import pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import Qwen2Tokenizer

    bpe = Qwen2Tokenizer().backend_tokenizer
    trainer = BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    learned = json.loads(bpe.to_str())["model"]
    learned["vocab"].pop(END_OF_TEXT, None)
    merges: Any = [tuple(pair) for pair in learned["merges"]]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


def model_config(shape: DemoSizes, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """The configuration of a model of this shape with this tokenizer."""
    from transformers import Qwen2_5_VLConfig

    ids = tokenizer.get_vocab()
    end_of_text, turn_end = ids[END_OF_TEXT], ids[TURN_END]
    return Qwen2_5_VLConfig(
        vision_config=_vision_config(shape),
        text_config=_text_config(shape, len(tokenizer))
        | {"bos_token_id": end_of_text, "eos_token_id": turn_end, "pad_token_id": end_of_text},
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids[VIDEO_PAD],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
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


def _text_config(shape: DemoSizes, tokens: int) -> dict[str, Any]:
    head_size = shape.text_hidden // shape.text_heads
    return {
        "vocab_size": math.ceil(tokens / 128) * 128,
        "hidden_size": shape.text_hidden,
        "intermediate_size": 8 * shape.text_hidden // 3,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.text_heads,
        "num_key_value_heads": shape.text_kv_heads,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "mrope_section": mrope_section(head_size),
        },
        "initializer_range": shape.initializer_range,
    }


def build_model(config: Qwen2_5_VLConfig, tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """The model with random weights; the caller's random state is unchanged."""
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
    ids = tokenizer.get_vocab()
    model.generation_config = GenerationConfig(
        bos_token_id=ids[END_OF_TEXT],
        eos_token_id=[ids[TURN_END], ids[END_OF_TEXT]],
        pad_token_id=ids[END_OF_TEXT],
        do_sample=False,
    )
    return model


def write_processor(folder: Path) -> None:
    """Write the image processor's settings into `folder`."""
    from transformers import Qwen2VLImageProcessorPil

    Qwen2VLImageProcessorPil().save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    # As in published folders: AutoImageProcessor picks the installed backend, and AutoProcessor works too.
    settings |= {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
