"""The configurations in examples/ load, and their layouts suit the published models in the worlds that they name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megatron_hetero.layout import ModuleShape, resolve
from megatron_hetero.training.config import load_config, require_modules

EXAMPLES = Path(__file__).parents[2] / "examples"
# Ranks that the example is for; text heads, key/value heads, hidden size, layers. All share one vision encoder.
MODELS = {
    "3b": (8, 16, 2, 2048, 36),
    "7b": (8, 28, 4, 3584, 28),
    "32b": (16, 40, 8, 5120, 64),
    "72b": (32, 64, 8, 8192, 80),
}
NUMBERS = {"one": 1, "two": 2, "four": 4}


def _shapes(size: str) -> dict[str, ModuleShape]:
    _, heads, kv_heads, hidden, layers = MODELS[size]
    return {
        "vision": ModuleShape("vision", 16, 16, 1280, 32, "encoder"),
        "text": ModuleShape("text", heads, kv_heads, hidden, layers, "text"),
    }


def test_every_example_is_tested() -> None:
    assert {file.name for file in EXAMPLES.glob("*.yaml")} == {f"qwen2_5_vl_{size}.yaml" for size in MODELS}


@pytest.mark.parametrize("size", MODELS)
def test_example_loads_and_its_layouts_fit(size: str) -> None:
    file = EXAMPLES / f"qwen2_5_vl_{size}.yaml"
    config = load_config(["--config", str(file)])
    ranks, shapes = MODELS[size][0], _shapes(size)
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


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("slurm/*.sbatch")), ids=lambda path: path.name)
def test_slurm_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
