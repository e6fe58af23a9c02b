"""The examples of the library in several placements, against the same modules in one process, and started as a user
starts them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_hetero import Layout, UserError, build
from megatron_hetero.groups.platform import CPU
from tests.functional.forked import Forked
from tests.support.matrix import thinned
from tests.support.ranks import on_ranks

ROOT = Path(__file__).parents[2]
# Encoder, decoder.
PLACEMENTS = [
    ("dp:4", "sp:2,dp:2"),  # colocated, gradients of rows in parts
    ("dp:2@0-1", "sp:2@2-3"),  # disjoint
    ("dp:3@0-2", "sp:2@2-3"),  # mixed
    ("dp:4", "sp:2,pp:2"),  # stages: colocated, disjoint, mixed
    ("dp:2@0-1", "pp:2@2-3"),
    ("dp:3@0-2", "pp:2@2-3"),
]


@pytest.mark.parametrize("encoder, decoder", PLACEMENTS)
@on_ranks(4)
def test_custom_modules_train_as_in_one_process(encoder: str, decoder: str) -> None:
    from examples import custom_modules as example

    topology = build(example.GRAPH, encoder=encoder, decoder=decoder)
    example.require_layouts(topology.layouts)
    with contextlib.redirect_stdout(io.StringIO()):
        trained, losses = example.train(topology)
    assert example.difference(topology, trained) < example.TOLERANCE
    losses_by_rank: list[Any] = [None] * 4
    dist.all_gather_object(losses_by_rank, losses)
    assert losses_by_rank == [losses] * 4 and losses[-1] < losses[0] / 2


@on_ranks(4)
def test_more_replicas_than_samples() -> None:
    from examples import custom_modules as example

    with mock.patch.object(example, "SAMPLES", 2), contextlib.redirect_stdout(io.StringIO()):
        topology = build(example.GRAPH, encoder="dp:4", decoder="dp:4")
        trained, _ = example.train(topology)
        assert example.difference(topology, trained) < example.TOLERANCE


@on_ranks(4)
def test_layouts_that_the_example_does_not_support_are_refused() -> None:
    from examples import custom_modules as example

    for encoder, decoder, module in (
        ("tp:4", "dp:4", "encoder"),
        ("dp:4", "cp:4", "decoder"),
        ("dp:4", "pp:4", "decoder"),
    ):
        layouts = {"encoder": Layout.parse(encoder, 4), "decoder": Layout.parse(decoder, 4)}
        with pytest.raises(UserError, match=f"{module} layout"):
            example.require_layouts(layouts)


@pytest.mark.parametrize(
    "vision, text",
    thinned(
        [
            ("dp:3@0-2", "dp:1@3"),
            ("dp:4", "dp:4"),
            ("dp:3@0-2", "dp:3@1-3"),
            ("dp:4", "dp:2@0-1"),
            ("dp:1@0", "dp:3@1-3"),
        ],
        2,
    ),
)
@on_ranks(4)
def test_the_plain_loop_trains_as_one_process_does(vision: str, text: str) -> None:
    from examples import plain_loop

    topology = build(plain_loop.GRAPH, vision=vision, text=text)
    found = plain_loop.differences(plain_loop.train(topology), plain_loop.train_alone(CPU))
    assert found and max(found) < 1e-5


@pytest.mark.parametrize("text, generator", [("dp:4", "dp:4"), ("pp:2,dp:2", "dp:4"), ("pp:2@0-1", "dp:2@2-3")])
@on_ranks(4)
def test_a_text_module_that_feeds_a_generator_trains_as_in_one_process(text: str, generator: str) -> None:
    from examples import generator as example

    topology = build(example.GRAPH, text=text, generator=generator)
    with contextlib.redirect_stdout(io.StringIO()):
        found = example.train(topology)
    assert example.difference(topology, found, example.train_alone(CPU)) < 1e-5


def launched(program: str, *flags: str, ranks: int, folder: Path) -> list[str]:
    """The lines that an example prints, run in a folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    finished = subprocess.run(
        [*command, str(ROOT / "examples" / program), *flags],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def test_under_torchrun(tmp_path: Path) -> None:
    *steps, last = launched("custom_modules.py", "dp:1@0", "dp:1@1", ranks=2, folder=tmp_path)
    assert steps and all(re.fullmatch(r"step \d+/\d+: loss \d\.\d+", line) for line in steps)
    assert last.startswith("weights: ")


def losses(lines: list[str]) -> dict[int, float]:
    """By step."""
    found = [re.fullmatch(r"step (\d+): loss (\d+\.\d+)", line) for line in lines]
    return {int(match[1]): float(match[2]) for match in found if match}


RECIPE, LINES = ROOT / "examples/recipe.py", ROOT / "examples/two_modules.py"


def program(path: Path, folder: Path) -> None:
    """Run an example in a folder."""
    os.chdir(folder)
    runpy.run_path(str(path), run_name="__main__")


def test_the_lines_of_the_readme_run(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"```python\n{LINES.read_text(encoding='utf-8')}```\n" in readme
    with Forked(tmp_path / "said", program, [[LINES, tmp_path]] * 2) as run:
        run.require_success()
        assert [run.said(rank).splitlines()[-1] for rank in range(2)] == [
            f"rank {rank}: the gradient is that of one process" for rank in range(2)
        ]


def trained(folder: Path, said: Path) -> dict[int, float]:
    """The losses of a run of the recipe on two ranks."""
    with Forked(said, program, [[RECIPE, folder]] * 2) as run:
        run.require_success()
        return losses(run.said(0).splitlines())


def test_the_recipe_to_copy_learns_and_resumes(tmp_path: Path) -> None:
    assert len(RECIPE.read_text(encoding="utf-8").splitlines()) <= 100
    first = trained(tmp_path, tmp_path / "first")
    assert list(first) == list(range(1, 21))
    shutil.rmtree(tmp_path / "runs/recipe/00000020")
    second = trained(tmp_path, tmp_path / "second")
    assert list(second) == list(range(11, 31))
    assert {step: second[step] for step in range(11, 21)} == {step: first[step] for step in range(11, 21)}
    assert sum(second[step] for step in range(26, 31)) < 0.85 * sum(first[step] for step in range(1, 6))
