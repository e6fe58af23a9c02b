"""Tensors beside those of folders: a throwaway kind of adapter gets its shares, its values and its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hetero.base.errors import UserError
from megatron_hetero.hf.weight_map import Share, TensorShapes, TensorSlice, WeightMap, held, load_slices
from megatron_hetero.layout.pipeline import PipelineStage, cut_stages
from megatron_hetero.models.folders import ModelFolders
from megatron_hetero.models.layers.parts import Site
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.stages import ModuleStage
from megatron_hetero.models.weights import (
    fresh_projector,
    open_encoders,
    open_modules,
    stored_shapes,
    tensors_by_subset,
    tensors_of,
    weight_map,
)
from megatron_hetero.step.family_module import load_parameters
from tests.support.folders import ModelChoice, write_model
from tests.support.stages import lone_site


@dataclass(frozen=True)
class LowRank:
    """A product of two matrices beside each linear layer of the layers: `A` [rank, in] of each stored tensor, one below
    the other in the parameter; `B` [out, rank], with the rows of the base.
    """

    rank: int
    freezes: ClassVar[frozenset[str]] = frozenset()
    replaces: ClassVar[frozenset[str]] = frozenset()
    folder: ClassVar[Path | None] = None

    def _is_beside(self, name: str) -> bool:
        return name.endswith(("_proj.weight", "attn.qkv.weight"))

    def tensors(self, stored: TensorShapes) -> TensorShapes:
        beside = {name.removesuffix("weight"): shape for name, shape in stored.items() if self._is_beside(name)}
        return {
            f"{name}lora_{kind}.weight": shape
            for name, (out, inputs) in beside.items()
            for kind, shape in (("A", (self.rank, inputs)), ("B", (out, self.rank)))
        }

    def weight_map(self, weights: WeightMap, prefix: str) -> WeightMap:
        result: dict[str, tuple[TensorSlice, ...]] = {}
        for module, names in groupby(weights, lambda name: name.rpartition(".")[0]):
            own = {name: weights[name] for name in names}
            result |= own
            slices = own.get(f"{module}.weight", ())
            if slices and all(each.name.startswith(prefix) and self._is_beside(each.name) for each in slices):
                result |= {f"{module}.lora_A": self._first(slices), f"{module}.lora_B": self._second(slices)}
        return result

    def _first(self, slices: tuple[TensorSlice, ...]) -> tuple[TensorSlice, ...]:
        columns = {each.name.removesuffix("weight"): each for each in slices}
        return tuple(
            TensorSlice(f"{name}lora_A.weight", (0, self.rank), number * self.rank, each.columns, each.padding)
            if each.columns is not None
            else TensorSlice(f"{name}lora_A.weight", (0, self.rank), number * self.rank)
            for number, (name, each) in enumerate(columns.items())
        )

    def _second(self, slices: tuple[TensorSlice, ...]) -> tuple[TensorSlice, ...]:
        return tuple(
            replace(
                each,
                name=f"{each.name.removesuffix('weight')}lora_B.weight",
                columns=None,
                padding=0 if each.columns is not None else each.padding,
            )
            for each in slices
        )

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.empty(shape).normal_(generator=generator)

    def attach(self, module: torch.nn.Module, name: str, weights: WeightMap, site: Site) -> None:
        within = f"{name}."
        for name, slices in self.weight_map(weights, "").items():
            if name.endswith((".lora_A", ".lora_B")):
                owner: Any = module.get_submodule(name.removeprefix(within).rpartition(".")[0])
                rows = sum(each.rows[1] - each.rows[0] for each in slices)
                width = owner.weight.shape[1] if name.endswith("A") else self.rank
                rows = owner.weight.shape[0] if name.endswith("B") else rows
                owner.register_parameter(name.rpartition(".")[2], torch.nn.Parameter(torch.empty(rows, width)))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    choice = ModelChoice(family=request.param, text_layers=3, vision_layers=3)
    return write_model(tmp_path_factory.mktemp("added") / "model", choice)


def shapes_of(folder: Path, added: LowRank | None = None, further: bool = False) -> ModelShapes:
    shapes = ModelShapes.of(ModelFolders.read(folder), {"detail": folder} if further else None)
    encoders = {name: replace(shape, added=added) for name, shape in shapes.encoders.items()}
    return replace(shapes, encoders=encoders, text=replace(shapes.text, added=added))


def local_of(slices: tuple[TensorSlice, ...], whole: dict[str, Tensor], columns: int | None = None) -> Tensor:
    rows = sum(each.rows[1] - each.rows[0] for each in slices) + sum(
        each.padding for each in slices if not each.columns
    )
    width = columns or max(
        (each.columns[1] - each.columns[0] + each.padding if each.columns else whole[each.name].shape[1])
        for each in slices
    )
    local = torch.empty(max(rows, *(each.at + each.rows[1] - each.rows[0] for each in slices), 0), width)
    load_slices(local, slices, [whole[each.name][each.source] for each in slices])
    return local


LAYOUTS = [(1, (3,)), (2, (2, 1)), (4, (3,)), (4, (1, 1, 1))]
"""Ranks of tp, and layers of each stage. There are two key/value heads: under tp 4 each has copies."""


@pytest.mark.parametrize("tp, split", LAYOUTS)
def test_shares_follow_the_base(folder: Path, tp: int, split: tuple[int, ...]) -> None:
    """On every rank the product of its shares is its share of the product, of fused rows and split columns too."""
    added = LowRank(2)
    shapes, base = shapes_of(folder, added), shapes_of(folder)
    generator = torch.Generator().manual_seed(0)
    for module in ("vision", "text"):
        whole = {n: torch.randn(size, generator=generator) for n, size in tensors_of(module, shapes).items()}
        products = {
            f"{name.removesuffix('lora_A.weight')}weight": whole[name.replace("lora_A", "lora_B")] @ first
            for name, first in whole.items()
            if name.endswith("lora_A.weight")
        }
        seen = set[str]()
        for stage, rank in product(cut_stages(3, len(split), split=split, module=module), range(tp)):
            found = weight_map(module, shapes, Share(rank, tp), stage)
            assert {n: s for n, s in found.items() if "lora" not in n} == weight_map(
                module, base, Share(rank, tp), stage
            )
            for name, slices in found.items():
                if (beside := name.replace(".weight", ".lora_A")) == name or beside not in found:
                    continue
                expected = local_of(slices, products)
                first, second = local_of(found[beside], whole), local_of(found[beside.replace("_A", "_B")], whole, 2)
                names = list(dict.fromkeys(each.name for each in slices))
                got = torch.zeros_like(expected)
                for each in slices:
                    number, rows = names.index(each.name), slice(each.at, each.at + each.rows[1] - each.rows[0])
                    got[rows] = second[rows] @ first[number * 2 : number * 2 + 2]
                torch.testing.assert_close(got, expected)
                seen.update(each.name for each in slices)
        assert seen == products.keys()
        of_ranks = held([weight_map(module, shapes, Share(rank, tp), PipelineStage.whole(3)) for rank in range(tp)])[0]
        for name, copies in of_ranks.items():
            if name.endswith("linear_qkv.lora_A"):
                assert not copies.sharded, "a layer that is split by rows has all of A on every rank"
            if name.endswith("linear_qkv.lora_B"):
                assert copies == of_ranks[name.replace("lora_B", "weight")]


@pytest.fixture(scope="module")
def site() -> Site:
    return lone_site()


def modules(folder: Path, site: Site, seed: int, **options: Any) -> Iterator[tuple[str, Any]]:
    shapes = shapes_of(folder, LowRank(2))
    opened = open_modules(ModelFolders.read(folder), shapes, seed)
    for name, stage in product(("vision", "text"), cut_stages(3, 2)):
        architecture = shapes[name].architecture
        model, own = ModuleStage(architecture, site, stage), weight_map(name, shapes, Share(0, 1), stage)
        assert [stage.global_name(n) for n, _ in model.named_parameters()] == list(own)
        load_parameters(model, own, opened[name], stage, architecture.stored_twice)
        yield from ((f"{name}.{stage.global_name(n)}", p.detach().clone()) for n, p in model.named_parameters())


def test_first_values_follow_from_names_and_seed(folder: Path, site: Site) -> None:
    """They are loaded with the weights of the folder; no layout changes them, and no other tensor."""
    one, again, other = (dict(modules(folder, site, seed)) for seed in (1, 1, 2))
    new = {name for name in one if "lora" in name}
    assert len(new) > 20 and len({one[name].sum().item() for name in new}) == len(new)
    for name, values in one.items():
        assert torch.equal(values, again[name]) and torch.equal(values, other[name]) == (name not in new)
    shapes = shapes_of(folder, LowRank(2), further=True)
    weights = open_modules(ModelFolders.read(folder), shapes, 1) | open_encoders({"detail": folder}, shapes, 1)
    of_further = [n for n in tensors_of("detail", shapes) if "lora" in n]
    assert of_further and not torch.equal(
        weights["detail"].whole(of_further[0]), weights["vision"].whole(of_further[0].removeprefix("detail."))
    )
    assert all(
        torch.equal(weights["vision"].whole(n), one["vision.layers.0.self_attention.linear_qkv.lora_A"])
        for n in stored_shapes(shapes)
        if n == "visual.blocks.0.attn.qkv.lora_A.weight"
    )


def test_what_no_folder_has_is_neither_asked_of_one_nor_taken_from_it(folder: Path, tmp_path: Path) -> None:
    plain, shapes = shapes_of(folder), shapes_of(folder, LowRank(2))
    assert {n: s for n, s in stored_shapes(shapes).items() if "lora" not in n} == stored_shapes(plain)
    parts = tensors_by_subset(shapes)
    assert {name for names in parts.values() for name in names} == set(stored_shapes(shapes))
    fresh = fresh_projector(plain, 3)
    assert all(torch.equal(values, fresh[name]) for name, values in fresh_projector(shapes, 3).items())
    own = tmp_path / "model"
    own.mkdir()
    for file in folder.iterdir():
        (own / file.name).write_bytes(file.read_bytes())
    stored = load_file(own / "model.safetensors")
    name = next(n for n in stored if n.endswith("layers.0.self_attn.q_proj.weight")).replace("weight", "lora_A.weight")
    save_file(stored | {name: torch.zeros(2, 2)}, own / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"unexpected: .*q_proj\.lora_A\.weight"):
        open_modules(ModelFolders.read(own), shapes, 0)
