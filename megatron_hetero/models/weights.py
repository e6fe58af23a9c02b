"""The tensors of a whole model, and the map from Megatron's parameters to them, over the families of its modules.

Names are those that published folders use; the tensors of further encoders, which lie in folders of their own, have
the encoder's name before them.
"""

from __future__ import annotations

from megatron_hetero.hf.weight_map import WeightMap
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.common.parameters import EMBEDDING, HEAD, PROJECTOR
from megatron_hetero.models.family import EncoderShape, TensorShapes
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.names import TEXT, VISION, parts_of

ENCODER = "visual."


def canonical_name(stored: str) -> str:
    """The name that published folders use. Newer versions of transformers may nest both modules under `model.`."""
    for nested, flat in ((f"model.{ENCODER}", ENCODER), ("model.language_model.", "model.")):
        if stored.startswith(nested):
            return flat + stored.removeprefix(nested)
    return stored


def prefix_of(encoder: str) -> str:
    """What names of an encoder's tensors begin with, here: those of further encoders lie in folders of their own, where
    they begin as the first one's do.
    """
    return ENCODER if encoder == VISION else f"{encoder}.{ENCODER}"


def canonical_name_of(encoder: str, stored: str) -> str:
    """The name here of a tensor in the folder of a further encoder."""
    name = canonical_name(stored)
    return prefix_of(encoder) + name.removeprefix(ENCODER) if name.startswith(ENCODER) else name


def group_of(module: str, parameter: str) -> str:
    """The parameter group of a parameter (or stored tensor, without prefix), one of `parts_of` the module."""
    return parts_of(module)[-1] if parameter.startswith(PROJECTOR) else module


def stored_shapes(shapes: ModelShapes) -> TensorShapes:
    """Every tensor of the model with its shape, in the order in which it is written: first those of further encoders,
    then what the model's own folder must hold.
    """
    further = [encoder_shapes(name, shape) for name, shape in shapes.encoders.items() if name != VISION]
    return {name: shape for of_encoder in further for name, shape in of_encoder.items()} | folder_shapes(shapes)


def folder_shapes(shapes: ModelShapes) -> TensorShapes:
    """The tensors of the model's own folder: those of the encoder `vision` and of the text module."""
    text = family_of(shapes.text.family).text_tensors(shapes.text)
    return encoder_shapes(VISION, shapes.vision) | text


def encoder_shapes(encoder: str, shape: EncoderShape) -> TensorShapes:
    """The tensors of one encoder."""
    prefix = prefix_of(encoder)
    return {prefix + name: size for name, size in family_of(shape.family).encoder_tensors(shape).items()}


def projector_shapes(encoder: str, shape: EncoderShape) -> TensorShapes:
    """Those of them that are its projector's."""
    starts = tuple(prefix_of(encoder) + start for start in PROJECTOR)
    return {name: size for name, size in encoder_shapes(encoder, shape).items() if name.startswith(starts)}


def weight_map(module: str, shapes: ModelShapes, tp_rank: int, tp: int, stage: Stage | None = None) -> WeightMap:
    """The map of `module` (an encoder or "text") for one rank of a tensor-parallel group of `tp`; only what `stage`
    holds where one is given. Layers are numbered over the whole module.
    """
    shape = shapes[module]
    family, stage = family_of(shape.family), stage or Stage.whole(shape.layers)
    if module == TEXT:
        return family.text_map(shape, tp_rank, tp, stage)
    return family.encoder_map(prefix_of(module), shape, tp_rank, tp, stage)


def tied_parameter(module: str, shapes: ModelShapes, stage: Stage) -> str | None:
    """The parameter of `stage` of which another stage holds a copy: the embedding of a tied model, which is on the
    first stage, and the head on the last. None where there is none.
    """
    if module != TEXT or not shapes.text.tied or stage.is_first == stage.is_last:
        return None
    return EMBEDDING if stage.is_first else HEAD
