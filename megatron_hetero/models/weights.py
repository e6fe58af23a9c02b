"""Stored tensors of a whole model, whose modules may be of several families: names, shapes, reading and writing.

Names are the ones in published folders. Tensors of further encoders, which have folders of their own, are prefixed with
the encoder's name.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
    """Return the prefix of a module's tensors: the namespace of its architecture. The name of a further encoder
    precedes its namespace, since all encoders have the same namespace in their folders.
    """
    namespace = shapes[module].architecture.namespace
    return namespace if module in (*shapes.own, TEXT) else f"{module}.{namespace}"


def module_of(name: str, shapes: ModelShapes) -> str:
    """Return the name of the module that has a stored tensor."""
    return next((encoder for encoder in shapes.encoders if name.startswith(prefix_of(encoder, shapes))), TEXT)


def tensors_by_subset(shapes: ModelShapes) -> dict[str, list[str]]:
    """Return the names of stored tensors in each subset that `model.freeze` accepts (`ModelShapes.subsets_of`)."""
    by_subset = dict[str, list[str]]()
    for encoder in shapes.encoders:
        subset, projector = shapes.subsets_of(encoder)
        prefix, architecture = prefix_of(encoder, shapes), shapes[encoder].architecture
        in_projector = {prefix + tensor for tensor in architecture.tensors if architecture.is_of_projector(tensor)}
        by_subset[subset] = [name for name in tensors_of(encoder, shapes) if name not in in_projector]
        by_subset[projector] = [name for name in tensors_of(encoder, shapes) if name in in_projector]
    return by_subset | {TEXT: list(tensors_of(TEXT, shapes))}


def stored_shapes(shapes: ModelShapes) -> TensorShapes:
    """Return the shapes of all tensors in writing order: further encoders, then the model's own folder."""
    return _tensors_of_all(shapes.further, shapes) | folder_shapes(shapes)


def added_shapes(shapes: ModelShapes) -> TensorShapes:
    """Return the shapes of tensors that no folder of the model has, such as adapters."""
    in_folders = {name for module in shapes.modules for name in tensors_of(module, shapes, in_folder=True)}
    return _without(in_folders, _tensors_of_all(shapes.modules, shapes))


def folder_shapes(shapes: ModelShapes) -> TensorShapes:
    """Return the shapes of the tensors in the model's folder: those of its encoders and of the text module."""
    return _tensors_of_all((*shapes.own, TEXT), shapes)


def _tensors_of_all(modules: Iterable[str], shapes: ModelShapes) -> TensorShapes:
    return {name: size for module in modules for name, size in tensors_of(module, shapes).items()}


def tensors_of(module: str, shapes: ModelShapes, *, in_folder: bool = False) -> TensorShapes:
    """Return the shapes of one module's tensors; with `in_folder`, only of tensors in its folder."""
    prefix, architecture = prefix_of(module, shapes), shapes[module].architecture
    tensors = architecture.in_folder if in_folder else architecture.tensors
    return {prefix + name: size for name, size in tensors.items()}


def fused_of(module: str, shapes: ModelShapes) -> dict[str, Fused]:
    """Return the fused tensors of folders that consist of several tensors of one module, by name."""
    return fused_tensors(tensors_of(module, shapes), family_of(shapes[module].family).fused_name)


def projector_shapes(encoder: str, shapes: ModelShapes) -> TensorShapes:
    """Return the shapes of the tensors of an encoder's projector."""
    prefix = prefix_of(encoder, shapes)
    return {prefix + name: size for name, size in shapes[encoder].architecture.projector.items()}


def weight_map(
    module: str, shapes: ModelShapes, share: Share, stage: PipelineStage | None = None, view: str = MAIN
) -> WeightMap:
    """Return the parameters of `module` (only of `stage`, if given) that belong to a view, for one `share` of what the
    view splits, in the order of the torch module. Layers are numbered over the whole module.
    """
    shape = shapes[module]
    return shape.architecture.weight_map(
        prefix_of(module, shapes), share, stage or PipelineStage.whole(shape.layers), view
    )


STD = 0.02
"""Standard deviation of new weights: `initializer_range` of the families."""


def own_projectors(shapes: ModelShapes) -> TensorShapes:
    """Return the shapes of the projector tensors of the model's own encoders."""
    return {name: size for encoder in shapes.own for name, size in projector_shapes(encoder, shapes).items()}


def fresh_projector(shapes: ModelShapes, seed: int) -> dict[str, Tensor]:
    """Return the tensors of new projectors by stored name, in fp32: normal weights, zero biases, norms of ones. Whole
    tensors are drawn with a dedicated generator, so values are equal on every rank and in every layout.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = dict[str, Tensor]()
    for name, size in own_projectors(shapes).items():
        if len(size) > 1:
            tensors[name] = torch.empty(size).normal_(std=STD, generator=generator)
        else:
            tensors[name] = torch.zeros(size) if name.endswith(".bias") else torch.ones(size)
    return tensors


def _with_added(opened: Mapping[str, StoredWeights], shapes: ModelShapes, seed: int) -> dict[str, StoredWeights]:
    """Return the weights of modules with initial values for tensors that no folder has or whose values are replaced."""
    result = dict(opened)
    for name, weights in opened.items():
        if (added := shapes[name].architecture.added) is not None:
            in_folder, prefix = tensors_of(name, shapes, in_folder=True), prefix_of(name, shapes)
            new = {each: size for each, size in tensors_of(name, shapes).items() if each not in in_folder}
            new |= {prefix + each: in_folder[prefix + each] for each in added.replaces}
            result[name] = replace(weights, fresh=ChainMap(FirstValues(added, new, seed), weights.fresh))  # pyright: ignore[reportArgumentType]
    return result


def _adapters(shapes: ModelShapes) -> list[Path | None]:
    """Return the PEFT folders from which adapters are loaded."""
    return [added.folder for name in shapes.modules if (added := shapes[name].added) is not None]


def open_text(folders: ModelFolders, shapes: ModelShapes) -> StoredWeights:
    """Open the stored weights of `text` without checking which tensors exist. Raises `UserError` for damaged files."""
    family = family_of(shapes.text.family)
    weights = StoredWeights.open(folders.text, family.canonical_name, fused_of(TEXT, shapes), _adapters(shapes))
    return replace(weights, copied=family.copied)


def open_modules(folders: ModelFolders, shapes: ModelShapes, seed: int) -> dict[str, StoredWeights]:
    """Open and check the stored weights of the model's own encoders and of `text`. `seed`: seed of new tensors. Raises
    `UserError`.
    """
    new = frozenset(own_projectors(shapes) if folders.fresh_projector else ())
    text, of_text = open_text(folders, shapes), tensors_of(TEXT, shapes, in_folder=True)
    copies = frozenset(shapes.text.architecture.stored_twice)
    if folders.vision == folders.text:
        encoders = dict.fromkeys(shapes.own, text)
        of_encoders = (tensors_of(name, shapes, in_folder=True) for name in shapes.own)
        text.require(_without(new, reduce(or_, of_encoders, of_text)), copies | new)
    else:  # If the folder has a whole model, its encoders are ignored.
        text.require(of_text, copies.union(*(_beginning(text, prefix_of(name, shapes)) for name in shapes.own)))
        unused = frozenset(prefix_of(name, shapes) + tensor for name in shapes.own for tensor in folders.unused)
        encoders = {name: _open_encoder(name, folders.vision, shapes, new | unused) for name in shapes.own}
    # Allocate new tensors only after the checks above have confirmed their sizes.
    fresh = fresh_projector(shapes, seed) if new else {}
    opened = {name: replace(weights, fresh=fresh) for name, weights in encoders.items()} | {TEXT: text}
    return _with_added(opened, shapes, seed)


def open_encoders(further: Mapping[str, Path], shapes: ModelShapes, seed: int = 0) -> dict[str, StoredWeights]:
    """Open and check the stored weights of `further` encoders. `seed`: seed of new tensors. Raises `UserError`."""
    opened = {name: _open_encoder(name, folder, shapes) for name, folder in further.items()}
    return _with_added(opened, shapes, seed)


def _open_encoder(name: str, folder: Path, shapes: ModelShapes, new: frozenset[str] = frozenset()) -> StoredWeights:
    """Open the weights of an encoder, which may lack the tensors `new`. If the folder has a whole model, its language
    model is ignored.
    """
    weights = StoredWeights.open(folder, partial(_canonical_name, name, shapes), adapters=_adapters(shapes))
    others = frozenset(weights.shapes) - _beginning(weights, prefix_of(name, shapes))
    weights.require(_without(new, tensors_of(name, shapes, in_folder=True)), others | new)
    return weights


def _without(names: Collection[str], tensors: TensorShapes) -> TensorShapes:
    return {name: size for name, size in tensors.items() if name not in names}


def _canonical_name(encoder: str, shapes: ModelShapes, stored: str) -> str:
    """Return the canonical name of the tensor `stored` in the folder of an encoder."""
    shape = shapes.encoders[encoder]
    name, namespace = family_of(shape.family).canonical_name(stored), shape.architecture.namespace
    return prefix_of(encoder, shapes) + name.removeprefix(namespace) if name.startswith(namespace) else name


def _beginning(weights: StoredWeights, prefix: str) -> frozenset[str]:
    return frozenset(name for name in weights.shapes if name.startswith(prefix))


def companions_of(folders: Mapping[str, Path], changes: Changes = NO_CHANGES) -> dict[str, Companions]:
    """Read the files to write next to the weights of `text` (including the tokenizer) and of each further encoder.
    `folders`: source folder by module; `changes`: changes to the files, see `read_companions`. Raises `UserError`.
    """
    return {name: read_companions(folder, changes.get(name, {})) for name, folder in folders.items()}


Writer = Callable[..., AbstractContextManager[Callable[[str, Tensor], None]]]
"""A function with the signature of `model_writer`."""


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
    """Write a `transformers` folder.

    Yields a function that receives the name and values (on the CPU) of each tensor in `stored_shapes`; it skips tensors
    that no folder has. Further encoders are written to `encoders/NAME` in the folder, for `modules.NAME.hf_path`. If
    tensors arrive in the order of `stored_shapes`, at most one shard of `limit` bytes is in memory; with fused tensors,
    also a second shard and the fused tensors of one layer.

    Args:
        target: the folder, which appears once it is complete.
        shapes: shapes of the model.
        dtype: one dtype for all tensors, or a dtype by name.
        companions: see `companions_of`.
        limit: maximum bytes of a weight file.
        transposed: whether fused tensors are written transposed, see `StoredWeights.transposed`.
        source: stored weights whose further tensors (see `Family.copied`) are copied unchanged.

    Raises:
        UserError: the folder cannot be written.
    """
    source, puts = source or StoredWeights(target), dict[str, Callable[[Tensor], None]]()
    with ExitStack() as stack:

        def add_folder(place: Path, *modules: str) -> FolderWriter:
            tensors, names, fused = dict[str, tuple[int, ...]](), dict[str, str](), dict[str, Fused]()
            for module in modules:
                tensors |= tensors_of(module, shapes, in_folder=True)
                names |= _published_names(module, shapes)
                fused |= fused_of(module, shapes)
            matrices = {matrix for each in fused.values() for matrix in each.matrices}
            alone = [name for name in tensors if name not in matrices]
            dtype_of = dict.fromkeys(tensors, dtype) if isinstance(dtype, torch.dtype) else dtype
            copies = source.unchanged if TEXT in modules else {}
            # Fused tensors come last, since a run exports the experts of a stage after its other tensors.
            sizes = copies | {names[name]: tensors[name] for name in alone}
            sizes |= {names[name]: each.shape(transposed) for name, each in fused.items()}
            dtypes = {names[name]: dtype_of[name] for name in alone} | {name: source.dtype(name) for name in copies}
            for name, each in fused.items():
                dtypes[names[name]] = reduce(torch.promote_types, {dtype_of[matrix] for matrix in each.matrices})
            writer = stack.enter_context(folder_writer(place, sizes, dtypes, companions[modules[-1]], limit))
            writer.copies = copies
            for name, size in copies.items():
                writer.put(name, source.read(TensorSlice(name, (0, size[0]))).view(size))
            for name in alone:
                puts[name] = partial(writer.put, names[name])
            for name, each in fused.items():
                published = names[name]
                puts.update(fusing(each, transposed, dtypes[published], partial(writer.put, published)))
            return writer

        partial_folder = add_folder(target, *shapes.own, TEXT).partial
        for encoder in shapes.further:
            add_folder(partial_folder / ENCODERS / encoder, encoder)
        yield lambda name, tensor: puts[name](tensor) if name in puts else None


def _published_names(module: str, shapes: ModelShapes) -> dict[str, str]:
    """Return the name in folders of each tensor and fused tensor of a module."""
    shape, prefix = shapes[module], prefix_of(module, shapes)
    publish, namespace = family_of(shape.family).published_name, shape.architecture.namespace
    return {
        name: publish(namespace + name.removeprefix(prefix))
        for name in (*tensors_of(module, shapes), *fused_of(module, shapes))
    }
