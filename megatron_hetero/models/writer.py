"""Writes a whole model as `transformers` folders: one for its own modules, in it one for each further encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import encoder_shapes, folder_shapes, prefix_of
from megatron_hetero.names import VISION


def companions_of(folders: Mapping[str, Path], changes: Mapping[str, str | None] = NO_CHANGES) -> dict[str, Companions]:
    """For each encoder the files that go out beside its weights, from the folder that it came from; with those of
    `vision` the tokenizer too, but for `changes` (see `read_companions`). Raises `UserError`.
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
    with (
        folder_writer(target, folder_shapes(shapes), dtype, companions[VISION], limit) as writer,
        ExitStack() as stack,
    ):
        further: dict[str, FolderWriter] = {}
        for name, shape in shapes.encoders.items():
            if name != VISION:
                of_encoder = {_in_folder(n, name): n for n in encoder_shapes(name, shape)}
                dtypes = dtype if isinstance(dtype, torch.dtype) else {f: dtype[n] for f, n in of_encoder.items()}
                place = encoder_folder(writer.partial, name)
                opened = folder_writer(place, encoder_shapes(VISION, shape), dtypes, companions[name], limit)
                further[name] = stack.enter_context(opened)
        yield partial(_put, writer, further)


def encoder_folder(model: Path, encoder: str) -> Path:
    """Where an exported model keeps a further encoder: a folder that `model.encoders.NAME.hf_path` takes."""
    return model / ENCODERS / encoder


def _in_folder(name: str, encoder: str) -> str:
    """What a tensor of a further encoder is called in its folder."""
    return prefix_of(VISION) + name.removeprefix(prefix_of(encoder))


def _put(writer: FolderWriter, further: Mapping[str, FolderWriter], name: str, tensor: Tensor) -> None:
    """Hand a tensor to the folder that it belongs to, under the name that it has there."""
    for encoder, of_encoder in further.items():
        if name.startswith(prefix_of(encoder)):
            return of_encoder.put(_in_folder(name, encoder), tensor)
    return writer.put(name, tensor)
