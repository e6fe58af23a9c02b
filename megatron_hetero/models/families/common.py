"""Which configurations are built: what all families require.

The configuration of a model whose language model and encoder come from two folders.

What published folders of these families call tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import Only, shown

_UNQUANTISED = Only(
    (None, {}),
    because="quantised weights cannot be trained",
    fix="use the unquantised model; if the weights have been dequantised, remove the key",
)
BUILT: Mapping[str, Only] = {
    "attention_dropout": Only((0, None), because="attention is computed without dropout", fix="set it to 0"),
    "in_channels": Only((3,), because="pictures are read as red, green and blue", fix="use a model for RGB pictures"),
    "partial_rotary_factor": Only((1, None), because="all of a head is rotated"),
    "per_layer_config": Only((None, {}), because="all layers of a module are built the same way"),
    "quantization_config": _UNQUANTISED,
    "compression_config": _UNQUANTISED,
    "tie_word_embeddings": Only((True, False), because="the head has the embedding's weights or its own"),
}
"""Values of `config.json` that transformers takes, anywhere in it, and that may only be these."""
Expectation = tuple[str, object, object]
"""What is checked, in words; what was found, and what is expected."""


def require(folder: Path, title: str, expectations: Iterable[Expectation]) -> None:
    """Check what is expected of the configuration in `folder`, of a family called `title`. Raises `UserError`."""
    for name, found, expected in expectations:
        if found != expected:
            raise UserError.at(
                folder / "config.json",
                found=f"{name} = {shown(found)}",
                expected=shown(expected),
                because=f"the model is built for the published {title} architecture",
                fix="use a model of that architecture",
            )


def of_vision(vision: Any, text: Any) -> tuple[Expectation, ...]:
    """What encoders of all families have to be, `text` being the language model of the same folder."""
    rope = vision.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    return (
        *positive("vision_config", vision, "depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size"),
        *positive("vision_config", vision, "patch_size", "spatial_merge_size", "temporal_patch_size"),
        *positive("vision_config.rope_parameters", rope, "rope_theta"),
        ("vision_config.out_hidden_size", vision.out_hidden_size, text.hidden_size),
        ("vision_config.hidden_size % num_heads", vision.hidden_size % vision.num_heads, 0),
        *head_dim("vision_config", vision, vision.hidden_size // vision.num_heads),
        ("vision_config.hidden_size / num_heads % 4", vision.hidden_size // vision.num_heads % 4, 0),
        ("vision_config.rope_parameters.rope_type", "axial" if rope_type == "default" else rope_type, "axial"),
        ("vision_config.rope_parameters with rope_theta", "rope_theta" in rope, True),
    )


def of_text(text: Any, size_of_heads: int, sections: Sequence[int]) -> tuple[Expectation, ...]:
    """What language models of all families have to be. `sections`: of rotary frequencies, where none are given."""
    rope = text.rope_parameters or {}
    layer_types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    windows = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    given = rope.get("mrope_section", sections)
    return (
        *positive("text_config", text, "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"),
        *positive("text_config", text, "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
        *positive("text_config.rope_parameters", rope, "rope_theta"),
        ("the number of sections in mrope_section", len(given), 3),
        ("the sections in mrope_section below 0", [each for each in given if each < 0], []),
        ("text_config.hidden_act", text.hidden_act, "silu"),
        ("text_config.rope_parameters.rope_type", rope.get("rope_type", "default"), "default"),
        ("text_config.rope_parameters with rope_theta", "rope_theta" in rope, True),
        ("text_config.sliding_window in use", bool(windows), False),
        ("the kinds in text_config.layer_types", sorted(set(layer_types)), ["full_attention"]),
        ("the length of text_config.layer_types", len(layer_types), text.num_hidden_layers),
        ("text_config.num_attention_heads % num_key_value_heads",
         text.num_attention_heads % text.num_key_value_heads, 0),
        ("2 * sum of mrope_section", 2 * sum(given), size_of_heads),
        ("text_config.pad_token_id below vocab_size", (text.pad_token_id or 0) < text.vocab_size, True),
    )  # fmt: skip


def positive(name: str, values: Any, *keys: str) -> Iterator[Expectation]:
    """The numbers among the attributes, or the items, of `values` that are to be above 0."""
    for key in keys:
        value = values.get(key) if isinstance(values, dict) else getattr(values, key, None)
        if value is not None and not 0 < value < math.inf:
            yield f"{name}.{key}", value, "a number above 0"


def head_dim(name: str, module: Any, implied: int) -> tuple[Expectation, ...]:
    """The size of heads, where the configuration gives it in addition to what it follows from."""
    given = getattr(module, "head_dim", None)
    return () if given is None else ((f"{name}.head_dim", given, implied),)


TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def join_configurations(
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


ENCODER, TEXT = "visual.", "model."
"""What the names of an encoder's and of a language model's tensors begin with here, as in older folders."""
_NESTED = {ENCODER: f"model.{ENCODER}", TEXT: "model.language_model."}


def canonical_name(stored: str) -> str:
    """The name here of a tensor in a folder. Newer versions of transformers nest both modules under `model.`."""
    for flat, nested in _NESTED.items():
        if stored.startswith(nested):
            return flat + stored.removeprefix(nested)
    return stored


def nested_name(name: str) -> str:
    """The name of which `canonical_name` makes `name`, in folders that nest both modules."""
    for flat, nested in _NESTED.items():
        if name.startswith(flat):
            return nested + name.removeprefix(flat)
    return name
