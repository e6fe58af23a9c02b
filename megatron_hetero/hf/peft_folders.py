"""PEFT folders: `adapter_config.json` and `adapter_model.safetensors`, read strictly, and what a new one contains.

For a linear layer at PATH of a `transformers` model keys are `base_model.model.PATH.lora_A.weight` [r, in] and
`base_model.model.PATH.lora_B.weight` [out, r]; members of `modules_to_save` have the keys of their own tensors. For a
parameter of E matrices, those of experts, PATH is its module:

    lora_A.weight [E r, in]     rows e r + j: direction j of expert e
    lora_B.weight [out, r E]    column j E + e: direction j of expert e

A module's second parameter has `base_layer.` before `lora_`. Which is which depends on an order in PEFT, but their
shapes differ. PEFT reads ranks and scales from the configuration; here ranks are those of tensors, and must agree.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.base.files import Only, check, read_object, shown
from megatron_hetero.hf.model_files import all_finite, require_own_files
from megatron_hetero.hf.peft_patterns import EXPECTED, Pattern, patterns

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What keys begin with."""
_PAIR = re.compile(r"(?P<layer>.+)\.lora_(?P<kind>[AB])\.weight")
_OTHER_PARTS = {
    ".lora_embedding_": "an adapter of an embedding",
    ".lora_magnitude_vector": "magnitudes of DoRA",
    ".lora_B.bias": "a bias of an adapter",
}
_TYPES = ("F32", "BF16", "F16")
_QUANTISED = re.compile(r"(?i)(?:^|[-_.])(?:bnb|gptq|awq|nf4|fp8|fp4|int4|int8|[48]-?bit)(?:$|[-_.])")
_MAX_ALPHA = 1e6
_MAX_LETTERS = 1024
"""Limit on the key of a tensor."""
_AGAIN = "train another adapter without it, or merge it with PEFT (merge_and_unload) and take the merged model"


def _none(because: str, fix: str = _AGAIN, *values: object) -> Only:
    return Only((None, False, *values), because, fix)


_BASE = "it is the adapter of a quantised base", "use an adapter of the unquantised model"
_CHANGED = "it is added to other weights than those of the base folder"
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
    "use_rslora": Only((None, False, True), "it says how adapters are scaled", "restore the file as PEFT wrote it"),
    "init_lora_weights": Only((None, True, False, "gaussian", "orthogonal", "eva"), _CHANGED, _CONVERT),
    "trainable_token_indices": _none("rows of embeddings are not trained by themselves", _AGAIN, [], {}),
    "layer_replication": _none("a model has the layers of its folder", _AGAIN, []),
    "alora_invocation_tokens": _none("adapters apply to all tokens of a sample", _AGAIN, []),
    **dict.fromkeys(
        ("use_bdlora", "arrow_config", "kasa_config", "velora_config", "monteclora_config", "megatron_config"),
        _none("this variant of LoRA is not supported"),
    ),
}
"""Keys of `adapter_config.json` with the only values that are supported."""


@dataclass(frozen=True)
class Pair:
    """A pair of matrices. `path`: of the layer, or of the module of a parameter of experts; `key`: what both keys begin
    with; `first`, `second`: shapes of A and B.
    """

    path: str
    key: str
    first: tuple[int, int]
    second: tuple[int, int]


@dataclass(frozen=True)
class PeftFolder:
    """A checked PEFT folder. `pairs`: its adapters; `whole`: its other tensors, by name without `PREFIX`."""

    folder: Path
    pairs: tuple[Pair, ...]
    whole: Mapping[str, tuple[int, ...]] = field(hash=False)
    config: Mapping[str, Any] = field(hash=False)

    @classmethod
    def open(cls, folder: Path, setting: str, otherwise: str = "") -> PeftFolder:
        """Read the configuration and the shapes of a folder that `setting` names. `otherwise`: how to do without it.
        Raises `UserError`.
        """
        config = _read_config(folder, setting, otherwise)
        pairs, whole = _tensors(folder)
        opened = cls(folder, pairs, whole, config)
        opened._check_layers()
        return opened

    @property
    def where(self) -> str:
        """The file with the tensors, for messages."""
        return str(self.folder / ADAPTER_WEIGHTS)

    def scale(self, path: str, r: int) -> float:
        """Return the scale of an adapter of rank `r`. `path`: of the layer, or of the parameter of experts. Raises
        `UserError` if the configuration has no such rank for it.
        """
        # PEFT writes patterns sorted: which of those that match was the first is not known.
        declared = [*self._matching("rank_pattern", path), self.config["r"]]
        if r not in declared:
            why = "PEFT divides alpha by the former, and would not load the latter"
            where, fix = f"{self.where}: {path}", "restore both files as PEFT wrote them"
            found = f"rank {declared[0]} in {ADAPTER_CONFIG} beside matrices of rank {r}"
            raise UserError.at(where, found=found, expected="the same", because=why, fix=fix)
        alpha = next(self._matching("alpha_pattern", path), self.config["lora_alpha"])
        return alpha / (math.sqrt(r) if self.config.get("use_rslora") else r)

    def _matching(self, key: str, path: str) -> Iterator[float]:
        """Yield the values of patterns that match a path."""
        for pattern, value in self._patterns[key]:
            if pattern.matches(path):
                yield value

    @cached_property
    def _patterns(self) -> Mapping[str, Sequence[tuple[Pattern, float]]]:
        of_keys = {key: self.config.get(key) or {} for key in ("rank_pattern", "alpha_pattern")}
        return {key: list(zip(patterns(list(each)), each.values(), strict=True)) for key, each in of_keys.items()}

    def read(self, key: str) -> Tensor:
        """Read a tensor by its key without `PREFIX`. Raises `UserError` if a value is not finite."""
        handle, keys = _opened(self.folder)
        values = handle.get_tensor(keys[key])
        if not all_finite(values):
            where, fix = f"{self.where}: tensor {keys[key]}", "use the adapter of an earlier training step"
            raise UserError.at(where, found="values that are NaN or infinite", expected="finite values", fix=fix)
        return values

    def is_zero(self, pair: Pair) -> bool:
        """Whether both matrices of a pair are zero: such a pair never trains, and exports have some for layers without
        an adapter.
        """
        handle, keys = _opened(self.folder)
        first = handle.get_slice(keys[f"{pair.key}.lora_A.weight"])[:1]
        kinds = "AB"
        return not first.any() and not any(self.read(f"{pair.key}.lora_{kind}.weight").any() for kind in kinds)

    def _check_layers(self) -> None:
        """Check that PEFT would not ignore adapters of layers that the configuration leaves out. Raises `UserError`."""
        given = self.config.get("layers_to_transform")
        if given is None or given == []:
            return
        layers = {given} if isinstance(given, int) else set(given)
        names = self.config.get("layers_pattern") or r"[^.]*"
        found = patterns([names] if isinstance(names, str) else names)
        for pair in self.pairs:
            number = next((number for each in found if (number := each.layer(pair.path)) is not None), None)
            if number is not None and number not in layers:
                raise UserError.at(
                    f"{self.folder / ADAPTER_CONFIG}: layers_to_transform",
                    found=f"{shown(given)} beside an adapter of {pair.path}",
                    expected="adapters of these layers alone",
                    because="PEFT ignores all others",
                    fix="restore both files as PEFT wrote them",
                )


def has_adapter(folder: Path) -> bool:
    """Whether a folder is a PEFT folder, complete or not."""
    return (folder / ADAPTER_CONFIG).exists() or (folder / ADAPTER_WEIGHTS).exists()


def _read_config(folder: Path, setting: str, otherwise: str) -> dict[str, Any]:
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
    # Not inside objects: what is called `bias` in one of patterns is a layer.
    check(path, {key: value for key, value in config.items() if key in SUPPORTED}, SUPPORTED)
    config = {"r": 8, "lora_alpha": 8, **config}
    _check_values(path, config)
    _require_unquantised(path, config.get("base_model_name_or_path"))
    return config


def _check_values(path: Path, config: Mapping[str, Any]) -> None:
    """Check the types of ranks, alphas and layers. Raises `UserError`."""

    def require(key: str, value: object, expected: str, fits: bool) -> None:
        if not fits:
            fix = "restore the file as PEFT wrote it"
            raise UserError.at(f"{path}: {key}", found=shown(value), expected=expected, fix=fix)

    require("r", config["r"], "a whole number above 0", _is_rank(config["r"]))
    alpha = f"a number above 0, at most {_MAX_ALPHA:g}"
    require("lora_alpha", config["lora_alpha"], alpha, _is_alpha(config["lora_alpha"]))
    kinds: dict[str, tuple[Callable[[object], bool], str]] = {
        "rank_pattern": (_is_rank, "a whole number above 0"),
        "alpha_pattern": (_is_alpha, alpha),
    }
    for key, (fits_key, expected) in kinds.items():
        values = config.get(key) or {}
        require(key, values, "an object", isinstance(values, dict))
        _require_patterns(path, key, list(values))
        for pattern, value in values.items():
            require(f"{key}.{pattern}", value, expected, fits_key(value))
    layers = config.get("layers_to_transform")
    numbers = layers if isinstance(layers, list) else [layers]
    fits = layers is None or all(isinstance(each, int) and not isinstance(each, bool) for each in numbers)
    require("layers_to_transform", layers, "numbers of layers", fits)
    names = config.get("layers_pattern") or []
    names = [names] if isinstance(names, str) else names
    fits = isinstance(names, list) and all(isinstance(each, str) for each in names)
    require("layers_pattern", names, "regular expressions", fits)
    _require_patterns(path, "layers_pattern", names)


def _require_patterns(path: Path, key: str, texts: list[str]) -> None:
    """Check that patterns are supported ones. Raises `UserError`."""
    try:
        patterns(texts)
    except ValueError as error:
        why, fix = "others may take hours to match", "name the layers in place of it"
        found = shown(str(error))
        raise UserError.at(f"{path}: {key}", found=found, expected=EXPECTED, because=why, fix=fix) from None


def _is_alpha(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MAX_ALPHA


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _require_unquantised(path: Path, base: object) -> None:
    """Check that the base that an adapter was trained beside is not quantised, as its name tells: a folder that a
    stranger named is not opened. Raises `UserError`.
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
    """Return the file of that time and size, opened, and its keys by their names without `PREFIX`."""
    try:
        handle = safe_open(path, framework="pt", device="cpu")
        stored = list(handle.keys())
    except (SafetensorError, OSError) as error:
        found, fix = f"a file that is truncated or not safetensors ({error})", "restore or download it again"
        raise UserError.at(path, found=found, expected="an intact one", fix=fix) from error
    keys = dict[str, str]()
    for key in stored:
        if len(key) > _MAX_LETTERS:
            found, expected = f"the name {shown(key)} of {len(key)} characters", f"at most {_MAX_LETTERS}"
            raise UserError.at(path, found=found, expected=expected, fix="restore the file as PEFT wrote it")
        if (name := key.removeprefix(PREFIX)) in keys:
            found, fix = f"{name} a second time", "restore the file as PEFT wrote it"
            raise UserError.at(path, found=found, expected="each tensor once", fix=fix)
        keys[name] = key
    return handle, keys


def _opened(folder: Path) -> tuple[Any, Mapping[str, str]]:
    path = folder / ADAPTER_WEIGHTS
    found = path.stat()
    return _handle(path, (found.st_mtime_ns, found.st_size))


def _tensors(folder: Path) -> tuple[tuple[Pair, ...], dict[str, tuple[int, ...]]]:
    """Return the pairs of a folder, and the shapes of its other tensors. Raises `UserError`."""
    (handle, keys), path = _opened(folder), folder / ADAPTER_WEIGHTS
    whole, halves = dict[str, tuple[int, ...]](), dict[str, dict[str, tuple[int, ...]]]()
    for name, key in keys.items():
        values = handle.get_slice(key)
        if (kind := values.get_dtype()) not in _TYPES:
            why, fix = "quantised weights are not supported", "save it again in bfloat16"
            found = f"{name} of type {kind}"
            raise UserError.at(path, found=found, expected=", ".join(_TYPES), because=why, fix=fix)
        if what := next((what for part, what in _OTHER_PARTS.items() if part in name), None):
            raise UserError.at(path, found=f"{what} ({name})", expected="lora_A and lora_B of layers", fix=_AGAIN)
        if match := _PAIR.fullmatch(name):
            halves.setdefault(match["layer"], {})[match["kind"]] = tuple(values.get_shape())
        elif ".lora_" in name:
            found, expected = f"the tensor {name}", "lora_A.weight and lora_B.weight of layers"
            raise UserError.at(path, found=found, expected=expected, fix="save the adapter again with PEFT")
        else:
            whole[name] = tuple(values.get_shape())
    return tuple(_pair(path, key, found) for key, found in sorted(halves.items())), whole


def _pair(path: Path, key: str, found: Mapping[str, tuple[int, ...]]) -> Pair:
    if missing := {"A", "B"} - found.keys():
        what, fix = f"{key}.lora_{missing.pop()}.weight", "restore the file as PEFT wrote it"
        raise UserError.at(path, found=f"no {what}", expected="A and B of each adapter", fix=fix)
    first, second = found["A"], found["B"]
    if len(first) != 2 or len(second) != 2:
        what = f"{key}.lora_A.weight {list(first)} and lora_B.weight {list(second)}"
        why, fix = "adapters of convolutions are not supported", _AGAIN
        raise UserError.at(path, found=what, expected="matrices", because=why, fix=fix)
    if first[0] != second[1] or not first[0]:
        what = f"{key}.lora_A.weight {list(first)} and lora_B.weight {list(second)}"
        fix = "restore the file as PEFT wrote it"
        raise UserError.at(path, found=what, expected="[r, in] and [out, r]", fix=fix)
    return Pair(key.replace(".base_layer", ""), key, (first[0], first[1]), (second[0], second[1]))


# --------------------------------------------------------------------------------------------------- experts


def from_columns(second: Tensor, experts: int) -> Tensor:
    """Turn B of experts [out, r E] to [E out, r], expert by expert."""
    out, columns = second.shape
    return second.view(out, columns // experts, experts).permute(2, 0, 1).reshape(experts * out, columns // experts)


def to_columns(second: Tensor, experts: int) -> Tensor:
    """Turn B of experts [E out, r] to [out, r E], as PEFT has it."""
    rows, r = second.shape
    return second.view(experts, rows // experts, r).permute(1, 2, 0).reshape(rows // experts, r * experts)


# --------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Target:
    """An adapter to write. `path`: of the linear layer, or of the parameter of experts."""

    path: str
    r: int
    scale: float
    of_experts: bool = False


def config_text(
    targets: Sequence[Target], whole: Sequence[str], base: str, task: str | None, dropout: float = 0.0
) -> str:
    """Return `adapter_config.json` for these adapters. `whole`: paths of modules that are saved whole; `base`: name or
    folder of the model; `task`: PEFT's type of the model, such as `CAUSAL_LM`.
    """
    plain, root = ([_neat(each.scale * by(each.r)) for each in targets] for by in (float, math.sqrt))
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
    """Return the number of few digits that differs by rounding alone, if there is one."""
    near = round(value, 4)
    return near if math.isclose(value, near, rel_tol=1e-12) else value


def _patterns(paths: Sequence[str], values: Sequence[float], default: float) -> dict[str, float]:
    """Return patterns for all paths whose value is not the default: a name if all layers of that name have it."""
    by_kind = dict[str, set[float]]()
    for path, value in zip(paths, values, strict=True):
        by_kind.setdefault(path.rpartition(".")[2], set()).add(value)
    named = {
        path.rpartition(".")[2] if len(by_kind[path.rpartition(".")[2]]) == 1 else path: value
        for path, value in zip(paths, values, strict=True)
    }
    return {pattern: value for pattern, value in named.items() if value != default}
