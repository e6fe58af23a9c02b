"""Contents of an export of a checkpoint: a whole model; of a checkpoint with adapters a PEFT folder or a merged model,
with the weights that it lacks from the model's folders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron_hetero.base.errors import UserError
from megatron_hetero.checkpoint.adapters import fingerprints, require_same_bases, with_recorded
from megatron_hetero.checkpoint.record import ModelSources, RunRecord
from megatron_hetero.hf.model_files import INDEX, SINGLE
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.hf.weight_map import TensorShapes
from megatron_hetero.layout.names import TEXT
from megatron_hetero.models.adapter_export import adapter_tensors, adapter_writer, merging_writer
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import (
    Writer,
    added_shapes,
    model_writer,
    module_of,
    open_encoders,
    open_modules,
    stored_shapes,
)


@dataclass(frozen=True, eq=False)
class Export:
    """Contents of an export. `shapes`: of the model; `tensors`: what `writer` takes, in order; `base`: sources of those
    that the checkpoint lacks; `whole`: whether it is a whole model.
    """

    shapes: ModelShapes
    tensors: TensorShapes
    writer: Writer = model_writer
    base: Mapping[str, StoredWeights] = field(default_factory=dict)
    whole: bool = True

    @property
    def parts(self) -> TensorShapes:
        """The tensors that are written as they are, or with adapters merged into them."""
        merged = added_shapes(self.shapes) if self.writer is merging_writer else {}
        return {name: shape for name, shape in self.tensors.items() if name not in merged}


def contents_of(
    record: RunRecord,
    folder: Path,
    sources: ModelSources,
    folders: ModelFolders,
    plain: ModelShapes,
    merge: bool,
    flag_of: Callable[[str], str],
) -> Export:
    """Return what to write of the checkpoint `folder` with this record. `folders`, `plain`: what `sources` has.
    `merge`: whether to merge adapters. `flag_of`: returns the flag for another folder. Raises `UserError`.
    """
    if not record.adapters:
        if merge:
            raise UserError.at("--merge", problem=f"{folder} has no adapters", fix="remove it")
        return Export(plain, stored_shapes(plain))
    shapes, held = with_recorded(plain, record.adapters), record.held(plain)
    # Adapters alone are the same beside any copy of the base, and do not need its weights.
    bases = (
        sources.folders if merge else {setting: each for setting, each in sources.folders.items() if _is_whole(each)}
    )
    old, what = {setting: record.bases.get(setting, "") for setting in bases}, f"the base of the adapters in {folder}"
    was = ModelSources.recorded(record.config).folders
    require_same_bases(old, fingerprints(bases), bases, was, what, flag_of)
    writer, names = merging_writer, {**added_shapes(shapes), **stored_shapes(shapes)}
    if not merge:
        chosen = adapter_tensors(shapes, held.keys())
        writer = partial(adapter_writer, trained=held.keys(), bases={TEXT: sources.model, **sources.encoders})
        names = {name: shape for name, shape in names.items() if name in chosen}
    base = dict[str, StoredWeights]()
    if lacking := names.keys() - held.keys():
        opened = open_modules(folders, plain, seed=0) | open_encoders(sources.encoders, plain)
        base = {name: opened[module_of(name, shapes)] for name in lacking}
    return Export(shapes, names, writer, base, merge)


def _is_whole(folder: Path) -> bool:
    """Return whether a folder has weights."""
    return any((folder / name).is_file() for name in (SINGLE, INDEX))
