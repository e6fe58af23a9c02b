"""Samples of bad records are left out: as if they were not there, whoever finds them and whenever; a machine's faults
are none of theirs.
"""

from __future__ import annotations

import errno
import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from megatron_hetero.base import contents
from megatron_hetero.base.errors import BadRecord, BadSample, UserError, blaming
from megatron_hetero.config.schema import load_config
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.records import Dataset, Reading
from megatron_hetero.data.sources import json_files
from megatron_hetero.models.items import video_files
from megatron_hetero.models.items.image_files import load_picture
from megatron_hetero.models.items.types import Item
from megatron_hetero.train.held_out import HeldOutEvaluation
from tests.support.folders import write_data, write_long
from tests.support.ranks import on_ranks
from tests.support.runs import MakeFlags, build, error_of, stored
from tests.support.videos import noise, write_video
from tests.unit.data.packs import by_rank

CAUSES = {1: "image_data", 3: "image_header", 4: "image_data", 5: "image_header", 6: "text", 7: "record", 10: "record"}
"""The bad ones of twelve samples: two of the first step, all of the second, one of the third."""
SKIP = "--data.bad_records skip --train.iters 3 --optimizer.name adamw --optimizer.lr 1e-3"
EVALUATED = "--eval.datasets d --eval.interval 3"
BUDGET = "--train.tokens_per_micro_batch 400 --data.max_seq_length 200"


def spoil(data: Path) -> None:
    """Make the records of `CAUSES` bad: two pictures that are cut, which two ranks may decode, one of 4096 x 18, ..."""
    images, lines = data.parent / "images", data.read_text().splitlines()
    for name in ("1_0.png", "1_1.png", "4_0.png"):
        (images / name).write_bytes((images / name).read_bytes()[:200])
    Image.new("RGB", (4096, 18)).save(images / "3_0.png")
    (images / "5_0.png").write_text("<html>404</html>")
    for number, old, new in ((6, '"value": "', '"value": "<|im_start|>'), (7, '"gpt"', '"human"'), (10, "{", "[")):
        lines[number] = lines[number].replace(old, new, 1)
    data.write_text("\n".join(lines))


def trained(flags: list[str]) -> dict[str, Any]:
    """What was trained and evaluated, and which samples were left out."""
    run = build(flags)
    steps = [(batch, run.trainer.train_step(step, batch)) for step, batch, _ in run.batches()]
    evaluated = list(HeldOutEvaluation.build(run).after(len(steps)))
    return {
        "losses": [metrics.loss for _, metrics in steps],
        "evaluated": [(m.loss, m.exact_match, m.samples) for m in evaluated],
        "bad in evaluations": [dict(m.bad) for m in evaluated],
        "bad": [[(each.record, each.cause) for each in batch.bad] for batch, _ in steps],
        "counted": [{k: v for k, v in m.record().items() if k.startswith(("bad", "skipped"))} for _, m in steps],
        "weights": stored(run),
    }


@pytest.fixture
def spoilt_and_long(layouts: tuple[str, str, str], make_flags: MakeFlags, tmp_path: Path) -> list[list[str]]:
    """Command lines for data with bad records, and for data in which the same records are too long."""
    folders = [write_data(tmp_path / name, 12) for name in ("bad", "long")]
    spoil(folders[0])
    write_long(folders[1], set(CAUSES))
    vision, text, more = layouts
    more = f"{SKIP} {EVALUATED} --data.max_seq_length 200 --data.too_long skip {more}"
    return [make_flags(vision, text, more, data=data) for data in folders]


@pytest.mark.parametrize(
    "layouts",
    [
        ("sp:4", "tp:4", "--data.workers 2"),
        ("sp:2@0-1", "tp:2@2-3", "--train.micro_batch_size 2 --data.scan true"),
        ("dp:4", "tp:2,dp:2", ""),
        ("sp:2,dp:2", "dp:4", f"{BUDGET} --data.workers 1"),
        pytest.param(("cp:2,dp:2", "cp:2,dp:2", "--data.workers 1 --data.worker_type process"), marks=pytest.mark.long),
    ],
    ids=str,
)
@on_ranks(4)
def test_training_goes_on_as_without_them(spoilt_and_long: list[list[str]]) -> None:
    """Losses, weights and evaluations have the same bits as with data where these samples are left out as too long."""
    found, expected = map(trained, spoilt_and_long)
    np.testing.assert_array_equal(found["losses"], expected["losses"])
    assert np.isnan(found["losses"]).tolist() == [False, True, False]
    assert found["evaluated"] == expected["evaluated"] and found["evaluated"][0][2] == 12 - len(CAUSES)
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(found["weights"][name], weight, err_msg=name)
    assert found["bad"] == [[(n, c) for n, c in CAUSES.items() if n // 4 == step] for step in range(3)]
    assert by_rank(found["bad"]) == [found["bad"]] * 4
    assert found["counted"][0] == {
        "skipped_samples": 0, "bad_samples": 2, "bad_samples_image_data": 1, "bad_samples_image_header": 1,
    }  # fmt: skip
    assert found["bad in evaluations"] == [
        {"bad_samples": 7, **{f"bad_samples_{cause}": 2 for cause in ("image_data", "image_header", "record")},
         "bad_samples_text": 1}
    ]  # fmt: skip
    assert [each["skipped_samples"] for each in expected["counted"]] == [2, 4, 1]


@pytest.fixture
def spoilt(make_flags: MakeFlags, tmp_path: Path) -> list[str]:
    """A command line for the data of `spoil`."""
    data = write_data(tmp_path, 12)
    spoil(data)
    return make_flags("dp:2", "tp:2", f"{SKIP} --data.max_bad_share 0.25", data=data)


@on_ranks(2)
def test_too_many_stop_all_ranks_with_one_message(spoilt: list[str], tmp_path: Path) -> None:
    with mock.patch("megatron_hetero.train.run.ALLOWED_BAD", 2):
        [(steps, message)] = set(by_rank(error_of(spoilt)))
    assert steps == 1 and message.startswith("data.max_bad_share (--data.max_bad_share): found 6 bad samples of 8")
    assert f"bad_records.jsonl of log.dir, such as `{tmp_path}/data.jsonl:8: field" in message
    named = [BadSample(**json.loads(line)) for line in (tmp_path / "log/bad_records.jsonl").read_text().splitlines()]
    assert [(each.dataset, each.record, each.cause) for each in named] == [("d", n, c) for n, c in CAUSES.items()][:6]
    assert all(each.message.startswith(each.where) and each.where.startswith(str(tmp_path)) for each in named)


@pytest.fixture
def without_a_disk(fault: str, make_flags: MakeFlags, tmp_path: Path) -> list[str]:
    """A command line for data of which a picture is not there, or that is read with a faulty disk."""
    data = write_data(tmp_path, 8, pictures=(1,))
    if fault == "missing":
        (tmp_path / "images/4_0.png").unlink()
    return make_flags("dp:2", "tp:2", SKIP, data=data)


@pytest.mark.parametrize("fault", ["missing", "disk"])
@on_ranks(2)
def test_faults_of_a_machine_stop_the_run(fault: str, without_a_disk: list[str]) -> None:
    real = contents.open_regular

    def broken(path: Path) -> Any:
        if path.name == "4_0.png":
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    with mock.patch.object(contents, "open_regular", broken if fault == "disk" else real):
        [(steps, message)] = set(by_rank(error_of(without_a_disk)))
    assert steps == 1 and message.startswith("step 2, data of rank ") and "4_0.png: cannot be read" in message


@pytest.mark.parametrize("form", ["lines", "list"])
def test_a_record_that_is_too_large_is_bad_by_itself(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "MAX_TEXT_BYTES", 200)
    texts = [json.dumps({"question": "a" * n, "answer": f"{n}"}) for n in (5, 900, 30, 180)]
    (tmp_path / "a.json").write_text("\n".join(texts) if form == "lines" else f"[{', '.join(texts)}]")
    data = Dataset("d", DatasetConfig(annotations=tmp_path / "a.json"), Reading(strict=False))
    assert (len(data), data.bad) == (4, 2)
    assert [data[k].turns[1].text for k in (0, 2)] == ["5", "30"]
    for k in (1, 3):
        with pytest.raises(BadRecord, match="more than 200 bytes"):
            data[k]


def _caused_by(*causes: BaseException) -> UserError:
    """A `UserError` of a library's errors, the first of which was raised first."""
    error: BaseException | None = None
    for each in (*causes, UserError("a.jsonl:3: image b.png: wrong.")):
        each.__cause__, error = error, each
    assert isinstance(error, UserError)
    return error


FFMPEG = type("PermissionError", (PermissionError,), {"__module__": "av.error"})
VERDICTS: Sequence[tuple[BaseException, ...]] = [
    (), (OSError("image file is truncated"),), (ValueError("aspect ratio"),), (FFMPEG(1, "not permitted"),),
    (OSError(errno.EINVAL, "not a regular file"),), (IsADirectoryError(errno.EISDIR, "is a directory"),),
]  # fmt: skip
FAULTS: Sequence[tuple[BaseException, ...]] = [
    (OSError(errno.EIO, "I/O"),), (PermissionError(errno.EACCES, "denied"),), (FileNotFoundError("of fsspec"),),
    (OSError(errno.ESTALE, "stale"), ValueError("of a library"), UserError("video b.mp4: wrong.")),
    (ImportError("av"),), (TimeoutError(),), (OSError(errno.EMFILE, "too many open files"),),
]  # fmt: skip


@pytest.mark.parametrize("causes", VERDICTS, ids=repr)
def test_verdicts_on_data_blame_the_record_in_every_process(causes: Sequence[BaseException]) -> None:
    with (
        pytest.raises(BadRecord) as caught,
        blaming("d", 2, "a.jsonl:3", "text"),
        blaming("d", 2, "a.jsonl:3", "image"),
    ):
        raise _caused_by(*causes)
    sent = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(sent, BadRecord) and sent.found == BadSample("d", 2, "a.jsonl:3", "image", str(caught.value))


@pytest.mark.parametrize("causes", FAULTS, ids=repr)
def test_faults_of_a_machine_blame_no_record(causes: Sequence[BaseException]) -> None:
    with pytest.raises(UserError) as caught, blaming("d", 2, "a.jsonl:3", "image"):
        raise _caused_by(*causes)
    assert not isinstance(caught.value, BadRecord)


class Failing(io.BytesIO):
    """A file on a disk that goes after the first reads."""

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell() > 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().read(size)


@pytest.mark.parametrize("end, cause", [("mp4", "video_header"), ("png", "image_data")])
def test_a_disk_that_goes_while_it_is_read_blames_no_record(end: str, cause: str, tmp_path: Path) -> None:
    """The same file that has been cut does."""
    data = write_video(tmp_path / "a.mp4", noise(8, (56, 56), 0)).read_bytes()
    if end == "png":
        Image.fromarray(noise(1, (256, 256), 0)[0]).save(tmp_path / "a.png")
        data = (tmp_path / "a.png").read_bytes()
    for opened, kind in ((Failing(data), UserError), (io.BytesIO(data[: len(data) // 2]), BadRecord)):
        content = mock.Mock(open=lambda opened=opened: opened, version=lambda kind=kind: (end, kind.__name__))
        item, limits = Item(content, "a.jsonl:1"), video_files.Limits(10.0, None)
        with pytest.raises(UserError) as caught, blaming("d", 0, "a.jsonl:1", cause):
            load_picture(content, "a.jsonl:1") if end == "png" else video_files.frame_table(item, limits)
        assert type(caught.value) is kind


def test_a_video_that_takes_too_long_blames_no_record() -> None:
    def never(late: video_files.Late) -> None:
        while True:
            late()

    with pytest.raises(UserError, match=r"not read within 0\.01 s") as caught, blaming("d", 0, "a.jsonl:1", "video"):
        video_files.within(contents.StoredFile("a.mp4"), 0.01, never)
    assert not isinstance(caught.value, BadRecord)


def test_a_share_without_skipping_is_refused(make_flags: MakeFlags) -> None:
    flags = make_flags("dp:1", "dp:1", "--data.max_bad_share 0.5")
    with pytest.raises(UserError, match=r"data\.max_bad_share.*found 0\.5, expected no value"):
        load_config(flags)
    assert load_config([*flags, "--data.bad_records", "skip"]).data.max_bad_share == 0.5
