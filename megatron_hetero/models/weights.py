"""Stored tensors of a whole model over the families of its modules: names, shapes, reading and writing.

Names are those of published folders. Tensors of further encoders, which are in folders of their own, have the encoder's
name before them.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.hf.fused_tensors import Fused, fused_tensors, fusing
from megatron_hetero.hf.model_files import (
    ENCODERS,
    NO_CHANGES,
    SHARD_BYTES,
    Changes,
    Companions,
    Dtypes,
    FolderWriter,
    folder_writer,
    read_companions,
)
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, TensorSlice, WeightMap
from megatron_hetero.layout.names import TEXT
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.added import FirstValues
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes


def prefix_of(module: str, shapes: ModelShapes) -> str:
    """Return the prefix of a module's tensors: the namespace of its architecture, behind the name of a further encoder,
    whose own folder uses the same namespace as the first one's.
    """
    namespace = shapes[module].architecture.namespace
    return namespace if module in (*shapes.own, TEXT) else f"{module}.{namespace}"


def module_of(name: str, shapes: ModelShapes) -> str:
    """Return the module of a stored tensor."""
    return next((encoder for encoder in shapes.encoders if name.startswith(prefix_of(encoder, shapes))), TEXT)


def tensors_of_parts(shapes: ModelShapes) -> dict[str, list[str]]:
    """Return the stored tensors of each part of the model, as `model.freeze` names parts."""
    found = dict[str, list[str]]()
    for encoder in shapes.encoders:
        own, projector = shapes.parts_of(encoder)
        prefix, architecture = prefix_of(encoder, shapes), shapes[encoder].architecture
        of_projector = {prefix + tensor for tensor in architecture.tensors if architecture.is_of_projector(tensor)}
        found[own] = [name for name in tensors_of(encoder, shapes) if name not in of_projector]
        found[projector] = [name for name in tensors_of(encoder, shapes) if name in of_projector]
    return found | {TEXT: list(tensors_of(TEXT, shapes))}


def stored_shapes(shapes: ModelShapes) -> TensorShapes:
    """Return every tensor of the model with its shape, in the order in which they are written: those of further
    encoders, then those of the model's own folder.
    """
    further = [tensors_of(name, shapes) for name in shapes.further]
    return {name: shape for of_encoder in further for name, shape in of_encoder.items()} | folder_shapes(shapes)


def added_shapes(shapes: ModelShapes) -> TensorShapes:
    """Return the tensors that no folder of the model has."""
    every = {name: tensors_of(name, shapes) for name in shapes.modules}
    in_folders = {name for module in shapes.modules for name in tensors_of(module, shapes, in_folder=True)}
    return {name: size for own in every.values() for name, size in own.items() if name not in in_folders}


def folder_shapes(shapes: ModelShapes) -> TensorShapes:
    """Return the tensors of the model's own folder: those of its own encoders and of the text module."""
    return {name: size for module in (*shapes.own, TEXT) for name, size in tensors_of(module, shapes).items()}


def tensors_of(module: str, shapes: ModelShapes, *, in_folder: bool = False) -> TensorShapes:
    """Return the tensors of one module, or those that its folder has."""
    prefix, architecture = prefix_of(module, shapes), shapes[module].architecture
    tensors = architecture.in_folder if in_folder else architecture.tensors
    return {prefix + name: size for name, size in tensors.items()}


def fused_of(module: str, shapes: ModelShapes) -> dict[str, Fused]:
    """Return the tensors of folders that several tensors of one module are parts of, by name."""
    return fused_tensors(tensors_of(module, shapes), family_of(shapes[module].family).fused_name)


def projector_shapes(encoder: str, shapes: ModelShapes) -> TensorShapes:
    """Return the tensors of an encoder's projector."""
    prefix = prefix_of(encoder, shapes)
    return {prefix + name: size for name, size in shapes[encoder].architecture.projector.items()}


def weight_map(
    module: str, shapes: ModelShapes, share: Share, stage: PipelineStage | None = None, view: str = MAIN
) -> WeightMap:
    """Return the map of the parameters of `module` in a view, for one `share` of what that splits, in the order of the
    torch module; of `stage` alone if given. Layers are numbered over the whole module.
    """
    shape = shapes[module]
    return shape.architecture.weight_map(
        prefix_of(module, shapes), share, stage or PipelineStage.whole(shape.layers), view
    )


STD = 0.02
"""Standard deviation of new weights, the `initializer_range` of the families."""


def own_projectors(shapes: ModelShapes) -> TensorShapes:
    """Return the tensors of the projectors of the model's own encoders."""
    return {name: size for encoder in shapes.own for name, size in projector_shapes(encoder, shapes).items()}


def fresh_projector(shapes: ModelShapes, seed: int) -> dict[str, Tensor]:
    """Return new projectors by stored name, fp32: normal weights, biases of 0, a norm of ones. Whole tensors are drawn
    by a generator of their own, so that they are equal on every rank and in every layout.
    """
    generator = torch.Generator().manual_seed(seed)
    return {name: _drawn(name, size, generator) for name, size in own_projectors(shapes).items()}


def _drawn(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(size) > 1:
        return torch.empty(size).normal_(std=STD, generator=generator)
    return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)


def _with_added(opened: Mapping[str, StoredWeights], shapes: ModelShapes, seed: int) -> dict[str, StoredWeights]:
    """Let weights of modules have the first values of tensors that no folder has, or that others replace."""
    result = dict(opened)
    for name, weights in opened.items():
        if (added := shapes[name].architecture.added) is not None:
            in_folder, prefix = tensors_of(name, shapes, in_folder=True), prefix_of(name, shapes)
            new = {each: size for each, size in tensors_of(name, shapes).items() if each not in in_folder}
            new |= {prefix + each: in_folder[prefix + each] for each in added.replaces}
            result[name] = replace(weights, fresh=ChainMap(FirstValues(added, new, seed), weights.fresh))  # pyright: ignore[reportArgumentType]
    return result


def _adapters(shapes: ModelShapes) -> list[Path | None]:
    """Return the folders whose adapters are loaded."""
    return [added.folder for name in shapes.modules if (added := shapes[name].added) is not None]


def open_text(folders: ModelFolders, shapes: ModelShapes) -> StoredWeights:
    """Open the stored weights of `text`, without checking them. Raises `UserError` for files that are damaged."""
    family = family_of(shapes.text.family)
    weights = StoredWeights.open(folders.text, family.canonical_name, fused_of(TEXT, shapes), _adapters(shapes))
    return replace(weights, copied=family.copied)


def open_modules(folders: ModelFolders, shapes: ModelShapes, seed: int) -> dict[str, StoredWeights]:
    """Open and check the stored weights of the model's own encoders and of `text`. `seed`: of new tensors. Raises
    `UserError`.
    """
    anew = frozenset(own_projectors(shapes) if folders.fresh_projector else ())
    text, own = open_text(folders, shapes), tensors_of(TEXT, shapes, in_folder=True)
    copies = frozenset(shapes.text.architecture.stored_twice)
    if folders.vision == folders.text:
        encoders = dict.fromkeys(shapes.own, text)
        of_encoders = (tensors_of(name, shapes, in_folder=True) for name in shapes.own)
        text.require(_without(anew, reduce(or_, of_encoders, own)), copies | anew)
    else:  # The folder may hold a whole model, of which the encoders are ignored.
        text.require(own, copies.union(*(_beginning(text, prefix_of(name, shapes)) for name in shapes.own)))
        unused = frozenset(prefix_of(name, shapes) + tensor for name in shapes.own for tensor in folders.unused)
        encoders = {name: _open_encoder(name, folders.vision, shapes, anew | unused) for name in shapes.own}
    # Last, since the stored tensors have shown by now that the sizes are those of a model.
    fresh = fresh_projector(shapes, seed) if anew else {}
    opened = {name: replace(weights, fresh=fresh) for name, weights in encoders.items()} | {TEXT: text}
    return _with_added(opened, shapes, seed)


def open_encoders(further: Mapping[str, Path], shapes: ModelShapes, seed: int = 0) -> dict[str, StoredWeights]:
    """Open and check the stored weights of `further` encoders. `seed`: of new tensors. Raises `UserError`."""
    opened = {name: _open_encoder(name, folder, shapes) for name, folder in further.items()}
    return _with_added(opened, shapes, seed)


def _open_encoder(name: str, folder: Path, shapes: ModelShapes, anew: frozenset[str] = frozenset()) -> StoredWeights:
    """Open the weights of an encoder, `anew` excepted. The folder may hold a whole model, of which the language model
    is ignored.
    """
    weights = StoredWeights.open(folder, partial(_canonical_name, name, shapes), adapters=_adapters(shapes))
    others = frozenset(weights.shapes) - _beginning(weights, prefix_of(name, shapes))
    weights.require(_without(anew, tensors_of(name, shapes, in_folder=True)), others | anew)
    return weights


def _without(names: frozenset[str], tensors: TensorShapes) -> TensorShapes:
    return {name: size for name, size in tensors.items() if name not in names}


def _canonical_name(encoder: str, shapes: ModelShapes, stored: str) -> str:
    """Return the name used here for a tensor in the folder of an encoder."""
    shape = shapes.encoders[encoder]
    name, own = family_of(shape.family).canonical_name(stored), shape.architecture.namespace
    return prefix_of(encoder, shapes) + name.removeprefix(own) if name.startswith(own) else name


def _beginning(weights: StoredWeights, prefix: str) -> frozenset[str]:
    return frozenset(name for name in weights.shapes if name.startswith(prefix))


def companions_of(folders: Mapping[str, Path], changes: Changes = NO_CHANGES) -> dict[str, Companions]:
    """Read the files to write next to the weights of `text` and of each further encoder from the folder that it came
    from; with those of `text` the tokenizer too, except for `changes` (see `read_companions`). Raises `UserError`.
    """
    return {name: read_companions(folder, changes.get(name, {})) for name, folder in folders.items()}


Writer = Callable[..., AbstractContextManager[Callable[[str, Tensor], None]]]
"""A function as `model_writer`."""


@contextmanager
def model_writer(
    target: Path,
    shapes: ModelShapes,
    dtype: Dtypes,
    companions: Mapping[str, Companions],
    limit: int = SHARD_BYTES,
    transposed: bool = False,
    source: StoredWeights | None = None,
) -> Iterator[Callable[[str, Tensor], None]]:
    """Write a `transformers` folder: yields a function that takes each of the model's `stored_shapes` by name, with its
    tensor on the CPU. Further encoders are written to folders in it, which `modules.NAME.hf_path` takes. If
    tensors come in the order of `stored_shapes`, at most one shard, of `limit` bytes, is in memory; of fused tensors
    another one, and those of one layer.

    `dtype`: one for all, or by the same names. `companions`: see `companions_of`. `transposed`: whether fused tensors
    are, see `StoredWeights.transposed`. `source`: of tensors that are copied unchanged. `target` appears when it is
    complete. Tensors that no folder has are left out. Raises `UserError` if it cannot be written.
    """
    source, puts = source or StoredWeights(target), dict[str, Callable[[Tensor], None]]()
    with ExitStack() as stack:

        def add_folder(place: Path, *modules: str) -> FolderWriter:
            tensors, names, fused = dict[str, tuple[int, ...]](), dict[str, str](), dict[str, Fused]()
            for module in modules:
                tensors |= tensors_of(module, shapes, in_folder=True)
                names |= _published_names(module, shapes)
                fused |= fused_of(module, shapes)
            parts = {part for found in fused.values() for part in found.matrices}
            alone = [name for name in tensors if name not in parts]
            of_parts = dict.fromkeys(tensors, dtype) if isinstance(dtype, torch.dtype) else dtype
            # Fused tensors last: a run exports experts behind all other tensors of a stage.
            sizes = {names[name]: tensors[name] for name in alone}
            sizes |= {names[name]: found.shape(transposed) for name, found in fused.items()}
            dtypes = {names[name]: of_parts[name] for name in alone}
            for name, found in fused.items():
                dtypes[names[name]] = reduce(torch.promote_types, {of_parts[part] for part in found.matrices})
            copies, files = source.unchanged if TEXT in modules else {}, companions[modules[-1]]
            sizes, dtypes = copies | sizes, dtypes | {name: source.dtype(name) for name in copies}
            writer = stack.enter_context(folder_writer(place, sizes, dtypes, files, limit))
            writer.copies = copies
            for name, size in copies.items():
                writer.put(name, source.read(TensorSlice(name, (0, size[0]))).view(size))
            puts.update({name: partial(writer.put, names[name]) for name in alone})
            for name, found in fused.items():
                there = names[name]
                puts.update(fusing(found, transposed, dtypes[there], partial(writer.put, there)))
            return writer

        partial_folder = add_folder(target, *shapes.own, TEXT).partial
        for encoder in shapes.further:
            add_folder(partial_folder / ENCODERS / encoder, encoder)
        yield lambda name, tensor: puts[name](tensor) if name in puts else None


def _published_names(module: str, shapes: ModelShapes) -> dict[str, str]:
    """Return the names of a module's tensors in its folder, by their names here; of fused tensors too."""
    shape, prefix = shapes[module], prefix_of(module, shapes)
    publish, namespace = family_of(shape.family).published_name, shape.architecture.namespace
    return {
        name: publish(namespace + name.removeprefix(prefix))
        for name in (*tensors_of(module, shapes), *fused_of(module, shapes))
    }
