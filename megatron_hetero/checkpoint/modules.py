"""Checkpoints of modules that a library user has built, which other layouts can resume from.

Weights, masters and moments are stored as whole tensors, `MODULE.PARAMETER`, that each rank writes and reads its own
part of, in the format of the program's checkpoints: safetensors and JSON, hashes of all files, complete or not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_hetero.checkpoint.contents import read, written
from megatron_hetero.checkpoint.format.index import INDEX, index_shapes, open_index
from megatron_hetero.checkpoint.format.keys import WEIGHTS, Shape, matrix
from megatron_hetero.checkpoint.format.storage import read_entries
from megatron_hetero.checkpoint.whole import save, verified
from megatron_hetero.distributed.collective import on_every, on_first
from megatron_hetero.errors import UserError, listed
from megatron_hetero.files.opening import read_text
from megatron_hetero.outputs.checkpoints import chosen_in, step_of
from megatron_hetero.step.joint import JointOptimizer
from megatron_hetero.step.module import TrainedModule
from megatron_hetero.step.wrapped import Wrapped, is_sharded

RECORD = "modules.json"
_ELSEWHERE = "save it with torch.distributed.checkpoint (docs/library.md), or give the module `AdamW` or `SGD`"


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds besides tensors: the last step, and what `save_checkpoint` was given as `extra`."""

    step: int
    extra: Mapping[str, Any] = field(default_factory=dict)


def save_checkpoint(
    folder: str | Path,
    optimizer: JointOptimizer,
    step: int,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write modules and optimizers after `step` to `folder`/step-N. All ranks call it, between steps.

    A checkpoint is complete once it has its name: an interrupted save leaves none, and older ones are intact.

    Args:
        folder: of checkpoints, on a disk that all ranks share.
        optimizer: made by `build_optimizers`, of modules that it gave `AdamW` or `SGD`, or that are frozen.
        step: number of the last step.
        extra: what the program needs to go on, as JSON has it; of the first rank.
        keep_last: number of newest checkpoints to keep; None keeps all.

    Returns:
        The checkpoint.

    Raises:
        UserError: on all ranks. It cannot be written, or a module has another optimizer.
    """
    group, folder = optimizer.topology.files, Path(folder).absolute()
    on_every(group, lambda: _require_own(optimizer))
    optimizers = [optimizer.sharded.get(module.key) for module in optimizer.modules]
    entries = list(written(optimizer.modules, optimizers, _shapes(optimizer.modules)))
    on_first(group, lambda: folder.mkdir(parents=True, exist_ok=True))
    texts = {RECORD: json.dumps(asdict(Loaded(step, dict(extra or {}))))}
    return save(entries, folder, step, lambda: texts, keep_last, group).path


def load_checkpoint(folder: str | Path, optimizer: JointOptimizer) -> Loaded | None:
    """Load weights and optimizer states into modules and optimizers, in any layout. All ranks call it.

    Args:
        folder: a checkpoint, or a folder of checkpoints, of which the newest is taken.
        optimizer: as for `save_checkpoint`; its modules have the same parameters.

    Returns:
        The step and what was saved with it; None where `folder` has no checkpoint.

    Raises:
        UserError: on all ranks. The checkpoint is damaged, or of other modules.
    """
    group = optimizer.topology.files
    on_every(group, lambda: _require_own(optimizer))
    chosen = on_first(group, lambda: chosen_in(Path(folder).absolute()))
    if on_first(group, lambda: step_of(chosen) is None or not chosen.is_dir()):
        return None
    manifest = verified(chosen, (INDEX, RECORD), group)
    index = on_first(group, lambda: open_index(chosen, manifest))
    shapes, stored = _shapes(optimizer.modules), index_shapes(index)
    on_every(group, lambda: _require_same(shapes, stored, chosen))
    optimizers = [optimizer.sharded.get(module.key) for module in optimizer.modules]
    optimizer.wait_for_weights()
    read_entries(chosen, index, read(optimizer.modules, optimizers, shapes, stored), group)
    for each in optimizer.sharded.values():
        each.renew_weights()
    optimizer.wait_for_weights()
    found = on_first(group, lambda: json.loads(read_text(chosen / RECORD)))
    return Loaded(int(found["step"]), found["extra"])


def _require_own(optimizer: JointOptimizer) -> None:
    """Check that the states of all modules are in flat tensors. Raises `UserError`."""
    for module in optimizer.modules:
        where, sharing = f"checkpoint of module `{module.name}`", module.data_parallel
        if module.key in optimizer.optimizers and module.key not in optimizer.sharded:
            found = f"an optimizer of another kind, {type(optimizer.parts[module.key]).__name__}"
            raise UserError.at(where, found=found, expected="`AdamW` or `SGD`", fix=_ELSEWHERE)
        if isinstance(sharing, Wrapped) and any(map(is_sharded, module.parameters.values())):
            raise UserError.at(where, found="DTensors", expected="tensors", fix=_ELSEWHERE)


def _shapes(modules: Sequence[TrainedModule]) -> dict[str, Shape]:
    """Shapes of the whole tensors that parameters of this rank are parts of."""
    found: dict[str, Shape] = {}
    for module in modules:
        for name, parameter in module.parameters.items():
            slices = [each for of_rank in module.maps for each in of_rank[name]]
            rows, columns = max(each.rows[1] for each in slices), [each.columns for each in slices if each.columns]
            if parameter.dim() == 0:
                found[slices[0].name] = (1,)
            elif columns:
                found[slices[0].name] = (rows, max(stop for _, stop in columns))
            else:
                found[slices[0].name] = (rows, *parameter.shape[1:])
    return found


def _require_same(shapes: Mapping[str, Shape], stored: Mapping[str, Shape], checkpoint: Path) -> None:
    """Check that the checkpoint has all weights of this rank, in their shapes. Raises `UserError`."""
    wrong = [name for name, shape in shapes.items() if stored.get(f"{WEIGHTS}/{name}") != matrix(shape)]
    if wrong:
        first = stored.get(f"{WEIGHTS}/{wrong[0]}")
        raise UserError.at(
            checkpoint,
            found=f"{wrong[0]} of shape {first}" if first else f"no weights of {listed(wrong)}",
            expected=f"shape {matrix(shapes[wrong[0]])}" if first else "those of all parameters of the modules",
            fix="build the modules that it was saved from, or load another checkpoint",
        )
