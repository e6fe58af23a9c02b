"""Validates the fields of `run.json` that are read later. The file is untrusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_hetero.config.optimizers import NONE, OPTIMIZERS
from megatron_hetero.job import DTYPES

_Check = Callable[[object], bool]
_MISSING = object()


def require_fields(values: object) -> None:
    """Check the values of a record, as JSON gives them. Raises `ValueError` naming the first field that is wrong."""
    runs = isinstance(values, dict) and values.get("imported_from") is None
    for name, fits in {**_ALWAYS, **(_OF_RUNS if runs else {})}.items():
        _require(name, _at(values, name), fits)
    for name, fits in _OPTIONAL.items():
        found = _at(values, name)
        if found is not _MISSING:
            _require(name, found, fits)


def _at(values: object, name: str) -> object:
    for part in name.split("."):
        if not isinstance(values, dict) or part not in values:
            return _MISSING
        values = values[part]
    return values


def _require(name: str, found: object, fits: _Check) -> None:
    if found is _MISSING:
        raise ValueError(f"{name} is missing")
    if not fits(found):
        raise ValueError(f"{name} cannot be {found!r:.80}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_optimizer(value: object) -> bool:
    return isinstance(value, str) and value in (NONE.name, *OPTIMIZERS)


def _is_path(value: object) -> bool:
    return _is_text(value) and value != ""


def _or_none(fits: _Check) -> _Check:
    return lambda value: value is None or fits(value)


def _list_of(fits: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _by_name(fits: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _with(**fields: _Check) -> _Check:
    return lambda value: all(fits(_at(value, name)) for name, fits in fields.items())


def _is_dtype(value: object) -> bool:
    return _is_text(value) and value in DTYPES


_ALWAYS: Mapping[str, _Check] = {
    "step": _is_count,
    "world_size": _is_count,
    "layouts": _by_name(_is_text),
    "datasets": _list_of(_with(share=_is_text, records=_is_count, sha256=_is_text)),
    "config.model.hf_path": _is_path,
    "config.model.freeze": _list_of(_is_text),
    "config.optimizer.name": _is_optimizer,
}
_OF_RUNS: Mapping[str, _Check] = {
    "config.model.dtype": _is_dtype,
    "config.data.shuffle": _is_flag,
    "config.train.seed": _is_count,
    "config.train.global_batch_size": _is_count,
}
_OPTIONAL: Mapping[str, _Check] = {
    "imported_from": _or_none(_is_path),
    "config.model.hf_path_vision": _or_none(_is_path),
    "config.model.fresh_projector": _is_flag,
    "config.model.train": _list_of(_is_text),
    "config.model.encoders": _by_name(_with(hf_path=_is_path)),
    "model_files": _by_name(_by_name(_is_text)),
}
