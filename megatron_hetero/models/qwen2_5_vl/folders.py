"""Where the modules of a model come from: one `transformers` folder of Qwen2.5-VL, or one for the language model and
another one for the vision encoder. Here are the configurations; `fresh` has the weights that no folder gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hetero.errors import UserError, in_short
from megatron_hetero.files.json_objects import check, read_object, shown
from megatron_hetero.models.qwen2_5_vl.config_rules import CONFIG
from megatron_hetero.outputs.checkpoints import advice_to_export

VISION_FOLDER = "model.hf_path_vision"
FAMILY, LANGUAGE_MODEL = "qwen2_5_vl", "qwen2"
"""`model_type` of whole models, and of the language model alone."""
DEFAULT_SECTIONS = (16, 24, 24)


@dataclass(frozen=True, eq=False)
class ModelFolders:
    """The folders of a model, and the `Qwen2_5_VLConfig` of what they make together.

    `fresh_projector`: no folder gives the projector. `text_alone`: the folder of the text module has no encoder, and
    its tokenizer's chat template shows no images.
    """

    text: Path
    vision: Path
    config: Any
    fresh_projector: bool = False
    text_alone: bool = False

    @classmethod
    def read(cls, hf_path: Path, hf_path_vision: Path | None = None, fresh_projector: bool = False) -> ModelFolders:
        """Read `config.json` of the folders (as saved by any version of transformers).

        Args:
            hf_path: of the whole model; with `hf_path_vision` a language model alone (Qwen2, Qwen2.5) will do.
            hf_path_vision: a Qwen2.5-VL folder whose vision encoder takes the place of that of `hf_path`.
            fresh_projector: whether the projector starts anew even where the folder's would fit.

        Raises:
            UserError: a folder is missing, broken, or of another family.
        """
        if hf_path_vision is None:
            config = read_config(hf_path, "model.hf_path")
            check_vision(hf_path, config)
            check_text(hf_path, config)
            return cls(hf_path, hf_path, config, fresh_projector)
        vision = read_config(hf_path_vision, VISION_FOLDER)
        check_vision(hf_path_vision, vision)
        own = read_config(hf_path, "model.hf_path", (FAMILY, LANGUAGE_MODEL))
        text_alone = own.model_type == LANGUAGE_MODEL
        with _sound(hf_path / "config.json"):
            config = _joined(own, vision, text_alone)
        check_text(hf_path, config)
        fits = vision.vision_config.out_hidden_size == config.text_config.hidden_size
        return cls(hf_path, hf_path_vision, config, fresh_projector or not fits, text_alone)


def _joined(own: Any, vision: Any, text_alone: bool) -> Any:
    """The configuration of a model with the language model of `own` and the encoder of `vision`."""
    from transformers import Qwen2_5_VLConfig

    text = _with_sections(own.to_dict()) if text_alone else own.text_config.to_dict()
    ids = () if text_alone else ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision.vision_config.to_dict() | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=own.tie_word_embeddings,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        **{name: getattr(own, name) for name in ids},
    )


def _with_sections(text: dict[str, Any]) -> dict[str, Any]:
    """The settings of a Qwen2 language model as those of Qwen2.5-VL's: its rotary frequencies in three sections.

    Tokens of text have three equal positions, so that on text alone nothing changes.
    """
    sections = {"mrope_section": mrope_section(text["hidden_size"] // text["num_attention_heads"])}
    left_out = ("architectures", "model_type", "transformers_version")
    kept = {name: value for name, value in text.items() if name not in left_out}
    return kept | {"rope_parameters": dict(text["rope_parameters"]) | sections}


def mrope_section(head_dim: int) -> list[int]:
    """Rotary frequencies for time, height and width; as in Qwen2.5-VL, time gets what the other two leave."""
    frequencies = head_dim // 2
    space = 3 * frequencies // 8
    return [frequencies - 2 * space, space, space]


def read_config(folder: Path, setting: str, families: Sequence[str] = (FAMILY,)) -> Any:
    """The configuration of the folder that `setting` names, of one of the families. Raises `UserError`."""
    from transformers import Qwen2_5_VLConfig, Qwen2Config

    path = folder / "config.json"
    if not folder.is_dir() or not path.is_file():
        found = f"the file {folder}" if folder.is_file() else f"no {path if folder.is_dir() else folder}"
        make = "download one, or make a small one: python -m megatron_hetero.cli.make_demo DIR"
        raise UserError(
            f"{setting}: found {found}, expected a transformers folder of Qwen2.5-VL with config.json and "
            f"safetensors weights; {advice_to_export(folder) or make}"
        )
    raw = read_object(path)
    found = raw.get("model_type")
    if found not in families:
        raise _of_another_family(path, found, families)
    check(path, raw, CONFIG)
    kind: Any = Qwen2_5_VLConfig if found == FAMILY else Qwen2Config
    with _sound(path):
        return kind.from_pretrained(folder, local_files_only=True)


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    """Inside, transformers makes a configuration of the file `path`. What it says of it is a `UserError`."""
    try:
        yield
    except Exception as error:  # of its validation, or of whatever its code does with an odd value
        raise UserError(
            f"{path}: found a configuration that cannot be read ({in_short(error)}); restore the original"
        ) from error


def _of_another_family(path: Path, found: Any, families: Sequence[str]) -> UserError:
    more = ""
    if found == LANGUAGE_MODEL:
        more = f", or the folder of a vision encoder too, with --{VISION_FOLDER}"
    return UserError(
        f"{path}: found model_type {shown(found)}, expected {' or '.join(map(repr, families))}, the family that this "
        f"program builds; give a Qwen2.5-VL folder{more}"
    )


def check_vision(folder: Path, config: Any) -> None:
    """Check that the vision encoder of `folder` is one that is built here. Raises `UserError`."""
    vision, text = config.vision_config, config.text_config
    rope = vision.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    _require(folder, (
        ("vision_config.hidden_act", vision.hidden_act, "silu"),
        ("vision_config.out_hidden_size", vision.out_hidden_size, text.hidden_size),
        ("vision_config.hidden_size % num_heads", vision.hidden_size % vision.num_heads, 0),
        *_head_dim("vision_config", vision, vision.hidden_size // vision.num_heads),
        ("vision_config.hidden_size / num_heads % 4", vision.hidden_size // vision.num_heads % 4, 0),
        ("vision_config.window_size % (patch_size * spatial_merge_size)",
         vision.window_size % (vision.patch_size * vision.spatial_merge_size), 0),
        ("vision_config.fullatt_block_indexes from depth on",
         [layer for layer in vision.fullatt_block_indexes if layer >= vision.depth], []),
        ("vision_config.rope_parameters.rope_type", "axial" if rope_type == "default" else rope_type, "axial"),
        ("vision_config.rope_parameters with rope_theta", "rope_theta" in rope, True),
    ))  # fmt: skip


def check_text(folder: Path, config: Any) -> None:
    """Check that the language model of `folder` is one that is built here. Raises `UserError`."""
    text = config.text_config
    rope = text.rope_parameters or {}
    _require(folder, (
        ("text_config.hidden_act", text.hidden_act, "silu"),
        ("text_config.rope_parameters.rope_type", rope.get("rope_type", "default"), "default"),
        ("text_config.rope_parameters with rope_theta", "rope_theta" in rope, True),
        ("text_config.sliding_window in use", bool(text.sliding_window and text.use_sliding_window), False),
        ("the kinds in text_config.layer_types", sorted(set(text.layer_types)), ["full_attention"]),
        ("the length of text_config.layer_types", len(text.layer_types), text.num_hidden_layers),
        ("text_config.hidden_size % num_attention_heads", text.hidden_size % text.num_attention_heads, 0),
        *_head_dim("text_config", text, text.hidden_size // text.num_attention_heads),
        ("text_config.num_attention_heads % num_key_value_heads",
         text.num_attention_heads % text.num_key_value_heads, 0),
        ("2 * sum of mrope_section", 2 * sum(rope.get("mrope_section", DEFAULT_SECTIONS)),
         text.hidden_size // text.num_attention_heads),
        ("text_config.pad_token_id below vocab_size", (text.pad_token_id or 0) < text.vocab_size, True),
    ))  # fmt: skip


def _head_dim(name: str, module: Any, implied: int) -> tuple[tuple[str, object, object], ...]:
    """The size of heads, where the configuration gives it besides what it follows from."""
    given = getattr(module, "head_dim", None)
    return () if given is None else ((f"{name}.head_dim", given, implied),)


def _require(folder: Path, expectations: Sequence[tuple[str, object, object]]) -> None:
    for name, found, expected in expectations:
        if found != expected:
            raise UserError(
                f"{folder / 'config.json'}: found {name} = {shown(found)}, expected {shown(expected)}, because the "
                "model is built for the published Qwen2.5-VL architecture; use a model of that architecture"
            )
