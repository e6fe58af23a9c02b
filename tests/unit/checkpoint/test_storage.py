"""The files of a checkpoint: safetensors that anybody can open, and an index that says what is where."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.outputs import MANIFEST, read_manifest
from megatron_hetero.checkpoint.index import INDEX, Entry, read_index
from megatron_hetero.checkpoint.record import RunRecord
from megatron_hetero.checkpoint.storage import read_entries, write_entries
from tests.support.mutations import ODD, at, places
from tests.support.pool import world
from tests.support.ranks import on_ranks
from tests.unit.checkpoint.test_record import RUN

VALUES = {
    "weights/a": torch.arange(21.0).view(7, 3),
    "weights/b": torch.arange(10, dtype=torch.bfloat16),
    "weights/c": torch.arange(5, dtype=torch.float16),
    "random/d": torch.arange(3, dtype=torch.uint8),
    "step/e": torch.tensor([4.0]),
}


def entries(values: dict[str, Tensor]) -> list[Entry]:
    """Whole tensors, but for one in two rectangles, the second of which begins in the middle of a row."""
    found = [Entry(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in values.items() if key != "weights/a"]
    cut = values["weights/a"]
    return [*found, Entry("weights/a", (7, 3), (0, 0), cut[:, :1]), Entry("weights/a", (7, 3), (0, 1), cut[:, 1:])]


def test_files_are_safetensors(tmp_path: Path) -> None:
    """With every value where the index says that it is, and aligned."""
    records = write_entries(tmp_path, entries(VALUES), None)
    [name] = [name for name in records if name.endswith(".safetensors")]
    with safe_open(tmp_path / name, framework="pt") as opened:
        stored = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    index, found = read_index(tmp_path), 0
    for key, tensor in index.items():
        for chunk in tensor.chunks:
            (top, bottom), (left, right) = chunk.rows, chunk.columns
            expected = VALUES[key].view(len(VALUES[key]), -1)[top:bottom, left:right]
            values = stored[f"{key}[{top}:{bottom},{left}:{right}]"]
            assert values.dtype == expected.dtype and torch.equal(values.view_as(expected), expected)
            assert chunk.file == name and chunk.at % expected.element_size() == 0
            data = (tmp_path / name).read_bytes()[chunk.at : chunk.at + expected.nbytes]
            assert data == expected.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found += 1
    assert found == len(stored) == len(VALUES) + 1 and index.keys() == VALUES.keys()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_entries(tmp_path, entries(VALUES), None)
    empty = {key: torch.zeros_like(values) for key, values in VALUES.items()}
    wanted = [Entry(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in empty.items()]
    read_entries(tmp_path, read_index(tmp_path), wanted, None)
    assert all(torch.equal(empty[key], values) for key, values in VALUES.items())


def test_a_tensor_that_is_not_written_whole_is_refused(tmp_path: Path) -> None:
    """It would be a fault of the program, which ends the save on all ranks."""
    parts = [entry for entry in entries(VALUES) if entry.offsets != (0, 1)]
    with pytest.raises(UserError, match=r"tensors\.json: .* ranks wrote do not fit .*'weights/a' do not cover"):
        write_entries(tmp_path, parts, None)


@on_ranks(2)
def test_the_index_is_gathered_by_the_rank_that_writes_it(tmp_path: Path) -> None:
    rank, values = dist.get_rank(), torch.arange(2.0)
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("parts for all ranks")):
        records = write_entries(tmp_path, [Entry("weights/a", (4,), (2 * rank,), values)], world())
    assert ("tensors.json" in records) == (rank == 0)
    assert [chunk.rows for chunk in read_index(tmp_path)["weights/a"].chunks] == [(0, 2), (2, 4)]


@pytest.mark.parametrize("shape, rectangles", [
    ([4, 6], [(0, 2, 0, 6), (1, 3, 0, 6)]),  # as many elements, some twice
    ([4, 6], [(0, 4, 0, 3), (0, 4, 0, 3)]),
    ([4, 6], [(0, 4, 0, 6), (0, 4, 0, 6), (2, 2, 0, 6)]),
    ([4, 4], [(0, 2, 0, 2), (2, 4, 2, 4), (0, 2, 0, 4)]),
    ([4], [(0, 3, 0, 1), (2, 3, 0, 1)]),
    ([4], [(0, 0, 0, 1)]),
    ([4, 6], [(0, 4, 0, 6), (0, 1, 0, 1), (0, 1, 0, -1)]),
    ([4, 6], [(-1, 3, 0, 6)]),
    ([4, 6], [(0, 4, 0, 7)]),
    ([4, 6], [(3, 1, 0, 6)]),
    ([4, 6], [(0, 4, 0, True)]),
    ([-4, -6], [(0, 4, 0, 6)]),
    ([4.0, 6], [(0, 4, 0, 6)]),
    ([2, 2, 2], [(0, 2, 0, 4)]),
    (["4"], [(0, 4, 0, 1)]),
])  # fmt: skip
def test_an_index_covers_every_element_once(shape: list[Any], rectangles: list[Any], tmp_path: Path) -> None:
    chunks = [{"file": "a", "at": 0, "rows": [t, b], "columns": [x, y]} for t, b, x, y in rectangles]
    (tmp_path / INDEX).write_text(json.dumps({"weights/a": {"dtype": "F32", "shape": shape, "chunks": chunks}}))
    with pytest.raises(UserError, match=f"{INDEX}: cannot be read .ValueError: .*(exactly once|no place|no tensor)"):
        read_index(tmp_path)


def test_tiles_of_any_kind_cover_a_tensor(tmp_path: Path) -> None:
    """Many of them: their number squared would take hours."""
    tiles = [(row, row + 1, at, at + 1) for row in range(100) for at in range(500)] + [(100, 200, 0, 500), (7, 7, 1, 3)]
    chunks = [{"file": "a", "at": 0, "rows": [t, b], "columns": [x, y]} for t, b, x, y in tiles]
    empty = {"dtype": "F32", "shape": [0, 5], "chunks": []}
    text = {"weights/a": {"dtype": "F32", "shape": [200, 500], "chunks": chunks}, "weights/b": empty}
    (tmp_path / INDEX).write_text(json.dumps(text))
    assert len(read_index(tmp_path)["weights/a"].chunks) == len(tiles)


CHUNK = {"file": "x", "at": 0, "rows": [0, 4], "columns": [0, 6]}
FILES: dict[str, tuple[Any, Callable[[Path], Any]]] = {
    INDEX: ({"a": {"dtype": "F32", "shape": [4, 6], "chunks": [CHUNK]}}, read_index),
    MANIFEST: ({"files": {"a": {"size": 4, "sha256": "0"}}}, read_manifest),
    "run.json": (RUN, RunRecord.read),
}


@pytest.mark.parametrize("name", FILES)
def test_values_of_other_kinds_are_one_error(name: str, tmp_path: Path) -> None:
    good, read = FILES[name]
    refused = 0
    for path in list(places(good))[1:]:
        for odd in ODD:
            values = copy.deepcopy(good)
            at(values, path[:-1])[path[-1]] = odd
            (tmp_path / name).write_bytes(json.dumps(values).encode())
            try:
                read(tmp_path)
            except UserError as error:
                assert name in str(error) and len(str(error)) < 1000
                refused += 1
    assert refused
