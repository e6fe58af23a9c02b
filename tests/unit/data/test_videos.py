"""Records with videos: fields, tokens, positions and patches, for both families."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from megatron_hetero.base.contents import ByteRange, InMemory, StoredFile
from megatron_hetero.base.errors import UserError
from megatron_hetero.cli.inspect_data import contact_sheet, draw_sheets, show_sample
from megatron_hetero.config.sections import VideoConfig
from megatron_hetero.data.packing import PackMetadata
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.validation import item_fields, validate_record
from megatron_hetero.models.family import Family
from megatron_hetero.models.items.types import Piece
from megatron_hetero.models.items.video_sampling import given_size
from megatron_hetero.models.items.videos import VideoReader
from megatron_hetero.models.registry import family_of
from tests.support.folders import ModelChoice, write_model
from tests.support.items import annotated, item_of
from tests.support.videos import VideoOracle, noise, write_video, write_video_data

FIELDS = item_fields({"vision": ("image", "video")})
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


class Section:
    """Section `data`."""

    def __init__(self, **video: Any):
        self.video = VideoConfig(**video)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and records with videos."""
    made = tmp_path_factory.mktemp(request.param)
    choice = ModelChoice(family=request.param)
    if request.param == "qwen3_vl":
        choice = replace(choice, head_dim=16, text_hidden=48)
    write_model(made / "model", choice)
    write_video_data(made, 20, seed=3)
    return made


def processor(folder: Path, **video: Any) -> Processor:
    """The processor of a folder with settings of `data.video`."""
    return Processor.from_folder(folder / "model", Section(**{"fps": 2.0, "min_frames": 2} | video))


def reader(folder: Path, **video: Any) -> VideoReader:
    """Its reader of videos."""
    found = processor(folder, **video)
    [reader] = (each for each in found.readers.values() if isinstance(each, VideoReader))
    return reader


@pytest.mark.parametrize("version", ["", "5.3", "4.57"])
def test_tokens_positions_and_patches_are_those_of_transformers(folder: Path, version: str) -> None:
    oracle = VideoOracle.load(folder / "model", folder / "data.jsonl")
    oracle.overlapping, oracle.pairs_only = version == "5.3", version == "4.57" and folder.name.startswith("qwen3")
    settings = {"text_after": "transformers" if oracle.overlapping else "max"}
    ours = processor(folder, **settings, marks="pairs" if oracle.pairs_only else "video")
    annotations = annotated("d", folder / "data.jsonl", folder / "images", ours.fields)
    assert {ref.field.name for record in annotations for ref in record.items} == {"image", "video"}
    assert any(ref.frames for record in annotations for ref in record.items)
    for record, known in zip(annotations, oracle.records, strict=True):
        sample, (ids, inputs) = ours.tokenize(record), oracle.inputs_of(known)
        np.testing.assert_array_equal(sample.input_ids, ids)
        np.testing.assert_array_equal(sample.position_ids, inputs["position_ids"][:, 0])
        for name, tail in (("image", ""), ("video", "_videos")):
            found = [
                ours.patches(record, k, [Piece(n, size) for n, size in enumerate(sizes)])
                for k, (ref, sizes) in enumerate(zip(record.items, sample.pieces, strict=True))
                if ref.field.name == name
            ]
            if found:
                np.testing.assert_allclose(np.concatenate(found), inputs[f"pixel_values{tail}"], atol=1e-5)


def test_marks_of_pairs_are_those_of_qwen3_vl(folder: Path) -> None:
    if not reader(folder).timestamps:
        with pytest.raises(UserError, match=r"data\.video\.marks .*found pairs, expected no value"):
            processor(folder, marks="pairs")
        return
    ours = processor(folder, marks="pairs")
    record = next(
        each
        for each in annotated("d", folder / "data.jsonl", folder / "images", ours.fields)
        if [ref.field.name for ref in each.items] == ["video"]
    )
    text = ours.tokenizer.decode(ours.tokenize(record).input_ids)
    assert text.count("<|vision_start|>") == text.count(" seconds>") == text.count("<|vision_end|>") > 0
    assert "<|im_start|>user\n<0." in text


def test_pairs_are_read_apart_as_together(folder: Path) -> None:
    path = write_video(folder / "images/apart.mp4", noise(14, (84, 56), 1), rate=4)
    read, shown = reader(folder, fps=4.0), item_of(path)
    size = read.size(shown)
    assert (size.pairs, len(size.times)) == (7, 14)
    whole = read.patches(shown, [Piece(n, piece) for n, piece in enumerate(read.pieces(size))])
    for number, piece in enumerate(read.pieces(size)):
        one = read.patches(shown, [Piece(number, piece)])
        np.testing.assert_array_equal(one, whole[number * len(one) : (number + 1) * len(one)])


def test_videos_inside_other_files_are_read_as_those_alone(folder: Path, tmp_path: Path) -> None:
    path = write_video(folder / "images/inside.mp4", noise(30, (84, 56), 1), rate=10)
    data = path.read_bytes()
    (tmp_path / "pack").write_bytes(b"before" + data + b"after")
    part = ByteRange(StoredFile(f"{tmp_path}/pack"), 6, len(data), "a.mp4")
    memory = InMemory(data, "a.mp4 in a file", "a.mp4", ("a file", 1, 2))
    read, shown = reader(folder, fps=4.0), item_of(path)
    size = read.size(shown)
    pieces = [Piece(n, piece) for n, piece in enumerate(read.pieces(size))]
    for content in (part, memory):
        item = shown._replace(content=content)
        assert read.size(item) == size and read.header(item) == (84, 56)
        np.testing.assert_array_equal(read.patches(item, pieces), read.patches(shown, pieces))
    cut = shown._replace(content=replace(part, size=len(data) - 100))
    with pytest.raises(UserError, match=f"d:1: video a.mp4 in {tmp_path}/pack: found a truncated file"):
        read.size(cut)


def test_a_pair_of_one_frame_is_a_picture(folder: Path) -> None:
    """A list of one frame, which other processors refuse."""
    frame = Image.fromarray(noise(1, (64, 64), 5)[0])
    side = reader(folder).patch * 4
    frame.resize((side, side)).save(folder / "images/one.png")
    [of_pictures] = (each for each in processor(folder).readers.values() if not isinstance(each, VideoReader))
    path = folder / "images/one.png"
    alone, film = item_of(path), item_of(path, frames=[path], fps=2.0)
    size = reader(folder).size(film)
    assert (size.pairs, size.times) == (1, (0.0, 0.0))
    [piece], picture = reader(folder).pieces(size), of_pictures.size(alone)
    assert piece == picture
    found = reader(folder).patches(film, [Piece(0, piece)])
    np.testing.assert_allclose(found, of_pictures.patches(alone, [Piece(0, picture)]), atol=1e-5)


def test_uneven_times_are_read(folder: Path) -> None:
    times = [k / 30 for k in range(15)] + [0.5 + k / 2 for k in range(10)]
    path = write_video(folder / "images/uneven.mp4", noise(25, (56, 56), 2), times=times, rate=30)
    read = reader(folder, fps=1.5)
    size = read.size(item_of(path))
    # Evenly spaced to half a frame of the slow part, though most frames are in the first half second.
    gaps = np.diff(size.times[: len(set(size.times))])
    assert gaps.min() > 0.4 and gaps.max() < 1.3 and size.times[-1] >= 4
    assert size.step is None and set(np.round(size.times, 3)) <= set(np.round(times, 3))


def test_segments_and_rates_of_records(folder: Path) -> None:
    path = write_video(folder / "images/long.mp4", noise(80, (56, 56), 2), rate=4)  # 20 seconds.
    read = reader(folder)
    whole = read.size(item_of(path))
    part = read.size(item_of(path, video_start=5.0, video_end=9.75))
    assert whole.pairs == 20 and part.pairs == 5
    assert part.times[0] == 5.0 and 9.0 <= part.times[-1] <= 9.75
    assert read.size(item_of(path, fps=1.0)).pairs == 10
    assert read.size(item_of(path, nframes=6)).pairs == read.size(item_of(path, fps=9.0, max_frames=6)).pairs == 3
    sized = read.size(item_of(path, resized_height=112, resized_width=60))
    assert (sized.rows * read.patch, sized.columns * read.patch) == given_size(
        {"resized_height": 112, "resized_width": 60}, 2 * read.patch
    )
    assert read.size(item_of(path, nframes=82)).pairs == 40
    assert read.size(item_of(path, video_start=12.0)).times[0] == 12.0
    times = [k / 30 for k in range(30)] + [1 + k / 2 for k in range(20)]
    uneven = write_video(folder / "images/fast.mp4", noise(50, (56, 56), 2), times=times, rate=30)
    fast = read.size(item_of(uneven, video_start=0.0, video_end=0.99))
    assert len(fast.times) == 2, "two frames per second of that part, whose rate is not the file's"
    for given in ({"video_start": 30.0}, {"video_start": 6.0, "video_end": 5.0}):
        with pytest.raises(UserError, match="d:1: fields 'video_start' and 'video_end': found"):
            read.size(item_of(path)._replace(given=tuple(given.items())))


def test_frames_without_times(folder: Path) -> None:
    frames = []
    for k, frame in enumerate(noise(4, (56, 56), 2)):
        Image.fromarray(frame).save(folder / f"images/f{k}.png")
        frames.append(folder / f"images/f{k}.png")
    film, read = item_of(frames[0], frames=frames), reader(folder)
    if read.timestamps:
        with pytest.raises(UserError, match="d:1: field 'video': .*'fps'.*'times'"):
            read.size(film)
    else:
        assert read.size(film).times[1] <= 4 / 24
    timed = film._replace(given=(("times", (0.0, 1.0, 4.0, 9.0)),))
    assert read.size(timed).times == (0.0, 1.0, 4.0, 9.0)
    later = film._replace(given=(("times", (10.0, 11.0, 12.0, 13.0)),))
    assert read.size(later).times == (10.0, 11.0, 12.0, 13.0)
    [block, *_] = read.blocks(read.size(timed))
    if read.timestamps:
        assert block.before == "<0.5 seconds><|vision_start|>"
    else:
        assert sorted(set(block.places[0])) == [0, 4 * read.rate]
    Image.fromarray(noise(1, (64, 56), 2)[0]).save(frames[2])
    pieces = [Piece(n, piece) for n, piece in enumerate(read.pieces(read.size(timed)))]
    with pytest.raises(UserError, match=r"f2.png: found a frame of 64 x 56 pixels, expected 56 x 56"):
        read.patches(timed, pieces)


def test_times_are_rounded_as_python_does(folder: Path) -> None:
    read = reader(folder)
    if not read.timestamps:
        pytest.skip("times are positions")
    path = write_video(folder / "images/rounded.mp4", noise(8, (64, 64), 2), rate=2)
    size = read.size(item_of(path))
    assert [block.before.split(" ")[0] for block in read.blocks(size)] == ["<0.2", "<1.2", "<2.2", "<3.2"]


def test_a_video_that_changes_meanwhile(folder: Path) -> None:
    path = write_video(folder / "images/changing.mp4", noise(8, (56, 56), 2), rate=2)
    read, shown = reader(folder), item_of(path)
    pieces = read.pieces(read.size(shown))
    write_video(path, noise(4, (56, 56), 2), rate=2)
    with pytest.raises(UserError, match="d:1: video .*changing.mp4: found 2 pairs of frames"):
        read.patches(shown, [Piece(3, pieces[3])])


def test_metadata_has_the_pairs(folder: Path) -> None:
    ours = processor(folder)
    annotations = annotated("d", folder / "data.jsonl", folder / "images", ours.fields)
    for number, record in enumerate(annotations):
        sample = ours.tokenize(record)
        told = PackMetadata.of_sample(number, sample, ["vision"])
        assert len(told.sizes[0]) == sum(map(len, sample.pieces))
        assert told.sources[0].tolist() == [
            [number, item, piece] for item, pieces in enumerate(sample.pieces) for piece in range(len(pieces))
        ]


def test_samples_and_sheets_are_shown(folder: Path, tmp_path: Path) -> None:
    ours, console = processor(folder), Console(file=(file := StringIO()), width=300, color_system=None)
    annotations = annotated("d", folder / "data.jsonl", folder / "images", ours.fields)
    with_files = next(r for r in annotations if any(ref.field.name == "video" and not ref.frames for ref in r.items))
    show_sample(console, ours, ours.tokenize(with_files), None)
    assert "frames in" in file.getvalue() and "yuv420p → " in file.getvalue()
    paths = [path for record in annotations for path in draw_sheets(ours, record, tmp_path)]
    assert len(paths) == sum(ref.field.name == "video" for record in annotations for ref in record.items)
    for path in paths:
        with Image.open(path) as sheet:
            assert sheet.size[0] > 50 and np.asarray(sheet).std() > 10


def test_a_sheet_has_rows_of_six() -> None:
    sheet = contact_sheet([(float(k), Image.new("RGB", (400, 200), "red")) for k in range(8)])
    assert sheet.size == (6 * 204, 2 * 116)


# --------------------------------------------------------------------------------------------------- records


def record(**fields: Any) -> dict[str, Any]:
    """A record that shows its videos in order."""
    marks = fields.pop("marks", "<video>\n")
    turns = [{"from": "human", "value": f"{marks}What?"}, {"from": "gpt", "value": "That."}]
    return {"conversations": turns, **fields}


def items(**fields: Any) -> Sequence[tuple[Any, ...]]:
    """Files, frames and further fields of the items of a record."""
    return [ref[1:] for ref in validate_record(record(**fields), "d:1", folder=Path("/images"), fields=FIELDS).items]


def test_forms_of_the_field() -> None:
    assert items(video="a.mp4") == [("a.mp4", (), ())]
    assert items(video=["a.mp4", "b.webm"], marks="<video><video>") == [("a.mp4", (), ()), ("b.webm", (), ())]
    assert items(video=["0.jpg", "1.PNG"]) == [("0.jpg", ("0.jpg", "1.PNG"), ())]
    both = items(video=[["0.jpg"], "b.mp4"], fps=[2, 4], marks="<video><video>")
    assert both == [("0.jpg", ("0.jpg",), (("fps", 2.0),)), ("b.mp4", (), (("fps", 4.0),))]
    assert items(video="a.mp4", fps=2, video_start=1, video_end=2.5)[0][2] == (
        ("fps", 2.0),
        ("video_start", 1.0),
        ("video_end", 2.5),
    )
    assert items(video=["0.jpg", "1.jpg"], times=[0, 2])[0][2] == (("times", (0.0, 2.0)),)
    mixed = items(image="c.png", video="a.mp4", marks="<video><image>")
    assert [each[0] for each in mixed] == ["a.mp4", "c.png"]
    assert items(video=None, marks="", fps="anything") == []


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"video": 3}, "field 'video': found a number"),
        ({"video": [[], "a.mp4"]}, r"field 'video'\[0\]: found an empty list"),
        ({"video": ["0.jpg", "a.mp4"]}, "pictures and 'a.mp4' in one list"),
        ({"video": "/etc/passwd"}, "leaves the image folder"),
        ({"video": [["0.jpg", "../1.jpg"]]}, "leaves the image folder"),
        ({"video": "a.mp4", "videos": ["a.mp4"]}, "fields 'video' and 'videos': given both"),
        ({"video": ["a.mp4", "b.mp4"]}, "1 <video> placeholders for 2 videos"),
        ({"video": "a.mp4", "fps": 0}, "field 'fps'"),
        ({"video": "a.mp4", "fps": True}, "field 'fps'"),
        ({"video": "a.mp4", "fps": 10**400}, "field 'fps'"),
        ({"video": "a.mp4", "fps": 1e-320}, "field 'fps'"),
        ({"video": "a.mp4", "video_start": float("nan")}, "field 'video_start'"),
        ({"video": [["a.mp4", "b.mp4"]]}, r"field 'video'\[0\]: found .* frames of one video"),
        ({"video": "a.mp4", "fps": [1, 2]}, "field 'fps'"),
        ({"video": "a.mp4", "video_start": -1}, "field 'video_start'"),
        ({"video": "a.mp4", "video_end": "3"}, "field 'video_end'"),
        ({"video": "a.mp4", "times": [0, 1]}, "2 times for the file 'a.mp4'"),
        ({"video": ["0.jpg", "1.jpg"], "times": [1, 1]}, "field 'times'"),
        ({"video": ["0.jpg", "1.jpg"], "times": [1]}, "1 times for 2 frames"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        items(**fields)


def test_marks_of_pictures_stand_for_videos_if_a_data_set_says_so(tmp_path: Path) -> None:
    """LLaVA-Video-178K."""
    lines = [record(video="a.mp4", marks="<image>\n"), record(image="b.png", marks="<image>\n"), record(marks="")]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="0 <video> placeholders for 1 videos|1 <image> placeholders for 0 images"):
        annotated("d", path, tmp_path, FIELDS)
    read = annotated("d", path, tmp_path, FIELDS, video_placeholder="<image>")
    assert [[ref.field.name for ref in each.items] for each in read] == [["video"], ["image"], []]
    assert read[0].turns[0].text == "<video>\nWhat?"


def test_links_and_stored_records(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out.jpg").touch()
    (tmp_path / "in/1.jpg").symlink_to(tmp_path / "out.jpg")
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(record(video=["0.jpg", "1.jpg"], times=[0, 2])) + "\n")
    [read] = annotated("d", path, tmp_path / "in", FIELDS)
    assert read.items[0][1:] == ("0.jpg", ("0.jpg", "1.jpg"), (("times", (0.0, 2.0)),))
    assert hash(read.items[0])
    with pytest.raises(UserError, match="which leads to"):
        read.item(0)


def test_a_token_of_videos_may_mark_another_encoder(folder: Path) -> None:
    """Then there are no videos in the run."""
    from megatron_hetero.config.modules import ModuleConfig

    encoder = ModuleConfig(hf_path=folder / "model", token="<|video_pad|>")
    found = Processor.from_folder(folder / "model", None, {"detail": encoder})
    assert [field.name for field in found.fields] == ["image", "detail"]


def test_numbers_of_frames_hold_without_a_rate(folder: Path) -> None:
    path = write_video(folder / "images/many.mp4", noise(40, (56, 56), 2), rate=4)
    if not reader(folder).timestamps:
        assert len(reader(folder, fps=None, min_frames=None).size(item_of(path)).times) == 40
        assert len(reader(folder, fps=None, min_frames=None, max_frames=16).size(item_of(path)).times) == 16


def test_a_user_without_a_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert reader(folder).limits.folder is None


def test_settings_of_the_folder(folder: Path) -> None:
    plain = Processor.from_folder(folder / "model")
    [found] = (each for each in plain.readers.values() if isinstance(each, VideoReader))
    newer = found.timestamps
    assert found.sampling.fps == (2.0 if newer else None)
    if newer:
        assert (found.sampling.min_frames, found.sampling.max_frames) == (4, 768)
    assert found.sampling.bounded == ("video" if newer else "frame")
    assert reader(folder, rules="authors", fps=None).sampling.fps == 2.0
    levels = torch.tensor(found._values)
    assert levels.shape == (3, 256) and (levels.diff(dim=1) > 0).all()


def test_an_export_samples_as_the_run_did(folder: Path, tmp_path: Path) -> None:
    """Its folder read without settings gives what the run had; other files stay."""
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    run = {"fps": 1.5, "min_frames": 2, "max_frames": 40, "frame_pixels": 100_000, "total_pixels": 2_000_000}
    [videos] = (each for each in read_family(model).items if each.modality == "video")
    assert videos.exported(model, {"video": {"fps": None, "rules": "transformers"}}) == {}
    (model / "video_preprocessor_config.json").write_text(json.dumps(videos.exported(model, {"video": run})))
    [found] = (each for each in Processor.from_folder(model).readers.values() if isinstance(each, VideoReader))
    wanted = reader(folder, **run | {"frame_pixels" if found.timestamps else "total_pixels": None}).sampling
    for name in ("fps", "min_frames", "max_frames"):
        assert getattr(found.sampling, name) == getattr(wanted, name)
    for frames, height, width in ((2, 56, 56), (20, 720, 1280), (40, 2000, 3000)):
        assert found.sampling.size(frames, height, width) == wanted.size(frames, height, width)
    told = videos.exported(folder / "model", {"video": {"frame_pixels": 1 << 40, "total_pixels": 1 << 40}})
    assert told["size"]["longest_edge"] < 1 << 40, "the folder's own limit stays"
    nested = {"video_processor": {"fps": 3, "do_sample_frames": True}}
    (model / "processor_config.json").write_text(json.dumps(nested))
    told = videos.exported(model, {"video": {"rules": "authors"}})
    assert (told["fps"], told["max_frames"], told["cap_pixels_per_frame"]) == (2.0, 768, True)


def read_family(folder: Path) -> Family:
    """The family of a folder."""
    return family_of(json.loads((folder / "config.json").read_text())["model_type"])
