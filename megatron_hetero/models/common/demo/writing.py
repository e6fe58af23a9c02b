"""Writes small models: random weights, a tokenizer trained on the demo's text, and processor files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_hetero.models.common.demo.template import END_OF_TEXT, IMAGE_TOKENS, SPECIAL_TOKENS, TURN_END
from megatron_hetero.models.common.demo_sizes import DemoSizes

# transformers and torch are imported where they are used: that takes seconds, which Ctrl-C may interrupt.


def write_folder(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write model and tokenizer into `folder` as `save_pretrained` does."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train_tokenizer(tokenizer_class: Any, corpus: Iterable[str], vocab_size: int, template: str) -> Any:
    """A byte-level BPE tokenizer with the pre-tokenizer of `tokenizer_class`, trained on `corpus`, plus the families'
    special tokens.
    """
    from tokenizers import pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    bpe = tokenizer_class().backend_tokenizer
    trainer = BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    learned = json.loads(bpe.to_str())["model"]
    learned["vocab"].pop(END_OF_TEXT, None)
    merges: Any = [tuple(pair) for pair in learned["merges"]]
    return tokenizer_class(
        vocab=learned["vocab"],
        merges=merges,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=template,
        model_max_length=4096,
    )


def token_ids(tokenizer: Any) -> dict[str, Any]:
    """The numbers of the tokens that show images, as `config.json` calls them."""
    ids = tokenizer.get_vocab()
    return {name: ids[token] for name, token in IMAGE_TOKENS.items()}


def text_config(shape: DemoSizes, tokenizer: Any, rope: dict[str, Any]) -> dict[str, Any]:
    """The settings of a language model of this shape; `rope`: those of its rotary positions, besides the base."""
    ids = tokenizer.get_vocab()
    return {
        "vocab_size": math.ceil(len(tokenizer) / 128) * 128,
        "hidden_size": shape.text_hidden,
        "intermediate_size": 8 * shape.text_hidden // 3,
        "num_hidden_layers": shape.text_layers,
        "num_attention_heads": shape.text_heads,
        "num_key_value_heads": shape.text_kv_heads,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta} | rope,
        "initializer_range": shape.initializer_range,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids[END_OF_TEXT],
    }


def build_model(model_class: Any, config: Any, tokenizer: Any, seed: int) -> Any:
    """The model with random weights; the caller's random state is unchanged."""
    import torch
    from transformers import GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    ids = tokenizer.get_vocab()
    model.generation_config = GenerationConfig(
        bos_token_id=ids[END_OF_TEXT],
        eos_token_id=[ids[TURN_END], ids[END_OF_TEXT]],
        pad_token_id=ids[END_OF_TEXT],
        do_sample=False,
    )
    return model


def write_processor(folder: Path, processor: Any, names: dict[str, str]) -> None:
    """Write an image processor's settings into `folder`, with the `names` of classes that published folders give."""
    processor.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    # As in published folders: AutoImageProcessor picks the installed backend, and AutoProcessor works too.
    settings = json.loads(path.read_text(encoding="utf-8")) | names
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
