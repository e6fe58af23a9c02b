"""Modules in pipeline stages compute what they compute whole: losses, rows, every gradient, weights after steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

from megatron_hetero.hf.stored_weights import StoredWeights
from megatron_hetero.hf.weight_map import Share
from megatron_hetero.layout.pipeline import cut_stages, stages_of_rank
from megatron_hetero.models.families.common import canonical_name
from megatron_hetero.models.weights import companions_of, weight_map
from megatron_hetero.step.family_module import load_parameters
from megatron_hetero.train.hf_export import export_model, gather_parameters
from tests.support import stages as jobs
from tests.support.folders import ModelChoice, write_model
from tests.support.matrix import thinned
from tests.support.pool import Pools
from tests.support.stages import Case, Trainee


def export(case: Case, target: Path) -> list[str]:
    """Write what was read. Returns the modules that this rank holds a part of."""
    trainee = Trainee(case)
    companions = companions_of({"text": case.folder})
    export_model(trainee.modules, trainee.shapes, trainee.topology, target, companions, torch.float32)
    return [module.name for module in trainee.modules]


def gathered(case: Case) -> list[str]:
    """The stored tensors that the parameters are parts of, as they reach rank 0: one name for each slice."""
    trainee = Trainee(case)
    parts = gather_parameters(trainee.modules, trainee.topology)
    return [tensor_slice.name for slices, _ in parts for tensor_slice in slices]


def loading(case: Case, name: str) -> dict[str, Any]:
    """The numbers of this rank's layers, counted over the whole module; and what is said of a map of another stage."""
    trainee = Trainee(case)
    module, layout = trainee.module, trainee.layouts[name]
    every = cut_stages(trainee.shapes[name].layers, layout.pp, split=case.split, module=name)
    stage = module.chunks[0].stage
    assert (stage,) == stages_of_rank(every, layout.coordinate(dist.get_rank()).pp, layout.pp)
    weights = StoredWeights.open(case.folder, canonical_name)
    said, (model,) = {}, module.chunks
    for other in every:
        try:
            own_map = weight_map(name, trainee.shapes, Share(0, 1), other)
            load_parameters(model, own_map, weights, stage, copies={})
        except AssertionError as error:
            said[other] = str(error)
    numbers = [layer.number for layer in model.layers]
    return {"numbers": numbers, "said": said, "own": stage, "names": sorted(module.parameters)}


SEEDS = (0, 1, 2, 3, 4, 5)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A model with an untied head, and one with a tied head. Full attention is where local numbers would lack it."""
    choice = ModelChoice(text_layers=5, vision_layers=4, full_layers=(1, 2))
    folder = tmp_path_factory.mktemp("stages")
    return {tied: write_model(folder / str(tied), replace(choice, tied=tied)) for tied in (False, True)}


@pytest.fixture(scope="module")
def whole(models: dict[bool, Path], pools: Pools) -> dict[bool, dict]:
    """The step of the text module in one process, without stages."""
    return {tied: pools(1).run(jobs.text, Case(models[tied], {"text": "dp:1"}), SEEDS)[0] for tied in models}


def ranks_of(layout: str) -> int:
    """The number of ranks that a layout needs."""
    return prod(int(part.split(":")[1]) for part in layout.split(","))


def assert_near(got: jobs.Arrays, expected: jobs.Arrays) -> None:
    """Every array, by the norm of what is expected."""
    assert got.keys() == expected.keys() and expected
    scale = np.sqrt(sum((array.astype(np.float64) ** 2).sum() for array in expected.values()))
    for name, array in expected.items():
        distance = np.linalg.norm((got[name] - array).astype(np.float64))
        assert distance <= TOLERANCE * np.linalg.norm(array.astype(np.float64)) + 1e-8 * scale, name


def merged(of_ranks: list[dict], what: str) -> dict:
    """What the ranks have by number, together."""
    return {number: value for found in of_ranks for number, value in found[what].items()}


# ---------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "layout, split, per_rank, more",
    thinned(
        [
            ("pp:2", None, 1, {}),
            ("pp:2", (1, 4), 1, {}),
            ("pp:2", (4, 1), 1, {"recompute": "full"}),
            ("pp:2", None, 2, {}),
            ("pp:3", None, 1, {}),
            ("pp:3", (2, 1, 2), 1, {}),
            ("tp:2,pp:2", None, 1, {}),
            ("tp:2,pp:2", (2, 3), 1, {"sequence_parallel": False}),
            ("tp:2,pp:2", (1, 1, 2, 1), 2, {}),
            ("pp:2,dp:2", (3, 2), 1, {}),
            ("cp:2,pp:2", None, 1, {}),
            ("tp:2,pp:3", (1, 3, 1), 1, {}),
        ],
        3,
    ),
    ids=str,
)
def test_text_stages(
    layout: str, split: tuple[int, ...] | None, per_rank: int, more: dict, tied: bool, models: dict[bool, Path],
    whole: dict[bool, dict], pools: Pools,
) -> None:  # fmt: skip
    case = Case(models[tied], {"text": layout}, split, per_rank, **more)
    found, expected = pools(ranks_of(layout)).run(jobs.text, case, SEEDS), whole[tied]
    for of_rank in found:
        assert of_rank["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
        assert of_rank["norms"]["text"] == pytest.approx(expected["norms"]["text"], rel=TOLERANCE)
        assert of_rank["faults"] == ()
    assert_near(found[0]["gradients"], expected["gradients"])
    for name, weights in expected["before"].items():
        np.testing.assert_array_equal(found[0]["before"][name], weights)


def test_stages_alone_change_no_bit(models: dict[bool, Path], whole: dict[bool, dict], pools: Pools) -> None:
    found = pools(3).run(jobs.text, Case(models[False], {"text": "pp:3"}, (1, 2, 2)), SEEDS)
    assert found[0]["loss"] == whole[False]["loss"]
    for name, gradient in whole[False]["gradients"].items():
        np.testing.assert_array_equal(found[0]["gradients"][name], gradient, name)
    rows = merged(found, "rows")
    assert rows.keys() == whole[False]["rows"].keys() and rows
    for number, gradient in whole[False]["rows"].items():
        np.testing.assert_array_equal(rows[number], gradient)


@pytest.mark.parametrize("name, layout", thinned(product(jobs.OPTIMIZERS, ["pp:2,dp:3", "tp:2,pp:3", "pp:2,dp:2"]), 5))
def test_tied_copies_stay_equal(name: str, layout: str, models: dict, pools: Pools) -> None:
    case = Case(models[True], {"text": "dp:1"}, optimizer=name)
    expected = pools(1).run(jobs.steps, case, SEEDS, 3)[0]
    found = pools(ranks_of(layout)).run(jobs.steps, replace(case, layouts={"text": layout}), SEEDS, 3)
    assert_near(found[0]["weights"], expected["weights"])
    weights: dict[int, list] = {}
    for of_rank in found:
        if of_rank["tied"] is not None:
            weights.setdefault(of_rank["at"].tp, []).append(of_rank)
    for holders in weights.values():
        assert {of_rank["copy"] for of_rank in holders} == {True, False}
        assert all((of_rank["tied"] == holders[0]["tied"]).all() for of_rank in holders)


def test_frozen_text_stages_pass_gradients_on(models: dict[bool, Path], whole: dict, pools: Pools) -> None:
    found = pools(2).run(jobs.text, Case(models[True], {"text": "pp:2"}, freeze=("text",)), SEEDS)
    rows = merged(found, "rows")
    assert rows.keys() == whole[True]["rows"].keys()
    for number, gradient in whole[True]["rows"].items():
        np.testing.assert_array_equal(rows[number], gradient)
    assert all(of_rank["norms"] == {} and of_rank["faults"] == () for of_rank in found)


# -------------------------------------------------------------------------------------------------- vision


@pytest.mark.parametrize(
    "layout, split, more",
    [
        ("pp:2", None, {}),
        ("pp:2", (3, 1), {"recompute": "full"}),
        ("pp:2", (1, 3), {}),
        ("tp:2,pp:2", None, {}),
        ("tp:2,pp:2", (1, 3), {"sequence_parallel": False}),
        ("sp:2,pp:2", None, {}),
        ("dp:2,pp:2", (1, 3), {}),
    ],
    ids=str,
)
def test_vision_stages(layout: str, split: tuple[int, ...] | None, more: dict, models: dict, pools: Pools) -> None:
    case = Case(models[False], {"vision": "dp:1"})
    check_vision(case, replace(case, layouts={"vision": layout}, split=split, **more), pools)


# A stage that trains nothing makes no optimizer, while another one does.
@pytest.mark.parametrize("frozen", ["vision", "projector"])
@pytest.mark.parametrize("optimizer", jobs.OPTIMIZERS)
def test_frozen_parts_of_vision_stages(frozen: str, optimizer: str, models: dict, pools: Pools) -> None:
    case = Case(models[False], {"vision": "dp:1"}, freeze=(frozen,), optimizer=optimizer)
    check_vision(case, replace(case, layouts={"vision": "tp:2,pp:2"}), pools)


def check_vision(whole: Case, case: Case, pools: Pools) -> None:
    """Gradients, norm and rows are those of the whole module."""
    [expected] = pools(1).run(jobs.vision, whole)
    found = pools(ranks_of(case.layouts["vision"])).run(jobs.vision, case)
    assert_near(found[0]["gradients"], expected["gradients"])
    for of_rank in found:
        assert of_rank["norms"]["vision"] == pytest.approx(expected["norms"]["vision"], rel=TOLERANCE)
    rows = merged(found, "rows")
    assert_near({str(i): row for i, row in rows.items()}, {str(i): row for i, row in expected["rows"].items()})


# ------------------------------------------------------------------------------------- loading and writing


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name, split, layers", [("text", (2, 1, 2), 5), ("vision", (1, 2, 1), 4)])
def test_stages_load_their_own_weights_only(
    name: str, split: tuple[int, ...], layers: int, tied: bool, models: dict[bool, Path], pools: Pools
) -> None:
    found = pools(3).run(loading, Case(models[tied], {name: "pp:3"}, split), name)
    numbers = [number for of_rank in found for number in of_rank["numbers"]]
    assert numbers == list(range(layers)), "layers are numbered over the whole module"
    for of_rank in found:
        own, said = of_rank["own"], of_rank["said"]
        assert own not in said and len(said) == 2
        for other, message in said.items():
            assert message.startswith("weight map: missing ['") and "unexpected ['" in message
            missing, unexpected = message.split("unexpected")
            for layer in range(layers):
                named = f"layers.{layer}.mlp.linear_fc1.weight"
                assert (named in missing) == (layer in own.layers) and (named in unexpected) == (layer in other.layers)
    ends = {"text": ("embedding.word_embeddings.weight", "output_layer.weight"), "vision": ("patch_embed", "merger")}
    for end, stage in zip(ends[name], (0, -1), strict=True):
        holders = [i for i, of_rank in enumerate(found) if any(n.startswith(end) for n in of_rank["names"])]
        assert holders == [range(3)[stage]]


def test_a_tied_copy_is_not_sent(models: dict[bool, Path], pools: Pools) -> None:
    names = pools(4).run(gathered, Case(models[True], {"text": "tp:2,pp:2"}))
    assert names[0].count("model.embed_tokens.weight") == 2, "once by each tp rank of the first stage"
    assert names[1:] == [[], [], []]


def stored(folder: Path) -> jobs.Arrays:
    """All tensors of a folder by canonical name."""
    files = sorted(folder.glob("*.safetensors"))
    return {canonical_name(name): array for file in files for name, array in load_file(file).items()}


HOLDERS = {
    ("pp:2,sp:2", "tp:2,pp:2"): {0: ["vision", "text"], 3: ["vision", "text"]},
    ("dp:1@0", "tp:1,pp:3@1-3"): {0: ["vision"], 2: ["text"]},
    ("sp:2,pp:2", "tp:2@1,3"): {0: ["vision"], 1: ["vision", "text"]},
    ("tp:2@2-3", "pp:2@0-1"): {0: ["text"], 3: ["vision"]},
}
"""For layouts of vision and text, some of the ranks that write, and what."""


@pytest.mark.parametrize("layouts, tied", thinned(product(HOLDERS, [False, True]), 3), ids=str)
def test_what_is_written_is_what_was_read(
    layouts: tuple[str, str], tied: bool, models: dict[bool, Path], pools: Pools, tmp_path: Path
) -> None:
    (vision, text), holders = layouts, HOLDERS[layouts]
    case = Case(models[tied], {"vision": vision, "text": text})
    found = pools(4).run(export, case, tmp_path / "out")
    assert {rank: found[rank] for rank in holders} == holders
    read, written = stored(models[tied]), stored(tmp_path / "out")
    assert written.keys() == read.keys()
    for name, array in read.items():
        np.testing.assert_array_equal(written[name], array, name)
