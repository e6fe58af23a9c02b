"""Shared code of families: items, positions, names of stored tensors, and checks of configurations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import Only, shown
from megatron_hetero.hf.model_files import INDEX, SINGLE
from megatron_hetero.models.family import Family
from megatron_hetero.models.items.pictures import IMAGE_TOKENS, Pictures, rope_positions
from megatron_hetero.models.items.types import RowBlock

_UNQUANTISED = Only(
    (None, {}),
    because="quantised weights cannot be trained",
    fix="use the unquantised model; if the weights have been dequantised, remove the key",
)
_RENAME = f"rename the file to {SINGLE}, or to {INDEX} if it is an index, and remove the key"
SUPPORTED: dict[str, Only] = {
    "attention_dropout": Only((0, None), because="attention is computed without dropout", fix="set it to 0"),
    "in_channels": Only((3,), because="pictures are read as red, green and blue", fix="use a model for RGB pictures"),
    "partial_rotary_factor": Only((1, None), because="all of a head is rotated"),
    "per_layer_config": Only((None, {}), because="all layers of a module are built the same way"),
    "quantization_config": _UNQUANTISED,
    "compression_config": _UNQUANTISED,
    "transformers_weights": Only((None, SINGLE, INDEX), because="other files are not read", fix=_RENAME),
    "tie_word_embeddings": Only((True, False), because="the head has the embedding's weights or its own"),
}
"""Keys anywhere in `config.json`, each with its supported values."""
Expectation = tuple[str, object, object]
"""The name of a checked value, the value found, and the value expected."""


def require(folder: Path, title: str, expectations: Iterable[Expectation]) -> None:
    """Check the configuration in `folder` of the family `title`. Raises `UserError` at the first difference."""
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
    """Return the expectations of any family's encoder. `text`: configuration of the folder's language model."""
    rope, head_dim = vision.rope_parameters or {}, vision.hidden_size // vision.num_heads
    rope_type = rope.get("rope_type", "default")
    return (
        *positive("vision_config", vision, "depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size"),
        *positive("vision_config", vision, "patch_size", "spatial_merge_size", "temporal_patch_size"),
        *positive("vision_config.rope_parameters", rope, "rope_theta"),
        ("vision_config.out_hidden_size", vision.out_hidden_size, text.hidden_size),
        ("vision_config.hidden_size % num_heads", vision.hidden_size % vision.num_heads, 0),
        ("vision_config.head_dim", getattr(vision, "head_dim", None) or head_dim, head_dim),
        ("vision_config.hidden_size / num_heads % 4", head_dim % 4, 0),
        ("vision_config.rope_parameters.rope_type", "axial" if rope_type == "default" else rope_type, "axial"),
        ("vision_config.rope_parameters with rope_theta", "rope_theta" in rope, True),
    )


def of_text(
    text: Any, rotary_width: int, sections: Sequence[int], kinds: Sequence[str] = ("full_attention",)
) -> tuple[Expectation, ...]:
    """Return the expectations of any family's language model. `sections`: default of `mrope_section`; `kinds`:
    supported kinds of layers.
    """
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
        ("the kinds in text_config.layer_types", sorted({*layer_types, *kinds}), sorted(kinds)),
        ("the length of text_config.layer_types", len(layer_types), text.num_hidden_layers),
        ("text_config.num_attention_heads % num_key_value_heads",
         text.num_attention_heads % text.num_key_value_heads, 0),
        ("2 * sum of mrope_section", 2 * sum(given), rotary_width),
        ("text_config.pad_token_id below vocab_size", (text.pad_token_id or 0) < text.vocab_size, True),
    )  # fmt: skip


def positive(name: str, values: Any, *keys: str) -> Iterator[Expectation]:
    """Yield a failed expectation for each of the attributes or items `keys` of `values` that is set but not above 0."""
    for key in keys:
        value = values.get(key) if isinstance(values, dict) else getattr(values, key, None)
        if value is not None and not 0 < value < math.inf:
            yield f"{name}.{key}", value, "a number above 0"


def of_experts(text: Any, *widths: str) -> tuple[Expectation, ...]:
    """Return the expectations of a language model with experts. `widths`: keys that must be above 0."""
    return (
        *positive("text_config", text, "num_experts", "num_experts_per_tok", *widths),
        ("text_config.num_experts_per_tok beyond num_experts", max(0, text.num_experts_per_tok - text.num_experts), 0),
    )


def expert_fields(text: Any) -> dict[str, int]:
    """Return the fields of an `ExpertShape` from the configuration of a language model."""
    return {
        "experts": text.num_experts,
        "experts_per_token": text.num_experts_per_tok,
        "expert_ffn": text.moe_intermediate_size,
    }


_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def fused_expert(name: str) -> tuple[str, int] | None:
    """Return the fused tensor that contains a matrix of an expert, and the expert's index in it; None for any other
    tensor. The gates and ups of a layer form one fused tensor, the downs another.
    """
    if (match := _EXPERT.fullmatch(name)) is None:
        return None
    experts, number, kind = match.groups()
    return f"{experts}.{'down' if kind == 'down' else 'gate_up'}_proj", int(number)


ENCODER, TEXT = "visual.", "model."
"""Prefixes of the tensors of an encoder and of a language model in older folders."""
_NESTED = {ENCODER: f"model.{ENCODER}", TEXT: "model.language_model."}


def canonical_name(stored: str) -> str:
    """Return the canonical name of a tensor, without the prefix of newer folders that nest modules in `model.`."""
    for flat, nested in _NESTED.items():
        if stored.startswith(nested):
            return flat + stored.removeprefix(nested)
    return stored


def nested_name(name: str) -> str:
    """Return the name of a tensor in folders that nest both modules: the inverse of `canonical_name`."""
    for flat, nested in _NESTED.items():
        if name.startswith(flat):
            return nested + name.removeprefix(flat)
    return name


def _image_processor() -> type:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil


PICTURES = Pictures(_image_processor)


class PictureFamily(Family):
    """Base of families with an encoder of pictures whose folders name tensors like Qwen-VL's."""

    built = SUPPORTED
    tokens = IMAGE_TOKENS
    encoders = MappingProxyType({"vision": (PICTURES,)})

    def positions(self, tokens: int, starts: np.ndarray, blocks: Sequence[RowBlock], /) -> np.ndarray:
        """Return the rotary positions of text, pictures and videos, see `rope_positions`."""
        return rope_positions(tokens, starts, blocks)

    def canonical_name(self, stored: str, /) -> str:
        """Return the name of a tensor in folders without nested modules."""
        return canonical_name(stored)

    def joined(self, text: Any, encoder: Any, text_alone: bool) -> Any:
        """Return the joint configuration, see `Family.joined`."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

        if text_alone:
            excluded = ("architectures", "model_type", "transformers_version")
            text_config = {name: value for name, value in text.to_dict().items() if name not in excluded}
            head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            text_config["rope_parameters"] = self.rope_settings(head_dim) | dict(text_config["rope_parameters"])
        else:
            text_config = text.text_config.to_dict()
        return self.config_class(self.model_type)(
            text_config=text_config,
            vision_config=self.encoder_settings(encoder) | {"out_hidden_size": text_config["hidden_size"]},
            tie_word_embeddings=text.tie_word_embeddings,
            architectures=[MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[self.model_type]],
            **{name: getattr(text, name) for name in (() if text_alone else self.tokens)},
        )

    def encoder_settings(self, config: Any) -> dict[str, Any]:
        """Return `vision_config` of a model of this family with the encoder of `config`, a whole model's configuration
        of this family or of one of `encoders_of`.
        """
        return {name: value for name, value in config.vision_config.to_dict().items() if name != "model_type"}
