"""The tensors of a whole model, and the map from Megatron's parameters to them, over the families of its modules.

Names are those that published folders use; the tensors of further encoders, which lie in folders of their own, have
the encoder's name before them.
"""

from __future__ import annotations

from megatron_hetero.hf.weight_map import MAIN, Share, TensorShapes, WeightMap
from megatron_hetero.layout.stages import Stage
from megatron_hetero.models.layers.parts import Drawn
from megatron_hetero.models.registry import family_of
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.names import TEXT, VISION, parts_of


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
