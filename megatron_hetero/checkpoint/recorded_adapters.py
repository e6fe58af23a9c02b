"""Adapters in the record of a run, and checks that a run with adapters may resume from a checkpoint.

Checkpoints of a run with adapters contain the trained tensors and the tensors replaced by a PEFT folder. All other
weights, the base, are read from the model's folders at every start; fingerprints show whether they have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megatron_hetero.base.errors import UserError, listed
from megatron_hetero.config.fields import flag_of, wrong
from megatron_hetero.hf.fingerprint import fingerprint
from megatron_hetero.hf.model_files import ENCODERS, weight_files
from megatron_hetero.hf.weight_map import TensorShapes
from megatron_hetero.models.adapter_folders import Adapter
from megatron_hetero.models.folders import VISION_FOLDER
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import prefix_of, stored_shapes

if TYPE_CHECKING:
    from megatron_hetero.models.adapters import Lora

_EXPORT = "python -m megatron_hetero.cli.export"
_ALLOW = "allow it with --checkpoint.allow_changes modules"


@dataclass(frozen=True)
class ModuleAdapters:
    """The adapters of a module in the record of a run. `replaced`: tensors of the module that a PEFT folder replaces,
    even if the folder has no adapters for the module.
    """

    adapters: tuple[Adapter, ...]
    dropout: float = 0.0
    replaced: tuple[str, ...] = ()


Adapters = Mapping[str, ModuleAdapters]
"""Adapters by module; empty for a run without any."""
Bases = Mapping[str, str]
"""Fingerprints of base weights, by the setting of their folder, such as `model.hf_path`."""


def adapters_of(shapes: ModelShapes) -> dict[str, ModuleAdapters]:
    """Return the adapters of a model in the form that `run.json` records, by module."""
    from megatron_hetero.models.adapters import Lora  # This import loads Megatron-Core.

    added = {name: shapes[name].added for name in shapes.modules}
    return {name: _recorded(lora) for name, lora in added.items() if isinstance(lora, Lora)}


def _recorded(lora: Lora) -> ModuleAdapters:
    return ModuleAdapters(lora.adapters, lora.dropout, tuple(sorted(lora.replaces)))


def replaced(adapters: Adapters, shapes: ModelShapes) -> frozenset[str]:
    """Return the names of a model's stored tensors that the PEFT folders of `adapters` replace."""
    return frozenset(prefix_of(name, shapes) + each for name, module in adapters.items() for each in module.replaced)


def held(adapters: Adapters, shapes: ModelShapes, frozen: Collection[str]) -> TensorShapes:
    """Return the shapes of a model's stored tensors that its checkpoints contain, by name. `frozen`: frozen tensors."""
    stored = stored_shapes(shapes)
    # Without adapters, a checkpoint has the whole model, frozen tensors included.
    always = replaced(adapters, shapes) if adapters else stored
    return {name: shape for name, shape in stored.items() if name not in frozen or name in always}


def with_recorded(shapes: ModelShapes, adapters: Adapters) -> ModelShapes:
    """Return the shapes of a model with exactly these adapters. Raises `UserError` if the model lacks a layer."""
    if adapters_of(shapes) == adapters:
        return shapes
    if unknown := adapters.keys() - {*shapes.modules}:
        _refuse_unknown(unknown)
    added = {name: _lora(each, name, shapes) for name, each in adapters.items()}
    return shapes.with_added(added)


def _lora(recorded: ModuleAdapters, module: str, shapes: ModelShapes) -> Lora:
    from megatron_hetero.models.adapters import Lora, frozen_beside, linear_layers  # This import loads Megatron-Core.

    architecture = shapes[module].architecture
    layers = {name for name, _ in linear_layers(architecture)}
    if unknown := {f"{each.name} of {module}" for each in recorded.adapters if each.name not in layers}:
        _refuse_unknown(unknown)
    return Lora(recorded.adapters, frozen_beside(recorded.adapters, architecture), recorded.dropout)


def _refuse_unknown(names: Collection[str]) -> NoReturn:
    problem = f"adapters beside {listed(sorted(names))}, which the model does not have"
    fix = "give the model that the checkpoint was saved from (model.hf_path of a run, --model of an export)"
    raise UserError.at("adapters of the checkpoint", problem=problem, fix=fix)


def fingerprints(folders: Mapping[str, Path]) -> dict[str, str]:
    """Return the fingerprint of the weights in each folder, by the folder's setting. Raises `UserError`."""
    return {setting: fingerprint(weight_files(folder, [folder])) for setting, folder in folders.items()}


def require_same_adapters(
    old: Adapters, new: Adapters, folders: Collection[str], allowed: Collection[str], checkpoint: Path
) -> None:
    """Check that a run with adapters `new` may resume from a checkpoint with adapters `old`. `folders`: settings of the
    run's model folders. `allowed`: sections in which changes are allowed. Raises `UserError`.
    """
    for module in sorted(old.keys() | new.keys()):
        setting, before, now = f"modules.{module}.lora", old.get(module), new.get(module)
        if not old:
            why, run = "adapters train beside weights of model folders", f"{_EXPORT} {checkpoint} DIR"
            expected = f"none, as in {checkpoint}, which holds a whole model"
            raise wrong(setting, "adapters", expected, why, f"run `{run}`, then train with {_started_from(folders)}")
        if not new:
            why, run = "a checkpoint with adapters lacks the weights beside them", f"{_EXPORT} {checkpoint} DIR --merge"
            fix = f"restore them, or run `{run}` and train with {_started_from(folders)}"
            raise wrong(setting, "no adapters", f"those of {checkpoint}", why, fix)
        (found, expected), more = _first_difference(_layers(before), _layers(now))
        if found != expected:
            why, merge = "their tensors are of other shapes", f"`{_EXPORT} {checkpoint} DIR --merge`"
            fix = f"restore r, targets and patterns, or run {merge} and train with {_started_from(folders)}"
            raise wrong(setting, f"{found}{more}", f"{expected}, as in {checkpoint}", why, fix)
        if before is None or now is None or "modules" in allowed:
            continue
        (found, expected), more = _first_difference(_scales(before), _scales(now))
        if found != expected:
            why, fix = "the same weights would be another model", f"restore alpha, rslora and patterns, or {_ALLOW}"
            raise wrong(f"{setting}.alpha", f"{found}{more}", f"{expected}, as in {checkpoint}", why, fix)
        if before.dropout != now.dropout:
            expected, why = f"{before.dropout}, as in {checkpoint}", "the run would not continue as it began"
            raise wrong(f"{setting}.dropout", now.dropout, expected, why, f"restore it, or {_ALLOW}")


def _layers(adapters: ModuleAdapters | None) -> Mapping[str, str]:
    return {} if adapters is None else {each.name: f"r {each.r}" for each in adapters.adapters}


def _scales(adapters: ModuleAdapters) -> Mapping[str, str]:
    return {each.name: f"a scale of {each.scale:g}" for each in adapters.adapters}


def _first_difference(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[tuple[str, str], str]:
    """Return the (new, old) texts of the first layer that differs, equal if none does, and a note on other layers."""
    differing = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if not differing:
        return ("", ""), ""
    name, others = differing[0], len(differing) - 1
    more = f" (and other values at {others} more layer{'s'[: others > 1]})" if others else ""
    return (f"{new.get(name, 'no adapter')} at {name}", old.get(name, "none")), more


def _started_from(folders: Collection[str]) -> str:
    """Return the command-line flags for a run that starts from a whole model exported to DIR."""
    further = [setting for setting in folders if setting.startswith("modules.")]
    flags = ["--model.hf_path DIR", *(f"{flag_of(each)} DIR/{ENCODERS}/{each.split('.')[1]}" for each in further)]
    vision = f", without --{VISION_FOLDER}" if VISION_FOLDER in folders else ""
    return f"{' '.join(flags)} and another checkpoint.dir{vision}"


def require_same_bases(
    old: Bases,
    new: Bases,
    folders: Mapping[str, Path],
    was: Mapping[str, Path],
    what: str,
    flag: Callable[[str], str] = flag_of,
) -> None:
    """Check that the fingerprints of the weights in `folders` have not changed.

    Args:
        old: recorded fingerprints, by setting.
        new: fingerprints of `folders`, by setting.
        folders: folders by setting.
        was: recorded folders, for messages.
        what: description of the recorded weights, for messages.
        flag: function that returns the command-line flag of a setting.

    Raises:
        UserError: a folder has other weights.
    """
    for setting in sorted(old.keys() | new.keys()):
        if old.get(setting) != new.get(setting):
            place = f": {folders[setting]}" if setting in folders else ""
            problem = f"other weights than {what}" if place else f"missing, unlike for {what}"
            origin = f" (then in {was[setting]})" if setting in was else ""
            why = "adapters fit only the weights that they are trained beside, which their checkpoints do not hold"
            fix = "give the folder with these weights, unchanged and in the same dtype; no setting allows others"
            where = f"{setting} ({flag(setting)}){place}"
            raise UserError.at(where, problem=problem + origin, because=why, fix=fix)


def require_held(old: Collection[str], new: Collection[str], train: bool, checkpoint: Path) -> None:
    """Check that a resumed run's checkpoints will contain all tensors of the checkpoint it resumes from. `old`, `new`:
    names of tensors before and after. `train`: whether the run sets `model.train`. Raises `UserError`.
    """
    if lost := {*old} - {*new}:
        setting = "model.train" if train else "model.freeze"
        raise UserError.at(
            f"{setting} ({flag_of(setting)})",
            problem=f"freezes {listed(lost)}, of which {checkpoint} has other values than the model's folder",
            because="checkpoints of a run with adapters hold what trains only, so that later ones would lack it",
            fix=f"train it on, or run `{_EXPORT} {checkpoint} DIR --merge` and train from that folder",
        )


def unrecorded_base(checkpoint: Path) -> UserError:
    """Return the error for a run with adapters that starts from weights imported by a version without fingerprints."""
    problem, why = "no fingerprint of the weights that it was imported from", "adapters need them at every start"
    fix = "import the folder again with `python -m megatron_hetero.cli.import`, or start from the folder itself"
    return UserError.at(checkpoint, problem=problem, because=why, fix=fix)
