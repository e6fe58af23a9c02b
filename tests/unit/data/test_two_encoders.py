"""Records that show images to two encoders: who sees what, in which order, at which positions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_hetero.base.errors import UserError
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.data.packing import IGNORED, PackMetadata
from megatron_hetero.data.processor import Processor
from megatron_hetero.data.records import Dataset
from megatron_hetero.data.validation import item_fields
from tests.support.items import IMAGE, annotated
from tests.support.sizes import grids

ENCODERS = ("vision", "detail")
ANSWER = {"from": "gpt", "value": "A cup."}
MIXED = {
    "conversations": [
        {"from": "human", "value": "<detail>\nand <image>?"}, ANSWER,
        {"from": "human", "value": "<image> or <detail>"}, ANSWER,
    ],
    "image": ["100x40.png", "56x56.png"],
    "detail": ["200x140.png", "33x90.png"],
}  # fmt: skip


def load(folder: Path, pictures: Path, record: object, encoders: tuple[str, ...] = ENCODERS) -> Dataset:
    path = folder / "train.jsonl"
    path.write_text(json.dumps(record) + "\n")
    return annotated("d", path, pictures, item_fields({"vision": ("image",)}, dict.fromkeys(encoders[1:], ("image",))))


@pytest.fixture(scope="module")
def two(model_folder: Path) -> Processor:
    source = ModuleConfig(hf_path=model_folder, token="<|video_pad|>", min_pixels=28 * 28 * 9, max_pixels=28 * 28 * 30)
    return Processor.from_folder(model_folder, encoders={"detail": source})


def test_images_come_in_the_order_of_their_placeholders(tmp_path: Path, pictures: Path) -> None:
    [record] = load(tmp_path, pictures, MIXED)
    assert [ref.file for ref in record.items] == ["200x140.png", "100x40.png", "56x56.png", "33x90.png"]
    assert [ref.field.encoder for ref in record.items] == ["detail", "vision", "vision", "detail"]


def test_each_encoder_has_its_own_token_and_sizes(two: Processor, tmp_path: Path, pictures: Path) -> None:
    [record] = load(tmp_path, pictures, MIXED)
    sample = two.tokenize(record)
    tokens = two.tokenizer.convert_tokens_to_ids(["<|video_pad|>", "<|image_pad|>"])
    expected = np.repeat(np.array([tokens[0], tokens[1], tokens[1], tokens[0]]), sample.rows)
    np.testing.assert_array_equal(sample.input_ids[sample.row_positions], expected)
    assert sample.rows.tolist() == [int(grid.prod()) // 4 for grid in grids(sample)]
    assert all(9 <= rows <= 30 for rows in sample.rows[[0, 3]])
    alone = Processor.from_folder(two_folder(two))
    assert sample.sizes[1] == alone.readers[IMAGE].size(record.item(1))
    starts = sample.row_positions[np.cumsum(sample.rows) - sample.rows]
    for start, rows, grid in zip(starts, sample.rows, grids(sample), strict=True):
        inside = sample.position_ids[:, start : start + rows]
        assert (inside[0] == inside[0, 0]).all() and np.ptp(inside[1]) == grid[1] // 2 - 1
        assert np.ptp(inside[2]) == grid[2] // 2 - 1


def two_folder(processor: Processor) -> Path:
    return Path(processor.tokenizer.name_or_path)


def test_packs_say_which_rows_are_whose(two: Processor, tmp_path: Path, pictures: Path) -> None:
    [record] = load(tmp_path, pictures, MIXED)
    plain = {"conversations": [{"from": "human", "value": "<image>"}, ANSWER], "image": "56x56.png"}
    samples = [two.tokenize(r) for r in (record, *load(tmp_path, pictures, plain))]
    input_ids = np.concatenate([sample.input_ids for sample in samples])
    parts = [PackMetadata.of_sample(number, sample, ENCODERS) for number, sample in zip((7, 8), samples, strict=True)]
    pack = PackMetadata.joined(parts, len(ENCODERS))
    labelled = sum(int((sample.labels != IGNORED).sum()) for sample in samples)
    assert (pack.tokens, pack.supervised) == (len(input_ids), labelled)
    assert pack.lengths == tuple(map(len, samples))
    sources = [each.tolist() for each in pack.sources]
    assert sources == [[[7, 1, 0], [7, 2, 0], [8, 0, 0]], [[7, 0, 0], [7, 3, 0]]]
    for encoder, token in enumerate(("<|image_pad|>", "<|video_pad|>")):
        expected = np.flatnonzero(input_ids == two.tokenizer.convert_tokens_to_ids(token))
        np.testing.assert_array_equal(pack.positions(encoder), expected)


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"detail": "a.png"}, ["'detail' and 'conversations'", "2 <detail> placeholders for 1 images"]),
        ({"detail": ["../a.png", "b.png"]}, ["field 'detail'[0]", "leaves the image folder"]),
        ({"detail": 3}, ["field 'detail'", "a number"]),
        ({"conversations": [{"from": "human", "value": "<image><image>"}, {"from": "gpt", "value": "<detail>"}]},
         ["'detail' and 'conversations'", "0 <detail> placeholders for 2 images"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change: dict, parts: list[str], tmp_path: Path, pictures: Path) -> None:
    with pytest.raises(UserError) as error:
        load(tmp_path, pictures, MIXED | change)
    for part in parts:
        assert part in str(error.value)


def test_without_such_an_encoder_the_mark_is_text(tmp_path: Path, pictures: Path) -> None:
    [record] = load(tmp_path, pictures, MIXED, encoders=("vision",))
    assert [ref.field.encoder for ref in record.items] == ["vision", "vision"] and "<detail>" in record.turns[0].text


@pytest.mark.parametrize(
    "token, found", [("<|image_pad|>", "stands for images of vision"), ("<|nothing|>", "is not in the tokenizer"),
                     ("a", "is not an added token"), ("<|im_end|>", "structure"), ("<|vision_start|>", "structure")],
)  # fmt: skip
def test_tokens_that_do_not_serve_are_refused(token: str, found: str, model_folder: Path) -> None:
    with pytest.raises(UserError, match=f"modules.detail.token .*: .*{re.escape(found)}"):
        Processor.from_folder(model_folder, encoders={"detail": ModuleConfig(hf_path=model_folder, token=token)})
