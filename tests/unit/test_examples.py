"""The configurations in examples/ load, and their layouts suit the published models in the worlds that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_hetero.cli.make_demo import DemoOptions, make_demo
from megatron_hetero.config.schema import load_config, require_modules
from megatron_hetero.job import JobSpec
from megatron_hetero.layout.layout import ModuleShape, resolve
from megatron_hetero.models.shapes import ModelShapes
from megatron_hetero.models.weights import parameter_count

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = {"3b": 8, "7b": 8, "32b": 16, "72b": 32}
"""What the example of each published model is for."""
PARAMETERS = {"3b": 3_754_622_976, "7b": 8_292_166_656, "32b": 33_452_718_336, "72b": 73_410_777_344}
"""Of the published weights."""
NUMBERS = {"one": 1, "two": 2, "four": 4}


def _published(size: str) -> ModelShapes:
    return ModelShapes.from_folder(EXAMPLES / f"models/qwen2_5_vl_{size}")


def _shapes(size: str) -> dict[str, ModuleShape]:
    return _published(size).module_shapes()


def test_every_example_is_tested() -> None:
    files = {file.name for file in EXAMPLES.glob("*.yaml")}
    assert files == {"tiny.yaml", *(f"qwen2_5_vl_{size}.yaml" for size in RANKS)}
    assert {folder.name for folder in EXAMPLES.glob("models/*")} == {f"qwen2_5_vl_{size}" for size in RANKS}


@pytest.mark.parametrize("size", RANKS)
def test_shapes_have_the_published_number_of_parameters(size: str) -> None:
    assert parameter_count(_published(size)) == PARAMETERS[size]


@pytest.mark.parametrize("size", RANKS)
def test_example_loads_and_its_layouts_fit(size: str) -> None:
    file = EXAMPLES / f"qwen2_5_vl_{size}.yaml"
    config = load_config(["--config", str(file)])
    ranks, shapes = RANKS[size], _shapes(size)
    nodes = re.search(r" on (\w+) nodes? of eight GPUs", file.read_text(encoding="utf-8"))
    assert nodes and 8 * NUMBERS[nodes[1]] == ranks
    require_modules(config, shapes)
    layouts = resolve(config.parallel, shapes, ranks)
    assert config.train.global_batch_size % (layouts["text"].dp * config.train.micro_batch_size) == 0
    # The largest image leaves room for text.
    assert config.data.max_pixels is not None
    assert config.data.max_pixels // 28**2 <= config.data.max_seq_length // 2


def test_the_readmes_eight_gpu_command() -> None:
    flags = "--vision-parallel sp:8 --text-parallel tp:4,dp:2".split()
    config = load_config(["--config", str(EXAMPLES / "qwen2_5_vl_7b.yaml"), *flags])
    assert {name: layout.degrees_text for name, layout in resolve(config.parallel, _shapes("7b"), 8).items()} == {
        "vision": "sp:8",
        "text": "tp:4,dp:2",
    }


@pytest.mark.parametrize(
    "flags",
    [(), ("--vision-parallel dp:1@0", "--text-parallel dp:1@1", "--train.micro_batch_size 8")],
    ids=["shared", "apart"],
)
def test_the_tiny_example_fits_what_make_demo_writes(flags: tuple[str, ...], tmp_path: Path) -> None:
    make_demo(tmp_path / "demo", DemoOptions(train_pictures=2, heldout_questions=2))
    (tmp_path / "examples").mkdir()
    text = (EXAMPLES / "tiny.yaml").read_text(encoding="utf-8")
    assert [flag for flag in flags if flag not in text] == []
    (tmp_path / "examples/tiny.yaml").write_text(text, encoding="utf-8")
    config = load_config(["--config", str(tmp_path / "examples/tiny.yaml"), *" ".join(flags).split()])
    assert JobSpec.of(config, 2).layouts.keys() == {"vision", "text"}
    assert all(entry.annotations.is_file() for entry in config.data.registry.values())
