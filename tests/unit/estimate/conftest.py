"""Folders with a `config.json` and nothing else, and command lines for plans of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig

from megatron_hetero.config.schema import load_config
from megatron_hetero.estimate.estimate import Estimate

MakePlan = Callable[..., Estimate]
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="session")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes of a model as wide as Qwen2.5-VL-7B, of 16 and 16 layers."""
    folder = tmp_path_factory.mktemp("shapes")
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 16, "hidden_size": 1280, "intermediate_size": 340, "num_heads": 16, "out_hidden_size": 3584,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15],
        },
        text_config={
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 16,
            "num_attention_heads": 28, "num_key_value_heads": 4, "rope_parameters": rope,
        },
        tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes of a model as wide as Qwen3-VL-8B, of 12 and 16 layers."""
    folder = tmp_path_factory.mktemp("qwen3")
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    config = Qwen3VLConfig(
        vision_config={
            "depth": 12, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
            "patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [2, 5, 8],
        },
        text_config={
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_parameters": rope,
        },
        tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes of a model as wide as Qwen3-VL-30B-A3B, of 4 and 6 layers, two of which are dense."""
    folder = tmp_path_factory.mktemp("moe")
    config = json.loads((EXAMPLES / "models/qwen3_vl_30b_a3b/config.json").read_text(encoding="utf-8"))
    config["text_config"] |= {"num_hidden_layers": 6, "mlp_only_layers": [0, 3]}
    config["vision_config"] |= {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def plan_flags(config_folder: Path, tmp_path: Path) -> Callable[[str], list[str]]:
    """`plan_flags(more)`: a command line whose data and weights do not exist."""

    def make(more: str) -> list[str]:
        common = f"--model.hf_path {config_folder} --data.registry.d.annotations {tmp_path}/none.json --data.datasets d"
        return [*common.split(), *more.split()]

    return make


@pytest.fixture
def make_plan(plan_flags: Callable[[str], list[str]]) -> MakePlan:
    """`make_plan(world size, vision layout, text layout, more flags)`."""

    def make(world: int, vision: str, text: str, more: str = "") -> Estimate:
        return Estimate.of(
            load_config(plan_flags(f"--vision-parallel {vision} --text-parallel {text} {more}")), world
        )  # fmt: skip

    return make
