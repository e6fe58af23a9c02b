"""Reading of video files: the time of each frame, and requested frames as upright RGB.

Files are not trusted. FFmpeg reads an open file and opens no other file: formats that name other files (playlists,
`concat`) or are made of pictures are not accepted. A truncated file is refused, because FFmpeg reports no error for it.
Reading has a time limit.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from PIL import Image

from megatron_hetero.base.contents import Content, Version
from megatron_hetero.base.errors import UserError, in_short, reason
from megatron_hetero.base.files import mark_used, read_bytes, remove_unused, replacing
from megatron_hetero.models.items.image_files import over_white
from megatron_hetero.models.items.types import Item

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

T = TypeVar("T")
Convert: TypeAlias = Callable[[Image.Image], T]

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif,ivf,mxf"
"""Accepted formats, by FFmpeg's names, regardless of a file's suffix."""
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 1 << 27)
"""Maximum pixels of a frame, the same as for pictures."""
MAX_FRAMES = 1 << 23
"""Maximum frames of a file: 38 hours at 60 frames per second."""
MAX_STORED = 1 << 15
"""Maximum number of stored frame tables in each of 256 folders, not counting recently used tables."""
WORTH_A_SEEK = 16
"""Minimum number of skipped frames for which a seek is faster than decoding."""
UPRIGHT = -1
"""Value of `FrameTable.turn` for frames that are upright."""
_EXACT = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv", "ivf")
"""Formats with a time for every frame. In other formats FFmpeg extrapolates times, differently after a seek."""
_FORMAT = 2
"""Version of the format of stored frame tables. Tables of other versions are not read."""
_TURNS = {
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
}
"""Transposition of a frame by the signs of its display matrix: (x, y) is shown at (a x + c y, b x + d y)."""
_LINEAR = (0, 1, 3, 4)
"""Indices of a, b, c and d in a display matrix."""


@dataclass(frozen=True, eq=False)
class FrameTable:
    """The frames of a video file in presentation order.

    Attributes:
        stamps: int64 [frames], presentation times in units of `unit` seconds, ascending.
        keys: int64 [keys], numbers of the frames at which decoding can start, ascending.
        unit: unit of `stamps` in seconds.
        exact: whether decoded frames have the times of their packets. If not, frames are counted from the beginning.
        rate: frames per second in the header; 0 if it has none.
        stream: number of the video stream in its file.
        width, height: size of an upright frame in pixels.
        turn: the transposition of Pillow that turns a frame upright; `UPRIGHT` if none is needed.
        pixels: FFmpeg's name of the pixel format.
    """

    stamps: np.ndarray
    keys: np.ndarray
    unit: float
    exact: bool
    rate: float
    stream: int
    width: int
    height: int
    turn: int
    pixels: str

    @property
    def times(self) -> np.ndarray:
        """Presentation times in seconds from the first frame, float64 [frames]."""
        return (self.stamps - self.stamps[0]) * self.unit


class Limits(NamedTuple):
    """Limits of reading videos. `seconds`: time limit per video; 0: no limit. `folder`: folder of stored frame tables;
    None: tables are not stored.
    """

    seconds: float
    folder: Path | None


def frame_table(item: Item, limits: Limits) -> FrameTable:
    """Return the frame table of an item's file, from `limits.folder` if it is stored there for the unchanged file.

    Raises:
        UserError: the file is missing, not a video, truncated or too large, or takes too long.
    """
    with _named(item):
        with _problems(item.content):
            version = within(item.content, limits.seconds, lambda _: item.content.version())
        known = _known(version, limits)
        if not known:
            known.append(_table(item.content, version, limits))
        return known[0]


def read_frames(
    item: Item, table: FrameTable, wanted: Iterable[int], limits: Limits, convert: Convert[T]
) -> dict[int, T]:
    """Decode the `wanted` frames, upright, in mode RGB and over white, and return the results of `convert` by frame
    number. Decoding starts at the last key frame before the first wanted frame, and seeks over long gaps between wanted
    frames.

    Raises:
        UserError: as in `frame_table`, or a wanted frame is damaged.
    """
    content, numbers = item.content, sorted(set(wanted))

    def read(late: Late) -> dict[int, T]:
        frames = dict[int, T]()
        with _open(content, table.stream) as (container, stream):
            for number, run in enumerate(_runs(table.keys, numbers) if table.exact else [numbers] if numbers else []):
                start = _key_before(table.keys, run[0]) if table.exact else 0
                if number or start:
                    container.seek(int(table.stamps[start]), stream=stream)
                frames |= _pass(content, table, start, run, _decoded(container, stream, late), convert)
        # In some containers, a seek ends at another place than requested.
        if table.exact and (missing := sorted(set(numbers) - frames.keys())):
            with _open(content, table.stream) as (container, stream):
                frames |= _pass(content, table, 0, missing, _decoded(container, stream, late), convert)
        if missing := sorted(set(numbers) - frames.keys()):
            raise _unusable(content, f"a video whose frame {missing[0]} of {len(table.stamps)} cannot be decoded")
        return frames

    with _named(item):
        return within(content, limits.seconds, read)


@contextlib.contextmanager
def _named(item: Item) -> Iterator[None]:
    """Add the name of the record to errors raised in this context."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{item.where}: {error}") from error


# --------------------------------------------------------------------------------------------- stored tables


@lru_cache(maxsize=64)
def _known(version: Version, limits: Limits) -> list[FrameTable]:  # noqa: ARG001 (the key)
    """Return the cached list for a file's frame table, which is empty until the caller adds the table. The key is the
    version of the content, since a cache should not keep contents in memory.
    """
    return []


def _table(content: Content, version: Version, limits: Limits) -> FrameTable:
    name = hashlib.sha256(repr((_FORMAT, *version)).encode()).hexdigest()[:40]
    file = None if limits.folder is None else limits.folder / name[:2] / f"{name}.times"

    def read(late: Late) -> FrameTable:
        if file is not None and (stored := _stored(file)) is not None:
            mark_used(file)
            return stored
        table = _read_table(content, late)
        if file is not None:
            _store(file, table)
        return table

    return within(content, limits.seconds, read)


def _stored(file: Path) -> FrameTable | None:
    """Read a stored table: a line of JSON, then the arrays as compressed differences. Returns None if incomplete."""
    try:
        head, _, rest = read_bytes(file).partition(b"\n")
        values = json.loads(head)
        frames, count = values.pop("frames"), values.pop("keys")
        numbers = np.frombuffer(zlib.decompressobj().decompress(rest, 16 * MAX_FRAMES), np.int64).cumsum()
        stamps, keys = np.split(numbers, [frames])
        return FrameTable(stamps, keys, **values) if len(keys) == count else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, zlib.error):
        return None


def _store(file: Path, table: FrameTable) -> None:
    """Store a frame table atomically. If the folder is not writable, the table is recomputed next time."""
    values = {name: value for name, value in vars(table).items() if not isinstance(value, np.ndarray)}
    head = json.dumps({**values, "frames": len(table.stamps), "keys": len(table.keys)})
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as new:
            steps = np.diff(np.concatenate([table.stamps, table.keys]).astype(np.int64), prepend=0)
            new.write_bytes(head.encode() + b"\n" + zlib.compress(steps.tobytes(), 1))
        if not secrets.randbelow(1024):  # Rarely, since listing a folder takes time.
            remove_unused(file.parent.glob(f"{file.parent.name}*.times"), MAX_STORED)


# ------------------------------------------------------------------------------------------------ time limits


class _TooLate(Exception):
    """Raised when the time limit is exceeded."""


Late = Callable[[], None]
"""Function that raises `_TooLate` if the time limit is exceeded."""


class _Helper:
    """A reusable thread that works for one caller at a time. Threads are reused because FFmpeg leaks some memory in
    each thread that uses it.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self._tasks: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]]] = SimpleQueue()
        threading.Thread(target=self._serve, name="video", daemon=True).start()

    def _serve(self) -> None:
        while True:
            work, answer = self._tasks.get()
            try:
                answer.put((work(), None))
            except BaseException as error:  # The caller raises this error.
                answer.put((None, error))
            del work, answer

    def result(self, work: Callable[[], Any], seconds: float) -> Any:
        """Run `work` in the thread and return its result and exception. Raises `Empty` after `seconds`."""
        answer: SimpleQueue[Any] = SimpleQueue()
        self._tasks.put((work, answer))
        return answer.get(timeout=seconds)


_IDLE: SimpleQueue[_Helper] = SimpleQueue()


def _helper() -> _Helper:
    with contextlib.suppress(Empty):
        while (helper := _IDLE.get_nowait()).process != os.getpid():
            pass  # A forked process has none of these threads.
        return helper
    return _Helper()


def within(content: Content, seconds: float, work: Callable[[Late], T]) -> T:
    """Run `work` and return its result. Raises `UserError` after `seconds` (0: no limit). A decoder that never returns
    occupies its thread until the process ends.
    """
    if not seconds:
        return work(lambda: None)
    end, helper = time.monotonic() + seconds, _helper()

    def late() -> None:
        if time.monotonic() > end:
            raise _TooLate

    result, error = None, _TooLate()
    with contextlib.suppress(Empty):
        result, error = helper.result(lambda: work(late), seconds + 1.0)
        _IDLE.put(helper)
    if isinstance(error, _TooLate):
        raise UserError.at(
            _place(content),
            problem=f"not read within {seconds:g} s",
            because="a damaged file or a slow disk must not stop training for hours",
            fix="raise data.video.timeout_s for long videos, convert the video to smaller frames, or remove the record",
        ) from TimeoutError()
    if error is not None:
        raise error
    return cast(T, result)


# ---------------------------------------------------------------------------------------------------- reading


@contextlib.contextmanager
def _problems(content: Content) -> Iterator[None]:
    """Convert exceptions raised in this context to `UserError`. FFmpeg raises many kinds of built-in exceptions."""
    try:
        yield
    except (UserError, MemoryError, _TooLate):
        raise
    except ImportError as error:
        raise UserError.at(
            _place(content),
            problem=f"PyAV, which reads videos, is not installed ({in_short(error)})",
            fix="install it with `pip install av`, or this package with its extra `video`",
        ) from error
    except Exception as error:
        # FFmpeg's own error numbers are below all error numbers of the system.
        missing, denied = (errno.ENOENT, errno.ENAMETOOLONG, errno.EISDIR), isinstance(error, PermissionError)
        if isinstance(error, OSError) and (denied or error.errno in missing):
            fix = "check the permissions" if denied else "correct the record's 'video', or `images` in data.registry"
            raise UserError.at(_place(content), problem=f"cannot be read ({reason(error)})", fix=fix) from error
        raise _unusable(content, f"a file that cannot be read as a video ({in_short(error)})") from error


def _place(content: Content) -> str:
    return f"video {content}"


def _unusable(content: Content, found: str) -> UserError:
    return UserError.at(
        _place(content),
        found=found,
        expected="an intact video of a common format (MP4, WebM, Matroska, MOV, AVI, MPEG)",
        fix="copy the file again or convert it, for example with ffmpeg, or remove the record",
    )


@contextlib.contextmanager
def _open(content: Content, stream: int | None = None, **options: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file and its video stream as a context manager that converts exceptions to `UserError`."""
    with _problems(content):
        import av
        from av.stream import Disposition

        closed = {"format_whitelist": FORMATS, "protocol_whitelist": "none", **options}
        # Accept tags that are not UTF-8, as PyAV 19 and later always do.
        lenient: Any = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
        with (
            content.open() as file,
            av.open(file, "r", container_options=closed, **lenient) as opened,
        ):
            streams = opened.streams.video
            shown = [s for s in streams if not s.disposition & Disposition.attached_pic]
            chosen = [s for s in shown if s.index == stream] if stream is not None else shown
            if not chosen:
                raise _unusable(content, "a file with a cover picture alone" if streams else "a file without a video")
            # Decode in one thread, since several workers read files at once.
            chosen[0].codec_context.thread_count = 1
            yield opened, chosen[0]


def _read_table(content: Content, late: Late) -> FrameTable:
    """Compute the frame table from all packets of a file and its first decoded frame."""
    with _open(content) as (container, stream):
        if stream.codec_context.width * stream.codec_context.height > MAX_PIXELS:
            raise _unusable(content, f"frames of {stream.codec_context.width} x {stream.codec_context.height} pixels")
        frames, end, packets, exact = list[tuple[int, bool]](), 0.0, 0, container.format.name in _EXACT
        for packet in container.demux():
            late()
            if not packet.size:
                continue
            stamp = packet.dts if packet.pts is None else packet.pts
            if stamp is not None:
                end = max(end, float((stamp + (packet.duration or 0)) * packet.time_base))
            if packet.stream_index != stream.index:
                continue
            if stamp is None:
                raise _unusable(content, "frames without times")
            packets, exact = packets + 1, exact and packet.pts is not None
            if packets > MAX_FRAMES:
                raise _unusable(content, f"more than {MAX_FRAMES} frames")
            if not packet.is_discard and not _is_hidden(stream, packet):
                frames.append((stamp, packet.is_keyframe))
        _check_whole(content, container, stream, packets, end)
        if not frames:
            raise _unusable(content, "a video without frames")
        stamps, first = np.unique(np.array([stamp for stamp, _ in frames], np.int64), return_index=True)
        keys = np.flatnonzero(np.array([key for _, key in frames])[first])
        unit, rate, number = float(stream.time_base or 0), float(stream.average_rate or 0), stream.index
    with _open(content, number) as (container, stream):
        frame = next(_decoded(container, stream, late), None)
        if frame is None:
            raise _unusable(content, "a video of which no frame can be decoded")
        turn = _turn(frame)
        size = _picture(frame, turn).size
        return FrameTable(stamps, keys, unit, exact, rate, number, *size, turn, frame.format.name)


def _is_hidden(stream: VideoStream, packet: Packet[Any]) -> bool:
    """Return whether a packet is a VP8 frame that is referenced but not shown (RFC 6386, section 9.1)."""
    return stream.codec_context.name == "vp8" and not bytes(packet)[0] & 0x10


def _check_whole(content: Content, container: InputContainer, stream: VideoStream, packets: int, end: float) -> None:
    """Check that a file is not shorter than its header says, in packets or duration. Raises `UserError`."""
    if "mp4" in container.format.name:
        if _is_cut(content):
            raise _unusable(content, "a truncated file: its last part is not complete")
        # Edit lists hide frames that the header counts.
        if packets < stream.frames and (whole := _all_packets(content, stream.index)) < stream.frames:
            raise _unusable(content, f"a truncated file: {whole} of {stream.frames} frames")
    length, start = (container.duration or 0) / 1e6, max(0.0, (container.start_time or 0) / 1e6)
    if end - start < length - min(1.0, max(0.2, 0.1 * length)):
        raise _unusable(content, f"a truncated file: {end - start:.1f} of {length:.1f} seconds")


def _all_packets(content: Content, stream: int) -> int:
    """Return the number of packets of an MP4 file, including packets that its edit list skips."""
    with _open(content, stream, ignore_editlist="1") as (container, chosen):
        return sum(1 for packet in container.demux(chosen) if packet.size)


def _is_cut(content: Content) -> bool:
    """Return whether an MP4 file ends within its last box (ISO/IEC 14496-12, section 4.2), by all box sizes."""
    end = 0
    with content.open() as file:
        while len(head := file.read(16)) >= 8:
            size = int.from_bytes(head[:4])
            size = int.from_bytes(head[8:16]) if size == 1 else size
            if size < 8:  # The box extends to the end of the file.
                return False
            end += size
            file.seek(end)
        return end > file.seek(0, os.SEEK_END)


def _decoded(container: InputContainer, stream: VideoStream, late: Late) -> Iterator[VideoFrame]:
    """Yield the frames from the current position of the file, in presentation order."""
    for packet in container.demux(stream):
        late()
        yield from packet.decode()  # type: ignore[misc]


def _runs(keys: np.ndarray, wanted: Sequence[int]) -> list[list[int]]:
    """Split wanted frames into runs, each decoded without a seek because no gap inside it is worth a seek."""
    runs: list[list[int]] = []
    for number in wanted:
        if runs and _key_before(keys, number) <= runs[-1][-1] + WORTH_A_SEEK:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _key_before(keys: np.ndarray, number: int) -> int:
    """Return the last frame, at or before `number`, at which decoding can start."""
    place = int(np.searchsorted(keys, number, side="right"))
    return int(keys[place - 1]) if place else 0


def _pass(
    content: Content,
    table: FrameTable,
    start: int,
    run: Sequence[int],
    frames: Iterator[VideoFrame],
    convert: Convert[T],
) -> dict[int, T]:
    """Return results of `convert` by number for a run among `frames`, which begin at or before number `start`."""
    result, chosen, last = dict[int, T](), frozenset(run), run[-1]
    for count, frame in enumerate(frames, start):
        number = int(np.searchsorted(table.stamps, frame.pts or 0)) if table.exact else count
        if table.exact and (number == len(table.stamps) or table.stamps[number] != frame.pts):
            continue
        if number in chosen:
            if frame.is_corrupt:
                raise _unusable(content, f"damaged data at frame {number}")
            picture = _picture(frame, table.turn)
            if picture.size != (table.width, table.height):
                raise _unusable(content, f"frames of several sizes ({picture.size} at frame {number})")
            result[number] = convert(picture)
        if number >= last:
            break
    return result


def _turn(frame: VideoFrame) -> int:
    """Return the transposition that turns a frame upright, by its display matrix."""
    side_data: Any = frame.side_data
    if (data := side_data.get("DISPLAYMATRIX")) is None:
        return UPRIGHT
    matrix = np.frombuffer(bytes(data), np.int32)
    return _TURNS.get(tuple(round(matrix[i] / 65536) for i in _LINEAR), UPRIGHT)


def _picture(frame: VideoFrame, turn: int) -> Image.Image:
    """Convert a frame to upright RGB, over white where it is transparent."""
    if any(component.is_alpha for component in frame.format.components):
        picture = over_white(Image.fromarray(frame.to_ndarray(format="rgba")))
    else:
        picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
    return picture if turn == UPRIGHT else picture.transpose(Image.Transpose(turn))
