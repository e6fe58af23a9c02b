"""Processors of an exported folder: read by `transformers`, they give the inputs that the run had."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.config.sections import VideoConfig
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.tokenizer import export_changes
from megatron_hetero.hf.model_files import Changes
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.items.pictures import ImageReader
from megatron_hetero.models.items.videos import VideoReader
from tests.support.folders import ModelChoice, write_model
from tests.support.items import item_of
from tests.support.video_processors import video_processor

FLAT, OF_VIDEOS, NESTED = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
LIMITS = ({"max_pixels": 9000}, {"min_pixels": 90_000}, {"min_pixels": 40_000, "max_pixels": 80_000})
LIMITS = ({"max_pixels": 70_000}, {"min_pixels": 90_000}, {"min_pixels": 4_000, "max_pixels": 8_000})
SIDES = ((40, 60), (300, 280), (2000, 900))


class Section:
    """Section `data` with limits of pictures."""

    def __init__(self, min_pixels: int | None = None, max_pixels: int | None = None, **video: Any):
        self.min_pixels, self.max_pixels, self.video = min_pixels, max_pixels, VideoConfig(**video)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    choice = ModelChoice(family=request.param)
    if request.param == "qwen3_vl":
        choice = replace(choice, head_dim=16, text_hidden=48)
    return write_model(tmp_path_factory.mktemp(request.param) / "model", choice)


def settings(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text()) if (folder / name).is_file() else {}


def in_form(source: Path, folder: Path, form: str) -> Path:
    """A copy with the processors' settings as saved by: 4.40 (one file), 4.57, 5 (one file), or 4.57 and then 5."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    pictures = settings(source, FLAT)
    videos = settings(source, OF_VIDEOS) or {**pictures, "video_processor_type": "Qwen2VLVideoProcessor"}
    for name in (FLAT, OF_VIDEOS, NESTED):
        (folder / name).unlink(missing_ok=True)
    nested = {"image_processor": pictures, "video_processor": videos, "processor_class": "X"}
    stale = {**pictures, "size": {"shortest_edge": 9, "longest_edge": 9}}
    older = dict(pictures)
    if source.parent.name.startswith("qwen2_5_vl"):  # As published; video processors of Qwen3-VL read `size` only.
        older |= {"min_pixels": 4096, "max_pixels": 900_000}
        del older["size"]
    files = {
        "one file": {FLAT: older},
        "two files": {FLAT: pictures, OF_VIDEOS: videos},
        "nested": {NESTED: nested},
        "nested, and older files": {
            NESTED: nested,
            FLAT: stale,
        },
    }
    for name, content in files[form].items():
        (folder / name).write_text(json.dumps(content))
    return folder


def with_changes(folder: Path, target: Path, changes: Mapping[str, str | None]) -> Path:
    shutil.copytree(folder, target)
    for name, text in changes.items():
        assert text is not None
        (target / name).write_text(text)
    return target


def changes_of(folder: Path, data: Mapping[str, Any]) -> Changes:
    return export_changes(ModelFolders.read(folder), {"model": {}, "data": data}, {})


def grids_of_transformers(folder: Path, version: int) -> list[list[int]]:
    """The grids of pictures by transformers 5, or 4, which looks for files in another order."""
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if version == 5:
        processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
    else:
        own = settings(folder, FLAT) or settings(folder, NESTED)["image_processor"]
        processor = Qwen2VLImageProcessorPil(**own)
    pictures = [Image.new("RGB", sides) for sides in SIDES]
    return processor(pictures, return_tensors="np")["image_grid_thw"].tolist()


def limits_of_videos(folder: Path, version: int) -> tuple[int, int]:
    """Areas of videos by transformers 5 or 4, which look for files in different orders."""
    flat, nested = (
        settings(folder, OF_VIDEOS) or settings(folder, FLAT),
        settings(folder, NESTED).get("video_processor"),
    )
    own = (nested or flat) if version == 5 else (flat or nested)
    assert own is not None
    size = video_processor(settings(folder, "config.json")["model_type"], **own).size
    return size["shortest_edge"], size["longest_edge"]


def readers(folder: Path, section: Any = None) -> tuple[ImageReader, VideoReader]:
    pictures, videos = Processor.from_folder(folder, section).readers.values()
    assert isinstance(pictures, ImageReader) and isinstance(videos, VideoReader)
    return pictures, videos


@pytest.fixture
def pictures(tmp_path: Path) -> list[Any]:
    for number, sides in enumerate(SIDES):
        Image.new("RGB", sides).save(tmp_path / f"{number}.png")
    return [item_of(tmp_path / f"{number}.png") for number in range(len(SIDES))]


@pytest.mark.parametrize("form", ["one file", "two files", "nested", "nested, and older files"])
@pytest.mark.parametrize("limits", LIMITS)
def test_pictures_have_the_size_that_they_had_in_training(
    model: Path, tmp_path: Path, pictures: list[Any], form: str, limits: dict[str, int]
) -> None:
    folder = in_form(model, tmp_path / "model", form)
    (trained, videos), changes = readers(folder, Section(**limits)), changes_of(folder, limits)
    export = with_changes(folder, tmp_path / "export", changes["text"])
    wanted = [list(trained.size(item)) for item in pictures]
    for version in (4, 5):
        assert grids_of_transformers(export, version) == wanted
        assert limits_of_videos(export, version) == (videos.sampling.low, videos.sampling.high)
    again, videos_again = readers(export)
    assert [list(again.size(item)) for item in pictures] == wanted
    assert videos_again.sampling == videos.sampling
    assert settings(export, NESTED).get("processor_class") == settings(folder, NESTED).get("processor_class")


def test_without_settings_no_file_differs(model: Path) -> None:
    assert changes_of(model, {"min_pixels": None, "video": {"fps": None}}) == {"text": {}}


@pytest.mark.parametrize("form", ["one file", "nested, and older files"])
def test_pictures_and_videos_at_once(model: Path, tmp_path: Path, form: str) -> None:
    folder = in_form(model, tmp_path / "model", form)
    data = {"max_pixels": 50_000, "video": {"fps": 1.5, "frame_pixels": 110_000, "total_pixels": 150_000}}
    export = with_changes(folder, tmp_path / "export", changes_of(folder, data)["text"])
    pictures, videos = readers(export)
    assert pictures.image_processor.size["longest_edge"] == 50_000
    assert videos.sampling.fps == 1.5 and videos.sampling.high in (110_000, 150_000)
    assert limits_of_videos(export, 4) == limits_of_videos(export, 5) == (videos.sampling.low, videos.sampling.high)


def test_a_further_encoder_has_its_own_limits(model: Path, tmp_path: Path, pictures: list[Any]) -> None:
    detail = in_form(model, tmp_path / "detail", "one file")
    limits: dict[str, Any] = {"min_pixels": 20_000, "max_pixels": 70_000}
    config = {"modules": {"detail": {"hf_path": str(detail), **limits}}, "data": {}}
    changes = export_changes(ModelFolders.read(model), config, {"detail": detail})
    export = with_changes(detail, tmp_path / "export", changes["detail"])
    source = ModuleConfig(hf_path=detail, token="<|video_pad|>", **limits)
    [trained] = (
        reader
        for field, reader in Processor.from_folder(model, encoders={"detail": source}).readers.items()
        if field.encoder == "detail"
    )
    assert changes["text"] == {} and readers(export)[1].sampling == readers(detail)[1].sampling
    assert grids_of_transformers(export, 5) == [list(trained.size(item)) for item in pictures]  # type: ignore[call-overload]
