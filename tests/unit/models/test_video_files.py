"""Video files: times, wanted frames, and files that are damaged, hostile or of other kinds."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from megatron_hetero.base.contents import Content
from megatron_hetero.base.errors import UserError
from megatron_hetero.models.items import video_files
from megatron_hetero.models.items.types import Item
from megatron_hetero.models.items.video_files import FrameTable, Limits, frame_table, read_frames
from megatron_hetero.models.items.videos import fitted
from tests.support.items import item_of
from tests.support.videos import noise, write_video

LIMITS = Limits(60.0, None)
FORMATS = {
    "a.mp4": ("libx264", "yuv420p"),
    "a.mkv": ("libx264", "yuv420p"),
    "a.webm": ("libvpx-vp9", "yuv420p"),
    "a.avi": ("mpeg4", "yuv420p"),
    "reordered.avi": ("libx264", "yuv420p"),
    "reordered.mpg": ("mpeg2video", "yuv420p"),
    "vp8.webm": ("libvpx", "yuv420p"),
    "a.ts": ("libx264", "yuv420p"),
    "ten_bits.mov": ("libx265", "yuv420p10le"),
    "alpha.mov": ("qtrle", "argb"),
}
COUNT, RATE = 40, 10


def item(path: Path) -> Item:
    """The file in a record."""
    return item_of(path, "train.jsonl:3")


def read(path: Path, numbers: Iterable[int]) -> dict[int, np.ndarray]:
    """The frames of these numbers."""
    return read_frames(item(path), frame_table(item(path), LIMITS), numbers, LIMITS, np.asarray)


def refused(path: Path, numbers: Iterable[int] = (0,)) -> str:
    """The message, which names record and file."""
    with pytest.raises(UserError) as caught:
        read(path, numbers)
    message = str(caught.value)
    assert message.startswith(f"train.jsonl:3: video {path}: ")
    return message.removeprefix(f"train.jsonl:3: video {path}: ")


@pytest.fixture(scope="module")
def frames() -> list[np.ndarray]:
    return noise(COUNT, (64, 48), 0)


@pytest.fixture(scope="module", params=list(FORMATS))
def video(request: pytest.FixtureRequest, frames: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    codec, pixels = FORMATS[request.param]
    path = tmp_path_factory.mktemp("videos") / request.param
    return write_video(path, frames, rate=rate_of(path), codec=codec, pixels=pixels)


def rate_of(path: Path) -> int:
    """MPEG-2 has few rates."""
    return 25 if path.suffix == ".mpg" else RATE


def all_frames(path: Path) -> list[np.ndarray]:
    """All frames, decoded one after the other."""
    with av.open(str(path)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def test_times_and_frames(video: Path) -> None:
    table = frame_table(item(video), LIMITS)
    assert (len(table.stamps), table.width, table.height, table.rate) == (COUNT, 64, 48, rate_of(video))
    np.testing.assert_allclose(table.times, np.arange(COUNT) / rate_of(video), atol=2e-3)
    expected = all_frames(video)
    for numbers in ([0], [COUNT - 1], [13, 14, 15], [2, 30], [0, 20, 39], range(COUNT)):
        found = read(video, numbers)
        assert sorted(found) == list(numbers)
        for number, pixels in found.items():
            np.testing.assert_array_equal(pixels, expected[number])


def test_one_pass_and_only_wanted_frames_are_converted(
    frames: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(tmp_path / "a.mp4", frames, rate=RATE, keys_every=10)
    table = frame_table(item(path), LIMITS)
    assert len(table.keys) >= 4
    decoded, passes = list[int](), list[int]()
    whole = video_files._pass

    def counted(path: Content, table: FrameTable, start: int, run: Any, coming: Any, convert: Any) -> Any:
        def each() -> Any:
            for frame in coming:
                decoded.append(frame.pts)
                yield frame

        passes.append(start)
        return whole(path, table, start, run, each(), convert)

    monkeypatch.setattr(video_files, "_pass", counted)
    # From the key frame before the first one, and past a whole group of frames that nobody wants.
    last = int(table.keys[-1]) + 1
    read_frames(item(path), table, [int(table.keys[1]) + 2, last], LIMITS, np.asarray)
    assert passes == [int(table.keys[1]), int(table.keys[-1])] and len(decoded) < 10
    passes.clear()
    read_frames(item(path), table, range(int(table.keys[1]), last), LIMITS, np.asarray)
    assert passes == [int(table.keys[1])]


def test_turned_frames_are_upright(frames: list[np.ndarray], tmp_path: Path) -> None:
    plain = read(write_video(tmp_path / "a.mp4", frames[:3]), [1])[1]
    for degrees, turns in ((90, 1), (180, 2), (270, 3)):
        path = write_video(tmp_path / f"{degrees}.mp4", frames[:3], rotation=degrees)
        table, found = frame_table(item(path), LIMITS), read(path, [1])[1]
        np.testing.assert_array_equal(found, np.rot90(plain, turns))  # Counterclockwise.
        assert (table.height, table.width) == found.shape[:2]


def test_transparent_frames_are_over_white(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.mov"), "w") as file:
        stream: Any = file.add_stream("qtrle", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "argb"
        for _ in range(3):
            clear = np.zeros((32, 32, 4), np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(clear, format="rgba")))
        file.mux(stream.encode())
    assert read(tmp_path / "a.mov", [0])[0].min() == 255


def test_uneven_times_are_those_of_the_frames(frames: list[np.ndarray], tmp_path: Path) -> None:
    times = [k / 30 for k in range(15)] + [0.5 + k / 2 for k in range(10)]
    for name in ("a.mp4", "a.mkv"):
        path = write_video(tmp_path / name, frames[:25], times=times, rate=30)
        np.testing.assert_allclose(frame_table(item(path), LIMITS).times, times, atol=2e-3)


def test_a_cover_picture_is_not_the_video(frames: list[np.ndarray], tmp_path: Path) -> None:
    Image.fromarray(frames[0]).save(tmp_path / "cover.png")
    path = write_video(tmp_path / "a.mp4", frames[:6])
    with av.open(str(path)) as source, av.open(str(tmp_path / "b.mp4"), "w") as file:
        own: Any = file.add_stream_from_template(source.streams.video[0])
        cover: Any = file.add_stream("png", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 48, "rgb24"
        cover.disposition = Disposition.attached_pic
        file.mux(cover.encode(av.VideoFrame.from_ndarray(frames[1], format="rgb24")))
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = own
                file.mux(packet)
    table = frame_table(item(tmp_path / "b.mp4"), LIMITS)
    assert len(table.stamps) == 6 and table.pixels == "yuv420p"


# ------------------------------------------------------------------------------------------------- bad files


def test_damaged_files(frames: list[np.ndarray], tmp_path: Path) -> None:
    start = {"movflags": "faststart"}
    for name, codec, options in (
        ("index_last.mp4", "libx264", None),
        ("index_first.mp4", "libx264", start),
        ("a.mkv", "libx264", None),
        ("a.webm", "libvpx-vp9", None),
    ):
        whole = write_video(tmp_path / name, frames, rate=RATE, codec=codec, container=options).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        assert "truncated" in refused(tmp_path / name) or "cannot be read" in refused(tmp_path / name)
    whole = write_video(tmp_path / "z.mp4", frames, rate=RATE, container=start).read_bytes()
    middle = len(whole) // 2
    (tmp_path / "z.mp4").write_bytes(whole[:middle] + bytes(4096) + whole[middle + 4096 :])
    refused(tmp_path / "z.mp4", range(COUNT))


def test_a_truncated_fragmented_file(frames: list[np.ndarray], tmp_path: Path) -> None:
    """Its header has no number of frames."""
    fragments = {"movflags": "frag_keyframe+empty_moov"}
    path = write_video(tmp_path / "a.mp4", frames, rate=RATE, container=fragments)
    assert len(frame_table(item(path), LIMITS).stamps) == COUNT
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    assert "truncated" in refused(path)


def test_frames_that_an_edit_list_leaves_out(frames: list[np.ndarray], tmp_path: Path) -> None:
    """A file that was trimmed without encoding it anew."""
    path = write_video(tmp_path / "a.mp4", frames, rate=RATE)
    content = bytearray(path.read_bytes())
    at = content.index(b"elst") + 12  # Version and flags, number of entries; duration, start of the first.
    length, start = (int.from_bytes(content[at + k : at + k + 4]) for k in (0, 4))
    scale = int.from_bytes(content[(mdhd := content.index(b"mdhd") + 4) + 12 : mdhd + 16])
    content[at + 4 : at + 8] = (start + scale).to_bytes(4)  # A second later,
    content[at : at + 4] = (length * 3 // 4).to_bytes(4)  # and a quarter shorter.
    path.write_bytes(content)
    table = frame_table(item(path), LIMITS)
    assert 28 <= len(table.stamps) <= 32
    np.testing.assert_array_equal(read(path, [3])[3], all_frames(path)[3])


def test_hidden_frames_are_none(tmp_path: Path, frames: list[np.ndarray]) -> None:
    """VP8 may refer to frames that are never shown."""
    whole = write_video(tmp_path / "a.webm", frames, rate=RATE, codec="libvpx")
    with av.open(str(whole)) as source, av.open(str(tmp_path / "b.webm"), "w") as file:
        own: Any = file.add_stream_from_template(source.streams.video[0])
        for k, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
            content = bytearray(bytes(packet))
            content[0] &= 0xFF if k != 7 else 0xEF  # The bit of frames that are shown.
            copy = av.Packet(bytes(content))
            copy.pts, copy.dts, copy.time_base = packet.pts, packet.dts, packet.time_base
            copy.is_keyframe, copy.stream = packet.is_keyframe, own
            file.mux(copy)
    expected = all_frames(tmp_path / "b.webm")
    found = read(tmp_path / "b.webm", range(COUNT - 1))
    assert len(expected) == len(found) == len(frame_table(item(tmp_path / "b.webm"), LIMITS).stamps) == COUNT - 1
    for number, pixels in found.items():
        np.testing.assert_array_equal(pixels, expected[number])


@pytest.mark.parametrize(
    "name, content",
    [
        ("empty.mp4", b""),
        ("random.mp4", np.random.default_rng(0).bytes(5000)),
        ("text.mp4", b"a film about nothing\n" * 50),
        ("svg.mp4", b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'),
        ("playlist.mp4", b"#EXTM3U\n#EXTINF:10,\nsecret.ts\n#EXT-X-ENDLIST\n"),
        ("concat.mp4", b"ffconcat version 1.0\nfile 'secret.ts'\n"),
        ("dash.mpd", b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period/></MPD>'),
    ],
)
def test_what_is_no_video(name: str, content: bytes, frames: list[np.ndarray], tmp_path: Path) -> None:
    write_video(tmp_path / "secret.ts", frames[:6])
    (tmp_path / name).write_bytes(content)
    assert "cannot be read" in refused(tmp_path / name)


def test_pictures_and_sound_are_no_videos(frames: list[np.ndarray], tmp_path: Path) -> None:
    Image.fromarray(frames[0]).save(tmp_path / "a.mp4", format="png")
    assert "cannot be read" in refused(tmp_path / "a.mp4")
    with av.open(str(tmp_path / "b.mp4"), "w") as file:
        stream: Any = file.add_stream("aac", rate=44100)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.rate = 44100
        file.mux(stream.encode(silence))
        file.mux(stream.encode())
    assert "without a video" in refused(tmp_path / "b.mp4")


def test_nothing_but_the_file_is_opened(frames: list[np.ndarray], tmp_path: Path) -> None:
    """A name that FFmpeg would take for another file, and a playlist that names an address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/a.ts"
        (tmp_path / "a.m3u8").write_text(f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{address}\n#EXT-X-ENDLIST\n")
        refused(tmp_path / "a.m3u8")
        with pytest.raises(TimeoutError):
            server.accept()
    (tmp_path / "concat:a.mp4").write_bytes(write_video(tmp_path / "a.mp4", frames[:6]).read_bytes())
    assert len(frame_table(item(tmp_path / "concat:a.mp4"), LIMITS).stamps) == 6


def test_missing_files_folders_and_pipes(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "a.mp4").lower()
    (tmp_path / "folder.mp4").mkdir()
    refused(tmp_path / "folder.mp4")
    os.mkfifo(tmp_path / "pipe.mp4")
    assert "not a regular file" in refused(tmp_path / "pipe.mp4")


def test_frames_of_too_many_pixels(frames: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_video(tmp_path / "a.mp4", frames[:3])
    monkeypatch.setattr(video_files, "MAX_PIXELS", 64 * 48 - 1)
    assert "frames of 64 x 48 pixels" in refused(path)
    monkeypatch.setattr(video_files, "MAX_PIXELS", 64 * 48)
    monkeypatch.setattr(video_files, "MAX_FRAMES", 2)
    assert "more than 2 frames" in refused(path)


def test_a_decoder_that_never_returns(
    frames: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, released = write_video(tmp_path / "a.mp4", frames[:3]), threading.Event()
    monkeypatch.setattr(video_files, "_picture", lambda *_: released.wait(60))
    start = time.monotonic()
    with pytest.raises(UserError, match=r"train.jsonl:3: video .*a.mp4: not read within 0.2 s.*data.video.timeout_s"):
        frame_table(item(path), Limits(0.2, None))
    assert time.monotonic() - start < 30
    released.set()


def test_a_slow_decoder_stops_at_the_limit(
    frames: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(tmp_path / "a.mp4", frames, rate=RATE)
    table, seen = frame_table(item(path), LIMITS), list[int]()

    def slow(picture: Image.Image) -> None:
        seen.append(0)
        time.sleep(0.05)

    with pytest.raises(UserError, match="not read within"):
        read_frames(item(path), table, range(COUNT), Limits(0.3, None), slow)
    count = len(seen)
    time.sleep(0.3)
    assert count < COUNT and len(seen) <= count + 1


def test_without_pyav(frames: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_video(tmp_path / "a.mp4", frames[:3])
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    assert "`pip install av`" in refused(path)


# ------------------------------------------------------------------------------------------------ stored tables


def test_tables_are_stored_until_a_file_changes(
    frames: list[np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, limits = write_video(tmp_path / "a.mp4", frames[:6]), Limits(60.0, tmp_path / "index")
    first = frame_table(item(path), limits)
    [stored] = (tmp_path / "index").glob("*/*.times")
    assert stored.name.startswith(stored.parent.name), "one of many folders"
    video_files._known.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(video_files, "_read_table", lambda *_: pytest.fail("it is stored"))
        again = frame_table(item(path), limits)
    np.testing.assert_array_equal(again.stamps, first.stamps)
    assert {**vars(again), "stamps": 0, "keys": 0} == {**vars(first), "stamps": 0, "keys": 0}
    for cut in (100, -5):
        stored.write_bytes(stored.read_bytes()[:cut])  # By a full disk: made anew.
        video_files._known.cache_clear()
        assert len(frame_table(item(path), limits).stamps) == 6
    write_video(path, frames[:9])
    assert len(frame_table(item(path), limits).stamps) == 9
    assert len([*(tmp_path / "index").glob("*/*.times")]) == 2


def test_stored_tables_take_few_bytes_and_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = np.arange(100_000) * 512 + np.random.default_rng(0).integers(0, 2, 100_000)
    table = FrameTable(stamps, np.arange(0, 100_000, 250), 1 / 12800, True, 25.0, 0, 640, 480, -1, "yuv420p")
    file = tmp_path / "ab" / f"ab{0:038}.times"
    video_files._store(file, table)
    assert file.stat().st_size < 100_000
    again = video_files._stored(file)
    assert again is not None
    np.testing.assert_array_equal(again.stamps, stamps)
    np.testing.assert_array_equal(again.keys, table.keys)
    monkeypatch.setattr(video_files, "MAX_STORED", 3)
    monkeypatch.setattr("secrets.randbelow", lambda _: 0)
    for k in range(1, 6):
        os.utime(file, (k, k))
        file = file.with_name(f"ab{k:038}.times")
        video_files._store(file, table)
    assert {each.name[-7] for each in file.parent.iterdir()} == {"3", "4", "5"}, "the newest"
    for k in range(5):
        video_files._store(file.with_name(f"ab{k:038}.times"), table)
    assert len([*file.parent.iterdir()]) == 6, "used in the last 30 days"


def test_a_folder_that_cannot_be_written_is_no_error(frames: list[np.ndarray], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = write_video(tmp_path / "a.mp4", frames[:6])
    assert len(frame_table(item(path), Limits(60.0, tmp_path / "file")).stamps) == 6


def test_frames_are_resized_as_torchvision_does() -> None:
    """To 1 of 255, in few places, and 2 at some of the hardest edges: with the picture beside this file, which
    torchvision 0.28 resized (bicubic, with antialias, as the processors of transformers ask it to).
    """
    coarse = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    picture = Image.fromarray(np.kron(coarse, np.ones((8, 8, 1), np.uint8)))
    with Image.open(Path(__file__).with_name("resized_by_torchvision.png")) as reference:
        difference = np.abs(np.asarray(fitted(picture, (84, 56)), np.int64) - np.asarray(reference))
    assert difference.max() <= 2 and (difference > 1).mean() < 1e-3 and (difference > 0).mean() < 0.05
