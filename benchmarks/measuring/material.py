"""A small model folder, and a data set of pictures and words."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

WORDS = "red green blue disc square left right above two pictures describe what is it in the".split()
ANSWER = 24
"""Words of an answer, unless given."""


@dataclass(frozen=True)
class ModelSize:
    """Both modules, small; proportions as published (see `encoder_shape`). With `experts`, each `expert_ffn` wide, all
    text layers are sparse, as in Qwen3-VL-MoE. With `attention_every`, one layer of so many has softmax attention, the
    others are gated delta nets, as in Qwen3.5. Otherwise the model is a Qwen2.5-VL.
    """

    vision_hidden: int = 256
    vision_layers: int = 8
    vision_heads: int = 16
    text_hidden: int = 256
    text_layers: int = 4
    text_heads: int = 8
    text_kv_heads: int = 4
    experts: int = 0
    experts_per_token: int = 4
    expert_ffn: int = 256
    attention_every: int = 0

    @property
    def family(self) -> str:
        """Type of the model."""
        return "qwen3_vl_moe" if self.experts else "qwen3_5" if self.attention_every else "qwen2_5_vl"

    @property
    def patch(self) -> int:
        """Pixels of a patch's side."""
        return 14 if self.family == "qwen2_5_vl" else 16


def write_samples(
    folder: Path,
    size: ModelSize,
    pictures: Sequence[int | tuple[int, int] | None],
    words: Sequence[int] | None = None,
) -> None:
    """`folder/model`, and `folder/data.jsonl` in which each sample has one of `pictures` (the side of a square, or
    width and height, in pixels; 0 or None: no picture), and an answer of `words` words, or `ANSWER`.
    """
    _write_model(folder / "model", size)
    (folder / "images").mkdir()
    rng = random.Random(0)
    counts = zip(pictures, words or [ANSWER] * len(pictures), strict=True)
    records = [_record(folder, picture, count, f"{i}.png", rng) for i, (picture, count) in enumerate(counts)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _record(
    folder: Path, picture: int | tuple[int, int] | None, words: int, name: str, rng: random.Random
) -> dict[str, object]:
    question, answer = (" ".join(rng.choices(WORDS, k=n)) for n in (12, words))
    turns = [
        {"from": "human", "value": ("<image>\n" if picture else "") + question},
        {"from": "gpt", "value": answer},
    ]
    if not picture:
        return {"conversations": turns}
    width, height = (picture, picture) if isinstance(picture, int) else picture
    pixels = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
    pixels.save(folder / "images" / name, compress_level=0)
    return {"conversations": turns, "image": name}


def _write_model(folder: Path, size: ModelSize) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    from examples.demo.model import SYSTEM_PROMPTS, chat_template, train_tokenizer, write_processor

    tokenizer = train_tokenizer(
        [" ".join(WORDS), "system user assistant\n"] * 4, 300, chat_template(SYSTEM_PROMPTS[size.family])
    )
    config = _config(size, tokenizer.convert_tokens_to_ids)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(folder, size.family)


def _config(size: ModelSize, token_id: Any) -> Any:
    from benchmarks.measuring.encoder import encoder_shape
    from megatron_hetero.models.registry import FAMILIES

    family, head = FAMILIES[size.family], size.text_hidden // size.text_heads
    shape = encoder_shape(size.vision_hidden, size.vision_layers, size.vision_heads, size.text_hidden)
    vision: dict[str, Any] = {
        "depth": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_heads": shape.heads,
        "out_hidden_size": shape.out_hidden,
        "patch_size": size.patch,
    }
    text: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": size.text_hidden,
        "intermediate_size": 3 * size.text_hidden,
        "num_hidden_layers": size.text_layers,
        "num_attention_heads": size.text_heads,
        "num_key_value_heads": size.text_kv_heads,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **family.rope_settings(head)},
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
    }
    if size.experts:
        deeper = list(range(min(3, size.vision_layers - 1, size.text_layers)))
        vision |= {"num_position_embeddings": 32**2, "deepstack_visual_indexes": deeper}
        text |= {
            "head_dim": head,
            "num_experts": size.experts,
            "num_experts_per_tok": size.experts_per_token,
            "moe_intermediate_size": size.expert_ffn,
        }
    elif size.attention_every:
        vision["num_position_embeddings"] = 32**2
        text |= {
            "head_dim": head,
            "full_attention_interval": size.attention_every,
            "linear_num_key_heads": size.text_kv_heads,
            "linear_num_value_heads": size.text_heads,
            "linear_key_head_dim": head,
            "linear_value_head_dim": head,
        }
    else:
        window = shape.window * shape.merge * shape.patch
        vision |= {"window_size": window, "fullatt_block_indexes": sorted(shape.full_layers)}
    return family.config_class(size.family)(
        vision_config=vision,
        text_config=text,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=False,
    )
