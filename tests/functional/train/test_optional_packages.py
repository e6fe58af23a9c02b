"""Modules where Transformer Engine or Apex is installed, by stand-ins: made of the former's layers they compute the
same, and where layers on plain PyTorch are chosen nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_hetero.models.layers.backend import te_backend
from tests.parity import cases as parity
from tests.parity import runs
from tests.support import stages as jobs
from tests.support.folders import ModelChoice, write_data, write_model
from tests.support.matrix import thinned
from tests.support.pool import Pool, Pools
from tests.support.stages import Case
from tests.support.stand_ins import APEX, transformer_engine, transformer_engine_versions

SEEDS = (1, 2, 5)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def with_te(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two workers that find the newest Transformer Engine installed."""
    packages = transformer_engine(transformer_engine_versions()[-1], tmp_path_factory.mktemp("packages"))
    pool = Pool(2, tmp_path_factory.mktemp("te"), packages)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def with_apex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two workers that find Apex installed."""
    pool = Pool(2, tmp_path_factory.mktemp("apex"), [APEX])
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows and full attention, fewer heads for keys than for queries."""
    return write_model(tmp_path_factory.mktemp("te") / "model", ModelChoice(vision_layers=4, text_layers=2))


REMADE = [{}, {"recompute": "selective"}, {"recompute": "selective", "chunk": 8}]


@pytest.mark.parametrize(
    "more, module, layout", thinned(product(REMADE, ["vision", "text"], ["sp:2", "tp:2", "cp:2"]), 7), ids=str
)
def test_layers_of_transformer_engine(
    more: dict[str, Any], module: str, layout: str, model: Path, with_te: Pool, pools: Pools
) -> None:
    case = Case(model, {module: layout})
    job, arguments = (jobs.vision, ()) if module == "vision" else (jobs.text, (SEEDS,))
    expected = pools(2).run(job, case, *arguments)[0]
    found = with_te.run(job, replace(case, backend="te", **more), *arguments)[0]
    assert found["norms"][module] == pytest.approx(expected["norms"][module], rel=TOLERANCE)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        error = np.linalg.norm(found["gradients"][name] - gradient) / np.linalg.norm(gradient)
        assert error < TOLERANCE, f"{name}: relative error {error}"


def gradients_by_te(flags: list[str]) -> dict[str, Any] | None:
    """Those of a run, whose layers are the stand-in's as on a GPU."""
    backend = te_backend((9, 0))
    with mock.patch("megatron_hetero.step.family_module.choose_backend", return_value=backend) as chosen:
        found = runs.gradients(flags)
    assert chosen.called and backend.column_linear.__name__ == "TEColumnParallelLinear"
    return found


def test_adapters_beside_layers_of_transformer_engine(model: Path, tmp_path: Path, with_te: Pool, pools: Pools) -> None:
    write_data(tmp_path, 4)
    case = parity.Case("tp:2", "tp:2", 2, micro=2, given_batch=4)
    (tmp_path / "model").symlink_to(model)
    flags = parity.flags_of(case, tmp_path, "--vision-lora.r", "4", "--text-lora.r", "4")
    expected = pools(2).run(runs.gradients, flags)[0]["gradients"]
    found = with_te.run(gradients_by_te, flags)[0]["gradients"]
    of_b = [name for name in expected if name.endswith("lora_B.weight")]
    assert len(of_b) > 20 and found.keys() == expected.keys()
    for name in of_b:
        error = np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name])
        assert error < TOLERANCE, f"{name}: relative error {error}"


@pytest.mark.parametrize(
    "installed, optimizer",
    thinned([("with_te", "adamw"), ("with_apex", "sgd"), ("with_apex", "adamw")], 3),
)
def test_what_is_installed_and_not_chosen_changes_no_bit(
    installed: str, optimizer: str, model: Path, pools: Pools,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Megatron-Core prefers the optimizers and kernels of both wherever it finds them. Those of the stand-ins fail."""
    case = Case(model, {"text": "tp:2"}, optimizer=optimizer)
    expected = pools(2).run(jobs.steps, case, SEEDS, 2)[0]["weights"]
    found = request.getfixturevalue(installed).run(jobs.steps, case, SEEDS, 2)[0]["weights"]
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, name)
