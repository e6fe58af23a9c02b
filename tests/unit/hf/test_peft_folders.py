"""What a PEFT folder's configuration says of adapters, and the order of experts in its tensors."""

from __future__ import annotations

import json
import math
import random
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_hetero.base.errors import UserError
from megatron_hetero.hf.peft_folders import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PREFIX,
    Pattern,
    PeftFolder,
    Target,
    config_text,
    from_columns,
    has_adapter,
    patterns,
    to_columns,
)

LAYER = "model.language_model.layers"


def write(folder: Path, targets: list[Target]) -> PeftFolder:
    """Write and open a folder of these adapters of layers."""
    folder.mkdir()
    (folder / ADAPTER_CONFIG).write_text(config_text(targets, [], "base", "CAUSAL_LM"))
    tensors = {}
    for each in targets:
        tensors[f"{PREFIX}{each.path}.lora_A.weight"] = torch.ones(each.r, 6)
        tensors[f"{PREFIX}{each.path}.lora_B.weight"] = torch.ones(5, each.r)
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    return PeftFolder.open(folder, "here")


@pytest.mark.parametrize(
    "targets",
    [
        [Target("a.q_proj", 4, 2.0), Target("b.q_proj", 4, 2.0), Target("b.proj", 2, 0.5), Target("c.proj", 2, 0.5)],
        [Target("a.q_proj", 4, 2.0), Target("b.q_proj", 2, 1.0), Target("c.q_proj", 4, 2.0), Target("d.proj", 8, 3.0)],
        [Target("a.q_proj", 8, 16 / math.sqrt(8)), Target("b.proj", 3, 16 / math.sqrt(3))],
        [Target("a.q_proj", 8, 16 / math.sqrt(8)), Target("b.proj", 3, 1 / 3)],
        [Target("a.mlp.0", 2, 1.0), Target("a.mlp.2", 3, 1.0), Target("b.mlp.0", 2, 1.0)],
        [Target("a.q_proj", 7, 0.1234567)],
    ],
)
def test_ranks_and_scales_are_read_as_they_were_written(tmp_path: Path, targets: list[Target]) -> None:
    folder = write(tmp_path / "adapter", targets)
    assert {pair.path: pair.first[0] for pair in folder.pairs} == {each.path: each.r for each in targets}
    for each in targets:
        assert folder.scale(each.path, each.r) == pytest.approx(each.scale, rel=1e-14)


def test_a_configuration_is_short_where_layers_are_alike() -> None:
    targets = [Target(f"{LAYER}.{n}.{name}", r, 16 / r) for n in range(9) for name, r in (("q_proj", 8), ("o_proj", 4))]
    config = json.loads(config_text(targets, ["model.visual.merger.ln_q"], "/models/base", None, 0.1))
    assert config["rank_pattern"] == {"o_proj": 4} and config["alpha_pattern"] == {}
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (8, 16, 0.1)
    assert config["target_parameters"] is None and config["modules_to_save"] == ["model.visual.merger.ln_q"]
    assert len(config["target_modules"]) == 18 and config["inference_mode"] is True
    assert json.loads(config_text([Target("q_proj", 16, 8.0)], [], "", None))["use_rslora"] is False
    roots = [Target("q_proj", 2, 16 / math.sqrt(2)), Target("k_proj", 3, 16 / math.sqrt(3))]
    config = json.loads(config_text(roots, [], "", None))
    assert config["use_rslora"] is True and config["lora_alpha"] == 16 and config["alpha_pattern"] == {}


def test_a_target_matches_itself_alone() -> None:
    """PEFT takes a target for the end of a path, and a pattern for a regular expression."""
    paths = [f"{LAYER}.1.mlp.up_proj", f"{LAYER}.11.mlp.up_proj", "model.visual.blocks.1.mlp.up_proj"]
    config = json.loads(config_text([Target(path, 2 + at, 1.0) for at, path in enumerate(paths)], [], "", None))
    for target in config["target_modules"]:
        assert [path for path in paths if path == target or path.endswith(f".{target}")] == [target]
    for pattern in config["rank_pattern"]:
        assert sum(bool(re.match(rf"(.*\.)?({pattern})$", path)) for path in paths) == 1


def test_experts_have_columns_in_turns() -> None:
    second = torch.arange(3 * 5 * 2.0).view(3 * 5, 2)  # 3 experts, 5 outputs, rank 2
    columns = to_columns(second, 3)
    assert columns.shape == (5, 6)
    for expert in range(3):
        for direction in range(2):
            own = second[expert * 5 : expert * 5 + 5, direction]
            assert torch.equal(columns[:, direction * 3 + expert], own)
    assert torch.equal(from_columns(columns, 3), second)


def test_patterns_match_as_in_peft() -> None:
    rng = random.Random(3)
    parts = [*"ab1.|^$", r"\.", r"\d", "[ab]", "[^.]", "a*", ".*", "b?", "[a1]+", "(a|b)", "(?:a|)", "(b.|1)", "a{1,2}"]
    parts += [".*?", r"\d+", r"\w+", "a{2}", "[^a]{1,}"]
    found = list[bool]()
    for _ in range(3000):
        pattern, path = "".join(rng.choices(parts, k=rng.randint(1, 5))), "".join(rng.choices("ab1..", k=6))
        found.append(re.match(rf"(.*\.)?({pattern})$", path) is not None)
        assert Pattern("here", pattern).matches(path) is found[-1], (pattern, path)
    assert 300 < sum(found) < 2700


@pytest.mark.parametrize("text", ["(", "a)", "a**", r"(a)\2", "[z-a]", "a{3,1}", "[", "a" * 300])
def test_patterns_that_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"here: found {re.escape(repr(text)[:20])}"):
        patterns("here", {"q_proj": 1, text: 1})


def test_patterns_take_no_long_time() -> None:
    paths = [f"{LAYER}.{n}.self_attn.{name}_proj" for n in range(20) for name in "qkvo"]
    many = patterns("here", {f"{LAYER}.{n}.self_attn.{name}_proj": 1 for n in range(1000) for name in "qkvo"})
    start = time.process_time()
    assert sum(each.matches(path) for path in paths for each, _ in many) == 80
    assert time.process_time() - start < 10
    with pytest.raises(UserError, match="here: found .*more than 1 s for model"):
        Pattern("here", r"(.|\w|[^x])*[!-&]").matches(paths[0])


def test_which_folders_are_some(tmp_path: Path) -> None:
    assert not has_adapter(tmp_path)
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"")
    assert has_adapter(tmp_path)
