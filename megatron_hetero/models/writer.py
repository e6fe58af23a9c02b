"""Writes a whole model as `transformers` folders: one for its own modules, in it one for each further encoder. Tensors
are called there what published folders of their family call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_hetero.hf.folder_files import ENCODERS
from megatron_hetero.hf.folder_writer import (
    NO_CHANGES,
    SHARD_BYTES,
    Companions,
    Dtypes,
    FolderWriter,
    folder_writer,
    read_companions,
)
from megatron_hetero.hf.weight_map import TensorShapes
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import drawn_tensors, encoder_shapes, folder_shapes, prefix_of
from megatron_hetero.names import TEXT, VISION


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
