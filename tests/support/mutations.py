"""Good input with something wrong in it. What is wrong is drawn from a `random.Random`, which hypothesis can be."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ODD: tuple[Any, ...] = (
    0, 1, -1, 2, 0.5, -0.0, 10**9, -(10**9), 10**30, 1e308, float("nan"), float("inf"), True, False, None,
    "", "x", "3", "qwen2", "\u0000", "\u202e", "a" * 5000, "\ud800", [], {}, [[]], [None], ["x"], [0] * 50, [1e9],
    {"x": {}}, {"": None},
)  # fmt: skip
SMALL = tuple(value for value in ODD if not any(size in str(value) for size in ("1000000000", "1e+", "1e9")))
"""Without numbers so large that what is made of them would fill the memory."""
NESTED = "\0nested\0"
TWICE = "\0twice\0"


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a value, its own first."""
    yield path
    if isinstance(value, dict | list):
        for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inside, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """The value at a path."""
    for key in path:
        value = value[key]
    return value


def mutated_value(rng: random.Random, good: Any, odd: Sequence[Any] = ODD) -> Any:
    """A copy of a JSON value with one to three things changed: values, keys, or what lies where. It may hold `NESTED`
    and `TWICE`.
    """
    root = {"": copy.deepcopy(good)}
    for _ in range(rng.randint(1, 3)):
        *above, key = rng.choice(list(places(root))[1:])
        _change(rng, root, at(root, tuple(above)), key, odd)
    return root[""]


def mutated_json(rng: random.Random, good: str, odd: Sequence[Any] = ODD) -> str:
    """The text of a JSON file with one to three values changed, and at times the text itself."""
    text = json.dumps(mutated_value(rng, json.loads(good), odd), indent=1)
    depth = 100_000 if rng.random() < 0.5 else 40
    text = text.replace(json.dumps(NESTED), "[" * depth + "]" * depth)
    text = text.replace(json.dumps(TWICE), '"twice", "model_type": "qwen2_5_vl", "size": 1, "size": 1')
    if rng.randint(0, 19) == 0:
        text = text[: rng.randint(0, len(text))] + rng.choice(["", "}", "\x00", '"', "?"])
    return text


def mutated_bytes(rng: random.Random, good: bytes) -> bytes:
    """A few bytes changed, removed or put elsewhere; or cut off, or with something behind."""
    found = bytearray(good)
    for _ in range(rng.choice((1, 1, 2, 5))):
        begin, length = rng.randrange(len(found) + 1), rng.choice((1, 1, 1, 4, 30))
        other = rng.randrange(len(found) + 1)
        some = bytes(rng.choice((0, 1, 127, 128, 255, rng.randrange(256))) for _ in range(length))
        found[begin : begin + length] = rng.choice((some, b"", found[other : other + length]))
    if rng.randint(0, 9) == 0:
        del found[rng.randint(0, len(found)) :]
    return bytes(found)


def mutated_text(rng: random.Random, good: str, words: Sequence[str]) -> str:
    """A text with one to three stretches left out, doubled, exchanged, or replaced by one of `words`."""
    found = good
    for _ in range(rng.randint(1, 3)):
        begin = rng.randint(0, len(found))
        end = rng.randint(begin, min(len(found), begin + rng.choice((1, 1, 3, 10))))
        other = rng.randint(0, len(found))
        inside = rng.choice(("", found[begin:end] * 2, rng.choice(words), found[other : other + 5]))
        found = found[:begin] + inside + found[end:]
    return found


def _change(rng: random.Random, root: Any, holder: Any, key: Any, odd: Sequence[Any]) -> None:
    kind = rng.choice(["odd", "odd", "odd", "leave out", "wrap", "list", "elsewhere", "nested", "twice"])
    old = holder[key]
    if kind == "leave out" and holder is not root:
        del holder[key]
    elif kind == "list" and isinstance(old, list) and old:
        holder[key] = rng.choice([old[:-1], [*old, old[-1]], old[::-1], old * 100])
    elif kind == "wrap":
        holder[key] = rng.choice([[old], {"x": old}, {str(key): old}, json.dumps(old)])
    elif kind == "elsewhere":
        holder[key] = copy.deepcopy(at(root, rng.choice(list(places(root))[1:])))
    elif kind == "nested":
        holder[key] = NESTED
    elif kind == "twice":
        holder[key] = TWICE
    else:
        holder[key] = copy.deepcopy(rng.choice(list(odd)))  # What is drawn next may change it.


def changed_index(path: Path, change: Callable[[dict[str, np.ndarray], dict[str, Any]], object]) -> None:
    """Write an index of a data set with other figures, as anyone can: with a checksum that is right."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    arrays = {
        name: np.frombuffer(data, kind, count, 8 + length + start).copy()
        for name, (start, count, kind) in header["arrays"].items()
    }
    change(arrays, header)
    body, where, checksum = b"", {}, 0
    for name, values in arrays.items():
        where[name] = (len(body), len(values), values.dtype.str)
        checksum = zlib.crc32(values.tobytes(), checksum)
        body += values.tobytes() + bytes(-values.nbytes % 64)
    header |= {"arrays": where, "checksum": checksum}
    header["arrays"] |= header.pop("last", {})
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    path.unlink()  # Others have mapped it.
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
