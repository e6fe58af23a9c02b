"""The configurations in examples/ load, and their layouts suit the published models in the worlds that they name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isqrt
from pathlib import Path

import pytest

from examples.make_demo import DemoOptions, make_demo
from megatron_hetero.config.schema import Config, load_config
from megatron_hetero.config.sections import EstimateConfig
from megatron_hetero.estimate.estimate import Estimate
from megatron_hetero.estimate.problems import problems_of
from megatron_hetero.job.job import JobSpec
from megatron_hetero.layout.layout import Layout, ModuleShape
from megatron_hetero.layout.modules import resolve
from megatron_hetero.models.registry import FAMILIES
from megatron_hetero.models.shapes import ModelShapes, item_types
from tests.support.shapes import parameter_count, shapes_of_folder
from tests.unit.examples.lists import WITH_ADAPTERS

EXAMPLES = Path(__file__).parents[3] / "examples"
RANKS = {
    "qwen2_5_vl_3b": 8, "qwen2_5_vl_7b": 8, "qwen2_5_vl_32b": 8, "qwen2_5_vl_72b": 8,
    "qwen3_vl_2b": 8, "qwen3_vl_4b": 8, "qwen3_vl_8b": 8, "qwen3_vl_32b": 16,
    "qwen3_vl_30b_a3b": 8, "qwen3_vl_235b_a22b": 128,
    "qwen3_5_9b": 8, "qwen3_5_27b": 16, "qwen3_5_35b_a3b": 8,
}  # fmt: skip
"""What the example of each published model is for."""
PARAMETERS = {
    "qwen2_5_vl_3b": 3_754_622_976, "qwen2_5_vl_7b": 8_292_166_656, "qwen2_5_vl_32b": 33_452_718_336,
    "qwen2_5_vl_72b": 73_410_777_344, "qwen3_vl_2b": 2_127_532_032, "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696, "qwen3_vl_32b": 33_357_390_064,
    "qwen3_vl_30b_a3b": 31_070_754_032, "qwen3_vl_235b_a22b": 235_670_022_896,
    "qwen3_5_9b": 9_409_813_744, "qwen3_5_27b": 27_356_728_560, "qwen3_5_35b_a3b": 35_107_181_936,
}  # fmt: skip
"""Of the published weights."""
NUMBERS = {"one": 1, "two": 2, "four": 4, "sixteen": 16}


def _published(model: str) -> ModelShapes:
    return shapes_of_folder(EXAMPLES / "models" / model)


def _shapes(model: str) -> dict[str, ModuleShape]:
    return _published(model).module_shapes()


def test_every_example_is_tested() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.yaml")} == {"tiny", "qwen3_vl_8b_video", *RANKS, *WITH_ADAPTERS}
    assert {folder.name for folder in EXAMPLES.glob("models/*")} == RANKS.keys()


@pytest.mark.parametrize("model", RANKS)
def test_shapes_have_the_published_number_of_parameters(model: str) -> None:
    assert parameter_count(_published(model)) == PARAMETERS[model]


@pytest.mark.parametrize("model", RANKS)
def test_example_loads_and_its_layouts_fit(model: str) -> None:
    file = EXAMPLES / f"{model}.yaml"
    config = load_config(["--config", str(file)])
    published, ranks = _published(model), RANKS[model]
    shapes = published.module_shapes()
    nodes = re.search(r" on (\w+) nodes? of eight GPUs", file.read_text(encoding="utf-8"))
    assert nodes and 8 * NUMBERS[nodes[1]] == ranks
    assert config.modules.keys() == shapes.keys()
    layouts = _layouts(config, shapes, ranks)
    assert config.train.global_batch_size % (layouts["text"].dp * config.train.micro_batch_size) == 0
    # The largest image leaves room for text.
    assert config.data.max_pixels is not None
    vision = published.encoders["vision"]
    side = isqrt(config.data.max_pixels)
    assert (
        vision.rows(item_types(published, "vision")[0].assumed(vision, EstimateConfig(image_side=side)))
        <= config.data.max_seq_length // 2
    )


@pytest.mark.parametrize("model", RANKS)
def test_memory_is_planned_as_the_example_says(model: str) -> None:
    said = re.search(r"planned at (\d+) GB per GPU, allowance", _comment(model))
    plan = _plan(model, RANKS[model])
    assert said and round(plan.totals.max() / 1e9) == int(said[1])
    assert plan.assumed.sample.tokens > 0.95 * plan.job.config.data.max_seq_length
    assert problems_of(plan) == ()


@pytest.mark.parametrize("model, ranks", [("qwen2_5_vl_7b", 4), ("qwen2_5_vl_72b", 16)])
def test_the_other_layout_of_an_example_fits_too(model: str, ranks: int) -> None:
    flags = re.search(r"\S*: (--(?:vision|text)-parallel .*)", _comment(model))
    assert flags
    plan = _plan(model, ranks, *flags[1].split())
    assert re.search(rf" {round(plan.totals.max() / 1e9)} GB (of each|per GPU)", _comment(model))
    host = round(plan.host_memory.sum() / 1e9)
    assert f"{host} GB of the host" in _comment(model) if host else "need no offload" in _comment(model)
    assert problems_of(plan) == ()


def test_the_example_of_long_videos() -> None:
    """Full samples of 768 frames."""
    line = f"--config {EXAMPLES}/qwen3_vl_8b_video.yaml --model.hf_path {EXAMPLES}/models/qwen3_vl_8b"
    plan = Estimate.of(load_config(line.split()), 8)
    assert f"planned at {round(plan.totals.max() / 1e9)} GB per GPU" in _comment("qwen3_vl_8b_video")
    assert plan.assumed.sample.tokens == plan.job.config.data.max_seq_length
    assert plan.assumed.sample.rows["vision"] == 384 * 36 and problems_of(plan) == ()


def test_72b_says_what_it_keeps_on_the_host() -> None:
    host = round(_plan("qwen2_5_vl_72b", 8).host_memory.sum() / 1e9)
    assert f"in host memory, {host} GB of a node's" in _comment("qwen2_5_vl_72b")


def _layouts(config: Config, shapes: Mapping[str, ModuleShape], ranks: int) -> dict[str, Layout]:
    return resolve({name: row.parallel for name, row in config.modules.items()}, shapes, ranks)


def _comment(model: str) -> str:
    """What stands above the settings of an example, in one line."""
    lines = (EXAMPLES / f"{model}.yaml").read_text(encoding="utf-8").split("model:\n")[0].splitlines()
    return " ".join(" ".join(line.lstrip("#") for line in lines).split())


def _plan(model: str, ranks: int, *flags: str) -> Estimate:
    line = ["--config", str(EXAMPLES / f"{model}.yaml"), "--model.hf_path", str(EXAMPLES / "models" / model)]
    return Estimate.of(load_config([*line, *flags]), ranks)


def test_the_readmes_eight_gpu_command() -> None:
    flags = "--vision-parallel sp:8 --text-parallel tp:4,dp:2".split()
    config = load_config(["--config", str(EXAMPLES / "qwen2_5_vl_7b.yaml"), *flags])
    layouts = _layouts(config, _shapes("qwen2_5_vl_7b"), 8)
    assert {name: layout.degrees_text for name, layout in layouts.items()} == {"vision": "sp:8", "text": "tp:4,dp:2"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "flags",
    [(), ("--vision-parallel dp:1@0", "--text-parallel dp:1@1", "--train.micro_batch_size 8")],
    ids=["shared", "apart"],
)
def test_the_tiny_example_fits_what_make_demo_writes(flags: tuple[str, ...], family: str, tmp_path: Path) -> None:
    make_demo(tmp_path / "demo", DemoOptions(train_pictures=2, heldout_questions=2, model=family))
    (tmp_path / "examples").mkdir()
    text = (EXAMPLES / "tiny.yaml").read_text(encoding="utf-8")
    assert [flag for flag in flags if flag not in text] == []
    (tmp_path / "examples/tiny.yaml").write_text(text, encoding="utf-8")
    config = load_config(["--config", str(tmp_path / "examples/tiny.yaml"), *" ".join(flags).split()])
    assert JobSpec.of(config, 2).layouts.keys() == {"vision", "text"}
    assert all(entry.annotations and entry.annotations.is_file() for entry in config.data.registry.values())
