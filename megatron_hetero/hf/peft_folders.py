"""Strict reading of PEFT folders (`adapter_config.json`, `adapter_model.safetensors`), and contents of new ones.

For a linear layer at PATH of a `transformers` model keys are `base_model.model.PATH.lora_A.weight` [r, in] and
`base_model.model.PATH.lora_B.weight` [out, r]; tensors in `modules_to_save` have their usual keys. For a parameter of E
matrices, such as those of experts, PATH is the path of its module:

    lora_A.weight [E r, in]     rows e r + j: direction j of expert e
    lora_B.weight [out, r E]    column j E + e: direction j of expert e

A module's second parameter has `base_layer.` before `lora_`. Which parameter has which key depends on an order in PEFT,
but their shapes differ. PEFT takes ranks from the configuration; here they come from tensors, and both must agree.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import regex
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import Only, check, read_object, shown
from megatron_hetero.hf.model_files import all_finite, require_own_files

T = TypeVar("T")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of all keys in `adapter_model.safetensors`."""
MAX_PATTERNS, MAX_CHARACTERS = 4096, 256
"""Limits on the number of patterns of a key, such as `rank_pattern`, and on the characters of each pattern."""
_MATCH_S = 1.0
"""Time-out in seconds for matching a path: some patterns take hours, and the file may be untrusted."""
_PAIR = re.compile(r"(?P<layer>.+)\.lora_(?P<kind>[AB])\.weight")
_UNSUPPORTED = {
    ".lora_embedding_": "an adapter of an embedding",
    ".lora_magnitude_vector": "magnitudes of DoRA",
    ".lora_B.bias": "a bias of an adapter",
}
_TYPES = ("F32", "BF16", "F16")
_NAME = re.compile(r"(?:[\w-]|\\?\.)*", re.ASCII)
_QUANTISED = re.compile(r"(?i)(?:^|[-_.])(?:bnb|gptq|awq|nf4|fp8|fp4|int4|int8|[48]-?bit)(?:$|[-_.])")
_MAX_KEY = 1024
"""Maximum characters of a tensor's key."""
_RESTORE = "restore both files as PEFT wrote them"
_AGAIN = "train another adapter without it, or merge it with PEFT (merge_and_unload) and take the merged model"


def _none(because: str, fix: str = _AGAIN, *values: object) -> Only:
    return Only((None, False, *values), because, fix)


_BASE = "it is the adapter of a quantised base", "use an adapter of the unquantised model"
_CHANGED = "it is added to other weights than in the base folder"
_CONVERT = "save it again with save_pretrained(..., path_initial_model_for_weight_conversion=...) of PEFT"
SUPPORTED: Mapping[str, Only] = {
    "peft_type": Only(("LORA",), "other kinds of adapters are not supported", "use an adapter of LoRA"),
    "use_dora": _none("weights of DoRA are normed, which low-rank products here are not"),
    "bias": _none("biases are not trained beside adapters", _AGAIN, "none"),
    "lora_bias": _none("adapters have no biases here"),
    "fan_in_fan_out": _none("weights of linear layers are [out, in] in these models", "set it to false"),
    "use_qalora": _none(*_BASE),
    "loftq_config": _none(*_BASE, {}),
    "quantization_config": _none(*_BASE, {}),
    "init_lora_weights": Only((None, True, False, "gaussian", "orthogonal", "eva"), _CHANGED, _CONVERT),
    "trainable_token_indices": _none("rows of embeddings are not trained by themselves", _AGAIN, [], {}),
    "layer_replication": _none("a model has the layers of its folder", _AGAIN, []),
    "alora_invocation_tokens": _none("adapters apply to all tokens of a sample", _AGAIN, []),
    **dict.fromkeys(
        ("use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config", "megatron_config"),
        _none("this variant of LoRA is not supported"),
    ),
}
"""Supported values of keys of `adapter_config.json`, by key."""
_Rank = Annotated[int, msgspec.Meta(ge=1)]
_Alpha = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class _Config(msgspec.Struct, frozen=True):
    """Keys of `adapter_config.json` that are used, with PEFT's defaults."""

    r: _Rank = 8
    lora_alpha: _Alpha = 8
    use_rslora: bool | None = None
    rank_pattern: dict[str, _Rank] | None = None
    alpha_pattern: dict[str, _Alpha] | None = None
    base_model_name_or_path: object = None


@dataclass(frozen=True)
class Pair:
    """The matrices A and B of an adapter.

    `path`: path of the layer, or of the module of a parameter of experts. `key`: common prefix of both keys. `first`,
    `second`: shapes of A and B.
    """

    path: str
    key: str
    first: tuple[int, int]
    second: tuple[int, int]


@dataclass(frozen=True)
class PeftFolder:
    """A checked PEFT folder. `pairs`: its adapters; `whole`: shapes of its other tensors by name without `PREFIX`."""

    folder: Path
    pairs: tuple[Pair, ...]
    whole: Mapping[str, tuple[int, ...]] = field(hash=False)
    config: _Config = field(hash=False)
    _ranks: Sequence[tuple[Pattern, int]] = field(hash=False)
    _alphas: Sequence[tuple[Pattern, float]] = field(hash=False)

    @classmethod
    def open(cls, folder: Path, setting: str, otherwise: str = "") -> PeftFolder:
        """Read the configuration and the shapes of a folder that `setting` names. `otherwise`: advice for a user who
        has no such folder. Raises `UserError`.
        """
        config = _read_config(folder, setting, otherwise)
        file, (pairs, whole) = folder / ADAPTER_CONFIG, _tensors(folder)
        ranks = patterns(f"{file}: rank_pattern", config.rank_pattern or {})
        alphas = patterns(f"{file}: alpha_pattern", config.alpha_pattern or {})
        return cls(folder, pairs, whole, config, ranks, alphas)

    @property
    def where(self) -> str:
        """The file with the tensors, for messages."""
        return str(self.folder / ADAPTER_WEIGHTS)

    def scale(self, path: str, r: int) -> float:
        """Return the scale of an adapter of rank `r`. `path`: path of the layer, or of the parameter of experts. Raises
        `UserError` if the configuration has no such rank for it.
        """
        # PEFT sorts patterns when it writes them, so which of the matching ones came first is unknown.
        declared = [*_matching(self._ranks, path), self.config.r]
        if r not in declared:
            why = "PEFT divides alpha by the former, and would not load the latter"
            found = f"rank {declared[0]} in {ADAPTER_CONFIG} beside matrices of rank {r}"
            raise UserError.at(f"{self.where}: {path}", found=found, expected="the same", because=why, fix=_RESTORE)
        alpha = next(_matching(self._alphas, path), self.config.lora_alpha)
        return alpha / (math.sqrt(r) if self.config.use_rslora else r)

    def read(self, key: str) -> Tensor:
        """Read a tensor by its key without `PREFIX`. Raises `UserError` if a value is not finite."""
        handle, keys = _opened(self.folder)
        values = handle.get_tensor(keys[key])
        if not all_finite(values):
            where, fix = f"{self.where}: tensor {keys[key]}", "use the adapter of an earlier training step"
            raise UserError.at(where, found="values that are NaN or infinite", expected="finite values", fix=fix)
        return values

    def is_zero(self, pair: Pair) -> bool:
        """Return whether both matrices of a pair are zero. Such a pair never trains; exports contain such pairs for
        layers without an adapter.
        """
        handle, keys = _opened(self.folder)
        first = handle.get_slice(keys[f"{pair.key}.lora_A.weight"])[:1]
        kinds = "AB"
        return not first.any() and not any(self.read(f"{pair.key}.lora_{kind}.weight").any() for kind in kinds)


class Pattern:
    """A regular expression at the place `where` of `adapter_config.json`, which matches a whole path or the text after
    one of its dots. Construction, and a match that takes too long, raise `UserError`.
    """

    def __init__(self, where: str, text: str) -> None:
        self._where, self._text, is_name = where, text, _NAME.fullmatch(text) is not None
        if len(text) > MAX_CHARACTERS:
            raise self._unsupported(f"more than {MAX_CHARACTERS} characters")
        # Most patterns are names, which `re` compiles and matches faster, and most differ from a path in the last word.
        self._end = text.rpartition(".")[2] if is_name else ""
        compiling: Any = re.compile if is_name else regex.compile
        limit = {} if is_name else {"timeout": _MATCH_S}
        try:
            self._match: Callable[[str], object] = partial(compiling(rf"(?:.*\.)?(?:{text})").fullmatch, **limit)
        except regex.error as error:
            raise self._unsupported(str(error)) from None

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches the end of a path."""
        try:
            return path.endswith(self._end) and self._match(path) is not None
        except TimeoutError:
            raise self._unsupported(f"more than {_MATCH_S:g} s for {path}") from None

    def _unsupported(self, why: str) -> UserError:
        found, fix = f"{shown(self._text)} ({why})", "name the layers in place of it"
        return UserError.at(self._where, found=found, expected="a regular expression", fix=fix)


def patterns(where: str, values: Mapping[str, T]) -> list[tuple[Pattern, T]]:
    """Return the patterns at a place of `adapter_config.json` with their values. Raises `UserError`."""
    if len(values) > MAX_PATTERNS:
        raise UserError.at(where, found=f"{len(values)} patterns", expected=f"at most {MAX_PATTERNS}", fix=_RESTORE)
    return [(Pattern(where, text), value) for text, value in values.items()]


def _matching(patterns: Iterable[tuple[Pattern, T]], path: str) -> Iterator[T]:
    """Yield the values of patterns that match a path."""
    return (value for pattern, value in patterns if pattern.matches(path))


def has_adapter(folder: Path) -> bool:
    """Return whether a folder is a PEFT folder, complete or not."""
    return (folder / ADAPTER_CONFIG).exists() or (folder / ADAPTER_WEIGHTS).exists()


def _read_config(folder: Path, setting: str, otherwise: str) -> _Config:
    path, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    if not path.is_file():
        found = f"no {path if folder.is_dir() else folder}"
        expected = f"a PEFT folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        fix = f"correct the path, or copy the folder again{otherwise and f'; {otherwise}'}"
        raise UserError.at(setting, found=found, expected=expected, fix=fix)
    require_own_files(folder)
    if not weights.is_file():
        if (folder / "adapter_model.bin").exists():
            found, why = "adapter_model.bin", "pickles are never loaded"
            fix = "load it with PEFT and save it again with save_pretrained(..., safe_serialization=True)"
            raise UserError.at(folder, found=found, expected=ADAPTER_WEIGHTS, because=why, fix=fix)
        found, expected = f"{ADAPTER_CONFIG} alone", f"{ADAPTER_WEIGHTS} beside it"
        raise UserError.at(folder, found=found, expected=expected, fix="copy the folder again")
    config = read_object(path)
    config.setdefault("peft_type", None)
    # Check keys at the top level only: a key `bias` of `rank_pattern` names a layer.
    check(path, {key: value for key, value in config.items() if key in SUPPORTED}, SUPPORTED)
    try:
        values = msgspec.convert(config, _Config)
    except msgspec.ValidationError as error:
        raise UserError.at(path, problem=f"wrong values ({error})", fix=_RESTORE) from None
    _require_unquantised(path, values.base_model_name_or_path)
    return values


def _require_unquantised(path: Path, base: object) -> None:
    """Check that the name of an adapter's base model is not that of a quantised one. The base is not opened, since its
    path is untrusted. Raises `UserError`.
    """
    if isinstance(base, str) and _QUANTISED.search(base.rstrip("/").rpartition("/")[2]):
        raise UserError.at(
            f"{path}: base_model_name_or_path",
            found=f"the quantised model {shown(base)}",
            expected="an unquantised one",
            because="the adapter was trained beside other weights",
            fix="use an adapter of the unquantised model, or, if this one is to be used beside it, name it there",
        )


@lru_cache(maxsize=8)
def _handle(path: Path, _: tuple[int, int]) -> tuple[Any, Mapping[str, str]]:
    """Open a file. Returns its handle, and its keys by name without `PREFIX`. `_`: its time and size, for the cache."""
    try:
        handle = safe_open(path, framework="pt", device="cpu")
        stored = list(handle.keys())
    except (SafetensorError, OSError) as error:
        found, fix = f"a file that is truncated or not safetensors ({error})", "restore or download it again"
        raise UserError.at(path, found=found, expected="an intact one", fix=fix) from error
    keys = dict[str, str]()
    for key in stored:
        if len(key) > _MAX_KEY:
            found, expected = f"the name {shown(key)} of {len(key)} characters", f"at most {_MAX_KEY}"
            raise UserError.at(path, found=found, expected=expected, fix=_RESTORE)
        if (name := key.removeprefix(PREFIX)) in keys:
            raise UserError.at(path, found=f"{name} a second time", expected="each tensor once", fix=_RESTORE)
        keys[name] = key
    return handle, keys


def _opened(folder: Path) -> tuple[Any, Mapping[str, str]]:
    path = folder / ADAPTER_WEIGHTS
    status = path.stat()
    return _handle(path, (status.st_mtime_ns, status.st_size))


def _tensors(folder: Path) -> tuple[tuple[Pair, ...], dict[str, tuple[int, ...]]]:
    """Return the adapters of a folder, and the shapes of its other tensors. Raises `UserError`."""
    (handle, keys), path = _opened(folder), folder / ADAPTER_WEIGHTS
    whole, halves = dict[str, tuple[int, ...]](), dict[str, dict[str, tuple[int, ...]]]()
    for name, key in keys.items():
        values = handle.get_slice(key)
        if (kind := values.get_dtype()) not in _TYPES:
            why, fix = "quantised weights are not supported", "save it again in bfloat16"
            found = f"{name} of type {kind}"
            raise UserError.at(path, found=found, expected=", ".join(_TYPES), because=why, fix=fix)
        if what := next((what for mark, what in _UNSUPPORTED.items() if mark in name), None):
            raise UserError.at(path, found=f"{what} ({name})", expected="lora_A and lora_B of layers", fix=_AGAIN)
        if match := _PAIR.fullmatch(name):
            halves.setdefault(match["layer"], {})[match["kind"]] = tuple(values.get_shape())
        elif ".lora_" in name:
            found, expected = f"the tensor {name}", "lora_A.weight and lora_B.weight of layers"
            raise UserError.at(path, found=found, expected=expected, fix="save the adapter again with PEFT")
        else:
            whole[name] = tuple(values.get_shape())
    return tuple(_pair(path, key, shapes) for key, shapes in sorted(halves.items())), whole


def _pair(path: Path, key: str, shapes: Mapping[str, tuple[int, ...]]) -> Pair:
    if missing := {"A", "B"} - shapes.keys():
        absent = f"no {key}.lora_{missing.pop()}.weight"
        raise UserError.at(path, found=absent, expected="A and B of each adapter", fix=_RESTORE)
    first, second = shapes["A"], shapes["B"]
    shapes_text = f"{key}.lora_A.weight {list(first)} and lora_B.weight {list(second)}"
    if len(first) != 2 or len(second) != 2:
        why = "adapters of convolutions are not supported"
        raise UserError.at(path, found=shapes_text, expected="matrices", because=why, fix=_AGAIN)
    if first[0] != second[1] or not first[0]:
        raise UserError.at(path, found=shapes_text, expected="[r, in] and [out, r]", fix=_RESTORE)
    return Pair(key.replace(".base_layer", ""), key, (first[0], first[1]), (second[0], second[1]))


# --------------------------------------------------------------------------------------------------- experts


def from_columns(second: Tensor, experts: int) -> Tensor:
    """Reorder the matrix B of all experts from PEFT's [out, r E] to [E out, r], expert by expert."""
    out, columns = second.shape
    return second.view(out, columns // experts, experts).permute(2, 0, 1).reshape(experts * out, columns // experts)


def to_columns(second: Tensor, experts: int) -> Tensor:
    """Reorder the matrix B of all experts from [E out, r] to PEFT's [out, r E]."""
    rows, r = second.shape
    return second.view(experts, rows // experts, r).permute(1, 2, 0).reshape(rows // experts, r * experts)


# --------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Target:
    """An adapter to write. `path`: path of the linear layer, or of the parameter of experts."""

    path: str
    r: int
    scale: float
    of_experts: bool = False


def config_text(
    targets: Sequence[Target], whole: Sequence[str], base: str, task: str | None, dropout: float = 0.0
) -> str:
    """Return the text of `adapter_config.json` for these adapters. `whole`: paths of modules that are saved whole;
    `base`: name or folder of the model; `task`: PEFT's type of the model, such as `CAUSAL_LM`.
    """
    plain = [_neat(each.scale * each.r) for each in targets]
    root = [_neat(each.scale * math.sqrt(each.r)) for each in targets]
    rslora = not all(map(float.is_integer, plain)) and all(map(float.is_integer, root))
    ranks, alphas = [each.r for each in targets], root if rslora else plain
    r, alpha = Counter(ranks).most_common(1)[0][0], Counter(alphas).most_common(1)[0][0]
    paths = [each.path for each in targets]
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if any(each.of_experts for each in targets) else dropout,
        "use_rslora": rslora,
        "rank_pattern": _patterns(paths, ranks, r),
        "alpha_pattern": _patterns(paths, alphas, alpha),
        "target_modules": [each.path for each in targets if not each.of_experts],
        "target_parameters": [each.path for each in targets if each.of_experts] or None,
        "modules_to_save": list(whole) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    return json.dumps(config, indent=2) + "\n"


def _neat(value: float) -> float:
    """Return `value` rounded to four decimals if this changes it by floating-point error alone, else `value`."""
    near = round(value, 4)
    return near if math.isclose(value, near, rel_tol=1e-12) else value


def _patterns(paths: Sequence[str], values: Sequence[float], default: float) -> dict[str, float]:
    """Return patterns for all paths whose value is not the default: a layer's name if all layers of that name have the
    same value, else the path.
    """
    values_by_name = dict[str, set[float]]()
    for path, value in zip(paths, values, strict=True):
        values_by_name.setdefault(path.rpartition(".")[2], set()).add(value)
    named = {
        path.rpartition(".")[2] if len(values_by_name[path.rpartition(".")[2]]) == 1 else path: value
        for path, value in zip(paths, values, strict=True)
    }
    return {pattern: value for pattern, value in named.items() if value != default}
