"""The tensors of a whole model, and the map from Megatron's parameters to them, over the families of its modules.

Names are those that published folders use; the tensors of further encoders, which lie in folders of their own, have
the encoder's name before them.

Opens the weights of a model's own modules, from one folder or two, with a projector that no folder gives.

Writes a whole model as `transformers` folders: one for its own modules, in it one for each further encoder. Tensors
are called there what published folders of their family call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.base.errors import TEXT, VISION, parts_of
from megatron_hetero.hf.folders import (
    ENCODERS,
    NO_CHANGES,
    SHARD_BYTES,
    Companions,
    Dtypes,
    FolderWriter,
    folder_writer,
    read_companions,
)
from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, WeightMap
from megatron_hetero.hf.weights import StoredWeights
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.layers.parts import Drawn
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes


def prefix_of(encoder: str, shapes: ModelShapes) -> str:
    """What names of an encoder's tensors begin with, here: those of further encoders lie in folders of their own, where
    they begin as the first one's do.
    """
    namespace = shapes.encoders[encoder].architecture.namespace
    return namespace if encoder == VISION else f"{encoder}.{namespace}"


def canonical_name_of(encoder: str, shapes: ModelShapes, stored: str) -> str:
    """The name here of a tensor in the folder of a further encoder."""
    shape = shapes.encoders[encoder]
    name, own = family_of(shape.family).canonical_name(stored), shape.architecture.namespace
    return prefix_of(encoder, shapes) + name.removeprefix(own) if name.startswith(own) else name


def group_of(module: str, shapes: ModelShapes, parameter: str) -> str:
    """The parameter group of a parameter, one of `parts_of` the module."""
    return parts_of(module)[-1] if shapes[module].architecture.in_projector(parameter) else module


def parts_of_tensors(shapes: ModelShapes) -> dict[str, str]:
    """For each stored tensor the part of the model that it is in, as `model.freeze` names them."""
    found = dict.fromkeys(shapes.text.architecture.tensors, TEXT)
    for encoder in shapes.encoders:
        own, projector = parts_of(encoder)
        found |= dict.fromkeys(encoder_shapes(encoder, shapes), own)
        found |= dict.fromkeys(projector_shapes(encoder, shapes), projector)
    return found


def stored_shapes(shapes: ModelShapes) -> TensorShapes:
    """Every tensor of the model with its shape, in the order in which it is written: first those of further encoders,
    then what the model's own folder must hold.
    """
    further = [encoder_shapes(name, shapes) for name in shapes.encoders if name != VISION]
    return {name: shape for of_encoder in further for name, shape in of_encoder.items()} | folder_shapes(shapes)


def folder_shapes(shapes: ModelShapes) -> TensorShapes:
    """The tensors of the model's own folder: those of the encoder `vision` and of the text module."""
    return encoder_shapes(VISION, shapes) | shapes.text.architecture.tensors


def encoder_shapes(encoder: str, shapes: ModelShapes) -> TensorShapes:
    """The tensors of one encoder."""
    prefix = prefix_of(encoder, shapes)
    return {prefix + name: size for name, size in shapes[encoder].architecture.tensors.items()}


def projector_shapes(encoder: str, shapes: ModelShapes) -> TensorShapes:
    """The tensors of an encoder's projector."""
    prefix = prefix_of(encoder, shapes)
    return {prefix + name: size for name, size in shapes[encoder].architecture.projector.items()}


def drawn_tensors(module: str, shapes: ModelShapes) -> dict[str, Drawn]:
    """The tensors of a module that no folder stores."""
    prefix = "" if module == TEXT else prefix_of(module, shapes)
    return {prefix + name: each for name, each in shapes[module].architecture.drawn.items()}


def weight_map(
    module: str, shapes: ModelShapes, share: Share, stage: Stage | None = None, view: str = MAIN
) -> WeightMap:
    """The map of the parameters of `module` (an encoder or "text") in a view, for one `share` of what that splits, in
    the order of the torch module; only what `stage` holds where one is given. Layers are numbered
    over the whole module.
    """
    shape = shapes[module]
    prefix = "" if module == TEXT else prefix_of(module, shapes)
    return shape.architecture.weight_map(prefix, share, stage or Stage.whole(shape.layers), view)


def tied_parameter(module: str, shapes: ModelShapes, stage: Stage) -> str | None:
    """The parameter of `stage` of which another stage holds a copy: the embedding of a tied model, which is on the
    first stage, and the head on the last. None where there is none.
    """
    return shapes[module].architecture.tied_parameter(stage)


STD = 0.02
"""Standard deviation of new weights: `initializer_range` of the families."""


def fresh_projector(shapes: ModelShapes, seed: int) -> dict[str, Tensor]:
    """A new projector by stored name, fp32: normal weights, biases of 0, a norm of ones.

    Whole tensors, drawn by a generator of their own, so that they are the same for every rank and layout.
    """
    generator = torch.Generator().manual_seed(seed)
    return {name: _drawn(name, size, generator) for name, size in projector_shapes(VISION, shapes).items()}


def _drawn(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(size) > 1:
        return torch.empty(size).normal_(std=STD, generator=generator)
    return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)


def open_modules(folders: ModelFolders, shapes: ModelShapes, seed: int) -> dict[str, StoredWeights]:
    """The stored weights of `vision` and `text`, opened and checked. Raises `UserError`."""
    values = {name: _first_values(name, shapes, seed) for name in (VISION, TEXT)}
    expected = {n: size for n, size in folder_shapes(shapes).items() if not any(n in of for of in values.values())}
    of_vision, namespace = encoder_shapes(VISION, shapes), prefix_of(VISION, shapes)
    of_text = {name: shape for name, shape in expected.items() if name not in of_vision}
    anew = frozenset(projector_shapes(VISION, shapes) if folders.fresh_projector else ())
    stored = {name: shape for name, shape in of_vision.items() if name in expected and name not in anew}
    text = StoredWeights.open(folders.text, family_of(shapes.text.family).canonical_name)
    own = folders.vision == folders.text
    vision = text if own else StoredWeights.open(folders.vision, family_of(shapes.vision.family).canonical_name)
    copies = frozenset(shapes.text.architecture.stored_twice)
    if vision is text:
        text.require(stored | of_text, copies | anew)
    else:  # Each folder may hold a whole model: what the other one gives is not wanted.
        text.require(of_text, copies | _beginning(text, namespace))
        vision.require(stored, frozenset(vision.shapes) - _beginning(vision, namespace) | anew)
    # Last: by now what is stored has shown that the sizes are those of a model.
    fresh = fresh_projector(shapes, seed) if anew else {}
    return {VISION: replace(vision, fresh=fresh | values[VISION]), TEXT: replace(text, fresh=values[TEXT])}


def _first_values(module: str, shapes: ModelShapes, seed: int) -> dict[str, Tensor]:
    """Whole tensors of a module that no folder stores: each by a generator of its own."""
    found, sizes = {}, stored_shapes(shapes)
    for name, each in drawn_tensors(module, shapes).items():
        key = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        found[name] = each.draw(sizes[name], torch.Generator().manual_seed(int.from_bytes(key, "little")))
    return found


def open_encoders(further: Mapping[str, Path], shapes: ModelShapes, seed: int) -> dict[str, StoredWeights]:
    """The stored weights of `further` encoders, opened and checked. Raises `UserError`."""
    opened = {}
    for name, folder in further.items():
        weights = StoredWeights.open(folder, partial(canonical_name_of, name, shapes))
        fresh = _first_values(name, shapes, seed)
        # The folder may hold a whole model: its language model is not wanted.
        weights.require(
            {each: size for each, size in encoder_shapes(name, shapes).items() if each not in fresh},
            frozenset(weights.shapes) - _beginning(weights, prefix_of(name, shapes)),
        )
        opened[name] = replace(weights, fresh=fresh)
    return opened


def _beginning(weights: StoredWeights, prefix: str) -> frozenset[str]:
    return frozenset(name for name in weights.shapes if name.startswith(prefix))


def companions_of(folders: Mapping[str, Path], changes: Mapping[str, str | None] = NO_CHANGES) -> dict[str, Companions]:
    """For each encoder the files to write next to its weights, from the folder that it came from; with those of
    `vision` the tokenizer too, except for `changes` (see `read_companions`). Raises `UserError`.
    """
    return {name: read_companions(folder, changes if name == VISION else {}) for name, folder in folders.items()}


@contextmanager
def model_writer(
    target: Path,
    shapes: ModelShapes,
    dtype: Dtypes,
    companions: Mapping[str, Companions],
    limit: int = SHARD_BYTES,
) -> Iterator[Callable[[str, Tensor], None]]:
    """What takes each of the model's `stored_shapes` by name, with its tensor on the CPU; in that order no more than
    one shard, of `limit` bytes at most, is held.

    `dtype`: one for all, or by the same names. `companions`: see `companions_of`. `target` appears when it is whole.
    Raises `UserError` where it cannot be written.
    """
    own = published_names(shapes)
    with (
        _folder(target, own, folder_shapes(shapes), dtype, companions[VISION], limit) as writer,
        ExitStack() as stack,
    ):
        puts = {name: partial(writer.put, there) for name, there in own.items()}
        for encoder in shapes.encoders:
            if encoder != VISION:
                names, place = names_of_encoder(encoder, shapes), encoder_folder(writer.partial, encoder)
                of_encoder = _folder(place, names, encoder_shapes(encoder, shapes), dtype, companions[encoder], limit)
                further = stack.enter_context(of_encoder)
                puts |= {name: partial(further.put, there) for name, there in names.items()}
        yield lambda name, tensor: puts[name](tensor) if name in puts else None  # What is not exported.


def published_names(shapes: ModelShapes) -> dict[str, str]:
    """What the tensors of the model's own folder are called there, by their names here."""
    text, encoder = family_of(shapes.text.family), family_of(shapes.vision.family)
    of_vision = encoder_shapes(VISION, shapes)
    kept = _not_exported(VISION, shapes) | _not_exported(TEXT, shapes)
    names = [name for name in folder_shapes(shapes) if name not in kept]
    return {name: (encoder if name in of_vision else text).published_name(name) for name in names}


def _not_exported(module: str, shapes: ModelShapes) -> frozenset[str]:
    return frozenset(name for name, each in drawn_tensors(module, shapes).items() if not each.exported)


def names_of_encoder(encoder: str, shapes: ModelShapes) -> dict[str, str]:
    """What the tensors of a further encoder are called in its folder, by their names here."""
    shape, own = shapes.encoders[encoder], prefix_of(encoder, shapes)
    publish, namespace = family_of(shape.family).published_name, shape.architecture.namespace
    names = [name for name in encoder_shapes(encoder, shapes) if name not in _not_exported(encoder, shapes)]
    return {name: publish(namespace + name.removeprefix(own)) for name in names}


def _folder(
    target: Path,
    names: Mapping[str, str],
    sizes: TensorShapes,
    dtype: Dtypes,
    companions: Companions,
    limit: int,
) -> AbstractContextManager[FolderWriter]:
    """A folder of tensors of `sizes`, which are called there as `names` say."""
    published = {there: sizes[name] for name, there in names.items()}
    dtypes = dtype if isinstance(dtype, torch.dtype) else {there: dtype[name] for name, there in names.items()}
    return folder_writer(target, published, dtypes, companions, limit)


def encoder_folder(model: Path, encoder: str) -> Path:
    """Where an exported model keeps a further encoder: a folder that `model.encoders.NAME.hf_path` takes."""
    return model / ENCODERS / encoder
