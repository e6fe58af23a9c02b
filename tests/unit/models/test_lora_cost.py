"""Operations of models with adapters, against what PyTorch counts of `peft` beside plain `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from megatron_hetero.config.lora import LoraConfig, LoraPattern
from megatron_hetero.config.modules import ModuleConfig
from megatron_hetero.layout.pipeline import PipelineStage
from megatron_hetero.models.adapters import with_adapters
from megatron_hetero.models.frozen import Frozen
from megatron_hetero.models.layers.parts import FORWARD, Passes, Tokens
from megatron_hetero.models.shapes import ModelShapes
from tests.support.folders import ModelChoice, write_model
from tests.support.shapes import shapes_of_folder

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
EXAMPLES = Path(__file__).parents[3] / "examples/models"
R = 3
GRID, PATCHES, TEXT_TOKENS = (1, 8, 4), 32, 24
"""Two windows of 16 patches."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two layers of text and three of vision, one of which has full attention."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, ModelChoice())
    return folder


def counted(folder: Path, chosen: Callable[[str], bool], also: Callable[[str], bool]) -> dict[str, int]:
    """What PyTorch counts of a step of a sample in `peft`, by module. `chosen`: linear layers with adapters. `also`:
    what else trains.
    """
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    model = get_peft_model(model, PeftConfig(r=R, target_modules=[name for name in linear if chosen(name)]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or also(name))
    image, rows = model.config.image_token_id, PATCHES // 4
    ids = torch.tensor([[5] * 3 + [image] * rows + [7] * (TEXT_TOKENS - 3 - rows)])
    size = {"image_grid_thw": torch.tensor([GRID]), "mm_token_type_ids": (ids == image).long()}
    pixels = torch.randn(PATCHES, model.config.vision_config.patch_size**2 * 6)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, pixel_values=pixels, **size).logits.sum().backward()
    of_module = {name: sum(found.values()) for name, found in counter.get_flop_counts().items()}
    core = "PeftModel.base_model.model"
    text = of_module[f"{core}.model.language_model"] + of_module[f"{core}.lm_head"]
    return {"vision": of_module[f"{core}.model.visual"], "text": text, "both": of_module["Global"]}


def planned(shapes: ModelShapes, frozen: Frozen) -> dict[str, int]:
    """What ours counts, with attention of text to later tokens, which plain attention computes."""
    n: int = TEXT_TOKENS
    attention: Any = shapes.text.architecture.layers[0].attention
    tokens = {"vision": shapes.encoders["vision"].tokens([GRID]), "text": Tokens([n], supervised=n)}
    found = {name: frozen.operations(name, shapes, tokens[name]) for name in tokens}
    begins = 0 if frozen.trains("vision") else frozen.first_layer(shapes)
    times = 3 * len(shapes.text.architecture.layers) - 2 * begins
    later = 4 * attention.heads * attention.head_dim * (n * n - n * (n + 1) // 2)
    return found | {"text": found["text"] + times * later}


def with_lora(folder: Path, **of_module: LoraConfig) -> ModelShapes:
    return with_adapters(shapes_of_folder(folder), {name: ModuleConfig(lora=lora) for name, lora in of_module.items()})


def first_products(shapes: ModelShapes, module: str) -> int:
    """The gradient of a module's input through the first layer, which `operations` counts but nothing needs: through
    its queries, keys and values and their adapters.
    """
    attention: Any = shapes[module].architecture.layers[0].attention
    tokens = TEXT_TOKENS if module == "text" else PATCHES
    rows = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
    return 2 * tokens * attention.hidden * (rows + R * (len(attention.stored) - 1))


def test_adapters_on_both_towers(folder: Path) -> None:
    """Text passes gradients on to vision, whose embedding is frozen; the projector trains."""
    shapes = with_lora(folder, vision=LoraConfig(r=R), text=LoraConfig(r=R))
    found = counted(folder, lambda name: "merger" not in name and name != "lm_head", lambda name: "merger" in name)
    ours = planned(shapes, Frozen.of(shapes))
    # Of a backward pass through both, PyTorch counts some operations with each.
    assert sum(ours.values()) - first_products(shapes, "vision") == found["both"]


def test_adapters_on_text_alone(folder: Path) -> None:
    """Vision computes forward alone."""
    shapes = with_lora(folder, text=LoraConfig(r=R))
    found = counted(folder, lambda name: "language_model" in name, lambda name: False)
    ours = planned(shapes, Frozen.of(shapes, ["vision", "projector"]))
    assert ours["vision"] == found["vision"]
    assert ours["text"] - first_products(shapes, "text") == found["text"]


def test_nothing_goes_back_below_the_first_layer_with_adapters(folder: Path) -> None:
    shapes = with_lora(folder, text=LoraConfig(r=R, targets=("*.layers.1.*",)))
    frozen = Frozen.of(shapes, ["vision", "projector"])
    assert frozen.first_layer(shapes) == 1
    found = counted(folder, lambda name: "language_model.layers.1." in name, lambda name: False)
    assert planned(shapes, frozen)["text"] - first_products(shapes, "text") == found["text"]


def test_adapters_of_the_projector(folder: Path) -> None:
    """A frozen projector behind a frozen encoder counts as a whole, as one that trains does: PyTorch needs the gradient
    of what its second product takes besides, and not of what the first takes.
    """
    shapes = with_lora(folder, vision=LoraConfig(r=R, targets=("merger.mlp.*",)))
    frozen = Frozen.of(shapes, ["vision", "text"])
    assert frozen.subsets == {"vision", "text"} and frozen.shares["projector"] == 0
    vision, merger = shapes.encoders["vision"].architecture, shapes.encoders["vision"].architecture.ends[0].part
    tokens = shapes.encoders["vision"].tokens([GRID])
    rows, width, out = merger.operations(tokens).linear, merger.width, merger.out  # pyright: ignore[reportAttributeAccessIssue]
    units = rows // (2 * (width * width + width * out))
    forward = vision.operations(tokens, passes=FORWARD)
    assert forward == replace(vision, added=None).operations(tokens, passes=FORWARD) + 2 * units * R * (3 * width + out)
    found = counted(folder, lambda name: "merger" in name, lambda name: False)
    ours = planned(shapes, frozen)
    assert ours["vision"] == forward + 2 * units * R * (3 * width + out)
    assert found["vision"] - ours["vision"] == 2 * units * (width * out + R * (2 * width + out))


def test_a_frozen_base_costs_4_operations_per_parameter_and_token(folder: Path) -> None:
    """And 6 where it trains."""
    shapes = with_lora(folder, text=LoraConfig(r=R, targets=("q_proj",)))
    text, frozen = shapes.text.architecture, Frozen.of(shapes)
    parameters = sum(layer.operations(Tokens([1])).linear for layer in text.layers) // 2
    adapters = 2 * R * sum(text.in_folder["model.layers.0.self_attn.q_proj.weight"])
    attention = 3 * sum(layer.operations(Tokens([100])).attention for layer in text.layers)
    found = frozen.operations("text", shapes, Tokens([100])) - attention
    assert found == 100 * (4 * parameters + 6 * adapters)
    trained = replace(shapes, text=replace(shapes.text, added=None))
    assert Frozen.of(trained).operations("text", trained, Tokens([100])) - attention == 100 * 6 * parameters


def test_stages_are_the_whole(folder: Path) -> None:
    """With ranks by pattern."""
    lora = LoraConfig(r=R, patterns={"*.layers.1.*": LoraPattern(r=1), "v_proj": LoraPattern(r=2)})
    shapes = with_lora(folder, vision=LoraConfig(r=R), text=lora)
    frozen, tokens = Frozen.of(shapes), Tokens([9], supervised=4)
    stages = PipelineStage(0, 1, True, False), PipelineStage(1, 2, False, True)
    of_stages = [frozen.operations("text", shapes, tokens, stage) for stage in stages]
    assert sum(of_stages) == frozen.operations("text", shapes, tokens)
    assert of_stages[0] > frozen.operations("text", with_lora(folder, text=LoraConfig(r=1)), tokens, stages[0])
    assert Passes(share=0).linear == 2


def test_a_token_is_multiplied_with_the_adapters_of_its_experts() -> None:
    """8 of 128, in 48 layers of Qwen3-VL-30B-A3B, each with one A for its gate and its up."""
    targets = ("experts.gate_up_proj", "experts.down_proj")
    shapes = with_lora(EXAMPLES / "qwen3_vl_30b_a3b", text=LoraConfig(r=4, targets=targets))
    text, tokens = shapes.text.architecture, Tokens([10])
    base = replace(text, added=None).operations(tokens, passes=FORWARD)
    added = text.operations(tokens, passes=FORWARD) - base
    assert added == 10 * 2 * 48 * 8 * 4 * ((2048 + 2 * 768) + (768 + 2048))
    frozen = Frozen.of(shapes)
    attention = 2 * sum(layer.operations(tokens).attention for layer in text.layers)
    assert frozen.operations("text", shapes, tokens) == 2 * base + attention // 2 + 3 * added
