"""Video files: when each frame is shown, and wanted frames as upright RGB.

Files come from anywhere. FFmpeg reads an open file and opens nothing else: formats that name other files (playlists,
`concat`) or start from pictures are not among the ones it may recognise. A file whose end is missing is refused, for
FFmpeg reports no error there. Reading has a time limit.
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
"""Limit of a frame, that of pictures."""
MAX_FRAMES = 1 << 23
"""Limit of a file: 38 hours of 60 frames a second."""
MAX_STORED = 1 << 15
"""Stored tables in each of 256 folders, but for those that were used lately."""
WORTH_A_SEEK = 16
"""Frames that seeking has to spare: it costs about as much as decoding a few."""
UPRIGHT = -1
"""In place of a transposition."""
_EXACT = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm", "mpegts", "flv", "ivf")
"""Formats with a time for every frame. Others' are extrapolated, differently after a seek."""
_FORMAT = 2
"""Of stored tables; another number makes them anew."""
_TURNS = {
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
}
"""How to turn a frame, by the signs of its display matrix: (x, y) is shown at (a x + c y, b x + d y)."""
_LINEAR = (0, 1, 3, 4)
"""Indices of a, b, c and d in a display matrix."""


@dataclass(frozen=True, eq=False)
class FrameTable:
    """All frames of a video file in the order in which they are shown.

    Attributes:
        stamps: int64 [frames], presentation times in units of `unit` seconds, ascending.
        keys: int64 [keys], numbers of the frames that decoding can start from, ascending.
        unit: seconds.
        exact: whether decoded frames have the times of their packets. If not, they are counted from the beginning.
        rate: frames per second in the header; 0 if it has none.
        stream: number of the video stream in its file.
        width, height: of an upright frame.
        turn: the transposition of Pillow that makes a frame upright; `UPRIGHT` if it is.
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
    """`seconds`: for reading a video, 0: no limit. `folder`: of stored tables; None: they are not stored."""

    seconds: float
    folder: Path | None


def frame_table(item: Item, limits: Limits) -> FrameTable:
    """The table of an item's file, from `limits.folder` if the file has not changed since.

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
    """What `convert` makes of the frames of these numbers, each upright and in mode RGB; transparent parts become
    white. One pass from the key frame before the first, past frames that a later key frame makes unnecessary; other
    frames are decoded but not converted to RGB.

    Raises:
        UserError: as `frame_table`, and where a wanted frame is damaged.
    """
    content, numbers = item.content, sorted(set(wanted))

    def read(late: Late) -> dict[int, T]:
        found = dict[int, T]()
        with _open(content, table.stream) as (container, stream):
            for number, run in enumerate(_runs(table.keys, numbers) if table.exact else [numbers] if numbers else []):
                start = _key_before(table.keys, run[0]) if table.exact else 0
                if number or start:
                    container.seek(int(table.stamps[start]), stream=stream)
                found |= _pass(content, table, start, run, _decoded(container, stream, late), convert)
        # Some containers go to another place than was asked for.
        if table.exact and (missing := sorted(set(numbers) - found.keys())):
            with _open(content, table.stream) as (container, stream):
                found |= _pass(content, table, 0, missing, _decoded(container, stream, late), convert)
        if missing := sorted(set(numbers) - found.keys()):
            raise _unusable(content, f"a video whose frame {missing[0]} of {len(table.stamps)} cannot be decoded")
        return found

    with _named(item):
        return within(content, limits.seconds, read)


@contextlib.contextmanager
def _named(item: Item) -> Iterator[None]:
    """Inside, errors name the record too."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{item.where}: {error}") from error


# --------------------------------------------------------------------------------------------- stored tables


@lru_cache(maxsize=64)
def _known(version: Version, limits: Limits) -> list[FrameTable]:  # noqa: ARG001 (the key)
    """The table of a file if it has been read, in a list to put it into: the file may be in memory, which no cache
    should keep.
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
    """The table in a file: a line of JSON, then the arrays, as differences; None if not all of it is there."""
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
    """Store a table, whole or not at all. A folder that cannot be written costs time only."""
    values = {name: value for name, value in vars(table).items() if not isinstance(value, np.ndarray)}
    head = json.dumps({**values, "frames": len(table.stamps), "keys": len(table.keys)})
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as new:
            steps = np.diff(np.concatenate([table.stamps, table.keys]).astype(np.int64), prepend=0)
            new.write_bytes(head.encode() + b"\n" + zlib.compress(steps.tobytes(), 1))
        if not secrets.randbelow(1024):  # Listing a folder takes time.
            remove_unused(file.parent.glob(f"{file.parent.name}*.times"), MAX_STORED)


# ------------------------------------------------------------------------------------------------ time limits


class _TooLate(Exception):
    """The time limit has passed."""


Late = Callable[[], None]
"""Raises `_TooLate` after the time limit."""


class _Helper:
    """A thread that works for one caller at a time. FFmpeg leaves some memory behind in each thread that it was used
    in, so that threads are used again.
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
            except BaseException as error:  # Raised by the one who waits.
                answer.put((None, error))
            del work, answer

    def result(self, work: Callable[[], Any], seconds: float) -> Any:
        """The result and error of `work`. Raises `Empty` after so many seconds."""
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
    """The result of `work`, or a `UserError` after so many seconds (0: no limit). A decoder that never returns stays
    behind in its thread, which ends with the process.
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
    """Inside, errors are raised as `UserError`s. FFmpeg's are of most built-in kinds."""
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
        # FFmpeg's own errors have numbers below those of the system.
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
    """A file and its video stream. Inside, errors are raised as `UserError`s."""
    with _problems(content):
        import av
        from av.stream import Disposition

        closed = {"format_whitelist": FORMATS, "protocol_whitelist": "none", **options}
        # Tags that are no UTF-8; PyAV 19 and later read them without being told to.
        lenient: Any = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
        with (
            content.open() as file,
            av.open(file, "r", container_options=closed, **lenient) as opened,
        ):
            found = opened.streams.video
            shown = [s for s in found if not s.disposition & Disposition.attached_pic]
            chosen = [s for s in shown if s.index == stream] if stream is not None else shown
            if not chosen:
                raise _unusable(content, "a file with a cover picture alone" if found else "a file without a video")
            # One thread each: files are read by several workers.
            chosen[0].codec_context.thread_count = 1
            yield opened, chosen[0]


def _read_table(content: Content, late: Late) -> FrameTable:
    """Read all packets of a file and decode its first frame."""
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
    """Whether a packet is of a frame that is only referred to, which VP8 has (RFC 6386, section 9.1)."""
    return stream.codec_context.name == "vp8" and not bytes(packet)[0] & 0x10


def _check_whole(content: Content, container: InputContainer, stream: VideoStream, packets: int, end: float) -> None:
    """Check that packets are as many, and last as long, as the header says."""
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
    """The packets of an MP4 file, those included that its edit list leaves out."""
    with _open(content, stream, ignore_editlist="1") as (container, chosen):
        return sum(1 for packet in container.demux(chosen) if packet.size)


def _is_cut(content: Content) -> bool:
    """Whether an MP4 file ends before its last box (ISO/IEC 14496-12, section 4.2), by the sizes of all."""
    end = 0
    with content.open() as file:
        while len(head := file.read(16)) >= 8:
            size = int.from_bytes(head[:4])
            size = int.from_bytes(head[8:16]) if size == 1 else size
            if size < 8:  # To the end of the file.
                return False
            end += size
            file.seek(end)
        return end > file.seek(0, os.SEEK_END)


def _decoded(container: InputContainer, stream: VideoStream, late: Late) -> Iterator[VideoFrame]:
    """All frames from where the file is, in the order in which they are shown."""
    for packet in container.demux(stream):
        late()
        yield from packet.decode()  # type: ignore[misc]


def _runs(keys: np.ndarray, wanted: Sequence[int]) -> list[list[int]]:
    """Frames that one pass reads: no key frame between two of them makes many frames unnecessary."""
    runs: list[list[int]] = []
    for number in wanted:
        if runs and _key_before(keys, number) <= runs[-1][-1] + WORTH_A_SEEK:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _key_before(keys: np.ndarray, number: int) -> int:
    """The last frame up to `number` that decoding can start from."""
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
    """The wanted frames among `frames`, which begin with number `start` or before it."""
    found, chosen, last = dict[int, T](), frozenset(run), run[-1]
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
            found[number] = convert(picture)
        if number >= last:
            break
    return found


def _turn(frame: VideoFrame) -> int:
    """The transposition that makes a frame upright, by its display matrix."""
    side_data: Any = frame.side_data
    if (data := side_data.get("DISPLAYMATRIX")) is None:
        return UPRIGHT
    matrix = np.frombuffer(bytes(data), np.int32)
    return _TURNS.get(tuple(round(matrix[i] / 65536) for i in _LINEAR), UPRIGHT)


def _picture(frame: VideoFrame, turn: int) -> Image.Image:
    """A frame as upright RGB, over white where it is transparent."""
    if any(component.is_alpha for component in frame.format.components):
        rgba = Image.fromarray(frame.to_ndarray(format="rgba"))
        picture = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    else:
        picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
    return picture if turn == UPRIGHT else picture.transpose(Image.Transpose(turn))
