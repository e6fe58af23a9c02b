"""The data side of a `transformers` folder: configuration, tokenizer and image processor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_hetero.errors import UserError
from megatron_hetero.models.folder_files import COMPANIONS
from megatron_hetero.user_files import is_unfit

# `transformers` is imported where it is used: it brings torch, which takes seconds that command-line help and checks of
# the configuration need not wait for.

_JSON_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.json",
)
_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
_FIX = "copy the complete Qwen2.5-VL folder again, tokenizer and processor files included"


Needed = tuple[tuple[str, ...], ...]
TEXT_FILES: Needed = (("config.json",), ("tokenizer.json", "vocab.json"))
VISION_FILES: Needed = (("config.json",), ("preprocessor_config.json", "processor_config.json"))


def check_folder(path: Path, needed: Needed = TEXT_FILES + VISION_FILES, setting: str = "model.hf_path") -> None:
    """Raises UserError unless the folder that `setting` names has the files that the loaders below need; of each entry
    of `needed` one will do.
    """
    if not path.is_dir():
        raise UserError.at(
            f"{setting}: {path}",
            found="no such folder",
            expected="a Qwen2.5-VL folder in transformers format",
            fix="correct the path; models are not downloaded: fetch one first with `hf download MODEL --local-dir DIR`",
        )
    for name in COMPANIONS:
        # `transformers` would go on without what is no file, and read one of any size.
        if unfit := is_unfit(path / name):
            raise UserError.at(path / name, found=unfit, expected=f"a file of {setting}", fix=_FIX)
    for names in needed:
        if not any((path / name).is_file() for name in names):
            raise UserError.at(
                path / names[0],
                found="no such file",
                expected=" or ".join(names) + f" in the folder {setting}",
                fix=_FIX,
            )
    for name in _JSON_FILES:
        if (path / name).is_file():
            _check_json(path / name, setting)


def _check_json(file: Path, setting: str) -> None:
    try:
        json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise UserError.at(
            f"{file}:{error.lineno}",
            found=f"broken JSON at column {error.colno} ({error.msg})",
            expected=f"a JSON file of {setting}",
            fix=_FIX,
        ) from error
    except (OSError, ValueError) as error:
        raise UserError.at(file, found=f"an unreadable file ({error})", expected="a JSON file", fix=_FIX) from error


@contextmanager
def _as_user_errors(path: Path, what: str, setting: str = "model.hf_path") -> Iterator[None]:
    """`transformers` raises OSError, ValueError, KeyError, ... and exceptions of its Rust parts."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError.at(
            f"{setting}: {path}",
            found=f"{what} that does not load ({type(error).__name__}: {error})",
            expected=f"{what} of Qwen2.5-VL in transformers format, without code of its own",
            fix=_FIX,
        ) from error


def load_config(path: Path, setting: str = "model.hf_path") -> Any:
    """The `Qwen2_5_VLConfig` of the folder that `setting` names."""
    from transformers import AutoConfig

    with _as_user_errors(path, "a config.json", setting):
        config = AutoConfig.from_pretrained(path, **_LOCAL)
    if config.model_type != "qwen2_5_vl":
        raise UserError.at(
            path / "config.json",
            found=f"model_type {config.model_type!r}",
            expected="'qwen2_5_vl'",
            fix=f"set {setting} to a Qwen2.5-VL folder",
        )
    return config


def load_tokenizer(path: Path, template: str | None = None) -> Any:
    """The tokenizer, with the chat template that older folders keep in chat_template.json, or with another
    `template`.
    """
    from transformers import AutoTokenizer

    with _as_user_errors(path, "a tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(path, **_LOCAL)
        tokenizer.chat_template = template or tokenizer.chat_template
        legacy = path / "chat_template.json"
        if tokenizer.chat_template is None and legacy.is_file():
            tokenizer.chat_template = json.loads(legacy.read_text("utf-8"))["chat_template"]
    if tokenizer.chat_template is None:
        raise UserError.at(
            f"model.hf_path: {path}",
            found="a tokenizer without a chat template",
            expected="chat_template.jinja, or `chat_template` in tokenizer_config.json",
            fix="copy the folder of an instruct model, or add the template of Qwen2.5-VL",
        )
    return tokenizer


def load_image_processor(
    path: Path, min_pixels: int | None, max_pixels: int | None, setting: str = "model.hf_path"
) -> Any:
    """The image processor in its PIL form, which gives the same pixels wherever it runs.

    Args:
        path: the folder.
        min_pixels: overrides the folder's smallest area in pixels after resizing.
        max_pixels: overrides the folder's largest area.
        setting: what names the folder.
    """
    # From its module: the package of releases before 5.18 offers it only where torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    with _as_user_errors(path, "an image processor", setting):
        processor = AutoImageProcessor.from_pretrained(path, backend="pil", **_LOCAL)
        size = dict(processor.size)
        low = min_pixels if min_pixels is not None else size.get("shortest_edge") or size["min_pixels"]
        high = max_pixels if max_pixels is not None else size.get("longest_edge") or size["max_pixels"]
    if not 0 < low <= high:
        section = "data" if setting.startswith("model.hf_path") else setting.removesuffix(".hf_path")
        raise UserError.at(
            f"{section}.min_pixels and {section}.max_pixels",
            found=f"an area of {low} to {high} pixels",
            expected="0 < min_pixels <= max_pixels",
            because=f"what is not set comes from {path}",
            fix="set both, as areas in pixels",
        )
    processor.size = {"shortest_edge": low, "longest_edge": high}
    return processor


def check_agreement(path: Path, config: Any, image_processor: Any) -> None:
    """Raises UserError where the image processor cuts patches that the vision encoder does not take."""
    vision = config.vision_config
    pairs = {
        "patch_size": (image_processor.patch_size, vision.patch_size),
        "merge_size": (image_processor.merge_size, vision.spatial_merge_size),
        "temporal_patch_size": (image_processor.temporal_patch_size, vision.temporal_patch_size),
    }
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise UserError.at(
                path / "preprocessor_config.json",
                found=f"{name} {ours}",
                expected=f"{theirs}, as in vision_config of config.json",
                fix="copy both files from the same model",
            )
