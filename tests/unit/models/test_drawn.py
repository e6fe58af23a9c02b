"""Tensors that no folder stores: drawn alike for all ranks, kept in checkpoints, exported if their part says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_hetero.base.errors import TEXT, VISION
from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.hf.weight_map import Share, TensorShapes, TensorSlice, WeightMap
from megatron_hetero.models.families.common import canonical_name
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.language import LanguageModelShape, _architecture
from megatron_hetero.models.layers.mlp import MLP
from megatron_hetero.models.layers.parts import Drawn
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import companions_of, model_writer, open_modules, stored_shapes
from tests.support.folders import ModelChoice, write_model


@dataclass(frozen=True)
class Adapted(MLP):
    """An MLP with two matrices of low rank beside it."""

    exported: bool = False

    def tensors(self) -> TensorShapes:
        return super().tensors() | {"mlp.down.weight": (4, self.hidden), "mlp.up.weight": (self.hidden, 4)}

    def drawn(self) -> Mapping[str, Drawn]:
        return {
            "mlp.down.weight": Drawn(lambda size, generator: torch.randn(size, generator=generator), self.exported),
            "mlp.up.weight": Drawn(lambda size, _: torch.zeros(size), self.exported),
        }

    def slices(self, stored: str, share: Share) -> WeightMap:
        own = {f"{n}.weight": (TensorSlice(f"{stored}mlp.{n}.weight", (0, r)),) for n, r in (("down", 4), ("up", 1))}
        return {**super().slices(stored, share), **own}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "own", ModelChoice(text_layers=2, vision_layers=2))


def adapted(*, exported: bool) -> Any:
    """The second layer of language models has such an MLP."""

    def architecture(shape: LanguageModelShape) -> Any:
        found = _architecture(shape)
        mlp: Any = found.layers[1].mlp
        own = Adapted(**{name: getattr(mlp, name) for name in mlp.__dataclass_fields__}, exported=exported)
        return replace(found, layers=(found.layers[0], replace(found.layers[1], mlp=own)))

    return mock.patch.object(LanguageModelShape, "architecture", property(architecture))


@pytest.mark.parametrize("exported", [False, True])
def test_tensors_that_no_folder_stores(exported: bool, folder: Path, tmp_path: Path) -> None:
    names = {"model.layers.1.mlp.down.weight", "model.layers.1.mlp.up.weight"}
    with adapted(exported=exported):
        folders = ModelFolders.read(folder)
        shapes = ModelShapes.of(folders)
        assert names <= stored_shapes(shapes).keys(), "checkpoints have them"
        opened = [open_modules(folders, shapes, seed)[TEXT] for seed in (1, 1, 2)]
        whole = [each.read(TensorSlice("model.layers.1.mlp.down.weight", (0, 4))) for each in opened]
        assert torch.equal(whole[0], whole[1]) and not torch.equal(whole[0], whole[2])
        part = opened[0].read(TensorSlice("model.layers.1.mlp.down.weight", (1, 3), columns=(2, 5)))
        assert torch.equal(part, whole[0][1:3, 2:5]), "cut from what is drawn whole"
        assert not opened[0].read(TensorSlice("model.layers.1.mlp.up.weight", (0, 2))).any()
        sources = open_modules(folders, shapes, 1)
        with model_writer(tmp_path / "out", shapes, torch.float32, companions_of({VISION: folder})) as put:
            for name in stored_shapes(shapes):
                put(name, sources[VISION if name.startswith("visual.") else TEXT].whole(name).float())
    written = StoredWeights.open(tmp_path / "out", canonical_name)
    assert names & written.shapes.keys() == (names if exported else set())
