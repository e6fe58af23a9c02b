"""Small models of published families: random weights, a tokenizer trained on the demo's text, and processor files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hetero.models.items.pictures import IMAGE_TOKENS
from megatron_hetero.models.registry import FAMILIES

# transformers and torch are imported where they are used: that takes seconds, which Ctrl-C may interrupt.
if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

DEEPSTACK = ("qwen3_vl", "qwen3_vl_moe")
DELTA = ("qwen3_5", "qwen3_5_moe")
QWEN3 = DEEPSTACK + DELTA
"""Families with the encoder and the processors of Qwen3-VL: with DeepStack, and with delta nets."""
EXPERTS = ("qwen3_vl_moe", "qwen3_5_moe")
"""Families with experts."""
SYSTEM_PROMPTS = {"qwen2_5_vl": "You are a helpful assistant.", **dict.fromkeys(QWEN3, "")}
"""System prompt of conversations without one, for each family that has a demo; may be empty."""
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SYSTEM_TURN = """\
{%- if loop.first and message['role'] != 'system' -%}
{{- '<|im_start|>system\\nSYSTEM_PROMPT<|im_end|>\\n' -}}
{%- endif -%}
"""
_TEMPLATE = """\
{%- for message in messages -%}
SYSTEM_TURN{{- '<|im_start|>' + message['role'] + '\\n' -}}
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


@dataclass(frozen=True)
class DemoSizes:
    """Sizes of the demo model. Numbers of heads are multiples of 4, so that `sp:4` and `tp:4` are valid."""

    vision_layers: int = 4
    vision_hidden: int = 64
    vision_heads: int = 4
    text_layers: int = 3
    text_hidden: int = 96
    text_heads: int = 4
    text_kv_heads: int = 2
    # Small models learn in fewer steps from larger weights than the 0.02 of real ones. Pictures of a few tokens need
    # faster rotations to distinguish positions than those of thousands.
    initializer_range: float = 0.1
    rope_theta: float = 8.0


def chat_template(system_prompt: str = "") -> str:
    """A chat template like published ones. A system prompt, if not empty, precedes conversations without one."""
    turn = _SYSTEM_TURN.replace("SYSTEM_PROMPT", system_prompt) if system_prompt else ""
    return _TEMPLATE.replace("SYSTEM_TURN", turn)


def write_model(folder: Path, model_type: str, corpus: Iterable[str], sizes: DemoSizes, seed: int) -> None:
    """Write config, weights, tokenizer and processors into `folder` with `save_pretrained`. `corpus`: the text of the
    data, without that of the template. The caller's random state is unchanged.
    """
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    prompt = SYSTEM_PROMPTS[model_type]
    written = [prompt, "system user assistant"] if prompt else ["user assistant"]
    tokenizer = train_tokenizer([*written, *corpus], template=chat_template(prompt))
    config = model_config(model_type, sizes, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
    ids = tokenizer.get_vocab()
    model.generation_config = GenerationConfig(
        bos_token_id=ids[END_OF_TEXT],
        eos_token_id=[ids[TURN_END], ids[END_OF_TEXT]],
        pad_token_id=ids[END_OF_TEXT],
        do_sample=False,
    )
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(folder, model_type)


def train_tokenizer(corpus: Iterable[str], vocab_size: int = 384, template: str | None = None) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer with the pre-tokenizer of Qwen2 and Qwen3, trained on `corpus`, and special tokens."""
    from tokenizers import pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import Qwen2Tokenizer

    bpe = Qwen2Tokenizer().backend_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(corpus, BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False))
    learned = json.loads(bpe.to_str())["model"]
    learned["vocab"].pop(END_OF_TEXT, None)
    merges: Any = [tuple(pair) for pair in learned["merges"]]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START, TURN_END, *IMAGE_TOKENS.values()],
        chat_template=chat_template() if template is None else template,
        model_max_length=4096,
    )


def model_config(model_type: str, sizes: DemoSizes, tokenizer: Qwen2Tokenizer) -> Any:
    """The configuration of a model of these sizes with this tokenizer."""
    ids, head = tokenizer.get_vocab(), sizes.text_hidden // sizes.text_heads
    vision: dict[str, Any] = {
        "depth": sizes.vision_layers,
        "hidden_size": sizes.vision_hidden,
        "intermediate_size": 2 * sizes.vision_hidden,
        "num_heads": sizes.vision_heads,
        "out_hidden_size": sizes.text_hidden,
        "initializer_range": sizes.initializer_range,
    }
    rope = {"rope_type": "default", "rope_theta": sizes.rope_theta} | FAMILIES[model_type].rope_settings(head)
    text: dict[str, Any] = {
        "vocab_size": math.ceil(len(tokenizer) / 128) * 128,
        "hidden_size": sizes.text_hidden,
        "intermediate_size": 8 * sizes.text_hidden // 3,
        "num_hidden_layers": sizes.text_layers,
        "num_attention_heads": sizes.text_heads,
        "num_key_value_heads": sizes.text_kv_heads,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        "initializer_range": sizes.initializer_range,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[END_OF_TEXT],
    }
    if model_type in QWEN3:
        vision |= {"patch_size": 16, "num_position_embeddings": 16**2}
        text["head_dim"] = head
        if model_type in DEEPSTACK:
            # One for each layer of the language model, three at most, as in published models.
            vision["deepstack_visual_indexes"] = list(range(min(3, sizes.vision_layers - 1, sizes.text_layers)))
        else:
            # A delta net in every second layer, the first and last included.
            text |= {"full_attention_interval": 2}
            text |= {"linear_num_key_heads": sizes.text_kv_heads, "linear_num_value_heads": sizes.text_heads}
            text |= {"linear_key_head_dim": head, "linear_value_head_dim": head}
        if model_type in EXPERTS:
            # As many parameters per token as without experts.
            text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 4 * sizes.text_hidden // 3}
            if model_type in DELTA:
                text["shared_expert_intermediate_size"] = 4 * sizes.text_hidden // 3
    else:
        # Full attention in every second layer, the last one included.
        full = list(range(sizes.vision_layers - 1, -1, -2))[::-1]
        vision |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": full}
    shown = {name: ids[token] for name, token in IMAGE_TOKENS.items()}
    config_class = FAMILIES[model_type].config_class(model_type)
    return config_class(vision_config=vision, text_config=text, tie_word_embeddings=True, **shown)


def write_processor(folder: Path, model_type: str) -> None:
    """Write the settings of the processors into `folder`, with the classes that published folders name. Qwen3-VL has
    patches of 16 pixels, values from -1 to 1 and a video processor, whose file `AutoProcessor` requires.
    """
    from transformers import Qwen2VLImageProcessorPil

    if model_type in QWEN3:
        halves = [0.5, 0.5, 0.5]
        alike: dict[str, Any] = {"patch_size": 16, "image_mean": halves, "image_std": halves}
        # Published: 64 to 16,384 tokens of 32 x 32 pixels. The demo's pictures are smaller.
        size = {"shortest_edge": 4 * 32**2, "longest_edge": 16384 * 32**2}
        processor = Qwen2VLImageProcessorPil(size=size, **alike)
        names = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
        videos = alike | {
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": 4 * 32**2, "longest_edge": 24576 * 32**2},
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
        }
        _write_json(folder / "video_preprocessor_config.json", videos)
    else:
        processor = Qwen2VLImageProcessorPil()
        names = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    processor.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    # As in published folders: AutoImageProcessor picks the installed backend, and AutoProcessor works too.
    _write_json(path, json.loads(path.read_text(encoding="utf-8")) | names)


def _write_json(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
