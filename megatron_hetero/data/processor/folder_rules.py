"""Valid content of the tokenizer and image-processor files in a `transformers` folder, key by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_hetero.files.json_objects import FLAG, OBJECT, TEXT, Rule, Table, either, list_of, number, one_of, whole

TOKEN = whole(0, 2**27)
_CHANNEL = number(-1000, 1000)
_SPREAD = number(1e-6, 1000)
_AREA = whole(1, 2**40).or_null()
# Every picture is upscaled to this area.
_LOWEST_AREA = whole(1, 2**24).or_null()


def _is_added(token: object) -> bool:
    return isinstance(token, dict) and isinstance(token.get("content"), str)


_WRITTEN = either(TEXT, Rule("an object with its text as content", _is_added))
_ADDED = Rule(
    "an object of tokens by number, each an object with its text as content",
    lambda v: isinstance(v, dict) and all(k.isascii() and k.isdigit() and _is_added(t) for k, t in v.items()),
)
_SPECIAL: Table = {
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _WRITTEN.or_null()),
    "additional_special_tokens": list_of(_WRITTEN).or_null(),
    "extra_special_tokens": either(OBJECT, list_of(_WRITTEN)).or_null(),
}
IMAGES: Table = {
    "image_processor_type": TEXT,
    "feature_extractor_type": TEXT,
    "do_resize": replace(one_of(True), because="the number of image tokens follows from the resized picture"),
    "do_rescale": FLAG.or_null(),
    "do_normalize": FLAG.or_null(),
    "do_convert_rgb": FLAG.or_null(),
    "rescale_factor": number(0, 1000, above=True).or_null(),
    "image_mean": either(_CHANNEL, list_of(_CHANNEL, 3)).or_null(),
    "image_std": either(_SPREAD, list_of(_SPREAD, 3)).or_null(),
    "resample": whole(0, 5).or_null(),
    "patch_size": whole(1, 128),
    "temporal_patch_size": whole(1, 16),
    "merge_size": whole(1, 16),
    "min_pixels": _LOWEST_AREA,
    "max_pixels": _AREA,
    "size": {
        "shortest_edge": _LOWEST_AREA,
        "longest_edge": _AREA,
        "min_pixels": _LOWEST_AREA,
        "max_pixels": _AREA,
    },
    "data_format": one_of("channels_first", None),
    "input_data_format": one_of(None, "channels_first", "channels_last"),
}
TOKENIZER: Table = {
    "tokenizer_class": TEXT.or_null(),
    "model_max_length": number(1, 1e31).or_null(),
    "padding_side": one_of("left", "right", None),
    "truncation_side": one_of("left", "right", None),
    **_SPECIAL,
    "added_tokens_decoder": _ADDED,
    "chat_template": either(TEXT, list_of(OBJECT)).or_null(),
    **dict.fromkeys(
        ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces"), FLAG.or_null()
    ),
    "split_special_tokens": replace(one_of(False, None), because="the image placeholder is one token"),
    "errors": TEXT.or_null(),
}
GENERATION: Table = {
    "eos_token_id": either(TOKEN, list_of(TOKEN)).or_null(),
    "bos_token_id": TOKEN.or_null(),
    "pad_token_id": TOKEN.or_null(),
}
FILES: Mapping[str, Table] = {
    "config.json": {},  # Of a family's own: see `read_config`.
    "generation_config.json": GENERATION,
    "tokenizer.json": {},
    "tokenizer_config.json": TOKENIZER,
    "special_tokens_map.json": _SPECIAL,
    "added_tokens.json": {},
    "preprocessor_config.json": IMAGES,
    "processor_config.json": {"image_processor": IMAGES},
    "chat_template.json": {"chat_template": TEXT},
}
"""The JSON files that are read here or go into an export, each with its table."""
