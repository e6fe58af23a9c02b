"""Headers of tar files in the formats ustar, pax, GNU and V7.

A scan reads only the headers, by their type:

  - a regular file is a field of a sample, unless its name is hidden, has no dot, or is in a folder such as `__meta__`;
  - a folder is skipped;
  - an extended header of pax or GNU gives the name or size of the next member;
  - anything else, such as a link, is refused.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron_hetero.base.contents import StoredFile
from megatron_hetero.base.errors import UserError, quoted

MAX_EXTENDED_BYTES = 1 << 20
"""Maximum bytes of an extended header."""
BLOCK = 512
"""Bytes of a header. Members are padded to a multiple of this number."""
_ZEROS = bytes(BLOCK)
_MAX_BEHIND = 1 << 20
"""Number of bytes after the last member that are checked to be zero."""
_REGULAR = (b"0", b"\0", b"7")
_FOLDER = b"5"
_EXTENDED = (b"x", b"X", b"g", b"L", b"K")
_WANTED = re.compile(rb"\d (path|size|GNU\.sparse)")
_MAX_NAME = 1 << 12
"""Maximum bytes of a name (the limit of paths in Linux)."""
_SPARSE = b"GNU.sparse"
_REFUSED = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe",
            b"S": "a sparse file"}  # fmt: skip
_COMPRESSED = {
    b"\x1f\x8b": "gunzip",
    b"BZh": "bunzip2",
    b"\xfd7zXZ\0": "unxz",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"\x04\x22\x4d\x18": "unlz4",
}


class Member(NamedTuple):
    """A field of a sample: the sample's key, the field's name, and its start and size in the tar in bytes."""

    key: bytes
    field: bytes
    start: int
    size: int


def tar_members(file: StoredFile, whole: int) -> Iterator[Member]:
    """Yield the fields of samples in a tar file of `whole` bytes, in the order of the file.

    Raises:
        UserError: the file is not a tar, is damaged or truncated, or has members other than files and folders.
        OSError: the file cannot be read.
    """
    with file.open() as opened:

        def read(at: int, size: int) -> bytes:
            opened.seek(at)
            return opened.read(size)

        for name, start, size in _regular_members(file, whole, read):
            key_and_field = _key_and_field(name, file)
            if key_and_field is not None:
                yield Member(*key_and_field, start, size)


def require_tar(file: StoredFile, block: bytes) -> None:
    """Check that a file that begins with `block` is an uncompressed tar. Raises `UserError`."""
    for magic, command in _COMPRESSED.items():
        if block.startswith(magic):
            fix = f"{command} it"
            raise UserError.at(file, found="a compressed file", expected="a tar file",
                               because="random access needs an uncompressed tar", fix=fix)  # fmt: skip
    if _header(block) is None and block != _ZEROS:
        found = f"a file that begins with {quoted(block[:40].decode('latin-1'))}" if block else "an empty file"
        raise UserError.at(file, found=found, expected="a tar file", fix="correct the path, or copy the file again")


def _regular_members(
    file: StoredFile, whole: int, read: Callable[[int, int], bytes]
) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, start and size in bytes of each regular file in a tar. Raises `UserError`."""
    at, given, given_to_all = 0, dict[bytes, bytes](), dict[bytes, bytes]()
    require_tar(file, read(0, BLOCK))
    while (block := read(at, BLOCK)) != _ZEROS:
        if len(block) < BLOCK:
            raise _unfinished(file)
        header = _header(block)
        if header is None:
            raise _damaged(file, at)
        kind, name, size = header
        is_extended = kind in _EXTENDED
        if not is_extended and (given or given_to_all):
            name, size, kind = _replaced(name, size, kind, given_to_all | given)
            given = {}
        start = at + BLOCK
        at = start if kind == _FOLDER else start + -(-size // BLOCK) * BLOCK
        if size > whole - start:
            problem, because = f"ends within member {quoted_name(name)}", "it has been cut"
            raise UserError.at(file, problem=problem, because=because, fix="copy or pack it again")
        if is_extended and size <= MAX_EXTENDED_BYTES:
            values = _extended(kind, read(start, size))
            if values is None:
                raise _damaged(file, start - BLOCK)
            if kind == b"g":
                given_to_all |= values
            else:
                given |= values
        elif is_extended or size < 0:
            raise _damaged(file, start - BLOCK)
        elif kind in _REGULAR:
            if not name.endswith(b"/"):
                yield name, start, size
        elif kind != _FOLDER:
            problem = f"member {quoted_name(name)} is {_REFUSED.get(kind, f'of type {quoted_name(kind)}')}"
            fix = "pack the samples anew, for example with tar --dereference --hard-dereference"
            raise UserError.at(file, problem=problem, because="members of samples are regular files", fix=fix)
    behind = read(at, _MAX_BEHIND)
    if len(behind) < 2 * BLOCK:
        raise _unfinished(file)
    if behind.strip(b"\0"):
        because = "several archives may have been joined, of which only the first would be read"
        fix = "join the archives with tar --concatenate, or name each in `files`"
        raise UserError.at(file, problem="data behind its end", because=because, fix=fix)


def _header(block: bytes) -> tuple[bytes, bytes, int] | None:
    """Return the type, name and size in a header; None if the block is not a header."""
    try:
        # The lower half of Adler-32 is 1 plus the sum of bytes. The checksum field counts as eight spaces.
        computed = zlib.adler32(block[156:], zlib.adler32(block[:148])) & 0xFFFF
        if (computed + 255) % 65521 != int(block[148:156].strip(b" \0"), 8) % 65521 or len(block) != BLOCK:
            return None
        size = _number(block[124:136])
    except ValueError:
        return None
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == b"ustar\0":
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return block[156:157], name, size


def _number(raw: bytes) -> int:
    """Decode a number of a header: octal digits, or big-endian after a leading 1 bit. Raises `ValueError`."""
    if raw[0] & 0x80:
        return int.from_bytes(raw, "big") & ((1 << 8 * len(raw) - 1) - 1)
    digits = raw.partition(b"\0")[0].strip()
    if digits and not digits.isdigit():
        raise ValueError("no number")
    return int(digits or b"0", 8)


def is_header_of(block: bytes, member: str, size: int, before: Callable[[], bytes]) -> bool:
    """Return whether a block is the header of a member with this name and size. `before`: function that returns the
    blocks before the header, which may end with its extended headers.
    """
    header = _header(block)
    if header is None or header[0] not in _REGULAR:
        return False
    kind, name, stored_size = header
    if stored_size != size or name.lower() != member.lower().encode():
        name, stored_size, kind = _replaced(name, stored_size, kind, _given_before(before()))
    is_named = not member.isascii() or len(member) > 100 or name.lower() == member.lower().encode()
    return is_named and kind in _REGULAR and stored_size == size


def _given_before(blocks: bytes) -> dict[bytes, bytes]:
    """Return the values of the extended headers at the end of some blocks."""
    for start in range(len(blocks) - 2 * BLOCK, -1, -BLOCK):
        kind, _, size = _header(blocks[start : start + BLOCK]) or (b"", b"", 0)
        if kind in _EXTENDED and -len(blocks) // BLOCK == -(start + BLOCK + size) // BLOCK:
            values = _extended(kind, blocks[start + BLOCK :][:size]) or {}
            return _given_before(blocks[:start]) | values
    return {}


def _replaced(name: bytes, size: int, kind: bytes, given: dict[bytes, bytes]) -> tuple[bytes, int, bytes]:
    """Return the name, size and type of a member after applying the values of its extended headers."""
    if _SPARSE in given:
        kind = b"S"
    if kind in _REGULAR and (text := given.get(b"size")) is not None:
        size = int(text) if text.isdigit() and len(text) < 20 else -1
    return given.get(b"path", name), size, kind


def _extended(kind: bytes, data: bytes) -> dict[bytes, bytes] | None:
    """Return the path, size and sparse mark in an extended header; None if the header is damaged."""
    if kind == b"L":
        name = data.partition(b"\0")[0]
        return {b"path": name} if len(name) <= _MAX_NAME else None
    values = dict[bytes, bytes]()
    if kind == b"K" or not _WANTED.search(data):  # Usually the header has only a fraction of a time.
        return values
    at = 0
    while at < len(data):
        length = data[at : at + 20].partition(b" ")[0]
        end = at + int(length) if length.isdigit() else 0
        if end <= at or data[end - 1 : end] != b"\n":
            return None
        key, _, value = data[at + len(length) + 1 : end - 1].partition(b"=")
        at = end
        if key in (b"path", b"size"):
            values[key] = value
        elif key.startswith(_SPARSE):
            values[_SPARSE] = b""
    return values if len(values.get(b"path", b"")) <= _MAX_NAME else None


def _key_and_field(name: bytes, file: StoredFile) -> tuple[bytes, bytes] | None:
    """Return the sample key and field name in the name of a member; None for a member that belongs to no sample."""
    folder, slash, last = name.rpartition(b"/")
    stem, dot, field = last.partition(b".")
    if name[:1] == b"/" or (b".." in name and b".." in name.split(b"/")):
        expected, fix = "names inside the archive", "pack the samples with relative names"
        raise UserError.at(file, found=f"a member {quoted_name(name)}", expected=expected, fix=fix)
    root = name.partition(b"/")[0]
    is_meta = root.startswith(b"__") and root.endswith(b"__") and len(root) > 3
    return None if is_meta or not stem or not dot else (folder + slash + stem, field)


def _unfinished(file: StoredFile) -> UserError:
    problem, because = (
        "it does not end as a tar file, with two blocks of zeros",
        "it may have been cut between two members",
    )
    fix = f"copy or pack it again; if nothing is missing, add them: truncate -s +1024 {file.name!r}"
    return UserError.at(file, problem=problem, because=because, fix=fix)


def _damaged(file: StoredFile, at: int) -> UserError:
    return UserError.at(file, problem=f"damaged header at byte {at}", fix="copy or pack the file again")


def quoted_name(name: bytes) -> str:
    """Return a name for a message."""
    return quoted(name.decode("utf-8", "backslashreplace"))
