"""Reading of PEFT folders as initial values of adapters: which module loads which key, and the values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatron_hetero.base.errors import UserError, listed
from megatron_hetero.base.files import resolved
from megatron_hetero.hf.fused_tensors import Cut, Fused
from megatron_hetero.hf.peft_folders import Pair, PeftFolder, from_columns
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import fused_of, prefix_of, tensors_of

_RESUME = (
    "to resume a run without it, set r, targets and patterns instead, as `adapters` in run.json of the checkpoint "
    "says, and alpha = r x scale"
)
"""Advice in messages: how to resume a run whose PEFT folder is missing."""
_HEADS = ("", "model.", "visual.")
"""Prefixes that are missing in paths of adapters for a model without a head or for an encoder alone."""


class Adapter(NamedTuple):
    """Adapter of a linear layer, or of the fused tensor of all `experts` of a layer."""

    name: str
    """Name of the weight in the architecture, without `.weight`."""
    r: int
    """Rank of the adapter."""
    scale: float
    """Factor by which the product B A is multiplied."""
    experts: int = 0


@dataclass(frozen=True)
class FolderTensors:
    """The adapters and tensors that one module loads from a PEFT folder.

    Attributes:
        folder: the folder.
        adapters: adapters of the module, in the order of the architecture.
        replaced: names in the architecture of tensors that replace tensors of the model's folder.
        keys: by full name of each tensor: its key, the number of experts, and its place in a fused tensor.
    """

    folder: PeftFolder
    adapters: tuple[Adapter, ...]
    replaced: frozenset[str]
    keys: Mapping[str, tuple[str, int, Cut | None]] = field(hash=False)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read the tensor with this full name, in its stored dtype."""
        key, experts, cut = self.keys[name]
        values = self.folder.read(key)
        if experts and key.endswith(".lora_B.weight"):
            values = from_columns(values, experts)
        return (values if cut is None else cut.turned(values[cut.source()])).reshape(shape)


def read_folders(
    folders: Mapping[str, Path], shapes: ModelShapes, layers: Mapping[str, Collection[str]]
) -> dict[str, FolderTensors]:
    """Return what each module loads from its PEFT folder. Modules that share a folder load different keys.

    Args:
        folders: `modules.NAME.lora.hf_path` by module.
        shapes: shapes of the model, without adapters.
        layers: by module, the layers that can have adapters, see `linear_layers`.

    Raises:
        UserError: a folder is broken, of an unsupported kind, or has keys that no module can load.
    """
    sharing = dict[Path, list[str]]()
    for module, folder in folders.items():
        sharing.setdefault(resolved(folder, _setting(module)), []).append(module)
    tensors = dict[str, FolderTensors]()
    for modules in sharing.values():
        folder = PeftFolder.open(folders[modules[0]], _setting(modules[0]), _RESUME)
        takers = {module: _Taker(module, shapes, folder, layers[module]) for module in modules}
        for pair in folder.pairs:
            taken = [taker.take_pair(pair) for taker in takers.values()]
            if not any(taken):
                raise _not_taken(pair.path, folder, modules, shapes, layers)
        for key in folder.whole:
            taken = [taker.take_whole(key) for taker in takers.values()]
            if not any(taken):
                raise _not_taken(key, folder, modules, shapes, layers)
        for module, taker in takers.items():
            if not taker.keys:
                other, fix = folder.where, f"remove {_setting(module)}, or set r to start from new adapters"
                problem = f"{folder.folder} has nothing of {module}"
                raise UserError.at(_setting(module), problem=f"{problem} ({other})", fix=fix)
            tensors[module] = taker.result()
    return tensors


def modules_in(folder: PeftFolder, shapes: ModelShapes, layers: Mapping[str, Collection[str]]) -> list[str]:
    """Return the model's own modules that load any key of a PEFT folder. Raises `UserError` for wrong shapes."""
    takers = {module: _Taker(module, shapes, folder, layers[module]) for module in (*shapes.own, TEXT)}
    takes = {
        module: [*map(taker.take_pair, folder.pairs), *map(taker.take_whole, folder.whole)]
        for module, taker in takers.items()
    }
    return [module for module, taken in takes.items() if any(taken)]


def _setting(module: str) -> str:
    return f"modules.{module}.lora.hf_path"


class _Taker:
    """Collector of the adapters and tensors that one module loads from a PEFT folder."""

    def __init__(self, module: str, shapes: ModelShapes, folder: PeftFolder, layers: Collection[str]) -> None:
        self.module, self.shapes, self.folder, self.layers = module, shapes, folder, dict.fromkeys(layers).keys()
        self.prefix, self.stored = prefix_of(module, shapes), tensors_of(module, shapes, in_folder=True)
        self.fused: Mapping[str, Fused] = fused_of(module, shapes)
        self.adapters = dict[str, Adapter]()
        self.keys = dict[str, tuple[str, int, Cut | None]]()
        self.zero = set[str]()

    def result(self) -> FolderTensors:
        order = {name: number for number, name in enumerate(self.layers)}
        adapters = tuple(sorted(self.adapters.values(), key=lambda each: order[each.name]))
        replaced = frozenset(name.removeprefix(self.prefix) for name in self.keys if name in self.stored)
        return FolderTensors(self.folder, adapters, replaced, self.keys)

    def take_pair(self, pair: Pair) -> bool:
        """Add an adapter if it belongs to the module, and return whether it does. Raises `UserError` if misshapen."""
        for name in _names(self.module, pair.path, self.shapes):
            if name in self.layers:
                out, inputs = self.stored[f"{self.prefix}{name}.weight"]
                self._require(pair, pair.path, {pair.path: (out, inputs)})
                self._add(pair, name, pair.path, pair.first[0], 0)
                return True
            fused = [f"{name}.{kind}" for kind in ("gate_up_proj", "down_proj")]
            if not self.layers.isdisjoint(fused):
                self._take_experts(pair, fused)
                return True
        return False

    def _take_experts(self, pair: Pair, names: Collection[str]) -> None:
        sizes = {name: self.fused[self.prefix + name] for name in names}
        matrices = {name: (sum(fused.rows), fused.columns) for name, fused in sizes.items()}
        name = self._require(pair, pair.path, matrices)
        experts, rows = len(sizes[name].names), pair.first[0]
        if rows % experts:
            found, expected = f"lora_A.weight of {pair.path} with {rows} rows", f"a multiple of {experts} experts"
            raise UserError.at(self.folder.where, found=found, expected=expected, fix="use an adapter of this model")
        kind = name.rpartition(".")[2]
        self._add(pair, name, f"{pair.path}.{kind}", rows // experts, experts)

    def _require(self, pair: Pair, path: str, matrices: Mapping[str, tuple[int, int]]) -> str:
        """Return the name of the matrix with the shape of the product of `pair`. Raises `UserError` if none fits."""
        out, inputs = pair.second[0], pair.first[1]
        if fitting := next((name for name, shape in matrices.items() if shape == (out, inputs)), None):
            return fitting
        expected = " or ".join(f"one of {list(shape)}" for shape in matrices.values())
        raise UserError.at(
            f"{self.folder.where}: {path}",
            found=f"an adapter of a weight of {[out, inputs]}",
            expected=expected,
            because=f"that is its shape in {self.module}",
            fix="use an adapter of this model, or the base that it was trained beside",
        )

    def _add(self, pair: Pair, name: str, path: str, r: int, experts: int) -> None:
        full = self.prefix + name
        if name in self.adapters or name in self.zero:
            found, fix = f"a second adapter of {path}", "restore the file as PEFT wrote it"
            raise UserError.at(self.folder.where, found=found, expected="one of each layer", fix=fix)
        scale = self.folder.scale(path, r)
        if self.folder.is_zero(pair):
            self.zero.add(name)
            return
        self.adapters[name] = Adapter(name, r, scale, experts)
        self.keys |= {f"{full}.lora_{kind}.weight": (f"{pair.key}.lora_{kind}.weight", experts, None) for kind in "AB"}

    def take_whole(self, key: str) -> bool:
        """Add a tensor if it replaces a tensor of the module, and return whether it does. Raises `UserError` if its
        shape does not fit.
        """
        shape = self.folder.whole[key]
        for name in _names(self.module, key, self.shapes):
            full = self.prefix + name
            if full in self.stored:
                self._require_shape(key, shape, self.stored[full])
                self._require_tied(key, name)
                cuts: Mapping[str, Cut | None] = {full: None}
            elif (fused := self.fused.get(full)) is not None:
                self._require_shape(key, shape, fused.shape(False))
                cuts = dict(fused.cuts(False))
            elif name in self.shapes[self.module].architecture.stored_twice:
                self._require_tied(key, name)
                return True
            else:
                continue
            for stored, cut in cuts.items():
                if stored in self.keys:
                    found, fix = f"{key} a second time", "restore the file as PEFT wrote it"
                    raise UserError.at(self.folder.where, found=found, expected="each tensor once", fix=fix)
                self.keys[stored] = key, 0, cut
            return True
        return False

    def _require_shape(self, key: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected and (len(shape) < 2 or shape[0] != expected[0] or prod(shape) != prod(expected)):
            where, fix = f"{self.folder.where}: {key}", "use an adapter of this model"
            why = f"that is its shape in {self.module}"
            raise UserError.at(where, found=str(list(shape)), expected=str(list(expected)), because=why, fix=fix)

    def _require_tied(self, key: str, name: str) -> None:
        """Check that loading a tensor does not untie embedding and head. Raises `UserError`."""
        twice = self.shapes[self.module].architecture.stored_twice
        if name in twice or name in twice.values():
            raise UserError.at(
                f"{self.folder.where}: {key}",
                found="an embedding or head of its own",
                expected="the base's",
                because="config.json ties them (tie_word_embeddings), and PEFT unties what it saves whole",
                fix="train an adapter without it in modules_to_save, or untie the base model first",
            )


def _names(module: str, path: str, shapes: ModelShapes) -> Iterator[str]:
    """Yield the possible names in a module's architecture of a path in a PEFT folder."""
    architecture, family = shapes[module].architecture, family_of(shapes[module].family)
    for head in _HEADS:
        name = family.canonical_name(head + path)
        if name.startswith(architecture.namespace):
            yield name.removeprefix(architecture.namespace)


def _not_taken(
    path: str,
    folder: PeftFolder,
    modules: Collection[str],
    shapes: ModelShapes,
    layers: Mapping[str, Collection[str]],
) -> UserError:
    """Return the error for a key of a PEFT folder that none of its `modules` loads."""
    where = f"{folder.where}: {path}"
    for other in (name for name in (*shapes.own, TEXT) if name not in modules):
        known = {*layers[other], *shapes[other].architecture.in_folder}
        known |= {each.removeprefix(prefix_of(other, shapes)) for each in fused_of(other, shapes)}
        known |= {each.rpartition(".")[0] for each in layers[other]}
        if known.intersection(_names(other, path, shapes)):
            return UserError.at(
                where,
                problem=f"the folder of {' and '.join(map(_setting, modules))} has what {other} takes",
                because="nothing of an adapter is ignored",
                fix=f"set {_setting(other)} (--{other}-lora.hf_path) to the same folder too",
            )
    kind = "an adapter of a layer that the model does not have"
    for module in modules:
        architecture = shapes[module].architecture
        for name in _names(module, path, shapes):
            if f"{name}.weight" in architecture.in_folder or f"{name}.weight" in architecture.stored_twice:
                kind = f"an adapter of {_what(module, name, shapes)}"
            elif ".experts." in name:
                kind = "an adapter of a single expert"
    if path in folder.whole:
        kind = "a tensor that the model does not have"
    kinds = dict.fromkeys(name.rpartition(".")[2] for module in modules for name in layers[module])
    expected, because = f"adapters of linear layers of {' and '.join(modules)}", f"these are {listed(kinds, 12)}"
    fix = "use an adapter of this model that was trained without it, or merge it with PEFT (merge_and_unload)"
    return UserError.at(where, found=kind, expected=expected, because=because, fix=fix)


def _what(module: str, name: str, shapes: ModelShapes) -> str:
    """Return a description of a layer that cannot have an adapter."""
    architecture = shapes[module].architecture
    shape = architecture.in_folder.get(f"{name}.weight", ())
    if name.endswith("lm_head") or f"{name}.weight" in architecture.stored_twice:
        return "the head"
    if name.endswith("mlp.gate"):
        return "a router"
    if name.endswith("shared_expert_gate"):
        return "the gate of a shared expert"
    if len(shape) > 2:
        return "a convolution"
    return "an embedding" if not architecture.is_of_layer(f"{name}.weight") else "a layer that cannot have one"
