"""The configuration of a model whose language model and encoder come from two folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def joined(
    config_class: Callable[..., Any],
    architecture: str,
    own: Any,
    vision: Any,
    rope_alone: dict[str, Any] | None,
) -> Any:
    """The configuration of a model with the language model of `own` and the encoder of `vision`.

    `rope_alone`: `own` is of a language model alone, whose rotary frequencies go into sections with these settings.
    Tokens of text have three equal positions, so that on text alone nothing changes.
    """
    text = own.text_config.to_dict() if rope_alone is None else _with_rope(own.to_dict(), rope_alone)
    return config_class(
        text_config=text,
        vision_config=vision.vision_config.to_dict() | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=own.tie_word_embeddings,
        architectures=[architecture],
        **{name: getattr(own, name) for name in (TOKENS if rope_alone is None else ())},
    )


def _with_rope(text: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    left_out: Sequence[str] = ("architectures", "model_type", "transformers_version")
    kept = {name: value for name, value in text.items() if name not in left_out}
    return kept | {"rope_parameters": dict(text["rope_parameters"]) | settings}
