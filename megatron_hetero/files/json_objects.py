"""JSON objects in files from elsewhere: read whole or refused, and checked for values that cannot be carried out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple, TypeAlias

from megatron_hetero.errors import UserError, reason
from megatron_hetero.files.opening import read_bytes

MOST_BYTES = 4 * 2**20
"""Larger than any configuration. Parsed, it takes some thirty times as much memory."""
RESTORE = "restore the file as its model was published or saved"
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_IN_JSON = {None: "null", True: "true", False: "false"}

Json: TypeAlias = "dict[str, Json] | list[Json] | str | float | bool | None"
"""What a file may hold."""


class Only(NamedTuple):
    """The values that a key may have; `because` and `fix` as in `UserError.at`."""

    values: tuple[object, ...]
    because: str
    fix: str = RESTORE


def shown(value: object) -> str:
    """A value as it stands in the file, on one short line."""
    return _IN_JSON[value] if value is None or isinstance(value, bool) else _SHORT.repr(value)


def check(path: Path, values: Mapping[str, Json], only: Mapping[str, Only], at: str = "") -> None:
    """Check the object that the file `path` holds, and those inside it. `at`: the keys above it, with a dot behind
    each.

    Raises:
        UserError: naming file, key and value, for a value that `only` does not have under its key.
    """
    for key, value in values.items():
        if key in only and value not in only[key].values:
            expected = " or ".join(map(shown, only[key].values))
            raise UserError.at(
                f"{path}: {at}{key}",
                found=shown(value),
                expected=expected,
                because=only[key].because,
                fix=only[key].fix,
            )
        if isinstance(value, dict):
            check(path, value, only, f"{at}{key}.")


def read_object(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object that the file `path` holds, of `most` bytes at most.

    Raises:
        UserError: it cannot be read, is broken, or holds no object.
    """
    where: object = path
    try:
        value: Json = json.loads(read_bytes(path, most).decode("utf-8"))
    except json.JSONDecodeError as error:
        where, found = f"{path}:{error.lineno}", f"broken JSON at column {error.colno} ({error.msg})"
    except (OSError, ValueError, RecursionError) as error:
        found = f"an unreadable file ({reason(error) if isinstance(error, OSError) else error})"
    else:
        if isinstance(value, dict):
            return value
        found = f"{shown(value)} in place of an object"
    raise UserError.at(where, found=found, expected="a JSON object in UTF-8", fix=RESTORE)
