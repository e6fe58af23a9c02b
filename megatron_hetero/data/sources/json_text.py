"""JSON texts: decoded fast, and by Python's own decoder where that refuses them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from megatron_hetero.base.errors import UserError

BOM = b"\xef\xbb\xbf"
"""Byte order mark, which some programs write before a text."""
MOST_TEXT_BYTES = 8 * 2**20
"""Limit of the text of a record."""


def decode_json(raw: bytes) -> Any:
    """The value of a JSON text. Python's own decoder also takes `NaN`, and names the place of a fault.

    Raises:
        UnicodeDecodeError: the text is not UTF-8.
        UnicodeEncodeError: the value has a lone surrogate.
        ValueError: the text is malformed; a `json.JSONDecodeError` if the fault has a place.
        RecursionError: the text is nested too deep.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = json.loads(raw.decode("utf-8"))
    json.dumps(value, ensure_ascii=False).encode()
    return value


def not_utf8(error: UnicodeDecodeError, where: str, fix: str) -> UserError:
    """The error for a text that is not UTF-8."""
    found = f"byte 0x{error.object[error.start]:02x}, which is not UTF-8"
    return UserError.at(where, found=found, expected="UTF-8 text", fix=fix)


def lone_surrogate(error: UnicodeEncodeError, where: str) -> UserError:
    """The error for half of a surrogate pair, which JSON can escape."""
    return UserError.at(
        where,
        problem=f"lone surrogate (\\u{ord(error.object[error.start]):04x})",
        because="UTF-8 cannot encode it",
        fix="correct the escape sequence",
    )
