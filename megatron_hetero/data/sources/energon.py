"""Folders that Energon has prepared: tars of samples, described by files in the folder `.nv-meta`.

- `split.yaml` or `split.json`: the tars of each split, and the excluded tars and samples;
- `.info.json` or `.info.yaml`: the number of samples in each tar;
- `dataset.yaml`: the mapping from members of a tar to fields of a sample. Code that it names is never run.

Tars are scanned like WebDataset tars; Energon's own index, `index.sqlite`, is not read.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from megatron_hetero.base.contents import ByteRange, StoredFile, is_url
from megatron_hetero.base.errors import MAX_QUOTED, UserError, in_short, listed, quoted, reason, truncated
from megatron_hetero.base.files import read_text, resolved
from megatron_hetero.config.sections import DatasetConfig
from megatron_hetero.data.item_fields import kind
from megatron_hetero.data.sources.formats import Columns, Opened, Place
from megatron_hetero.data.sources.json_files import MAX_TEXT_BYTES
from megatron_hetero.data.sources.mapping import value_at
from megatron_hetero.data.sources.patterns import with_braces_expanded
from megatron_hetero.data.sources.tar_headers import Member, tar_members
from megatron_hetero.data.sources.tar_records import decoded_json, form_of
from megatron_hetero.data.sources.tars import TarFiles, collect
from megatron_hetero.data.validation import FORMS

MAX_META_BYTES = 1 << 26
"""Maximum bytes of each YAML or JSON file."""

_PREPARE = "run `energon prepare` on the folder again"
_FIELDS = {
    "captioning": {"image": "image", "caption": "answer"},
    "vqa": {"image": "image", "context": "question", "answers": "answer"},
    "vidqa": {"video": "video", "context": "question", "answers": "answer"},
    "chatml": {"imgs": "image", "videos": "video", "conversation": ""},
}
"""For each class `NAMESample` or `NAMEWebdataset`, the record field of each sample field. The record field of a
conversation depends on the conversation.
"""
_OPTIONAL = ("imgs", "videos")
_PICKLED = ("jpgs", "mp4s", "videos", "pickle", "pkl", "pyd")
_KEYS = re.compile(r"[^\[\]]+")
_PATH = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_META = (".info.json", ".info.yaml", "split.yaml", "split.json", "dataset.yaml")

Paths: TypeAlias = tuple[tuple[str, ...], ...]
"""Alternative paths, each the name of a tar's field followed by keys in its value."""


class Shard(NamedTuple):
    """A tar of a split: the number of its samples, and the keys of its excluded samples."""

    samples: int
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnergonTars(TarFiles):
    """`Format` for the tars of a folder, see `TarFiles`. A record has the fields of Energon's sample in `field_map`,
    except a conversation, which is in `messages` or `conversations`.

    Attributes:
        shards: tars by file name.
        paths: for each field of a sample, the alternative paths of its value.
    """

    shards: Mapping[str, Shard] = field(default_factory=dict)
    paths: Mapping[str, Paths] = field(default_factory=dict)

    def scan(self, file: StoredFile, columns: Columns) -> Iterator[Place]:
        """Yield the places of all samples that are not excluded, see `Format.scan`."""
        shard, whole = self.shards[file.name], int(file.version()[1])
        excluded, left_out = {key.encode("utf-8", "backslashreplace") for key in shard.excluded}, set[bytes]()

        def wanted() -> Iterator[Member]:
            for member in tar_members(file, whole):
                if member.key in excluded:
                    left_out.add(member.key)
                else:
                    yield member

        yield from collect(file, whole, columns, wanted())
        samples = len(columns["key_ends"]) + len(left_out)
        if samples != shard.samples:
            expected, because = str(shard.samples), "`.info.json` or `.info.yaml` says so"
            raise UserError.at(file, found=f"{samples} samples", expected=expected, because=because, fix=_PREPARE)
        if len(left_out) < len(shard.excluded):
            problem = f"it does not have all of its excluded samples ({listed(shard.excluded)})"
            raise UserError.at(file, problem=problem, fix="correct `exclude` of split.yaml, TAR or TAR/KEY")

    def _record(self, fields: dict[str, Any], where: str) -> dict[str, Any]:
        record, mapped = super()._record(fields, where), dict[str, Any]()
        for name, paths in self.paths.items():
            value = next((value for path in paths if (value := value_at(fields, path)) is not None), None)
            if value is not None:
                mapped[name] = value
            elif name not in _OPTIONAL:
                missing = f"nothing at {' or '.join(map('.'.join, paths))}"
                expected = f"the place in field_map, in a sample with {', '.join(fields)}"
                fix = "correct dataset.yaml, set `fields` of the data set, or remove the sample"
                raise UserError.at(f"{where}: field '{name}'", found=missing, expected=expected, fix=fix)
        if "conversation" in mapped:
            turns = _turns(mapped.pop("conversation"), f"{where}: field 'conversation'")
            record = {name: value for name, value in record.items() if name not in FORMS} | {form_of(turns): turns}
        return record | {"field_map": mapped} if mapped else record


def open_energon(folder: Path, entry: DatasetConfig, setting: str) -> Opened:
    """Return the format, the tars of a split, and the mapping of fields in `dataset.yaml`. Raises `UserError`."""
    meta = folder / ".nv-meta"
    if is_url(entry.files or "") or not os.path.isdir(meta):  # noqa: PTH112
        problem = f"{entry.files or folder} is not a folder that Energon has prepared, with {meta.name} in it"
        fix = "run `energon prepare` on it, or name its tars, such as FOLDER/*.tar"
        if folder.suffix in (".yaml", ".yml"):
            fix = "add the folders of a metadataset to data.registry, and mix them by data.datasets"
        raise UserError.at(setting, problem=problem, fix=fix)
    _require_inside(folder, (f"{meta.name}/{name}" for name in _META))
    counts = _counts(meta)
    shards = {}
    split = _split(meta, entry.split, setting)
    _require_inside(folder, split)
    for name, excluded in split.items():
        if name not in counts:
            problem = f"it does not have {quoted(name)} of split {entry.split!r}"
            raise UserError.at(meta / ".info.json", problem=problem, fix=_PREPARE)
        shards[str(folder / name)] = Shard(counts[name], excluded)
    paths, mapping = ({}, {}) if entry.fields else _field_map(meta, setting)
    format = EnergonTars(bool(entry.fields or paths), shards, paths)
    return format, tuple(map(StoredFile, shards)), mapping


def _require_inside(folder: Path, names: Iterable[str]) -> None:
    """Check that none of the `names` leads out of the folder through a link. Raises `UserError`."""
    top = resolved(folder, "files")
    for name in names:
        target = resolved(folder / name, f"{folder}")
        if not target.is_relative_to(top):
            expected, because = f"a file inside {top}", "a data set must not reach other files, not even through links"
            fix = "copy the folder with what its links lead to: cp -rL FOLDER COPY"
            raise UserError.at(folder / name, found=f"a link to {target}", expected=expected, because=because, fix=fix)


# ----------------------------------------------------------------------------------------------- files of .nv-meta


class _Plain(yaml.SafeLoader):
    """YAML's safe loader without support for aliases, with which a short file can expand without limit."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias, which is not supported")
        return super().compose_node(parent, index)


def _loaded(*paths: Path) -> tuple[Path, dict[str, Any]]:
    """Read the first of these files that exists. Returns its path and the mapping in it. Raises `UserError`."""
    path = next((path for path in paths if os.access(path, os.F_OK)), paths[0])
    try:
        text = read_text(path, MAX_META_BYTES)
        content = json.loads(text) if path.suffix == ".json" else yaml.load(text, _Plain)
    except OSError as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({reason(error)})"
        raise UserError.at(path, problem=problem, fix=_PREPARE) from None
    # YAML tags on values that they do not fit raise any of these errors.
    except (ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, yaml.YAMLError) as error:
        problem = f"malformed ({in_short(error)})"
        raise UserError.at(path, problem=problem, fix=f"correct it, or {_PREPARE}") from None
    return path, _mapping(content, path)


def _mapping(value: Any, where: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError.at(where, found=kind(value), expected="a mapping", fix=f"correct it, or {_PREPARE}")
    return value


def _names(value: Any, where: object) -> list[str]:
    """Return the names in a list, with braces expanded. Raises `UserError`, also for names outside the folder."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UserError.at(where, found=kind(value), expected="a list of names", fix=f"correct it, or {_PREPARE}")
    names = with_braces_expanded(value, str(where))
    for name in names:
        if is_url(name) or name.startswith("/") or ".." in name.split("/"):
            expected = "names of tars inside the folder"
            raise UserError.at(where, found=quoted(name), expected=expected, fix="correct the split")
    return names


def _counts(meta: Path) -> dict[str, int]:
    """Return the number of samples of each tar."""
    path, info = _loaded(meta / ".info.json", meta / ".info.yaml")
    counts = _mapping(info.get("shard_counts"), f"{path}: shard_counts")
    for name, count in counts.items():
        if not isinstance(name, str) or type(count) is not int or not 0 <= count < 1 << 63:
            place = f"{path}: {quoted(str(name))}"
            raise UserError.at(place, found=kind(count), expected="a number of samples", fix=_PREPARE)
    return counts


def _split(meta: Path, split: str, setting: str) -> dict[str, tuple[str, ...]]:
    """Return the tars of a split, with the keys of the excluded samples of each tar."""
    path, content = _loaded(meta / "split.yaml", meta / "split.json")
    splits = _mapping(content.get("split_parts"), f"{path}: split_parts")
    if not splits.get(split):
        found, expected = quoted(split), f"a split with tars, of {truncated(', '.join(map(str, splits)), MAX_QUOTED)}"
        place = f"{setting.removesuffix('files')}split"
        raise UserError.at(place, found=found, expected=expected, because=f"{path} has these", fix="correct it")
    names, excluded = _names(splits[split], f"{path}: {split}"), _names(content.get("exclude"), f"{path}: exclude")
    keys: dict[str, list[str]] = {name: [] for name in names}
    if len(keys) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise UserError.at(f"{path}: {split}", problem=f"{quoted(twice)} given twice", fix="name each tar once")
    lengths, whole = {len(name) for name in names}, set(excluded)
    for each in excluded:
        ends = (k for k, sign in enumerate(each) if sign == "/" and k in lengths and each[:k] in keys)
        if (end := next(ends, None)) is not None:
            keys[each[:end]].append(each[end + 1 :])
    remaining = {name: tuple(dict.fromkeys(each)) for name, each in keys.items() if name not in whole}
    if not remaining:
        raise UserError.at(path, problem=f"all tars of split {split!r} are excluded", fix="correct the split")
    return remaining


# ----------------------------------------------------------------------------------------------- fields of samples


def _field_map(meta: Path, setting: str) -> tuple[dict[str, Paths], dict[str, str]]:
    """Return the paths of sample fields, and the mapping to fields of records; both are empty for unknown classes."""
    if not os.access(meta / "dataset.yaml", os.F_OK):
        return {}, {}
    path, content = _loaded(meta / "dataset.yaml")
    fix = f"set {setting.removesuffix('files')}fields, such as image: jpg and answer: json.caption"
    if content.get("sample_loader") is not None:
        place, found = f"{path}: sample_loader", quoted(str(content["sample_loader"]))
        raise UserError.at(place, found=found, expected="a field_map", because="code of data is never run", fix=fix)
    sample_type = content.get("sample_type")
    name = sample_type.get("__class__") if isinstance(sample_type, dict) else content.get("__class__")
    ours = _FIELDS.get(re.sub("(Sample|Webdataset)$", "", str(name)).lower())
    if ours is None:
        return {}, {}
    paths: dict[str, Paths] = {}
    for theirs, text in _mapping(content.get("field_map"), f"{path}: field_map").items():
        if theirs in ours:
            paths[theirs] = _parsed(text, f"{path}: field_map.{theirs}", fix)
    return paths, {ours[theirs]: f"field_map.{theirs}" for theirs in paths if ours[theirs]}


def _parsed(text: Any, where: str, fix: str) -> Paths:
    """Parse the alternative paths in a text such as `jpg,json[images][0]`. Raises `UserError`."""
    matches = [_PATH.fullmatch(each.strip()) for each in text.split(",")] if isinstance(text, str) else [None]
    paths = tuple((each[1].lower(), *_KEYS.findall(each[2])) for each in matches if each is not None)
    if len(paths) < len(matches):
        raise UserError.at(where, found=quoted(str(text)), expected="FIELD or FIELD[KEY]", fix="correct it")
    for name, *_ in paths:
        if name.rpartition(".")[2] in _PICKLED:
            because = "it is a pickle, which may run code"
            fix = "pack each picture as a member, such as 0001.0.jpg and 0001.1.jpg; " + fix
            raise UserError.at(where, problem=f"field {quoted(name)} is never loaded", because=because, fix=fix)
    return paths


def _turns(value: Any, where: str) -> list[Any]:
    """Return the turns of a conversation, given as a list, in an object, or as JSON text. Raises `UserError`."""
    if isinstance(value, ByteRange) and value.size <= MAX_TEXT_BYTES:
        value = value.read()
    if isinstance(value, str | bytes):
        value = decoded_json(value.encode() if isinstance(value, str) else value, where)
    if isinstance(value, dict):
        value = next((value[name] for name in ("conversations", "messages", "conversation") if name in value), value)
    if not isinstance(value, list):
        fix = "correct dataset.yaml, or set `fields` of the data set"
        raise UserError.at(where, found=kind(value), expected="a list of turns", fix=fix)
    return value
